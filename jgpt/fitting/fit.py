"""Training from a config to a run with its best model: `fit`, and its plan."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.batch import Batch
from jgpt.data.batches import batches, resident
from jgpt.data.characters import OwnTokenizer, UnencodableText
from jgpt.data.dataset import Dataset
from jgpt.data.encode import Tokenizer
from jgpt.data.own_batches import OwnBatches, own_batches
from jgpt.fields import Make
from jgpt.fitting.loop import Training
from jgpt.fitting.metrics import MetricsLogger
from jgpt.fitting.prepare import PreparedRun, prepare, shared_facts
from jgpt.fitting.progress import Progress, default_progress, draw_losses
from jgpt.fitting.trackers import Trackers, trackers_removed_on_error
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.hardware import (
    Platform,
    current_platform,
    memory_in_use,
    process_index,
    release_memory,
    this_machine,
)
from jgpt.nn.models import LanguageModel
from jgpt.parallel.mesh import current_mesh, use_mesh
from jgpt.parallel.processes import raise_in_all_processes, require_same
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import LOSS_PICTURE, METRICS, SAMPLES, RunDirectory
from jgpt.runs.load import describe_loaded, load
from jgpt.runs.target import choose_target
from jgpt.shapes.contract import typed
from jgpt.training.custom_objective import require_gradient, trace_objective, unread_arrays
from jgpt.training.evaluation import EvaluationPlan
from jgpt.training.plan import Plan, make_plan, with_process_memory
from jgpt.training.state import TrainState, dropout_stream, init_state
from jgpt.training.step import make_train_steps
from jgpt.user_code import custom_code, describe_error, with_code


@dataclass(frozen=True)
class Run:
    """The result of `fit`: the model of the best checkpoint and its loss."""

    directory: Path
    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig
    """The config as saved in the directory."""
    validation_loss: float
    """The loss in nats per token, over the targets of the run's evaluations."""
    best_step: int
    sample: str
    """Text that the model generated."""
    seconds: float
    """The duration of the call."""
    evaluations: EvaluationPlan
    """The targets of the loss."""

    def __repr__(self) -> str:
        return (
            f"Run(\n    directory: {self.directory}\n"
            f"    {describe_loaded(self.model, self.tokenizer, self.config)}\n"
            f"    validation_loss: {self.validation_loss:.4f} at step {self.best_step}\n)"
        )

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The columns of `metrics.jsonl`, for `pandas.DataFrame`; NaN where a step has no value."""
        lines = RunDirectory.open(self.directory).metrics()
        columns: dict[str, list[float]] = {}
        for line in lines:
            for name in line:
                columns.setdefault(name, [])
        for name, column in columns.items():
            for line in lines:
                column.append(line.get(name, math.nan))
        return columns


@dataclass
class OpenRun:
    """A run whose directory is locked and written, with everything that its loop needs."""

    prepared: PreparedRun
    directory: RunDirectory
    """The directory, with the lock that this process holds."""
    state: TrainState | None
    train_steps: jax.stages.Wrapped
    checkpoints: Checkpoints
    logger: MetricsLogger
    is_unevaluated: bool
    """Whether an evaluation of the state was interrupted, so that training begins with it."""

    def take_state(self) -> TrainState:
        """Return the state, once: each call of steps reuses the memory of its arrays."""
        state = self.state
        assert state is not None
        self.state = None
        return state


@typed
def fit(
    config: TrainConfig,
    *,
    model: Make | str = None,
    optimizer: Make | str = None,
    dataset: Dataset | None = None,
    objective: Make | str = None,
    batches: Make | str = None,
    initial: LanguageModel | str | Path | None = None,
    trainable: tuple[str, ...] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | Literal["auto"] | None = "auto",
    should_stop: Callable[[], bool] = lambda: False,
    platform: Platform | None = None,
) -> Run:
    """Train a config's run into its directory; return the run with its best model.

    `model` makes a custom model: `model(config.model, rngs=rngs)` returns a `LanguageModel`, and
    `config.model` is converted to the class that it annotates. `optimizer` makes an optax
    optimizer: `optimizer(config.optimizer, config.steps)`. `objective` makes what is minimised:
    `objective(config)` returns a function of (model, batch, rngs), whose result is the mean over
    the batch or a `Loss`. Each may be FILE.py:NAME. Training uses the mesh of the config, by
    default all accelerators. Every process calls `fit` with the same arguments; process 0 writes
    and reports.

    `dataset`, such as one of `Dataset.from_tokens`, is trained on in place of the config's data;
    give the same one to resume. `batches`, a pure function of (dataset, seed, step), makes the
    `Batch` of each step. The run starts from the weights of `initial`, which is a model, or the
    path of a run or a Hugging Face folder, whose tokenizer it takes. `trainable` replaces
    `config.optimizer.trainable`. `resume` continues from the directory's last checkpoint, or starts
    if there is none yet; `overwrite` deletes the existing run. `should_stop` is polled after each
    call of steps, and while the text is tokenized. `platform`, by default the current one, decides
    the config's `auto`. `progress` is by default shown on a terminal and in a notebook; None is
    silent. Raises ValueError or OSError
    before anything is written or deleted; later OSError if something can't be written,
    FloatingPointError for a loss or gradient that is not finite, and TrainingStopped, each with the
    last good state in a checkpoint. A stop before the first step raises StoppedBeforeTraining,
    which is a kind of TrainingStopped.
    """
    started = time.perf_counter()
    config = with_code(config, model, optimizer, objective, batches=batches)
    if trainable is not None:
        config = replace(config, optimizer=replace(config.optimizer, trainable=trainable))
    machine = this_machine(platform)
    progress = _progress_of_this_process(progress)
    with raise_in_all_processes():
        target = choose_target(config, resume=resume, overwrite=overwrite)
        prepared = prepare(
            config, target, machine, progress, should_stop, dataset=dataset, initial=initial
        )
    # From here on all processes compute together, and would wait for ever for a missing one.
    require_same(shared_facts(prepared, resume=resume, overwrite=overwrite))
    with use_mesh(prepared.config.trained.mesh), _opened(prepared, progress) as run:
        _train(run, progress, should_stop)
        return _finish(run, progress, machine.platform, started)


def plan(
    config: TrainConfig,
    *,
    initial: LanguageModel | str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Plan:
    """Return the plan of `fit`, and raise the errors that `fit` would. Nothing is written.

    On a CPU, `process_memory` assumes that training takes the memory that this process has taken so
    far, in addition to the memory of its steps.
    """
    progress = progress or Progress()
    target = choose_target(config, resume=resume, overwrite=overwrite)
    prepared = prepare(config, target, this_machine(platform), progress, initial=initial)
    trained = prepared.config.trained
    with use_mesh(trained.mesh):
        made = make_plan(trained, prepared.dataset, target.path, prepared.evaluations)
    # The memory is that of this machine, whatever the planned platform is.
    if current_platform().name != "cpu":
        return made
    return with_process_memory(made, memory_in_use())


def _progress_of_this_process(progress: Progress | Literal["auto"] | None) -> Progress:
    """Return the requested progress in process 0, and a silent one in the others."""
    if progress == "auto":
        progress = default_progress()
    if progress is None or process_index() != 0:
        return Progress()
    return progress


@contextlib.contextmanager
def _opened(prepared: PreparedRun, progress: Progress) -> Iterator[OpenRun]:
    """Lock the run's directory, restore or make the state, and only then write.

    If the start is rejected, for example for damage to a checkpoint or an error of a custom model,
    every file of the run stays unchanged.
    """
    config = prepared.config.trained
    target = prepared.target
    run = RunDirectory(target.path)
    with contextlib.ExitStack() as stack:
        with raise_in_all_processes():
            if process_index() == 0:
                run = replace(run, lock=stack.enter_context(run.reserved()))
        # Everything that may reject the start, which writes nothing.
        state = _starting_state(prepared, run)
        train_steps = make_train_steps(config)
        _check_custom_code(prepared, state, train_steps, progress)
        step = int(state.step)
        trackers = Trackers()
        with raise_in_all_processes():
            if process_index() == 0:
                stack.callback(trackers.close, progress.warned)
                _begin(prepared, run, trackers, step)
        with raise_in_all_processes():
            # Process 0 has written it; on another host it is visible if the disk is shared.
            RunDirectory.open(target.path)
            checkpoints = stack.enter_context(Checkpoints(run, prepared.config.recorded))
            unevaluated = checkpoints.unevaluated(step)
            if unevaluated is not None and process_index() == 0:
                # The line of a step whose evaluation has not ended is in its checkpoint.
                run.truncate(METRICS, step - 1)
        is_unevaluated = unevaluated is not None
        progress.planned(replace(prepared.evaluations, interrupted=is_unevaluated))
        progress.started(config, prepared.dataset, state, target.path)
        logger = MetricsLogger(
            config,
            run,
            [trackers.log],
            training_tokens=len(prepared.dataset.train),
            shares=prepared.dataset.shares,
            devices=max(current_mesh().size, 1),
            report=progress.stepped,
        )
        if unevaluated is not None:
            logger.resume_unevaluated(unevaluated)
        opened = OpenRun(
            prepared=prepared,
            directory=run,
            state=state,
            train_steps=train_steps,
            checkpoints=checkpoints,
            logger=logger,
            is_unevaluated=is_unevaluated,
        )
        del state  # otherwise this frame would keep its memory until the end
        yield opened


def _begin(prepared: PreparedRun, run: RunDirectory, trackers: Trackers, step: int) -> None:
    """Open the trackers and write the run's first files, or its new config, in process 0."""
    recorded = prepared.config.recorded
    mode = prepared.target.mode
    # If a tracker can't be opened or the disk is full, no file of a tracker remains.
    with trackers_removed_on_error(run.path):
        # Listed before new ones are opened, so that only those of the run to overwrite are deleted.
        earlier = run.tracker_files()
        trackers.open(recorded.trackers, run.path, step, recorded, new=mode != "resume")
        run.begin(recorded, prepared.dataset.tokenizer, mode, earlier=earlier)
    # Lines after the checkpoint belong to steps that are taken again.
    run.truncate(METRICS, step)
    run.append_provenance({"step": step} | prepared.provenance)


def _train(
    run: OpenRun,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Train to the end. The state and the tokens on the device are released when it returns."""
    training = Training(
        prepared=run.prepared,
        state=run.take_state(),
        train_steps=run.train_steps,
        checkpoints=run.checkpoints,
        logger=run.logger,
        progress=progress,
        should_stop=should_stop,
    )
    training.run(evaluate_first=run.is_unevaluated)
    run.checkpoints.wait()  # the best checkpoint is chosen among those on disk


def _finish(run: OpenRun, progress: Progress, platform: Platform, started: float) -> Run:
    """Return the best model with a sample, and draw the losses."""
    # Otherwise compiled programs and the state would stay in memory beside the model that samples.
    release_memory()
    recorded = run.prepared.config.recorded
    evaluations = run.prepared.evaluations
    best = run.checkpoints.best()
    own = None
    if isinstance(run.prepared.dataset.tokenizer, OwnTokenizer):
        own = run.prepared.dataset.tokenizer
    model, tokenizer, _ = load(
        run.directory.path, model=recorded.model.make, tokenizer=own, platform=platform
    )
    sample = _sample_or_warn(model, tokenizer, recorded, progress)
    release_memory()
    with raise_in_all_processes():
        if process_index() == 0:
            run.directory.write(SAMPLES, sample)
            picture = draw_losses(run.directory, "png", progress.warned)
            if picture is not None:
                run.directory.write(LOSS_PICTURE, picture)
    assert best.validation_loss is not None  # the last step is always evaluated
    # The best loss is over other targets if no evaluation had the current ones yet.
    if best.step <= evaluations.comparable_after:
        evaluations = replace(evaluations, targets=evaluations.split_targets)
    return Run(
        directory=run.directory.path,
        model=model,
        tokenizer=tokenizer,
        config=recorded,
        validation_loss=best.validation_loss,
        best_step=best.step,
        sample=sample,
        seconds=time.perf_counter() - started,
        evaluations=evaluations,
    )


def _starting_state(prepared: PreparedRun, run: RunDirectory) -> TrainState:
    """Restore the last checkpoint of a run to resume, or make the state of step 0."""
    config = prepared.config.trained
    if prepared.target.mode != "resume" or not run.checkpoint_steps():
        arrays = None
        if prepared.initial is not None:
            arrays = prepared.initial.arrays
        return init_state(config, arrays)
    # Read-only: the remains of a killed process are deleted once nothing can reject the start.
    with Checkpoints(run, prepared.config.recorded, read_only=True) as checkpoints:
        return checkpoints.restore(config)


def _check_custom_code(
    prepared: PreparedRun, state: TrainState, train_steps: jax.stages.Wrapped, progress: Progress
) -> None:
    """Trace custom code and what is logged of it, to raise errors before anything is written.

    Also make the next batch.
    """
    config = prepared.config.trained
    if not any(custom_code(config).values()) and not config.log:
        return
    sizes = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows: Any = jax.ShapeDtypeStruct(sizes, jnp.int32)
    made = own_batches(config, prepared.dataset)
    if made is not None:
        windows = made.abstract(int(state.step))
    if config.objective is not None:
        _check_objective(prepared, state, made, progress)
    # With the arguments of the first call, which then finds the traced steps in JAX's cache.
    arguments = (state, windows, dropout_stream(config.seed), 0, int(state.step))
    train_steps.eval_shape(*arguments)  # type: ignore[attr-defined]


def _check_objective(
    prepared: PreparedRun, state: TrainState, made: OwnBatches | None, progress: Progress
) -> None:
    """Raise ValueError for an objective that is not pure or has no gradient.

    Warn if it does not read the weights or the documents of a batch.
    """
    config = prepared.config.trained
    if made is not None:
        batch = jax.tree.map(jnp.asarray, made.of_step(int(state.step)))
    else:
        windows = batches(
            resident(prepared.dataset.train),
            config.seed,
            int(state.step),
            steps=1,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            shares=prepared.dataset.shares,
        )
        batch = Batch(windows[0])
    assert isinstance(config.micro_batches, int)
    # A micro-batch is what a step has memory for.
    rows = config.batch_size // config.micro_batches
    first = jax.tree.map(lambda array: array[:rows], batch)
    program = trace_objective(config, first)
    require_gradient(program, config)
    if made is not None:
        for name in unread_arrays(program, first):
            progress.warned(f"the objective does not read the {name} that the batches have")


def _sample_or_warn(
    model: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, progress: Progress
) -> str:
    """Return a sample; if custom code trains but can't be sampled from, warn instead of raising.

    A tokenizer may have a larger vocab_size than it can decode, as one that is padded.
    """
    try:
        return _sample(model, tokenizer, config.sample_tokens, config.seed)
    except Exception as error:
        if config.model.make is None and not isinstance(tokenizer, OwnTokenizer):
            raise
        reason = describe_error(error)
        if isinstance(error, UnencodableText):
            reason = str(error)
        if not reason:
            first_line, *_ = f"{type(error).__name__}: {error}".splitlines()
            reason = first_line
        progress.warned(f"no sample: {reason}")
        return ""


def _sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    prompt = jnp.asarray(default_prompt(tokenizer))  # time
    key = jax.random.key(np.uint32(seed))  # a Python number from 2**31 on would overflow
    drawn = generate(model, prompt[None], tokens, key=key)  # 1 time+tokens
    # Without the tokens that a tokenizer puts before each text, such as <s>.
    text = drawn[0, len(tokenizer.begin) :]
    return tokenizer.decode(np.asarray(text))
