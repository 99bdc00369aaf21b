"""Mutates jgpt's source, one small edit at a time, and reports which edits the tests notice.

    python -m tests.contract.mutants [--files attention model] [--every N] [--out REPORT.json]
    python -m tests.contract.mutants --again REPORT.json [--files attention model]

The second tries once more what survived, after the tests were mended, what there was no time for
(`--minutes`), and what is new in the report's files, and corrects the report; a module that
`--files` names joins it. `--minutes 0` writes one of which nothing has been tried yet. Each mutant
is tried by a child of one warm process, in a copy of the tree, on the tests about the mutated
function first. Exits with 1 if an edit that is not known to be equivalent survives.
"""

import argparse
import compileall
import contextlib
import functools
import gc
import importlib
import inspect
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.edits import Edit, Editor
from tests.contract.equivalent import reason_why_equivalent

ROOT = Path(__file__).parents[2]
COPIED = ("jgpt", "tests", "benchmarks", "pyproject.toml", "README.md")
# the proof's tests that a change of the contract can fail, without those that start processes
PROOF = [f"test_{name}.py" for name in ("meta", "sample", "inputs", "returns", "intermediates")]
# the runner's own tests, what runs for minutes, and tests of documents
WITHOUT = (
    "tests/contract/test_mutants.py",
    "tests/test_documents.py",
    "tests/test_figures.py",
    "tests/test_gpu_benchmark.py",
    "tests/test_notebooks.py",
    "tests/test_site.py",
)
# what else tests a module, beside the tests of its own name
ABOUT = {
    "contracts.py": (
        "contract/test_calls",
        "contract/test_messages",
        "contract/test_agreement",
        "contract/test_users",
        "contract/test_switch",
        "contract/test_returns",
        "training/test_explicit",
    ),
    "config.py": ("test_presets", "runs/test_directory"),
    "durable.py": ("runs/test_durability", "runs/test_directory", "runs/test_damage"),
    "hardware.py": ("nn/test_precision", "training/test_plan", "training/test_ahead"),
    "nn/attention.py": ("nn/test_windows", "nn/test_dropout"),
    "nn/bigram.py": ("nn/test_transformer", "generation/test_decoding"),
    "nn/cache.py": ("nn/test_heads", "generation/test_decoding"),
    "nn/heads.py": (
        "nn/test_sizes",
        "nn/test_attention",
        "nn/test_windows",
        "nn/test_dropout",
    ),
    "nn/depth.py": ("nn/test_transformer",),
    "nn/kernels.py": ("nn/test_attention", "nn/test_heads", "nn/test_windows", "nn/test_dropout"),
    "nn/layers.py": ("nn/test_sizes", "nn/test_dropout"),
    "nn/module.py": ("nn/test_sizes", "nn/test_vocabulary", "nn/test_dropout"),
    "nn/products.py": ("nn/test_layers",),
    "nn/models.py": ("nn/test_transformer",),
    "nn/transformer.py": (
        "nn/test_sizes",
        "nn/test_ngrams",
        "nn/test_dropout",
        "generation/test_decoding",
    ),
    "data/batches.py": ("data/test_data",),
    "data/corpus.py": ("runs/test_provenance",),
    "data/dataset.py": ("data/test_data", "runs/test_provenance"),
    "data/tokenizers.py": ("parity/test_tokenizer", "interop/test_exchange"),
    "training/optimizer.py": ("training/test_stacking",),
    "training/plan.py": ("training/test_memory", "cli/test_console"),
    "training/stacking.py": ("runs/test_loop",),
    "training/step.py": (
        "training/test_memory",
        "nn/test_dropout",
        "training/test_mesh",
        "training/test_stacking",
    ),
    "generation/decoding.py": ("generation/test_text",),
    "generation/sampling.py": ("generation/test_decoding",),
    "interop/formats.py": ("interop/test_huggingface", "parity/test_transformers"),
    "interop/huggingface.py": ("interop/test_exchange", "parity/test_transformers"),
    "interop/names.py": (
        "interop/test_huggingface",
        "interop/test_exchange",
        "parity/test_transformers",
        "parity/test_nanogpt",
    ),
    "interop/nanogpt.py": ("parity/test_nanogpt",),
    "runs/checkpoints.py": ("runs/test_durability", "runs/test_damage", "runs/test_loop"),
    "runs/directory.py": ("runs/test_durability", "runs/test_damage", "runs/test_loop"),
    "runs/loop.py": ("runs/test_metrics", "runs/test_resume", "cli/test_signals"),
    "runs/manifest.py": ("runs/test_durability", "runs/test_damage"),
    "runs/metrics.py": ("runs/test_loop",),
    "runs/profiling.py": ("runs/test_loop",),
    "runs/progress.py": ("runs/test_loop",),
    "runs/provenance.py": ("runs/test_loop",),
    "runs/resume.py": ("runs/test_checkpoints",),
    "sharding.py": ("training/test_mesh", "training/test_explicit", "runs/test_mesh"),
    "cli/__init__.py": ("cli/test_cli",),
    "cli/commands.py": ("cli/test_cli", "interop/test_exchange", "runs/test_profiling"),
    "cli/console.py": ("cli/test_commands",),
    "cli/options.py": ("cli/test_cli", "cli/test_commands"),
}
SECONDS_PER_MUTANT = 600
SURVIVED, KILLED_BY = "survived", "killed by "
PARTS = ("killed", "survivors", "not_tried", "equivalent")  # of a report
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


@dataclass
class Trial:
    """A mutant being tried by a child process."""

    mutant: Edit | None
    tree: Path
    began: float


def mutants(files: list[str]) -> list[Edit]:
    paths = sorted((ROOT / "jgpt").rglob("*.py"))
    return [
        edit
        for path in paths
        if not files or path.stem in files
        for edit in Editor(
            path.relative_to(ROOT / "jgpt").as_posix(), path.read_text(encoding="utf-8")
        ).edits
    ]


def kind_of(mutant: Edit) -> str:
    words = ("dtype", "weaken", "rename", "swap", "any shape", "drop check", "drop @")
    return "contract" if any(word in mutant.kind for word in words) else "value"


class About:
    """Keeps the tests about the mutated function, or puts them and those that name it first.

    Before them comes what noticed other mutants of the function.
    """

    def __init__(self, mutant: Edit | None, alone: bool, noticed: set[str]):
        self.noticed = noticed
        self.function = mutant.where if mutant else ""
        self.depth = mutant.file.count("/") + 2 if mutant else 0
        self.alone = alone

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.alone:
            items[:] = [item for item in items if self.function in item.nodeid]
        path = self.function.split(".")[self.depth :]  # without the packages and the module
        name, method = "".join(path[:1]), "".join(path[-1:])
        items.sort(
            key=lambda item: (
                item.nodeid not in self.noticed,
                self.function not in item.nodeid,
                method not in source_of(item),
                name not in source_of(item),
                item.get_closest_marker("slow") is not None,
                "subprocess" in source_of(item) or "python(" in source_of(item),
                "family" in item.fixturenames,  # many models
            )
        )


@functools.cache
def source_of(item: Any) -> str:
    return inspect.getsource(item.function)


def own_tests(file: str) -> list[str]:
    """The tests of a module: those of its name, and what else is about it."""
    path = Path(file)
    names = (f"{path.parent}/test_{path.stem}", *ABOUT.get(file, ()))
    paths = [Path(f"tests/{name}.py") for name in names]
    return [path.as_posix() for path in paths if (ROOT / path).exists()]


def stages(mutant: Edit | None, own_alone: bool) -> Iterator[tuple[list[str], bool]]:
    """What to run on a mutant, until something fails: the likeliest to notice first."""
    proof = [f"tests/contract/{name}" for name in PROOF]
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    everything = sorted(path for path in paths if path not in WITHOUT)
    if mutant is None:
        yield everything, False
    elif kind_of(mutant) == "contract":
        yield proof[1:], True
        yield proof, False
    else:
        own = own_tests(mutant.file)
        yield own, False
        if not own_alone:
            yield [path for path in everything if path not in own], False


def try_in_child(mutant: Edit | None, tree: Path, own_alone: bool, noticed: set[str]) -> int:
    """Fork; the child runs the tests in the tree and never returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        sys.dont_write_bytecode = True
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path) not in (Path(), ROOT))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("jgpt", "tests")]:
            del sys.modules[name]
        with (tree / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            import pytest

            arguments = ["-x", "-q", "-o", f"cache_dir={tree}/cache", "--no-header", "--tb=line"]
            arguments += ["--assert=plain"]  # rewriting costs more than most of the tests
            for paths, alone in stages(mutant, own_alone):
                code = int(
                    pytest.main([*arguments, *paths], plugins=[About(mutant, alone, noticed)])
                )
                if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    break
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def warm_up() -> None:
    """Import what every child needs, but not what is mutated, and start no thread."""
    for name in NEEDED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # or each child's collections would copy all of it
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)


def copies(count: int, scratch: Path) -> list[Path]:
    trees = []
    for i in range(count):
        tree = scratch / f"tree-{i}"
        tree.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
                compileall.compile_dir(tree / name, quiet=1)
            else:
                shutil.copy(source, tree / name)
        trees.append(tree)
    return trees


def write(mutant: Edit | None, tree: Path) -> None:
    if mutant is not None:
        source = (ROOT / "jgpt" / mutant.file).read_bytes()
        (tree / "jgpt" / mutant.file).write_bytes(mutant.apply(source))


def restore(mutant: Edit | None, tree: Path) -> None:
    if mutant is not None:
        shutil.copy(ROOT / "jgpt" / mutant.file, tree / "jgpt" / mutant.file)


def run(
    chosen: list[Edit | None],
    workers: int,
    own_alone: bool,
    minutes: float,
    outcomes: dict[Edit, str],
) -> Iterator[tuple[Edit | None, str]]:
    """Try all mutants, several at a time; None is no edit at all."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # where programs are kept that no mutant changes: in a folder that is warm, if one is named
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        warm_up()
        free = copies(workers, Path(scratch))
        running: dict[int, Trial] = {}
        waiting = list(reversed(chosen))
        ends = time.monotonic() + 60 * minutes
        while waiting or running:
            if time.monotonic() > ends:
                waiting.clear()
            while waiting and free:
                mutant, tree = waiting.pop(), free.pop()
                write(mutant, tree)
                noticed = {
                    outcome.removeprefix(KILLED_BY)
                    for other, outcome in outcomes.items()
                    if mutant and other.where == mutant.where
                }
                pid = try_in_child(mutant, tree, own_alone, noticed)
                running[pid] = Trial(mutant, tree, time.monotonic())
            if not running:  # the time was over before anything began
                return
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                for late, trial in running.items():
                    if trial.mutant and time.monotonic() - trial.began > SECONDS_PER_MUTANT:
                        os.kill(late, signal.SIGKILL)
                time.sleep(0.02)
                continue
            trial = running.pop(pid)
            restore(trial.mutant, trial.tree)
            code = os.waitstatus_to_exitcode(status)
            yield trial.mutant, SURVIVED if code == 0 else verdict(trial.tree, code)
            free.append(trial.tree)


def verdict(tree: Path, code: int) -> str:
    """What killed a mutant, as pytest put it."""
    lines = (tree / "output.txt").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed and code in (1, 2):  # a test failed, or could not even be imported
        return f"{KILLED_BY}{failed[0].split(' ', 1)[1].split(' - ')[0]}"
    if code == -signal.SIGKILL:
        return f"killed: it ran for more than {SECONDS_PER_MUTANT} seconds"
    # pytest itself never ends without a summary; `jgpt train` leaves so when a process is lost
    if code == 2 and set("".join(lines)) <= set("."):
        return "killed: it ended the process in the middle of a test"
    if any("PytestUnraisableExceptionWarning" in line for line in lines):
        return "killed: a file or an exception was left behind"  # an error once pytest ends
    # neither green nor red: a runner that is broken must not look like tests that are good
    sys.exit(f"the tests did not run: exit code {code}, {lines[-12:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="*", default=[], help="of these modules only")
    parser.add_argument("--every", type=int, default=1, help="every N-th mutant")
    parser.add_argument("--kind", choices=["contract", "value"], help="of this kind only")
    parser.add_argument("--green", action="store_true", help="believe that the tests pass unedited")
    parser.add_argument("--own", action="store_true", help="on a module's own tests alone")
    parser.add_argument("--again", type=Path, help="what this report did not kill")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing new after them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    options = parser.parse_args()
    began = time.time()
    command = " ".join(["python -m tests.contract.mutants", *sys.argv[1:]])
    earlier: dict[str, Any] = {"killed": {}, "survivors": [], "not_tried": []}
    if options.again:
        earlier, options.out = json.loads(options.again.read_text()), options.again
        command = f"{earlier['command']}, then {command}"
        files = {name.split(":")[0] for part in PARTS for name in earlier.get(part, ())}
        chosen = [
            mutant
            for mutant in mutants([])
            if mutant.file in files or mutant.stem in options.files
            if kind_of(mutant) in earlier["score"]
        ]
    else:
        chosen = [
            mutant for mutant in mutants(options.files) if options.kind in (None, kind_of(mutant))
        ]
    chosen = chosen[:: options.every]
    equivalent = {mutant: reason_why_equivalent(mutant) for mutant in chosen}
    outcomes: dict[Edit, str] = {
        mutant: earlier["killed"][str(mutant)]
        for mutant in chosen
        if str(mutant) in earlier["killed"]
    }
    untried = [mutant for mutant in chosen if not equivalent[mutant] and mutant not in outcomes]
    tried = [mutant for mutant in untried if not options.files or mutant.stem in options.files]
    tried.sort(key=lambda mutant: str(mutant) in earlier["survivors"])  # what is new comes first
    for mutant in untried:
        if mutant not in tried and str(mutant) in earlier["survivors"]:
            outcomes[mutant] = SURVIVED
    total = len(outcomes) + len(tried)

    def report() -> dict[str, Any]:
        told = {str(mutant): outcome for mutant, outcome in outcomes.items()}
        return {
            "command": command,
            "seconds": round(time.time() - began) + earlier.get("seconds", 0),
            "score": {kind_of(mutant): "0/0" for mutant in chosen} | scores(outcomes),
            "survivors": [mutant for mutant, outcome in told.items() if outcome == SURVIVED],
            "not_tried": [str(mutant) for mutant in untried if mutant not in outcomes],
            "equivalent": {str(mutant): reason for mutant, reason in equivalent.items() if reason},
            "killed": {mutant: outcome for mutant, outcome in told.items() if outcome != SURVIVED},
        }

    queue: list[Edit | None] = [*tried] if options.green else [None, *tried]
    for mutant, outcome in run(queue, options.workers, options.own, options.minutes, outcomes):
        if mutant is None:
            if outcome != SURVIVED:
                sys.exit(f"the tests fail without any edit: {outcome}")
            continue
        outcomes[mutant] = outcome
        print(f"[{len(outcomes)}/{total}] {mutant}: {outcome}", flush=True)
        if options.out:  # whatever ends this
            options.out.write_text(json.dumps(report(), indent=2) + "\n")
    found = report()
    print(json.dumps({name: found[name] for name in ("seconds", "score", "survivors")}, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(bool(found["survivors"]))


def scores(outcomes: dict[Edit, str]) -> dict[str, str]:
    """Killed of tried, by kind of edit."""
    labels = {mutant: f"{kind_of(mutant)}: {mutant.kind}" for mutant in outcomes}
    tried = Counter(labels.values()) + Counter(map(kind_of, outcomes))
    dead = [mutant for mutant, outcome in outcomes.items() if outcome != SURVIVED]
    killed = Counter(labels[each] for each in dead) + Counter(map(kind_of, dead))
    return {kind: f"{killed[kind]}/{tried[kind]}" for kind in sorted(tried)}


if __name__ == "__main__":
    main()
