"""The training loop: fit, evaluate, plan."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.config import Make, TrainConfig
from jgpt.data.batches import batches, resident
from jgpt.data.dataset import Dataset, count_characters, load_dataset
from jgpt.data.tokenizers import Tokenizer
from jgpt.fitting.metrics import MetricsLogger
from jgpt.fitting.profiling import compilations_watched
from jgpt.fitting.progress import Progress, default_progress, draw_losses
from jgpt.fitting.resume import (
    describe_learning_rate,
    fields_of,
    require_same_run,
    resume_evaluations,
)
from jgpt.fitting.trackers import Trackers, require_tracker, trackers_removed_on_error
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.hardware import (
    Platform,
    accelerators,
    current_platform,
    memory_in_use,
    memory_limit,
    process_count,
    process_index,
    release_memory,
)
from jgpt.nn.consistency import inconsistencies
from jgpt.nn.loss import bits_per_character
from jgpt.nn.models import LanguageModel, abstract_model, named_parameters, weights_of
from jgpt.nn.precision import for_platform, run_for_platform
from jgpt.parallel.mesh import abstract_mesh, current_mesh, use_mesh
from jgpt.parallel.processes import Vote, raise_in_all_processes, require_same
from jgpt.runs.checkpoints import Checkpoints, Which, load
from jgpt.runs.directory import CHECKPOINTS, LOSS_PICTURE, METRICS, PROFILE, SAMPLES, RunDirectory
from jgpt.runs.provenance import known_micro_batches, known_text, provenance
from jgpt.shapes.contract import typed
from jgpt.training.evaluation import EvaluationPlan, Evaluator, plan_evaluations
from jgpt.training.memory import require_feasible, with_micro_batches
from jgpt.training.placement import bytes_of, parameters_without_names
from jgpt.training.plan import Plan, default_mesh, make_plan, with_process_memory
from jgpt.training.state import TrainState, abstract_state, dropout_stream, init_state, is_finite
from jgpt.training.step import make_train_steps
from jgpt.user_code import changed_code, code_facts, describe_error, require_code, with_code
from jgpt.words import format_bytes

SECONDS_BETWEEN_SAVES = 30.0
"""Until the first evaluation a checkpoint is at most that old, if saving is quick."""
SAVING_SHARE = 0.01
"""The most of the time until the first evaluation that these checkpoints take."""
SECONDS_PER_CALL = 10.0
"""Until the first evaluation a call of slow steps is cut short, or no save could be in time."""


@dataclass(frozen=True)
class Run:
    """The result of `fit`: the model of the best checkpoint and its loss."""

    directory: Path
    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig
    """As saved in the directory."""
    validation_loss: float
    """In nats per token, over the targets of the run's evaluations."""
    best_step: int
    sample: str
    """Text that the model generated."""
    seconds: float
    """The duration of the call."""
    evaluations: EvaluationPlan
    """Which targets the loss is over."""

    @property
    def metrics(self) -> dict[str, list[float]]:
        """The columns of `metrics.jsonl`, for `pandas.DataFrame`; NaN where a step has no value."""
        lines = RunDirectory.open(self.directory).metrics()
        names = dict.fromkeys(name for line in lines for name in line)
        return {name: [line.get(name, math.nan) for line in lines] for name in names}


class TrainingStopped(Exception):
    """Raised when training was asked to stop, after a checkpoint was saved."""

    def __init__(self, step: int, directory: Path) -> None:
        super().__init__(f"stopped after step {step}; its checkpoint is in {directory}")
        self.step = step
        self.directory = directory


class StoppedBeforeTraining(TrainingStopped):
    """Raised when a stop was asked for while the text was tokenized. What was tokenized is kept."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0, directory)
        self.args = ("stopped before training began, while the text was tokenized",)


@typed
def fit(
    config: TrainConfig,
    *,
    model: Make | str = None,
    optimizer: Make | str = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | Literal["auto"] | None = "auto",
    should_stop: Callable[[], bool] = lambda: False,
    profile_steps: int = 0,
    platform: Platform | None = None,
) -> Run:
    """Train a config's run into its directory; return the run with its best model.

    `model` makes a user's own model: `model(config.model, rngs=rngs)` returns a `LanguageModel`,
    and `config.model` is converted to the class that it annotates. `optimizer` makes an optax
    optimizer: `optimizer(config.optimizer, config.steps)`. Either may be FILE.py:NAME. Training
    uses the mesh of the config, by default all accelerators. Every process calls `fit` with the
    same arguments; process 0 writes and reports.

    `resume` continues from the directory's last checkpoint, or starts if there is none yet;
    `overwrite` deletes the run that is there. `should_stop` is polled after each call of steps, and
    while the text is tokenized. `profile_steps` are traced into the run's folder `profile`.
    `platform`, by default the current one, decides the config's `auto`. `progress` is by default
    shown on a terminal and in a notebook; None is silent.
    Raises ValueError or OSError before anything is written or deleted; later OSError if something
    can't be written, FloatingPointError for a loss or gradient that is not finite, and
    TrainingStopped, each with the last good state in a checkpoint. A stop before the first step
    raises StoppedBeforeTraining, which is a TrainingStopped, too.
    """
    started = time.perf_counter()
    if profile_steps < 0:
        raise ValueError(f"profile_steps={profile_steps} must not be negative")
    config = with_code(config, model, optimizer)
    platform = platform or current_platform()
    shown = default_progress() if progress == "auto" else progress or Progress()
    progress = shown if process_index() == 0 else Progress()
    with raise_in_all_processes():
        saved, config, dataset, out, evaluations = _prepare(
            config, resume, overwrite, progress, platform, should_stop
        )
    start = provenance(config, dataset, evaluations)
    asked = {"resume": resume, "overwrite": overwrite}
    asked |= {"checkpoints": RunDirectory(out).checkpoint_steps()}
    texts = {name: start[name] for name in ("text_sha256", "corpus_sha256")}
    facts = dict(fields_of(config)) | code_facts(config) | asked | texts | start["versions"]
    require_same(facts)
    lock = None
    with use_mesh(config.mesh), contextlib.ExitStack() as stack:
        run = RunDirectory(out)
        with raise_in_all_processes():
            if process_index() == 0:
                lock = stack.enter_context(run.reserved())
                run = replace(run, lock=lock)
        # up to `begin` a run is read, not written: whatever rejects a start leaves it as it was
        state = _starting_state(config, saved, run, resume=resume)
        train_steps = make_train_steps(config)
        _check_custom_code(config, state, train_steps, progress)
        step = int(state.step)
        trackers = Trackers()
        with raise_in_all_processes():
            if process_index() == 0:
                with trackers_removed_on_error(run.path):
                    earlier = run.tracker_files()
                    new = not (resume and RunDirectory.exists(out))
                    trackers.open(saved.trackers, run.path, step, saved, new=new)
                    stack.callback(trackers.close, progress.warned)
                    run.begin(
                        saved,
                        dataset.tokenizer,
                        resume=resume,
                        overwrite=overwrite,
                        earlier=earlier,
                    )
                run.truncate(METRICS, step)
                run.append_provenance({"step": step} | start)
        with raise_in_all_processes():
            run = replace(RunDirectory.open(out), lock=lock)
            checkpoints = stack.enter_context(Checkpoints(run))
            unevaluated = checkpoints.unevaluated(step)
            if unevaluated is not None and process_index() == 0:
                # the line of a step whose evaluation has not ended is in its checkpoint
                run.truncate(METRICS, step - 1)
        progress.planned(replace(evaluations, interrupted=unevaluated is not None))
        progress.started(config, dataset, state, out)
        tokens = len(dataset.train)
        chips = max(current_mesh().size, 1)
        logger = MetricsLogger(config, run, [trackers.log], tokens, chips, progress.stepped)
        if unevaluated is not None:
            logger.resume_unevaluated(unevaluated)
        training = _Training(
            config=config,
            dataset=dataset,
            state=state,
            train_steps=train_steps,
            checkpoints=checkpoints,
            logger=logger,
            progress=progress,
            profile_steps=profile_steps,
            evaluations=evaluations,
            should_stop=should_stop,
        )
        training.run(evaluate_first=unevaluated is not None)
        checkpoints.wait()
        del state, training  # or the state is alive beside the model that samples
        release_memory()
        best = checkpoints.best()
        trained, tokenizer, _ = load(run.path, model=saved.model.make, platform=platform)
        sample = _sample_or_warn(trained, tokenizer, saved, progress)
        release_memory()
        with raise_in_all_processes():
            if process_index() == 0:
                run.write(SAMPLES, sample)
                picture = draw_losses(run, "png", progress.warned)
                if picture is not None:
                    run.write(LOSS_PICTURE, picture)
    assert best.validation_loss is not None  # the last step is always evaluated
    if best.step <= evaluations.comparable_after:  # of other targets, and none of these yet
        evaluations = replace(evaluations, targets=evaluations.split_targets)
    return Run(
        directory=run.path,
        model=trained,
        tokenizer=tokenizer,
        config=saved,
        validation_loss=best.validation_loss,
        best_step=best.step,
        sample=sample,
        seconds=time.perf_counter() - started,
        evaluations=evaluations,
    )


def plan(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Plan:
    """The plan of `fit`, which raises what `fit` would. Nothing is written.

    On a CPU its `process_memory` counts what this process has taken so far as what training takes
    beside its steps.
    """
    progress = progress or Progress()
    platform = platform or current_platform()
    _, config, dataset, out, evaluations = _prepare(config, resume, overwrite, progress, platform)
    with use_mesh(config.mesh):
        made = make_plan(config, dataset, out, evaluations)
    if current_platform().name != "cpu":
        return made
    return with_process_memory(made, memory_in_use())


def _prepare(
    config: TrainConfig,
    resume: bool,
    overwrite: bool,
    progress: Progress,
    platform: Platform,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[TrainConfig, TrainConfig, Dataset, Path, EvaluationPlan]:
    """Load the data and check everything that can be checked before compiling and writing.

    The first config is saved; the second has every `auto` decided for this machine.
    """
    out = RunDirectory.choose(config, resume=resume, overwrite=overwrite)
    for name in config.trackers:
        require_tracker(name)
    run = RunDirectory.open(out) if resume and RunDirectory.exists(out) else None
    lines, before = (run.provenance(), run.config()) if run else ([], config)
    tokenizer, checkpoints = (run.tokenizer(), run.checkpoint_steps()) if run else (None, [])
    known = known_text(lines)
    used = known_micro_batches(lines)
    if known is not None:
        known = replace(known, sources=before.dataset.data)
    for part in ("model", "optimizer"):
        if (make := getattr(config, part).make or getattr(before, part).make) is not None:
            require_code(make, part)
    # a run's text stays as it was first read, in runs from before universal newlines too
    universal = config.dataset.universal_newlines and before.dataset.universal_newlines
    data = replace(config.dataset, universal_newlines=universal)
    size = config.model.block_size
    warn = progress.warned

    stop_is_asked = False

    def tokenized(fraction: float) -> None:
        nonlocal stop_is_asked
        progress.tokenized(fraction)
        if process_count() == 1 and should_stop():
            stop_is_asked = True
            raise KeyboardInterrupt  # with which what is tokenized is kept

    try:
        dataset = load_dataset(
            data, size, tokenizer=tokenizer, known=known, warn=warn, progress=tokenized
        )
    except KeyboardInterrupt:
        if stop_is_asked:
            raise StoppedBeforeTraining(out) from None
        raise
    model = replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    decided_model = for_platform(model, platform)
    # the run's config records the dtype that `auto` was resolved to
    model = replace(model, dtype=decided_model.dtype)
    config = replace(config, model=model, dataset=data)
    if run:
        for line in changed_code(before, config):
            progress.warned(line)
        before = with_code(before, model.make, config.optimizer.make)
        require_same_run(before, config, checkpoints, text_is_known=known is not None)
        if (changed := describe_learning_rate(before, config, checkpoints)) is not None:
            progress.warned(changed)
    evaluations = plan_evaluations(config, len(dataset.validation))
    if checkpoints:
        evaluations, other_targets = resume_evaluations(
            saved=before,
            given=config,
            lines=lines,
            step=checkpoints[-1],
            validation_tokens=len(dataset.validation),
        )
        if other_targets is not None:
            progress.warned(other_targets)
    mesh = config.mesh or default_mesh(config, accelerators(), memory_limit())
    decided = replace(config, model=decided_model, mesh=mesh)
    require_feasible(decided, memory_limit())
    _require_room(decided, out)
    if config.micro_batches == "auto":
        progress.warned("micro_batches=auto: steps are compiled to see how many of them it takes")
    with use_mesh(mesh):
        decided = with_micro_batches(decided, memory_limit())
    if unnamed := parameters_without_names(decided.model, abstract_mesh(mesh)):
        progress.warned(
            f"mesh={mesh} replicates {len(unnamed)} parameters whose dimensions have no names, "
            f"such as {unnamed[0]}: nnx.Param(value, dimensions=('embed_dim', 'hidden_dim')) "
            "has names"
        )
    if used not in (None, decided.micro_batches):
        differences = "gradients differ in rounding"
        if model.dropout > 0:
            differences += ", and dropout in its random numbers"
        progress.warned(
            f"{decided.micro_batches} micro-batches fit here, {used} were used before: "
            f"{differences}"
        )
    return config, decided, dataset, out, evaluations


def _starting_state(
    config: TrainConfig, saved: TrainConfig, run: RunDirectory, *, resume: bool
) -> TrainState:
    """The state of the last checkpoint of a run to resume, or that of step 0."""
    if not resume or not run.checkpoint_steps():
        return init_state(config)
    with Checkpoints(run, saved, read_only=True) as checkpoints:
        state = checkpoints.restore(config)
    if not is_finite(config, state):
        damaged = run.path / CHECKPOINTS / str(int(state.step))
        raise ValueError(
            f"checkpoint {damaged} has values that are not finite: delete it to resume from the "
            "one before, or use overwrite=True with a lower learning_rate"
        )
    return state


def _check_custom_code(
    config: TrainConfig, state: TrainState, train_steps: jax.stages.Wrapped, progress: Progress
) -> None:
    """Trace a custom model and optimizer, so that their errors are raised before anything is
    written, and warn of a model that computes something else elsewhere than in training.
    """
    if config.model.make is None and config.optimizer.make is None:
        return
    sizes = (config.steps_per_call, config.batch_size, config.model.block_size + 1)
    windows = jax.ShapeDtypeStruct(sizes, jnp.int32)
    # traced once: the first call finds it in the cache
    jax.eval_shape(train_steps, state, windows, dropout_stream(config.seed), 0, int(state.step))
    if config.model.make is not None:
        # a mesh shards the batch
        batch = max(current_mesh().size, 1)
        for sentence in inconsistencies(abstract_model(config.model), state.weights, batch):
            progress.warned(sentence)


def _require_room(config: TrainConfig, out: Path) -> None:
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    needed = bytes_of(abstract_state(config)) * (config.keep_best + config.keep_last + 1)
    if needed > free:
        raise OSError(
            f"{existing} has {format_bytes(free)} free, the checkpoints need "
            f"{format_bytes(needed)}: free some space, or lower keep_best and keep_last"
        )


def _sample_or_warn(
    model: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, progress: Progress
) -> str:
    """The sample; a custom model that trains but can't be sampled costs a warning, not the run."""
    try:
        return _sample(model, tokenizer, config.sample_tokens, config.seed)
    except Exception as error:
        if config.model.make is None:
            raise
        reason = describe_error(error) or f"{type(error).__name__}: {error}".splitlines()[0]
        progress.warned(f"no sample: {reason}")
        return ""


def _sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    prompt = jnp.asarray(default_prompt(tokenizer))
    key = jax.random.key(np.uint32(seed))
    drawn = generate(model, prompt[None], tokens, key=key, temperature=0.8)
    text = drawn[0, len(tokenizer.begin) :]
    return tokenizer.decode(np.asarray(text))


@dataclass
class _Training:
    """Calls of many steps; the metrics of a call are read while the next one runs."""

    config: TrainConfig
    dataset: Dataset
    state: TrainState
    train_steps: jax.stages.Wrapped
    checkpoints: Checkpoints
    logger: MetricsLogger
    progress: Progress
    profile_steps: int
    evaluations: EvaluationPlan
    should_stop: Callable[[], bool]

    def __post_init__(self) -> None:
        config = self.config
        dataset = self.dataset
        self.tokens = resident(dataset.train)
        self.key = dropout_stream(config.seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.weights))
        held_out = dataset.validation
        spread_targets = None
        if self.evaluations.spread:
            spread_targets = self.evaluations.targets
        else:
            held_out = held_out[: self.evaluations.targets + 1]
        self.evaluator = Evaluator(config, held_out, self.parameters, spread_targets=spread_targets)
        self.first_step = self.step = int(self.state.step)
        second = self.first_step + 1  # the first step compiles
        self.traced = range(second, second + self.profile_steps)
        self.trace = contextlib.ExitStack()
        lines = self.checkpoints.run.metrics()
        self.losses = [
            line["validation_loss"]
            for line in lines
            if "validation_loss" in line and line["step"] > self.evaluations.comparable_after
        ]
        # until the first evaluation: estimates ever further apart, and at the first a checkpoint
        halves = {config.eval_interval >> halvings for halvings in range(1, 5)}
        self.early = {at for at in halves if at > self.step}
        if self.step == 0 and not lines:
            self.early.add(0)
        self.first_save = min(halves - {0}, default=config.eval_interval)
        self.vote = Vote()
        self.save_vote = Vote()
        self.last_save = time.monotonic()

    def run(self, *, evaluate_first: bool) -> None:
        """Train to the last step, or until the losses stop falling.

        `evaluate_first`: the evaluation of the first state was interrupted.
        """
        patience = self.config.patience
        is_warm = False
        with self.trace, contextlib.ExitStack() as watch, self._last_good_state_saved():
            if evaluate_first:
                self._evaluate()
            while self.step < self.config.steps and not _stops_early(self.losses, patience):
                if self.step in self.early:
                    self._estimate()
                self._save_if_due()
                self._stop_if_asked()
                self._take_steps()
                if self.step % self.config.eval_interval == 0 or self.step == self.config.steps:
                    self._evaluate()
                    if not is_warm:
                        release_memory()
                        watch.enter_context(compilations_watched(self.progress.warned))
                        is_warm = True
        if self.logger.tracker_failure is not None:  # in the last call
            self.progress.warned(str(self.logger.tracker_failure))
        if self.step < self.config.steps:
            self.progress.warned(
                f"stopped at step {self.step} of {self.config.steps}: no better validation loss in "
                f"{patience=} evaluations"
            )

    @contextlib.contextmanager
    def _last_good_state_saved(self) -> Iterator[None]:
        """Save the state before a loss or gradient that is not finite, and name its checkpoint."""
        try:
            yield
        except FloatingPointError as error:
            self.logger.finish()
            step = int(self.state.step)
            is_good = self._state_is_good()
            # a step that was not finite was skipped; what a start began with needs no checkpoint
            if is_good and self.first_step < step < self.step:
                self.checkpoints.save(self.state, None)
            self.checkpoints.wait()  # a pending one doesn't count yet
            saved = self.checkpoints.steps()
            good = [each for each in saved if is_good or each < step]
            kept = f"checkpoint {good[-1]} is kept" if good else "nothing was saved yet"
            if saved and saved[-1] not in good:
                folder = self.checkpoints.run.path / CHECKPOINTS / str(saved[-1])
                kept = f"delete {folder}, whose loss is not finite either; otherwise {kept}"
            raise FloatingPointError(f"{error}; {kept}") from None

    def _state_is_good(self) -> bool:
        """Whether training can go on from the state: it may be finite and its loss not."""
        if not is_finite(self.config, self.state):
            return False
        return math.isfinite(self.evaluator.estimate(self.state.weights))

    def _save(self) -> None:
        """Record the metrics and save the state. Raises FloatingPointError if it isn't finite."""
        self.logger.finish()
        self._require_finite_state()
        self.checkpoints.save(self.state, None)
        self.last_save = time.monotonic()

    def _require_finite_state(self) -> None:
        if not is_finite(self.config, self.state):
            raise FloatingPointError(
                f"the parameters are not finite after step {self.step}: lower learning_rate"
            )

    def _estimate(self) -> None:
        self.logger.wait()
        loss = self.evaluator.estimate(self.state.weights)
        if math.isfinite(loss):  # if not, the next step stops the run
            self.logger.add_evaluation(validation_estimate=loss)
            self.progress.estimated(self.step, loss)
        if self.step == self.first_save and math.isfinite(loss):
            self._save()
        self.logger.start_clock()

    def _save_if_due(self) -> None:
        """Until the first evaluation, save so often that little is lost at any time.

        Process 0 decides, by its clock. From then on each evaluation saves.
        """
        if self.step >= self.config.eval_interval:
            return
        is_due = False
        if process_index() == 0:
            waited = time.monotonic() - self.last_save
            is_due = waited >= max(SECONDS_BETWEEN_SAVES, self.checkpoints.seconds() / SAVING_SHARE)
        if self.save_vote(is_due):
            self._save()
            self.save_vote = Vote()  # what was asked before this save is done
            self.logger.start_clock()

    def _stop_if_asked(self) -> None:
        failures = self.logger.failure, self.logger.tracker_failure
        failed = self.checkpoints.have_failed() or failures != (None, None)
        if self.vote(self.should_stop() or failed):
            self._save()
            self.checkpoints.wait()
            with raise_in_all_processes():
                if self.logger.tracker_failure is not None:
                    raise self.logger.tracker_failure
            raise TrainingStopped(self.step, self.checkpoints.run.path)

    def _take_steps(self) -> None:
        """One call, at most to the next evaluation or estimate, or to an end of the trace."""
        config = self.config
        first = self.step
        traced = self.traced
        next_evaluation = (first // config.eval_interval + 1) * config.eval_interval
        pauses = {next_evaluation, config.steps, *self.early}
        if traced:
            pauses |= {traced.start, traced.stop}
        # the other processes have no such progress, and all take as many steps
        asked = self.progress.most_steps if process_count() == 1 else None
        most = min(config.steps_per_call, asked or config.steps_per_call)
        speed = self.logger.tokens_per_second
        if speed is not None and process_count() == 1 and first < config.eval_interval:
            tokens_per_step = config.batch_size * config.model.block_size
            most = min(most, max(1, int(SECONDS_PER_CALL * speed / tokens_per_step)))
        count = min(most, min(at for at in pauses if at > first) - first)
        if traced and first == traced.start and process_index() == 0:
            self.trace.enter_context(jax.profiler.trace(self.checkpoints.run.path / PROFILE))
        windows = batches(
            self.tokens,
            config.seed,
            first,
            steps=config.steps_per_call,
            batch_size=config.batch_size,
            block_size=config.model.block_size,
            count=count,
        )
        if first == self.first_step:  # a call of no steps compiles, which isn't training's time
            self.state, _ = self.train_steps(self.state, windows, self.key, 0, first)
            release_memory()
            self.logger.start_clock()
        self.state, metrics = self.train_steps(self.state, windows, self.key, count, first)
        self.step = first + count
        if traced and self.step == traced.stop:
            jax.block_until_ready(metrics)  # steps are only dispatched
            self.trace.close()
        self.logger.add(first, count, metrics)

    def _evaluate(self) -> None:
        """Save the state, evaluate it, and record its loss.

        An evaluation may take long, and a crash or a signal during it must lose no step. The line
        of metrics waits in the checkpoint for the loss. Whoever resumes evaluates again.
        """
        line = self.logger.unevaluated()
        if is_finite(self.config, self.state):
            self.checkpoints.save(self.state, None, unevaluated=line)
        loss = self.evaluator.exact(self.state.weights, self._between_calls)
        self._require_finite(loss)
        self._require_finite_state()
        losses = {"validation_loss": loss}
        exact = None
        if self.evaluations.exact_last and self.step == self.config.steps:
            whole = Evaluator(self.config, self.dataset.validation, self.parameters)
            exact = whole.exact(self.state.weights, self._between_calls)
            self._require_finite(exact)
            losses["exact_validation_loss"] = exact
        self.losses.append(loss)
        self.logger.add_evaluation(**losses)
        self.logger.finish()
        self.progress.evaluated(self.step, loss)
        if exact is not None:
            self.progress.evaluated_exactly(self.step, exact)
        self.checkpoints.evaluated(self.step, loss)
        self.logger.start_clock()

    def _between_calls(self, done: int, targets: int) -> None:
        """Between the calls of an evaluation."""
        self.progress.evaluating(done, targets)
        self._stop_if_asked()

    def _require_finite(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        self.checkpoints.discard(self.step)
        averaged = ""
        if self.config.optimizer.ema_decay > 0:
            averaged = "ema_decay or "
        raise FloatingPointError(
            f"the validation loss is {loss} after step {self.step}: lower {averaged}learning_rate"
        )


def _stops_early(losses: list[float], patience: int | None) -> bool:
    if patience is None or not losses:
        return False
    return len(losses) - 1 - losses.index(min(losses)) >= patience


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    loss: float
    """Nats per token, exact: every held-out target once."""
    perplexity: float
    bits_per_character: float
    tokens: int
    """The number of targets."""


def evaluate(
    run_directory: str | Path,
    *,
    model: Make | str = None,
    which: Which = "best",
    split: Literal["validation", "test"] = "validation",
    window: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The exact loss of a run's model on a split, in windows of its block or a shorter one.

    It is over the whole split, whatever the run's `eval_tokens`.
    """
    progress = progress or Progress()
    loaded, tokenizer, config = load(run_directory, model=model, which=which)
    size = config.model.block_size if window is None else window
    if not 0 < size <= config.model.block_size:
        raise ValueError(f"window={size} must be from 1 to block_size={config.model.block_size}")
    if split == "test" and not config.dataset.test_fraction:
        raise ValueError(f"{run_directory} has no test split: its test_fraction is 0")
    lines = RunDirectory.open(run_directory).provenance()
    known = known_text(lines)
    if config.micro_batches == "auto":
        count = known_micro_batches(lines) or config.batch_size
        config = replace(config, micro_batches=count, mesh=None)
    dataset = load_dataset(
        config.dataset,
        size,
        tokenizer=tokenizer,
        known=known,
        warn=progress.warned,
        progress=progress.tokenized,
    )
    tokens = dataset.test if split == "test" else dataset.validation
    config = replace(config, model=replace(config.model, block_size=size))
    weights = weights_of(loaded)
    evaluator = Evaluator(
        run_for_platform(config, current_platform()),
        tokens,
        sum(leaf.size for leaf in jax.tree.leaves(weights)),
    )
    loss = evaluator.exact(weights, progress.evaluating)
    _require_finite_loss(loss, loaded, run_directory)
    targets = tokens[1:]
    bits = bits_per_character(loss, count_characters(targets, tokenizer) / len(targets))
    return Evaluation(loss, _perplexity(loss), bits, len(targets))


def _require_finite_loss(loss: float, model: LanguageModel, run_directory: str | Path) -> None:
    if math.isfinite(loss):
        return
    for name, parameter in named_parameters(model).items():
        if not jnp.isfinite(parameter[...]).all():
            raise FloatingPointError(
                f"the loss of {run_directory} is {loss}: {name} is not finite, so the weights "
                "have diverged or are damaged"
            )
    raise FloatingPointError(f"the loss of {run_directory} is {loss}, of weights that are finite")


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:  # above 709 nats per token
        return math.inf
