"""What can happen to a run's files, and what is said of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jgpt import evaluate, fit, load
from tests.runs import faults
from tests.runs.harness import contents


@pytest.fixture
def run(copy) -> Path:
    return Path(copy.out)


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_fault_of_a_text_file_is_named(run, name, fault):
    faults.FAULTS[fault](run / name)
    reason = f"{name} is damaged"
    if fault == "missing":
        reason = f"no {name}|{name} is missing"

    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        load(run, which="last")


def test_a_damaged_checkpoint_can_be_deleted_to_go_on_from_the_one_before(copy, run, trained):
    """As the message says."""
    files = [path for path in (run / "checkpoints" / "11").rglob("*") if path.is_file()]
    faults.flip_a_bit(files[-1])
    with pytest.raises(ValueError, match=r"SHA-256 does not match; delete .* to use checkpoint 8"):
        fit(copy, resume=True, progress=None)

    shutil.rmtree(run / "checkpoints" / "11")
    again = fit(copy, resume=True, progress=None)

    assert again.metrics["loss"] == trained.metrics["loss"]


def test_a_run_is_read_wherever_it_lies_and_is_not_touched(trained, run, tmp_path):
    moved = run.rename(tmp_path / " a%20b?c#d:e\n$HOME ~ *[f]{g}'\"|&; e\u0301 \u00e9 ")
    paths = [moved, *moved.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(moved), [path.stat().st_mtime_ns for path in paths]
    try:
        assert load(str(moved)).config == trained.config
        assert evaluate(moved).loss == pytest.approx(trained.validation_loss, rel=1e-6)
        assert (contents(moved), [path.stat().st_mtime_ns for path in paths]) == before
    finally:
        for path in paths:
            path.chmod(0o755)


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    # and nothing of the threads of Orbax and TensorStore
    assert done.stderr == (
        f"jgpt: the checkpoint of step 12 could not be written to {run}/checkpoints "
        "(File too large); the last good checkpoint is step 11: free some space and use --resume\n"
    )
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["11", "11.sha256.json", "8", "8.sha256.json"]
    load(run)


def test_loading_a_run_unpickles_nothing(trained, monkeypatch):
    """Importing pickle from our code is refused by the linter; here every unpickler is."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle"):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(f"{module}.{name}", refuse)
    assert evaluate(trained.path).loss == pytest.approx(trained.validation_loss, rel=1e-6)
