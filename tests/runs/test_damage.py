"""What can happen to a run's files, and what is said of it."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jgpt import CharTokenizer, DataConfig, TrainConfig, fit, load
from jgpt.files import MovedDirectory
from jgpt.fitting.evaluate import evaluate
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from tests.runs import faults
from tests.runs.harness import BIGRAM, REPOSITORY, contents, with_changes


@pytest.fixture
def run(copy) -> Path:
    return Path(copy.out)


def python(code: str, **limits: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        **limits,  # type: ignore[arg-type]
    )


LAST = "checkpoints/11"


def edit(run: Path, name: str, **changes: object) -> None:
    path = run / LAST / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def take_another_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").write_text(CharTokenizer("abc").to_json())


# what can't be done to just any file: it needs to know a checkpoint's format
FAULTS_OF_THE_FORMAT: list[tuple[Callable[..., object], dict[str, object], str]] = [
    # or a damaged checkpoint could pass for the best
    (edit, {"name": "manifest.json", "validation_loss": 0.1}, "json .* SHA-256 does not match"),
    (take_another_tokenizer, {}, "checkpoints/11 was saved with another tokenizer than"),
]


@pytest.mark.parametrize(("fault", "options", "reason"), FAULTS_OF_THE_FORMAT)
def test_a_fault_of_a_checkpoint_is_named(run, fault, options, reason):
    fault(run, **options)

    with pytest.raises(ValueError, match=reason):
        load(run, which="last")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", f"{LAST}/manifest.json"])
def test_a_fault_of_a_text_file_is_named(run, name, fault):
    fault.apply(run / name)
    reason = f"{Path(name).name}.*{fault.said}"
    if name == "config.json" and not (run / name).is_file():
        reason = r"is not a run directory: it has no config\.json"

    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        load(run, which="last")


def test_a_lost_tokenizer_is_named_with_a_way_back(run):
    (run / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing.*copy it"):
        load(run)


def test_a_read_only_run_evaluates_from_anywhere(trained, run, tmp_path):
    moved = run.rename(tmp_path / "moved")
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in [moved, *moved.rglob("*")]}
    try:
        assert evaluate(moved).loss == pytest.approx(trained.validation_loss, rel=1e-6)
        assert {path: path.stat().st_mtime_ns for path in [moved, *moved.rglob("*")]} == before
    finally:
        for path in [moved, *moved.rglob("*")]:
            path.chmod(0o755)


def test_a_second_process_is_rejected_until_the_first_is_gone(copy, run):
    code = (
        "import sys; from pathlib import Path; from jgpt.runs.directory import RunDirectory\n"
        f"with RunDirectory(Path({str(run)!r})).locked(): print('locked', flush=True); input()"
    )
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError, match="is in use by another process"):
            fit(copy, resume=True)
        load(run)  # but it may be read
        holder.kill()
    with RunDirectory(run).locked():
        pass


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(run):
    """A limit on file sizes, as a quota sets it, that a file of a later save runs into."""
    code = f"""
import resource
import jax, jgpt.cli, jgpt.runs.checkpoints
jax.config.update("jax_enable_compilation_cache", False)  # or its programs would be cut off, too
save = jgpt.runs.checkpoints.Checkpoints.save
def limited(*args, **options):
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    save(*args, **options)
jgpt.runs.checkpoints.Checkpoints.save = limited
jgpt.cli.main(["train", "--out", {str(run)!r}, "--resume", "--steps", "12"])
"""
    done = python(code)
    assert done.returncode == 2
    # and nothing of the threads of Orbax and TensorStore
    assert done.stderr == (
        f"jgpt: the checkpoint of step 12 could not be written to {run}/checkpoints "
        "(File too large); the last good checkpoint is step 11: free some space and use --resume\n"
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["11", "8"]
    load(run)


def test_loading_a_run_unpickles_nothing(trained, monkeypatch):
    """Importing pickle from our code is refused by the linter; here every unpickler is."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle"):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(f"{module}.{name}", refuse)
    assert evaluate(trained.directory).loss == pytest.approx(trained.validation_loss, rel=1e-6)
    # the library pickletools lists what a file would do, and does none of it
    unsafe = re.compile(
        r"import (pickle|marshal|shelve)\b|\b(pickle|marshal|shelve)\.[a-z]| (eval|exec)\(|"
        r"np\.load\(|allow_pickle"
    )
    assert unsafe.search("import pickle")
    assert unsafe.search("x = pickle.loads(data)")
    for path in (REPOSITORY / "jgpt").rglob("*.py"):
        if path.name != "matching.py":  # evaluates the text of annotations, which is code
            assert unsafe.search(path.read_text()) is None, path.name


def test_a_run_whose_folder_is_replaced_stops_and_writes_nothing_into_the_new_one(poem, tmp_path):
    """A lock is that of a file, not of its name: the new folder can have another trainer."""
    out = tmp_path / "run"
    moved = tmp_path / "moved"
    config = with_changes(TrainConfig(out=str(out)), **BIGRAM)
    config = dataclasses.replace(config, steps=40, steps_per_call=2, eval_interval=6)
    config = dataclasses.replace(config, dataset=DataConfig((str(poem),)))
    before: dict[str, bytes | None] = {}

    def replace_after_an_evaluation() -> bool:
        checkpoints = out / "checkpoints"
        if before or not list(checkpoints.glob("*6*")):
            return False
        manifest = checkpoints / "6" / "manifest.json"
        # the state is saved meanwhile, and then its loss
        while not manifest.exists() or '"unevaluated": null' not in manifest.read_text():
            time.sleep(0.02)
        # what the manifest was written as may not be gone yet, and the copy would miss it
        while list(checkpoints.glob("saving-6*")):
            time.sleep(0.02)
        out.rename(moved)
        shutil.copytree(moved, out)
        (checkpoints / "6").rename(checkpoints / "2")  # would be deleted as an old one
        (checkpoints / "saving-8").mkdir()
        before.update(contents(out))
        return False

    with pytest.raises(MovedDirectory, match=f"^{out} was moved or replaced while this process"):
        fit(config, should_stop=replace_after_an_evaluation)
    assert contents(out) == before
    assert RunDirectory(moved).checkpoint_steps()[-1] == 6
    load(moved)


def test_nothing_is_saved_appended_or_deleted_in_a_folder_that_took_the_run_s_place(run, tmp_path):
    config = RunDirectory(run).config()
    with RunDirectory(run).locked() as lock:
        locked = RunDirectory(run, lock)
        with Checkpoints(locked) as checkpoints:
            state = checkpoints.restore(config)
            later = dataclasses.replace(state, step=jnp.int32(1000))
            run.rename(tmp_path / "moved")
            shutil.copytree(tmp_path / "moved", run)
            (run / "checkpoints" / "saving-3").mkdir()
            before = contents(run)
            writes = {
                "append": lambda: locked.append("metrics.jsonl", [{"step": 1}]),
                "truncate": lambda: locked.truncate("metrics.jsonl", 0),
                "config": lambda: locked.write_config(config),
                "file": lambda: locked.write("samples.txt", "text"),
                "delete": lambda: locked.delete_checkpoints([]),
                "save": lambda: checkpoints.save(later, None),
            }
            for name, write in writes.items():
                with pytest.raises(MovedDirectory, match=f"^{run} was moved or replaced"):
                    write()
                assert contents(run) == before, name
        assert contents(run) == before
