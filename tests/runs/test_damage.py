"""What can happen to a run's files, and what is said of it."""

import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jgpt import CharTokenizer, fit, load
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import evaluate

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
fuzz = importlib.import_module("fuzz")
forge = fuzz.forge


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained.directory, tmp_path / "copy"))


def python(code: str, **limits: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        timeout=300,
        **limits,  # type: ignore[arg-type]
    )


LAST = "checkpoints/11"
LARGE = "larger than the model's largest array"


def edit(run: Path, name: str, **changes: object) -> None:
    path = run / LAST / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_header(run: Path, **lie: object) -> None:
    """TensorStore would abort the process, so the manifest is forged to fit."""
    edit(run, "weights/final_norm.scale/.zarray", **lie)
    forge(run / LAST)


def write(run: Path, name: str, data: bytes) -> None:
    (run / name).write_bytes(data)


def add(run: Path, name: str) -> None:
    """The header of another format would claim memory too."""
    (run / LAST / name).parent.mkdir(exist_ok=True)
    (run / LAST / name).write_text(json.dumps({"zarr_format": 3, "shape": [131072, 131072]}))


def add_and_forge(run: Path, name: str) -> None:
    add(run, name)
    forge(run / LAST)


def list_outside(run: Path) -> None:
    (run.parent / "secret").write_text("secret")
    forge(run / LAST, files={"../../../secret": [6, hashlib.sha256(b"secret").hexdigest()]})


def link(run: Path, name: str) -> None:
    shutil.move(run / name, run.parent / "outside")
    (run / name).symlink_to(run.parent / "outside")


def truncate(run: Path, name: str) -> None:
    """To more than memory holds: a sparse file costs nothing to make."""
    os.truncate(run / name, 1 << 40)


FAULTS: list[tuple[Callable[..., object], dict[str, object], str]] = [
    (lambda run: (run / LAST).rename(run / "checkpoints/80"), {}, "80/.* it belongs to step 11"),
    (add, {"name": "weights/extra"}, "weights/extra is not in the manifest; checkpoint 8 is"),
    # or a damaged checkpoint could pass for the best
    (edit, {"name": "manifest.json", "validation_loss": 0.1}, "json .* SHA-256 does not match"),
    (list_outside, {}, "secret is missing"),
    (edit_header, {"chunks": [1 << 50]}, LARGE),
    (edit_header, {"shape": [1 << 50]}, LARGE),
    (edit_header, {"shape": [-1]}, r"shape is \[-1\]"),
    (edit_header, {"chunks": [0]}, r"chunks is \[0\]"),
    (edit_header, {"dtype": "<V999999"}, "not one that jgpt writes"),
    (edit_header, {"compressor": {"id": "zlib", "level": 1}}, "compressor is not zstd alone"),
    (edit_header, {"filters": [{"id": "delta"}]}, "compressor is not zstd alone"),
    *(
        (add_and_forge, {"name": name}, f"11/{name} is not a file that jgpt writes")
        for name in (
            *("weights/final_norm.scale/zarr.json", "weights/final_norm.scale/.zattrs"),
            *("weights/manifest.ocdbt", "weights/ocdbt.process_0/manifest.ocdbt"),
            *("weights/zarr.json", "other/_METADATA"),
        )
    ),
    *(
        (write, {"name": name, "data": data}, f"{name} is damaged")
        for name in ("config.json", "tokenizer.json")
        for data in (b"", b"{", b"\xff", b"[]", b'{"model": {"embed_dim": "wide"}}')
    ),
    (
        write,
        {"name": "tokenizer.json", "data": CharTokenizer("abc").to_json().encode()},
        "checkpoints/11 was saved with another tokenizer than",
    ),
    *(
        (link, {"name": name}, "link")
        for name in ("config.json", "metrics.jsonl", f"{LAST}/manifest.json")
    ),
    *(
        (truncate, {"name": name}, f"{name} is damaged: it has 1,099,511,627,776 bytes")
        for name in ("config.json", "tokenizer.json", f"{LAST}/manifest.json")
    ),
]


@pytest.mark.parametrize(("fault", "how", "reason"), FAULTS)
def test_a_fault_is_named_and_nothing_foreign_is_touched(copy, tmp_path, fault, how, reason):
    fault(copy, **how)
    elsewhere = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=reason):
        load(copy, which="last")
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == elsewhere


def test_metrics_larger_than_memory_are_read_up_to_their_last_line(copy):
    lines = RunDirectory(copy).metrics()
    truncate(copy, "metrics.jsonl")
    assert RunDirectory(copy).metrics() == lines


def test_what_is_no_file_of_the_run_is_neither_read_nor_written(copy, small_run, tmp_path):
    shutil.move(copy / "checkpoints" / "11", tmp_path / "elsewhere")
    (copy / "checkpoints" / "11").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="checkpoints/11 is a link or not a file"):
        load(copy)
    (copy / "checkpoints" / "11").unlink()
    config = dataclasses.replace(small_run, out=str(copy))
    for name in ("metrics.jsonl", "provenance.jsonl", "lock"):
        kept = (copy / name).rename(tmp_path / name)
        os.mkfifo(copy / name)
        with pytest.raises(ValueError, match=f"{name} is a link or not a file"):
            fit(config, resume=True)
        (copy / name).unlink()
        (copy / name).hardlink_to(kept)
        before = kept.read_bytes()
        with pytest.raises(ValueError, match=f"{name} is a link or not a file: delete it, or"):
            fit(config, resume=True)
        assert kept.read_bytes() == before
        (copy / name).unlink()
        shutil.copy(kept, copy / name)
    os.mkfifo(copy / "checkpoints" / "8" / "pipe")
    with pytest.raises(ValueError, match="8/pipe is a link or not a file"):
        load(copy)


def test_a_read_only_run_evaluates_and_samples_from_anywhere(trained, copy, tmp_path):
    moved = copy.rename(tmp_path / "moved")
    for path in [moved, *moved.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in [moved, *moved.rglob("*")]}
    try:
        assert evaluate(moved).loss == pytest.approx(trained.validation_loss, rel=1e-6)
        assert {path: path.stat().st_mtime_ns for path in [moved, *moved.rglob("*")]} == before
    finally:
        for path in [moved, *moved.rglob("*")]:
            path.chmod(0o755)


def test_a_second_process_is_refused_until_the_first_is_gone(copy, small_run):
    config = dataclasses.replace(small_run, out=str(copy), steps=12)
    code = (
        "import sys; from pathlib import Path; from jgpt.runs.directory import RunDirectory\n"
        f"with RunDirectory(Path({str(copy)!r})).locked(): print('locked', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert holder.stdout
    assert holder.stdin
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError, match=f"is in use by process {holder.pid}"):
            fit(config, resume=True)
        load(copy)  # but it may be read
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    with RunDirectory(copy).locked():
        pass


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_the_last_good_checkpoint(small_run, tmp_path):
    """A limit on file sizes, as a quota sets it, that a file of a later save runs into."""
    first = dataclasses.replace(small_run, out=str(tmp_path / "run"), steps=4, sample_tokens=0)
    fit(first)
    code = f"""
import resource
import jgpt.cli, jgpt.runs.checkpoints
save = jgpt.runs.checkpoints.Checkpoints.save
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    save(*args)
jgpt.runs.checkpoints.Checkpoints.save = limited
jgpt.cli.main(["train", "--out", {str(tmp_path / "run")!r}, "--resume", "--steps", "8"])
"""
    done = python(code)
    assert done.returncode == 2
    # and nothing of the threads of Orbax and TensorStore
    assert done.stderr == (
        f"jgpt: the checkpoint of step 8 could not be written to {tmp_path}/run/checkpoints "
        "(File too large); the last good checkpoint is step 4: free some space and use --resume\n"
    )
    with Checkpoints(RunDirectory.open(tmp_path / "run"), read_only=True) as checkpoints:
        assert checkpoints.steps() == [1, 4]  # the early one, and the last good one
    load(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("saving-*"))


def test_metrics_that_cannot_be_written_leave_no_half_line(copy):
    run = RunDirectory.open(copy)
    before = (copy / "metrics.jsonl").read_bytes()
    code = f"""
import resource; from pathlib import Path
from jgpt.runs.directory import RunDirectory
run = RunDirectory(Path({str(copy)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 10}, {len(before) + 10}))
try:
    run.append_metrics([{{"step": 12, "loss": 1.0}}])
except OSError as error:
    print(error)
"""
    assert "metrics.jsonl can't be written: File too large" in python(code).stdout
    assert (copy / "metrics.jsonl").read_bytes() == before
    assert run.metrics()[-1]["step"] == 11


def test_loading_a_run_unpickles_nothing(trained):
    """Importing pickle from our code is refused by the linter; here every unpickler is."""
    code = f"""
import _pickle, pickle
import jax, jgpt, jgpt.runs.loop
def refuse(*args, **options): raise AssertionError("unpickled")
for module in (pickle, _pickle):
    for name in ("load", "loads", "Unpickler"):
        setattr(module, name, refuse)
jgpt.load({str(trained.directory)!r})
print(jgpt.runs.loop.evaluate({str(trained.directory)!r}).loss)
"""
    assert float(python(code).stdout) == pytest.approx(trained.validation_loss, rel=1e-6)
    unsafe = ("pickle", "marshal", "shelve", "eval(", "exec(", "np.load(", "allow_pickle")
    for path in (REPOSITORY / "jgpt").rglob("*.py"):
        if path.name != "contracts.py":
            assert not [word for word in unsafe if f" {word}" in path.read_text()], path.name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(fuzz.TARGETS))
def test_mutated_files_raise_documented_errors_alone(name):
    inputs = 60 if "checkpoint" in name or name == "config.json" else 200
    result = fuzz.in_a_process(name, fuzz.Options(inputs=inputs, seed=1))
    assert result["escapes"] == []
    assert result["refused"] + result["loaded"] == inputs
