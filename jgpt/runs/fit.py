"""Training from a config to a run with its best model: prepare, the loop, finish.

The loop is that of the file which `jgpt new --training` writes, with calls of many steps: it adds
meshes, micro-batches, evaluations of bounded cost, and progress.
"""

import functools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.config import ModelConfig, TrainConfig
from jgpt.data.batches import batches, resident
from jgpt.data.dataset import (
    GIVEN,
    Dataset,
    load_dataset,
    require_same_tokenizer,
    require_usable,
)
from jgpt.data.encode import Tokenizer
from jgpt.fields import Make
from jgpt.files import write_file
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.machine import (
    describe_unused_gpu,
    memory_in_use,
    peak_flops,
    process_count,
    process_index,
    release_memory,
    this_machine,
)
from jgpt.nn.costs import flops_per_token
from jgpt.nn.models import LanguageModel, abstract_model, require_parameters_only
from jgpt.parallel.mesh import abstract_mesh, current_mesh, use_mesh
from jgpt.parallel.processes import Vote, raise_in_all_processes, require_same
from jgpt.parallel.rules import shardings
from jgpt.runs.checkpoints import loss_of
from jgpt.runs.directory import LOSS_PICTURE, RUNS, SAMPLES, RunDirectory
from jgpt.runs.initial import (
    Initial,
    read_initial,
    require_fitting,
    require_trainable,
    with_moments,
)
from jgpt.runs.load import load_model
from jgpt.runs.progress import Progress, default_progress, draw_losses
from jgpt.runs.provenance import machine_choices, versions
from jgpt.runs.resume import describe_learning_rate, fields_of, with_lowered_floor
from jgpt.runs.run import OpenRun, Request, Run
from jgpt.runs.trackers import open_trackers, require_tracker
from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import prove
from jgpt.training.complete import complete, require_memory
from jgpt.training.evaluation import Evaluator
from jgpt.training.memory import compile_steps, memory_of
from jgpt.training.optimizer import evaluated_weights
from jgpt.training.placement import bytes_of, parameters_without_names
from jgpt.training.plan import Plan, make_plan
from jgpt.training.state import (
    State,
    abstract_state,
    dropout_stream,
    init_state,
    placed_state,
)
from jgpt.training.step import placed_arrays
from jgpt.user_code import (
    code_facts,
    describe_error,
    require_all_code,
    with_code,
)
from jgpt.words import format_bytes

SECONDS_PER_CALL = 2.0
"""The longest call of several steps: as often a signal is answered and a display moves."""
SECONDS_PER_STEP = 0.5
"""The time that a step is expected to take until one was measured."""
LONGEST_PROOF = 1024
"""At this length a proof of a small model takes 4 s of a processor and 410 MiB, at 256 1.3 s."""


class TrainingStopped(Exception):
    """Raised when training was asked to stop, after a checkpoint was saved.

    At step 0 the text was still tokenized: there is no checkpoint, and the tokens so far are kept.
    """

    def __init__(self, step: int, directory: Path) -> None:
        message = f"stopped after step {step}; its checkpoint is in {directory}"
        if step == 0:
            message = "stopped before training began, while the text was tokenized"
        super().__init__(message)
        self.step = step
        self.directory = directory


@typed
def fit(
    config: TrainConfig,
    *,
    model: Make | str = None,
    optimizer: Make | str = None,
    objective: Make | str = None,
    dataset: Dataset | None = None,
    initial: LanguageModel | str | Path | None = None,
    with_optimizer: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | Literal["auto"] | None = "auto",
    should_stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Train a config's run into its directory; return the run with its best model.

    `model` makes a custom model: `model(config.model, rngs=rngs)` returns a `LanguageModel`, and
    `config.model` is converted to the class that it annotates. `optimizer` makes an optax
    optimizer: `optimizer(config.optimizer, config.steps)`. `objective` is what is minimised: a
    function of (model, tokens, rngs) that returns the mean over the windows `tokens`, or a `Loss`.
    Each may be FILE.py:NAME. Every process calls `fit` with the same arguments; process 0 writes
    and reports.

    `dataset`, such as one of `Dataset.from_tokens`, is trained on in place of the config's data;
    give the same one to resume. The run starts from the weights of `initial`, which is a model, or
    the path of a run or a Hugging Face folder, whose tokenizer it takes; `with_optimizer` takes the
    moments and the step of a run's checkpoint, RUN@STEP, too. `resume` continues from the
    directory's last checkpoint, or starts if there is none yet; `overwrite` deletes the existing
    run. `should_stop` is polled after each call of steps, and while the text is tokenized.
    `progress` is by default shown on a terminal and in a notebook; None is silent.

    Raises ValueError or OSError before anything is written or deleted; later OSError if something
    can't be written, FloatingPointError for a loss or gradient that is not finite, and
    TrainingStopped, each with the last good state in a checkpoint.
    """
    config = with_code(config, model, optimizer, objective)
    shown = _progress_of_this_process(progress)
    with raise_in_all_processes():
        prepared = prepare(
            config,
            dataset=dataset,
            initial=initial,
            with_optimizer=with_optimizer,
            resume=resume,
            overwrite=overwrite,
            progress=shown,
            should_stop=should_stop,
        )
    # From here on all processes compute together, and would wait for ever for a missing one.
    require_same(_shared_facts(prepared))
    with use_mesh(prepared.config.mesh):
        train_steps = _compiled_steps(prepared.config)
        with prepared.run:
            _train(prepared, train_steps, shown, should_stop)
        return _finish(prepared, shown)


def plan(
    config: TrainConfig,
    *,
    initial: LanguageModel | str | Path | None = None,
    with_optimizer: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Return the plan of `fit`, and raise the errors that `fit` would. Nothing is written."""
    prepared = prepare(
        config,
        initial=initial,
        with_optimizer=with_optimizer,
        resume=resume,
        overwrite=overwrite,
        progress=progress or Progress(),
    )
    with use_mesh(prepared.config.mesh):
        return make_plan(prepared.config, prepared.run.dataset, prepared.run.path)


def _progress_of_this_process(progress: Progress | Literal["auto"] | None) -> Progress:
    """Return the requested progress in process 0, and a silent one in the others."""
    if progress == "auto":
        progress = default_progress()
    if progress is None or process_index() != 0:
        return Progress()
    return progress


# --- prepare --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its text is open, and its config is complete."""

    run: OpenRun
    config: TrainConfig
    """That of the run, and what this machine decides, which the run doesn't record."""
    is_new: bool
    """Whether there is no checkpoint to resume from."""
    init: Callable[[], State]
    first: int
    """The state and the step with which a new run begins."""


def prepare(
    config: TrainConfig,
    *,
    dataset: Dataset | None = None,
    initial: LanguageModel | str | Path | None = None,
    with_optimizer: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
) -> Prepared:
    """Open the text, decide what the config leaves open, and check all of it; write nothing.

    Raises ValueError or OSError if the run can't start, and TrainingStopped.
    """
    if resume and config.out is None:
        raise ValueError("`resume=True` needs the run's `out=DIRECTORY`")
    for name in config.trackers:
        require_tracker(name)
    require_all_code(config)
    # first, since a large text is tokenized for minutes
    unused = describe_unused_gpu()
    if unused is not None:
        progress.warned(unused)
    out = Path(config.out or _unused_path(config.name))
    saved = None
    if resume and RunDirectory.exists(out):
        _require_known_initial(initial, RunDirectory(out))
        if RunDirectory(out).checkpoint_steps():
            saved = RunDirectory(out)
    if saved is not None:
        initial = None  # its checkpoint is what the run goes on from
        old = saved.config()
        config = replace(config, optimizer=with_lowered_floor(old.optimizer, config.optimizer))
        changed = describe_learning_rate(old, config, saved.checkpoint_steps()[-1])
        if changed is not None:
            progress.warned(changed)
    weights = None
    if initial is not None:
        if isinstance(initial, (str, Path)) and _is_same_folder(Path(initial), out):
            raise ValueError(
                f"`overwrite=True` would delete the weights of {initial}, from which the run "
                "starts: give another `out`"
            )
        weights = read_initial(initial, config, dataset)
    if dataset is None:
        dataset = _load_text(config, saved, weights, out, progress, should_stop)
    else:
        config = replace(config, dataset=replace(config.dataset, data=(GIVEN,)))
        require_usable(dataset, config.dataset, config.model.block_size)
        if weights is not None and weights.tokenizer is not None:
            require_same_tokenizer(f"`initial={weights.source!r}`", weights.tokenizer, dataset)
    model = replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    config = replace(config, model=model)
    trained = complete(config, this_machine())
    # A run keeps the dtype that it began with: its losses would not continue in another one.
    recorded = replace(config, model=replace(model, dtype=trained.model.dtype))
    run = Run.start(out, recorded, dataset, resume=resume, overwrite=overwrite)
    run.facts = machine_choices(trained)
    require_parameters_only(abstract_model(trained.model))
    require_trainable(recorded)
    first = 0
    init = functools.partial(init_state, trained)
    if weights is not None:
        require_fitting(weights, recorded)
        run.facts["initial"] = weights.source
        init = functools.partial(init_state, trained, weights.arrays)
    if with_optimizer and saved is None:
        first, init = with_moments(weights, trained)
    kept = config.keep_best + config.keep_last + 1  # and the one that is written
    _require_disk(out, kept * bytes_of(abstract_state(trained)))
    _warn(trained, progress, is_new=saved is None)
    return Prepared(run, trained, saved is None, init, first)


def _unused_path(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that does not exist."""
    path = RUNS / name
    # Another process may take the same name meanwhile; the lock of the directory decides.
    number = 1
    while path.exists():
        number += 1
        path = RUNS / f"{name}-{number}"
    return path


def _is_same_folder(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _require_known_initial(initial: Any, run: RunDirectory) -> None:
    """Raise ValueError unless a run is resumed from the weights that it started from.

    They may be given again, as in the command that is repeated with `resume`, and have to be as
    long as there is no checkpoint.
    """
    source = run.recorded("initial") or ""
    if initial is None and source and not run.checkpoint_steps():
        raise ValueError(
            "the run started from other weights and has no checkpoint yet: give "
            f"`initial={source!r}`"
        )
    is_path = isinstance(initial, (str, Path))
    if is_path and str(initial) not in (source, source.rpartition("@")[0]):
        raise ValueError(
            "the run to resume did not start from these weights: leave out "
            f"`initial={str(initial)!r}`, or train a new run from them"
        )


def _load_text(
    config: TrainConfig,
    saved: RunDirectory | None,
    weights: Initial | None,
    out: Path,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Dataset:
    """Load the text as tokens; a resumed run keeps its tokenizer. Raises TrainingStopped."""
    tokenizer = known = None
    if saved is not None:
        tokenizer = saved.tokenizer()
        known = saved.recorded("tokens_sha256")
    elif weights is not None:
        tokenizer = weights.tokenizer

    def tokenized(fraction: float) -> None:
        progress.tokenized(fraction)
        # Several processes would have to agree, which they do only between steps.
        if process_count() == 1 and should_stop():
            raise KeyboardInterrupt  # the tokens so far are kept

    try:
        return load_dataset(
            config.dataset,
            config.model.block_size,
            tokenizer=tokenizer,
            digest=known,
            warn=progress.warned,
            progress=tokenized,
        )
    except KeyboardInterrupt:
        if should_stop():
            raise TrainingStopped(0, out) from None
        raise


def _require_disk(out: Path, needed: int) -> None:
    """Raise OSError if the disk can't hold the checkpoints that are kept and the one being saved.

    A disk that fills up later costs steps, and hours may pass until then.
    """
    # The nearest existing folder, since the directory itself may not exist yet.
    folders = (out, *out.absolute().parents)
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise OSError(
            f"{existing} has {format_bytes(free)} free, but the checkpoints need "
            f"{format_bytes(needed)}: free some space, or lower `keep_best` and `keep_last`"
        )


def _warn(config: TrainConfig, progress: Progress, *, is_new: bool) -> None:
    """Warn of what a model of the user's own does that costs more than it seems to."""
    if config.model.make is None:
        return
    looking_ahead = None
    if is_new:
        looking_ahead = _describe_sight(config.model)
    if looking_ahead is not None:
        progress.warned(looking_ahead)
    unnamed = parameters_without_names(config.model, abstract_mesh(config.mesh))
    if unnamed:
        progress.warned(
            f"`mesh={config.mesh!r}` replicates {len(unnamed)} parameters whose dimensions have "
            f"no names, such as {unnamed[0]}: nnx.Param(value, dimensions=('embed_dim', "
            "'hidden_dim')) has names"
        )


def _describe_sight(config: ModelConfig) -> str | None:
    """Return a warning unless it is proven that a model of one's own reads no later token."""
    model = abstract_model(config)
    if not getattr(model, "causal", True):  # it says that it looks ahead on purpose
        return None
    time = min(model.block_size, LONGEST_PROOF)
    try:
        proof = prove(model, "int32[b t]", causal="t", sizes={"t": time, "b": 1})
    # A model that trains is not kept from it by a program that the proof can't read.
    except Exception as error:
        reason = str(error) or type(error).__name__
        return f"whether the model reads later tokens can't be proven: {reason}"
    if proof:
        return None
    # A model that reads later tokens has a low loss, and samples nonsense.
    verdict, *reasons = str(proof).splitlines()
    found = verdict.removeprefix("not proven: ")
    entries = [reason for reason in reasons if "comes in at" in reason]
    return (
        f"the model is not proven causal: {'; '.join([found, *map(str.strip, entries)])} "
        "(one that looks ahead on purpose has `causal = False`)"
    )


def _shared_facts(prepared: Prepared) -> dict[str, Any]:
    """Return the facts that must be equal in all processes of a run, by their names in messages."""
    facts: dict[str, Any] = dict(fields_of(prepared.config))
    facts |= code_facts(prepared.config)
    facts["resume"] = prepared.run.resume
    facts["overwrite"] = prepared.run.overwrite
    facts["tokens_sha256"] = prepared.run.dataset.digest
    # Another version of JAX may compute other numbers.
    facts |= versions()
    return facts


# --- train ----------------------------------------------------------------------------------------


def _compiled_steps(config: TrainConfig) -> Callable[..., Any]:
    """Trace a step, in which an error of the user's code shows, compile it, and weigh it."""
    compiled = compile_steps(config)
    release_memory()  # that of compiling, before the state is made
    require_memory(memory_of(compiled, config), config, this_machine())
    return compiled


def _train(
    prepared: Prepared,
    train_steps: Callable[..., Any],
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Train to the end, or until the losses stop falling."""
    run = prepared.run
    config = prepared.config
    for line in run.changed_code():
        progress.warned(line)
    opened = open_trackers(config, run.path, is_new=prepared.is_new, warn=progress.warned)
    with opened as track:
        # Only now, with open trackers: it deletes a run that is overwritten.
        state, step = run.restore(prepared.init, placed_state(config), prepared.first)
        progress.started(config, run.dataset, state["model"], step, run.path)

        def report(line: dict[str, Any]) -> None:
            if "tokens_per_second" in line:
                progress.stepped(line["step"], line["loss"], line["tokens_per_second"])
            track(line)

        run.report = report
        _Loop(run, config, train_steps, state, step, progress, should_stop).run_to_end()


class _Loop:
    """The loop of `fit`: calls of many steps, whose metrics are read during the next call."""

    def __init__(
        self,
        run: OpenRun,
        config: TrainConfig,
        train_steps: Callable[..., Any],
        state: State,
        step: int,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.run = run
        self.config = config
        self.train_steps = train_steps
        self.state = state
        self.step = step
        self.progress = progress
        self.should_stop = should_stop
        self.tokens = resident(run.dataset.train)
        self.arrays = placed_arrays(config.objective)
        self.key = dropout_stream(config.seed)
        self.tokens_per_step = config.batch_size * config.model.block_size
        self.evaluator = Evaluator(config, run.dataset.validation)
        self.taken = jax.device_put(np.int32(step), shardings(jax.sharding.PartitionSpec()))
        self.unread: tuple[int, int, Any] | None = None  # first step, count and metrics of a call
        self.seconds_per_step = SECONDS_PER_STEP  # of the slowest process
        self.measured = SECONDS_PER_STEP  # of this one
        self.vote = Vote()
        self.peak = _peak_tokens_per_second(config)
        self.clock = time.monotonic()

    def run_to_end(self) -> None:
        """Train, evaluate and save to the last step."""
        config = self.config
        lines = self.run.metrics()
        losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
        try:
            while self.step < config.steps and not _stops_early(losses, config.patience):
                pause = self._next_evaluation()
                self._take_steps(at_most=pause - self.step)
                if self.step == pause:
                    losses.append(self._evaluate())
                self._answer_request()
        except FloatingPointError as error:
            self._keep_last_good_state(error)
        if self.step < config.steps:
            self.progress.warned(
                f"stopped at step {self.step} of {config.steps}: no better validation loss "
                f"in `patience={config.patience!r}` evaluations"
            )

    def _next_evaluation(self) -> int:
        """Return the next step that is evaluated: also the first one early, so that a run that
        fails has a checkpoint."""
        interval = self.config.eval_interval
        steps = [interval // 8, (self.step // interval + 1) * interval, self.config.steps]
        return min(step for step in steps if step > self.step)

    def _take_steps(self, at_most: int) -> None:
        """Make one call of steps, and read the metrics of the call before while it computes."""
        config = self.config
        # All processes take equal steps; their slowest time is known one call late.
        if microseconds := self.vote(int(1e6 * self.measured)):
            self.seconds_per_step = microseconds / 1e6
        affordable = max(1, int(SECONDS_PER_CALL / self.seconds_per_step))
        count = min(config.steps_per_call, affordable, at_most)
        windows = batches(
            self.tokens,
            config.seed,
            self.step,
            steps=config.steps_per_call,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            count=count,
        )
        numbers = np.int32(count), np.int32(self.step), self.taken
        # The old state is donated, and what is read below may raise an error.
        self.state, metrics = self.train_steps(
            self.state, windows, self.key, *numbers, arrays=self.arrays
        )
        self.taken = metrics.taken
        before = self.unread
        self.unread = (self.step, count, metrics)
        self.step += count
        if before is not None:
            self._read(before)

    def _read(self, call: tuple[int, int, Any]) -> None:
        """Log the metrics of a call. Raises FloatingPointError for a step that is not finite."""
        first, count, metrics = call
        columns = {
            "loss": metrics.loss,
            "gradient_norm": metrics.gradient_norm,
            "learning_rate": metrics.learning_rate,
            **(metrics.extra or {}),
        }
        columns = {name: np.asarray(values)[:count] for name, values in columns.items()}
        good = int(metrics.taken) - first
        if good < count:
            if good > 0:
                before = {name: values[:good] for name, values in columns.items()}
                self.run.log(first + good, **before)
            raise FloatingPointError(_describe_step(first + good + 1, columns, good))
        self.run.log(first + count, **columns, **self._measurements(first + count, count))

    def _read_all(self) -> None:
        """Log the metrics of the last call, which is waited for."""
        call = self.unread
        self.unread = None
        if call is not None:
            self._read(call)

    def _measurements(self, step: int, count: int) -> dict[str, float]:
        """Return the measurements of a call, which only the line of its last step has."""
        now = time.monotonic()
        self.measured = max(now - self.clock, 1e-6) / count
        self.clock = now
        speed = self.tokens_per_step / self.measured
        measured: dict[str, float] = {
            "tokens": step * self.tokens_per_step,
            "tokens_per_second": round(speed, 1),
        }
        if self.peak:
            measured["model_flops_utilisation"] = round(speed / self.peak, 5)
        memory = memory_in_use()
        if memory is not None:
            measured["memory_bytes"] = memory
        return measured

    def _evaluate(self) -> float:
        """Evaluate and save the state after a step."""
        self._read_all()

        def between(done: int, targets: int) -> None:
            self.progress.evaluating(done, targets)
            # The save that is due has this loss. The last evaluation is finished in any case.
            if self._request() == "stop" and self.step < self.config.steps:
                self._save_and_stop()

        state = self._state_to_save()
        loss = self.evaluator.mean(state.get("average", state["model"]), between)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the validation loss is {loss} after step {self.step}: lower `learning_rate`"
            )
        self.run.save(self.step, state, validation_loss=loss)
        self.progress.evaluated(self.step, loss)
        self.clock = time.monotonic()
        return loss

    def _state_to_save(self) -> State:
        """Return the state, with the average to evaluate where the optimizer has one."""
        average = evaluated_weights(self.state["model"], self.state["optimizer"])
        if average is None:
            return self.state
        return self.state | {"average": average}

    def _request(self) -> Request:
        if self.should_stop():
            self.run.stop()
        return self.run.request()

    def _answer_request(self) -> None:
        """Save if it is time, and stop if any process was asked to, or can't write."""
        request = self._request()
        if request == "save":
            self._read_all()
            self.run.save(self.step, self._state_to_save())
            self.clock = time.monotonic()
        elif request == "stop":
            self._save_and_stop()

    def _save_and_stop(self) -> None:
        """Save and raise TrainingStopped, unless all steps are taken."""
        self._read_all()
        self.run.save(self.step, self._state_to_save())
        self.run.wait()
        if self.step < self.config.steps:
            raise TrainingStopped(self.step, self.run.path)

    def _keep_last_good_state(self, error: FloatingPointError) -> NoReturn:
        """Save the last state that was finite, if it is, and name the checkpoint that is kept."""
        taken = int(self.taken)
        state = self._state_to_save()
        loss = self.evaluator.mean(state.get("average", state["model"]))
        # A step that was not finite left the state as it was.
        if math.isfinite(loss) and 0 < taken < self.step:
            self.run.save(taken, state)
        self.run.wait()
        advice = "nothing was saved yet"
        if steps := self.run.steps():
            advice = f"checkpoint {steps[-1]} is kept"
        raise FloatingPointError(f"{error}; {advice}") from None


def _stops_early(losses: list[float], patience: int | None) -> bool:
    """Return whether `patience` evaluations have passed since the first one with the lowest
    loss."""
    if patience is None or not losses:
        return False
    best = losses.index(min(losses))
    return len(losses) - 1 - best >= patience


def _describe_step(step: int, columns: dict[str, Any], row: int) -> str:
    """Return the message for a step that is not finite: its number, and what to change."""
    values = {name: float(column[row]) for name, column in columns.items()}
    name = "loss"
    if math.isfinite(values["loss"]):
        name = "gradient_norm"
    advice = "lower `learning_rate`"
    if step == 1:  # there was no update yet, so a lower rate changes nothing
        advice = (
            "the model gives it at its first step, before any update: look for the mistake in its "
            "forward pass or its initial parameters"
        )
    return (
        f"{name} is {values[name]} at step {step} (learning_rate {values['learning_rate']:.3g}, "
        f"gradient_norm {values['gradient_norm']:.3g}): {advice}"
    )


def _peak_tokens_per_second(config: TrainConfig) -> float | None:
    """Return the tokens per second at the published peak of the devices, or None if unknown."""
    peak = peak_flops()
    if peak is None:
        return None
    # Computed only now, since counting the FLOPs lowers a custom model.
    # The backward pass has two products for each one of the forward pass.
    flops = 3 * flops_per_token(config.model)
    if flops == 0:  # a bigram model has no products
        return None
    return max(current_mesh().size, 1) * peak / flops


# --- finish ---------------------------------------------------------------------------------------


def _finish(prepared: Prepared, progress: Progress) -> Run:
    """Return the best model; write a sample and a picture of the losses."""
    # Otherwise compiled programs and the state would stay in memory beside the model that samples.
    release_memory()
    run = prepared.run
    directory = RunDirectory(run.path)
    tokenizer = run.dataset.tokenizer
    step, model = load_model(directory, prepared.config, "best")
    loss = loss_of(directory.checkpoints, step)
    sample = _sample_or_warn(model, tokenizer, run.config, progress)
    release_memory()
    with raise_in_all_processes():
        if process_index() == 0:
            write_file(run.path / SAMPLES, sample)
            picture = draw_losses(directory, "png", progress.warned)
            if picture is not None:
                write_file(run.path / LOSS_PICTURE, picture)
    return Run(run.path, model, tokenizer, run.config, loss)


def _sample_or_warn(
    model: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, progress: Progress
) -> str:
    """Return a sample, or warn: a model or a tokenizer of one's own may train and not sample.

    A tokenizer may have a larger vocab_size than it can decode, as one that is padded.
    """
    try:
        return _sample(model, tokenizer, config.sample_tokens, config.seed)
    except Exception as error:
        reason, *_ = (describe_error(error) or f"{type(error).__name__}: {error}").splitlines()
        progress.warned(f"no sample: {reason}")
        return ""


def _sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    prompt = jnp.asarray(default_prompt(tokenizer))  # time
    key = jax.random.key(np.uint32(seed))  # a Python number from 2**31 on would overflow
    drawn = generate(model, prompt[None], tokens, key=key)  # 1 time+tokens
    # Without the tokens that a tokenizer puts before each text, such as <s>.
    text = drawn[0, len(tokenizer.begin) :]
    return tokenizer.decode(np.asarray(text))
