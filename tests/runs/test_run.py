"""A run as a piece that a training by hand holds: locked, resumed, logged, saved, asked to stop."""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt import CharTokenizer, Dataset, ModelConfig, Run, TrainConfig
from jgpt.nn.models import create_model
from jgpt.runs import checkpoints
from jgpt.runs import run as run_module
from jgpt.runs.directory import RunDirectory
from jgpt.runs.run import OpenRun
from tests.runs import faults
from tests.runs.harness import Unread, contents

MODEL = ModelConfig("bigram", vocab_size=3, block_size=4)
CONFIG = TrainConfig(model=MODEL, steps=6, keep_best=1, keep_last=1)
LONGER = dataclasses.replace(CONFIG, steps=9)
TOKENIZER = CharTokenizer("abc")
DATASET = Dataset.from_tokens(TOKENIZER.encode("abcb" * 30), tokenizer=TOKENIZER)
LOSSES = {2: 1.0, 4: 3.0, 6: 2.0}
"""After every second step, the first of which is the best."""


def init() -> dict[str, Any]:
    """A state of several kinds of trees."""
    model = create_model(MODEL, rngs=nnx.Rngs(0))
    return {
        "model": nnx.state(model),
        "moments": (jnp.ones(3), [jnp.zeros((), jnp.int32), ()]),
        "key": jax.random.key(7),
        "nothing": (),
    }


def after(state: dict[str, Any]) -> dict[str, Any]:
    """The state of the next step."""
    moments, [count, nothing] = state["moments"]
    model = jax.tree.map(lambda leaf: 0.5 * leaf + moments[0], state["model"])
    key = jax.random.fold_in(state["key"], 1)
    moments = moments + jax.random.uniform(key)
    return state | {"model": model, "moments": (moments, [count + 1, nothing]), "key": key}


def start(out: Path, **options: Any) -> OpenRun:
    return Run.start(out, **{"config": CONFIG, "dataset": DATASET} | options)


def used(out: Path, use: Callable[[OpenRun], Any], **options: Any) -> None:
    with start(out, **options) as run:
        use(run)


def train(out: Path, stop_at: int | None = None, fail_at: int | None = None, **options: Any) -> Any:
    """A whole training, as a file of one's own has it; return its last state."""
    with start(out, **options) as run:
        state, step = run.restore(init)
        while step < CONFIG.steps:
            state = after(state)
            step += 1
            run.log(step, loss=state["moments"][0].sum(), constant=7)
            if step in LOSSES:
                run.save(step, state, validation_loss=LOSSES[step])
            if step == stop_at:
                run.stop()
            if run.request() == "stop":
                run.save(step, state)
                sys.exit(3)
            if step == fail_at:
                raise RuntimeError("a mistake in the training")
    return state


def bits(state: Any) -> list[Any]:
    numbers = jax.tree.map(
        lambda leaf: (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ),
        state,
    )
    return [(np.asarray(leaf).tobytes(), leaf.dtype) for leaf in jax.tree.leaves(numbers)]


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The metrics, without the seconds, which differ."""
    lines = []
    for text in (out / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        line.pop("seconds", None)
        lines.append(line)
    return lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("trained") / "run"
    return out, train(out)


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


# --- from start to end ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "last"), [({"stop_at": 3}, 3), ({"stop_at": 4}, 4), ({"fail_at": 5}, 4)]
)
def test_a_training_that_ended_early_goes_on_bit_for_bit(trained, out, ended, last):
    whole, state = trained
    with pytest.raises((SystemExit, RuntimeError)):
        train(out, **ended)
    assert max(RunDirectory(out).checkpoint_steps()) == last
    faults.leave_all(out)

    resumed = train(out, resume=True)

    assert bits(resumed) == bits(state)
    assert lines_of(out) == lines_of(whole)
    assert sorted(contents(out / "checkpoints")) == sorted(contents(whole / "checkpoints"))
    provenance = RunDirectory(out).provenance()
    assert [line["step"] for line in provenance] == [0, last]
    assert [line["tokens_sha256"] for line in provenance] == [DATASET.digest] * 2


def test_a_run_has_its_files_its_best_and_its_last_state(trained):
    out, state = trained
    assert {path.name for path in out.iterdir()} == {
        *("checkpoints", "config.json", "lock", "metrics.jsonl", "provenance.jsonl"),
        "tokenizer.json",
    }
    assert [line["step"] for line in lines_of(out)] == [1, 2, 3, 4, 5, 6]
    found = {
        line["step"]: line["validation_loss"] for line in lines_of(out) if line["step"] in LOSSES
    }
    assert found == LOSSES

    with start(out, resume=True) as run:
        restored, step = run.restore(init)
        assert (step, run.steps(), run.best()) == (6, [2, 6], 2)
        assert bits(restored) == bits(state)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        best = run.load("best", {"moments": jax.eval_shape(init)["moments"]})
        assert best["moments"][1][0] == 2
        with pytest.raises(ValueError, match=r"it is damaged, or of another model .*average"):
            run.load("last", {"average": restored["model"]})

    opened = jgpt.load(out)
    assert (opened.path, opened.validation_loss, opened.config.steps) == (out, 1.0, 6)
    assert opened.metrics["constant"] == [7] * 6
    assert opened.metrics["validation_loss"][3] == 3.0
    assert math.isnan(opened.metrics["validation_loss"][2])
    last = jgpt.load(out, which="last")
    assert bits(nnx.state(last.model)) == bits(state["model"])


def test_an_average_beside_the_weights_is_the_model_to_use(out):
    with start(out) as run:
        state, _ = run.restore(init)
        average = jax.tree.map(lambda leaf: leaf + 1, state["model"])
        run.save(1, state | {"average": average})

    model, _, _ = jgpt.load(out)

    assert bits(nnx.state(model)) == bits(average)


def test_nothing_is_changed_before_a_state_is_made(copy, out):
    """The first line of the user's code may fail."""
    before = contents(copy)

    def fails():
        raise RuntimeError("no state")

    with pytest.raises(RuntimeError, match="no state"), start(copy, overwrite=True) as run:
        run.restore(fails)
    with start(copy, overwrite=True) as run:
        for write in (lambda: run.log(1, loss=1.0), lambda: run.save(1, init()), run.request):
            with pytest.raises(ValueError, match="call `restore` of the run before"):
                write()
    assert contents(copy) == before

    deep = out / "in" / "folders"
    with pytest.raises(RuntimeError, match="no state"), start(deep) as run:
        run.restore(fails)
    assert not out.exists()


def test_overwriting_begins_anew_and_keeps_what_is_not_the_run_s(copy):
    ours = ("samples.txt", "loss.png", "tensorboard/events", "wandb.id", "imported/vocab.json")
    foreign = ("notes.txt", "wandb/run-1/theirs", "checkpoints/mine")
    for name in (*ours, *foreign):
        path = copy / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("text")
    with start(copy, overwrite=True) as run:
        run.restore(init)
    left = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert left == {"config.json", "lock", "provenance.jsonl", "tokenizer.json", *foreign}
    assert [line["step"] for line in RunDirectory(copy).provenance()] == [0]


# --- what is refused -----------------------------------------------------------------------------

OTHER_TOKENS = Dataset.from_tokens(TOKENIZER.encode("abca" * 30), tokenizer=TOKENIZER)
OTHER_TOKENIZER = Dataset.from_tokens(TOKENIZER.encode("abcb" * 30), tokenizer=CharTokenizer("abd"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "already exists: `resume=True` continues it, `overwrite=True` starts again"),
        ({"resume": True, "overwrite": True}, "not both"),
        ({"config": dataclasses.replace(CONFIG, seed=8), "resume": True}, "`seed` is 1337 in"),
        ({"dataset": OTHER_TOKENS, "resume": True}, "has other tokens than .*SHA-256"),
        ({"dataset": OTHER_TOKENIZER, "resume": True}, "the dataset has another tokenizer"),
    ],
)
def test_a_start_that_is_refused_changes_nothing(copy, options, message):
    before = contents(copy)

    with pytest.raises((ValueError, OSError), match=message), start(copy, **options):
        pass

    assert contents(copy) == before


def test_two_trainings_do_not_share_a_folder(copy):
    with start(copy, resume=True):
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(BlockingIOError, match="is in use by another process: wait for it"):
                start(copy, **options).__enter__()
    with start(copy, resume=True):
        pass


@pytest.mark.parametrize("other", ["deleted", "replaced"])
def test_nothing_is_written_where_a_folder_was_deleted_or_replaced(copy, other):
    """The new folder can have another training."""
    before: dict[str, bytes | None] = {}

    def use(run):
        state, _ = run.restore(init)
        run.log(7, loss=1.0)
        shutil.rmtree(copy)
        if other == "replaced":
            train(copy)
        before.update(contents(copy))
        with pytest.raises(OSError, match="nothing more is written there"):
            run.log(8, loss=1.0)
        run.save(8, state)

    with pytest.raises(OSError, match="was deleted or moved while this run"):
        used(copy, use, config=LONGER, resume=True)
    assert contents(copy) == before


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_arrays_of_steps_or_numbers_of_the_last(out):
    told: list[dict[str, Any]] = []
    with start(out) as run:
        run.report = told.append
        state, _ = run.restore(init)
        run.log(3, loss=jnp.array([3.0, 2.0, 1.5]), norm=jnp.array([1.0, jnp.inf, 2.0]), tokens=96)
        assert run.metrics() == []  # the newest line waits for a validation loss
        run.log(4, loss=np.float32(1.25))
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
        with pytest.raises(ValueError, match="`norm` has 3 values for 2 steps"):
            run.log(6, loss=1.0, norm=jnp.ones(3))
        with pytest.raises(ValueError, match="step 4 is logged after step 4"):
            run.log(4, loss=1.0)
        run.save(4, state, validation_loss=jnp.float32(1.75))
        run.log(6, loss=jnp.ones(2))
    assert lines_of(out) == [
        {"step": 1, "loss": 3.0, "norm": 1.0},
        {"step": 2, "loss": 2.0, "norm": None},  # JSON has no word for infinity
        {"step": 3, "loss": 1.5, "norm": 2.0, "tokens": 96},
        {"step": 4, "loss": 1.25, "validation_loss": 1.75},
        {"step": 5, "loss": 1.0},
        {"step": 6, "loss": 1.0},
    ]
    written = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert told == written
    assert ["seconds" in line for line in written] == [False, False, True, True, False, True]


def test_a_log_does_not_wait_for_the_device(out, monkeypatch):
    monkeypatch.setattr(run_module, "_is_ready", lambda metrics: False)
    read: list[int] = []
    with start(out) as run:
        run.restore(init)
        for step in range(1, 71):
            run.log(step, loss=Unread(float(step), read, step))
        # but the host does not run ahead for ever
        assert read == [1, 2, 3, 4, 5, 6]
    assert len(lines_of(out)) == 70


def test_a_loss_that_is_not_finite_is_not_saved_after(out):
    def use(run):
        state, _ = run.restore(init)
        run.save(1, state)
        run.log(4, loss=jnp.array([2.0, 1.0, jnp.nan, 1.0]))
        run.save(4, state)

    with pytest.raises(FloatingPointError, match="loss is nan at step 3"):
        used(out, use)
    assert [line["step"] for line in lines_of(out)] == [1, 2]
    assert RunDirectory(out).checkpoint_steps() == [1]


def test_a_model_that_is_not_finite_is_not_saved(out):
    with start(out) as run:
        state, _ = run.restore(init)
        broken = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.inf), state["model"])
        with pytest.raises(FloatingPointError, match="the model isn't finite after step 1"):
            run.save(1, state | {"model": broken})
        with pytest.raises(FloatingPointError, match="validation_loss is nan at step 1"):
            run.save(1, state, validation_loss=math.nan)
        assert run.steps() == []


# --- saves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep_best": 3, "keep_last": 1}, [2, 4, 5, 7]),
        ({"keep_best": 1, "keep_last": 3, "keep_every": 3}, [2, 3, 5, 6, 7]),
    ],
    ids=str,
)
def test_the_config_says_how_many_are_kept(out, policy, kept):
    # one that was saved in haste is never the best
    losses = (9.0, 1.0, 7.0, 2.0, 3.0, None, 8.0)
    with start(out, config=dataclasses.replace(CONFIG, **policy)) as run:
        state, _ = run.restore(init)
        for step, loss in enumerate(losses, start=1):
            run.save(step, state, loss)
        run.wait()
        assert run.steps() == kept
        names = {path.name for path in (out / "checkpoints").iterdir()}
    assert names == {name for step in kept for name in (str(step), f"{step}.sha256.json")}


def test_a_checkpoint_that_a_kill_left_goes_at_the_next_start(out):
    with start(out, config=dataclasses.replace(CONFIG, keep_last=5)) as run:
        state, _ = run.restore(init)
        for step in (1, 2, 3):
            run.save(step, state, 9.0 - step)
    kept = dataclasses.replace(CONFIG, keep_best=1, keep_last=2)
    with start(out, config=kept, resume=True) as run:
        run.restore(init)
        assert run.steps() == [2, 3]


def test_a_run_without_an_evaluation_has_its_last_state(out):
    with start(out) as run:
        state, _ = run.restore(init)
        run.save(1, state)
        assert run.best() is None
        run.save(2, after(state))
        run.save(2, state)  # it is saved already
    opened = jgpt.load(out)
    assert opened.validation_loss is None
    assert bits(nnx.state(opened.model)) == bits(after(state)["model"])


@pytest.mark.parametrize("asked", ["save", "request", "wait", "end", "exit"])
def test_a_save_that_fails_leaves_the_checkpoints_and_is_told(copy, monkeypatch, asked):
    failed = r"of step 7 could not be written .*No space left.*; the last good checkpoint is step 6"
    before = contents(copy / "checkpoints")

    def use(run):
        state, _ = run.restore(init)
        monkeypatch.setattr(checkpoints, "sync_below", faults.full_disk)
        run.save(7, state, validation_loss=0.5)
        if asked == "save":
            run.save(8, state)
        elif asked == "request":
            until = time.monotonic() + 60
            while run.request() is None:
                assert time.monotonic() < until
        elif asked == "wait":
            run.wait()
        elif asked == "exit":
            sys.exit(3)

    with pytest.raises(OSError, match=failed):
        used(copy, use, config=LONGER, resume=True)
    assert contents(copy / "checkpoints") == before


def test_the_first_error_is_told_before_that_of_a_save(copy, monkeypatch):
    def use(run):
        state, _ = run.restore(init)
        monkeypatch.setattr(checkpoints, "sync_below", faults.full_disk)
        run.save(7, state)
        raise RuntimeError("mistake")

    with pytest.raises(RuntimeError, match="mistake") as error:
        used(copy, use, config=LONGER, resume=True)
    assert "the checkpoint of step 7 could not be written" in error.value.__notes__[0]


@pytest.mark.parametrize(("waited_for", "is_waited"), [(1, True), (1 << 40, False)])
def test_a_large_state_is_written_from_its_own_memory_before_it_may_be_donated(
    copy, monkeypatch, waited_for, is_waited
):
    monkeypatch.setattr(checkpoints, "WAITED_FOR", waited_for)
    may_finish = threading.Event()
    sync_below = checkpoints.sync_below

    def slow_sync(path):
        may_finish.wait(0.3 if is_waited else 30)
        sync_below(path)

    monkeypatch.setattr(checkpoints, "sync_below", slow_sync)
    with start(copy, config=LONGER, resume=True) as run:
        state, _ = run.restore(init)
        run.save(7, state)
        is_written = (copy / "checkpoints" / "7.sha256.json").exists()
        may_finish.set()
    assert is_written == is_waited


# --- requests and signals ------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "saved"), [(0.1, [3, 6, 9]), (0.5, [5, 10]), (2.0, [])])
def test_it_is_time_to_save_after_half_a_minute_or_a_hundred_times_what_it_takes(
    out, monkeypatch, seconds, saved
):
    """Steps take ten seconds."""
    now = [1000.0]
    monkeypatch.setattr(run_module, "SECONDS_BETWEEN_SAVES", 30.0)
    monkeypatch.setattr(run_module.time, "monotonic", lambda: now[0])
    asked = []
    with start(out) as run:
        state, _ = run.restore(init)
        for step in range(1, 12):
            now[0] += 10
            run._open_checkpoints().seconds = seconds
            if run.request() == "save":
                asked.append(step)
                run.save(step, state)
                run.wait()
    assert asked == saved


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_for_a_stop_and_handlers_are_given_back(out, number, capfd):
    before = [signal.getsignal(each) for each in SIGNALS]
    with start(out) as run:
        run.restore(init)
        assert run.request() is None
        os.kill(os.getpid(), number)
        assert run.request() == "stop"
        assert capfd.readouterr().err.startswith("stopping after this step")
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        else:  # a closed terminal is told twice
            os.kill(os.getpid(), number)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_signals_that_the_program_handles_itself_are_left_to_it(out):
    def own(number, frame): ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with start(out):
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


# --- code ----------------------------------------------------------------------------------------


def test_code_is_copied_and_a_change_is_said(tmp_path, out):
    files = [tmp_path / "train.py", tmp_path / "layers.py"]
    for file in files:
        file.write_text("width = 3\n")
    with start(out, code=files) as run:
        state, _ = run.restore(init)
        run.save(1, state)
        assert run.changed_code() == []
    assert (out / "code" / "layers.py").read_text() == "width = 3\n"

    files[1].write_text("width = 4\n")
    with start(out, code=files, resume=True) as run:
        assert run.changed_code() == ["layers.py has changed since the run began"]
        assert (out / "code" / "layers.py").read_text() == "width = 3\n"
        run.restore(init)
    assert (out / "code" / "layers.py").read_text() == "width = 4\n"
    with start(out, code=str(files[0]), overwrite=True) as run:
        assert run.changed_code() == []
        run.restore(init)
    assert [path.name for path in (out / "code").iterdir()] == ["train.py"]


def test_no_run_goes_into_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(FileExistsError, match="is not a run directory, and has other files"):
            start(tmp_path, **options).__enter__()
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_the_seconds_of_a_run_go_on(trained, copy):
    seconds = json.loads((copy / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
    with start(copy, config=LONGER, resume=True) as run:
        run.restore(init)
        run.log(7, loss=1.0)
    assert jgpt.load(copy).metrics["seconds"][-1] >= seconds


def test_metrics_that_can_t_be_written_are_told_with_a_way_out(copy):
    def use(run):
        run.restore(init)
        (copy / "metrics.jsonl").unlink()
        (copy / "metrics.jsonl").mkdir()
        run.log(7, loss=1.0)

    with pytest.raises(OSError, match="the checkpoints are intact: free some space and use"):
        used(copy, use, config=LONGER, resume=True)


def test_another_thread_trains_without_signals(out):
    before = [signal.getsignal(each) for each in SIGNALS]
    found = []

    def in_thread():
        with start(out) as run:
            run.restore(init)
            found.append([signal.getsignal(each) for each in SIGNALS])

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [before]
