"""Mutates jgpt's source, one small edit at a time, and reports which edits the tests notice.

    python -m tests.contract.mutants --files attention heads --kind contract
    python -m tests.contract.mutants --report report.json
    python -m tests.contract.mutants --summary report.json > benchmarks/results/mutants.md

A report that exists is continued: what it killed is not tried again. Each mutant is tried by a
child of one warm process, in a copy of the tree, on the tests about its module first. Exits with 1
if an edit survives that is not known to be equivalent.
"""

import argparse
import compileall
import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.contract.edits import Edit, Editor, module_name
from tests.contract.equivalent import reason_why_equivalent

ROOT = Path(__file__).parents[2]
COPIED = ("jgpt", "tests", "benchmarks", "pyproject.toml", "README.md")
# the proof's tests that a change of the contract can fail, without those that start processes
PROOF = ["tests/contract/test_callables.py", "tests/contract/test_meta.py"]
# the runner's own tests, what runs for minutes, and tests of documents
WITHOUT = {
    "tests/contract/test_mutants.py",
    "tests/test_documents.py",
    "tests/test_figures.py",
    "tests/test_gpu_benchmark.py",
    "tests/test_notebooks.py",
    "tests/test_site.py",
}
CONTRACT = ("dtype", "weaken", "rename", "swap", "any shape", "drop check", "drop @")
SECONDS_PER_TEST = 600
"""A mutant that hangs is noticed; one that survives runs all tests, however long they take."""
SURVIVED, KILLED, EQUIVALENT, NOT_TRIED = "survived", "killed", "equivalent", "not tried"
NEEDED = (
    "flax.nnx",
    "hypothesis",
    "matplotlib.figure",
    "optax",
    "orbax.checkpoint",
    "pytest",
    "rich.progress",
    "tokenizers",
    "torch",
    "tyro",
)


def mutants(files: list[str]) -> list[Edit]:
    package = ROOT / "jgpt"
    paths = [path for path in sorted(package.rglob("*.py")) if not files or path.stem in files]
    editors = (Editor(path.relative_to(package).as_posix(), path.read_text()) for path in paths)
    return [edit for editor in editors for edit in editor.edits]


def kind_of(kind: str) -> str:
    return "contract" if any(word in kind for word in CONTRACT) else "value"


class MostLikelyFirst:
    """Sorts tests by how much they are about the mutated function; keeps only those, if alone."""

    def __init__(self, mutant: Edit | None, alone: bool, noticed: set[str]):
        self.noticed, self.alone = noticed, alone
        self.function = mutant.where if mutant else ""
        path = self.function.removeprefix(module_name(mutant.file)).split(".") if mutant else [""]
        self.names = path[-1], path[:2][-1]

    def pytest_runtest_setup(self) -> None:
        signal.alarm(SECONDS_PER_TEST)

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.alone:
            items[:] = [item for item in items if self.function in item.nodeid]
        items.sort(
            key=lambda item: (
                item.nodeid not in self.noticed,
                self.function not in item.nodeid,
                *(name not in source_of(item) for name in self.names),
                item.get_closest_marker("slow") is not None,
                "subprocess" in source_of(item) or "python(" in source_of(item),
                "family" in item.fixturenames,  # many models
            )
        )


@functools.cache
def source_of(item: Any) -> str:
    return inspect.getsource(item.function)


def stages(mutant: Edit | None) -> Iterator[tuple[list[str], bool]]:
    """The tests to run on a mutant, until one fails, and whether only those that name it."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = {path.relative_to(ROOT).as_posix(): path for path in paths}
    files = {name: path for name, path in files.items() if name not in WITHOUT}
    if mutant is None:
        yield list(files), False
    elif kind_of(mutant.kind) == "contract":
        yield PROOF[:-1], True
        yield PROOF, False
    else:
        module = module_name(mutant.file)

        def distance(name: str) -> int:
            if files[name].stem == f"test_{mutant.stem}":
                return 0
            if files[name].parent.name == "parity" and mutant.file.startswith(("nn/", "training/")):
                return 1
            near = files[name].parent.name == Path(mutant.file).parent.name
            return 2 if near or module in files[name].read_text() else 3

        for _, group in itertools.groupby(sorted(files, key=distance), distance):
            yield list(group), False


def start(mutant: Edit | None, tree: Path, noticed: set[str]) -> int:
    """Fork a child that runs the tests in the tree and never returns."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        signal.alarm(SECONDS_PER_TEST)
        sys.dont_write_bytecode = True
        os.chdir(tree)
        if mutant:
            file = tree / "jgpt" / mutant.file
            file.write_bytes(mutant.apply(file.read_bytes()))
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path) not in (Path(), ROOT))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("jgpt", "tests")]:
            del sys.modules[name]
        with (tree / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import pytest

        arguments = ["-x", "-q", "-o", f"cache_dir={tree}/cache", "--no-header", "--tb=line"]
        arguments += ["--assert=plain"]  # rewriting costs more than most of the tests
        for paths, alone in stages(mutant):
            order = MostLikelyFirst(mutant, alone, noticed)
            code = int(pytest.main([*arguments, *paths], plugins=[order]))
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                break
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(
    chosen: list[Edit | None], workers: int, minutes: float, outcomes: dict[str, str]
) -> Iterator[tuple[Edit | None, str]]:
    """Try all mutants, several at a time; None is no edit at all."""
    # threads would not survive the fork, so nothing here may start one
    for name in NEEDED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # or each child's collections would copy all of it
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # compiled programs that no mutant changes are shared, also with a cache that is named
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        original = Path(scratch) / "original"
        for name in COPIED:
            source, target = ROOT / name, original / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
                compileall.compile_dir(target, quiet=1)
            else:
                shutil.copy(source, target)
        running: dict[int, tuple[Edit | None, Path]] = {}
        waiting = list(reversed(chosen))
        ends = time.monotonic() + 60 * minutes
        while waiting or running:
            if time.monotonic() > ends:
                waiting.clear()
            while waiting and len(running) < workers:
                mutant = waiting.pop()
                tree = Path(scratch) / f"tree-{len(waiting)}"
                shutil.copytree(original, tree)
                place = str(mutant).split(" ")[0]
                noticed = {
                    outcome.partition(" by ")[2]
                    for other, outcome in outcomes.items()
                    if other.split(" ")[0] == place
                }
                running[start(mutant, tree, noticed)] = mutant, tree
            if running:
                pid, status = os.wait()
                mutant, tree = running.pop(pid)
                yield mutant, verdict(tree, os.waitstatus_to_exitcode(status))
                shutil.rmtree(tree)


def verdict(tree: Path, code: int) -> str:
    """What killed a mutant, as pytest put it, or that nothing did."""
    lines = (tree / "output.txt").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code in (0, 5):
        return SURVIVED
    if failed and code in (1, 2):  # a test failed, or could not even be imported
        return f"{KILLED} by {failed[0].split(' ', 1)[1].split(' - ')[0]}"
    if code == -signal.SIGALRM:
        return f"{KILLED}: a test ran for more than {SECONDS_PER_TEST} seconds"
    # pytest itself never ends without a summary; `jgpt train` leaves so when a process is lost
    if code == 2 and set("".join(lines)) <= set("."):
        return f"{KILLED}: it ended the process in the middle of a test"
    if any("PytestUnraisableExceptionWarning" in line for line in lines):
        return f"{KILLED}: a file or an exception was left behind"  # an error once pytest ends
    # neither green nor red: a runner that is broken must not look like tests that are good
    sys.exit(f"the tests did not run: exit code {code}, {lines[-12:]}")


def summary(report: dict[str, Any]) -> str:
    """Markdown for a person to review: per module and kind of edit, then what survived."""
    outcomes: dict[str, str] = report["outcomes"]
    classes = (KILLED, SURVIVED, NOT_TRIED, EQUIVALENT)
    modules, killed, tried = Counter(), Counter(), Counter()
    for name, outcome in outcomes.items():
        module, kind = name.split(":")[0], name.partition(" ")[2].partition(":")[0]
        found = next(each for each in classes if outcome.startswith(each))
        modules.update([(module, found), ("all", found)])
        if found in (KILLED, SURVIVED):
            kinds = [kind_of(kind), f"{kind_of(kind)}: {kind}"]
            tried.update(kinds)
            killed.update(kinds if found == KILLED else ())
    lines = ["# Mutants", "", *(f"    {command}" for command in report["commands"]), ""]
    lines += [f"| module | edits | {' | '.join(classes)} |", "|---|---|---|---|---|---|"]
    for module in [*sorted({module for module, _ in modules} - {"all"}), "all"]:
        row = [modules[module, found] for found in classes]
        lines.append(f"| {module} | {sum(row)} | {' | '.join(map(str, row))} |")
    score = ", ".join(f"{kind} {killed[kind]}/{tried[kind]}" for kind in sorted(tried))
    lines += ["", f"Killed by kind of edit: {score}."]
    lines += ["", "Equivalent, which no test can notice:", ""]
    reasons = Counter(each.partition(": ")[2] for each in outcomes.values() if EQUIVALENT in each)
    lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    if survivors := [name for name, outcome in outcomes.items() if outcome == SURVIVED]:
        lines += ["", "Survived:", "", *(f"- `{each}`" for each in survivors)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="*", default=[], help="of these modules only")
    parser.add_argument("--every", type=int, default=1, help="every N-th mutant")
    parser.add_argument("--kind", choices=["contract", "value"], help="of this kind only")
    parser.add_argument("--green", action="store_true", help="believe that the tests pass unedited")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing new after them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write or continue this report, as JSON")
    parser.add_argument("--summary", type=Path, help="only print this report as Markdown")
    options = parser.parse_args()
    if options.summary:
        print(summary(json.loads(options.summary.read_text())), end="")
        return
    command = " ".join(["python -m tests.contract.mutants", *sys.argv[1:]])
    report: dict[str, Any] = {"commands": [], "outcomes": {}}
    if options.report and options.report.exists():
        report = json.loads(options.report.read_text())
    report["commands"].append(command)
    known = set(map(str, mutants([])))  # others were edits of an earlier source
    outcomes = {name: what for name, what in report["outcomes"].items() if name in known}
    report["outcomes"] = outcomes
    tried: list[Edit | None] = []
    for mutant in mutants(options.files)[:: options.every]:
        if options.kind in (None, kind_of(mutant.kind)):
            name = str(mutant)
            if reason := reason_why_equivalent(mutant):
                outcomes[name] = f"{EQUIVALENT}: {reason}"
            elif not outcomes.get(name, "").startswith(KILLED):
                outcomes.setdefault(name, NOT_TRIED)
                tried.append(mutant)
    tried.sort(key=lambda mutant: outcomes[str(mutant)] == SURVIVED)  # what is new comes first
    queue = tried if options.green else [None, *tried]
    for mutant, outcome in run(queue, options.workers, options.minutes, outcomes):
        if mutant is None:
            if outcome != SURVIVED:
                sys.exit(f"the tests fail without any edit: {outcome}")
            continue
        outcomes[str(mutant)] = outcome
        print(f"{mutant}: {outcome}", flush=True)
        if options.report:  # whatever ends this
            options.report.write_text(json.dumps(report, indent=2) + "\n")
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    counts = Counter(outcomes[str(mutant)].split(" ")[0].rstrip(":") for mutant in tried)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    sys.exit(SURVIVED in counts)


if __name__ == "__main__":
    main()
