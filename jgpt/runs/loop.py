"""The training loop: fit, evaluate, plan."""

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.config import TrainConfig
from jgpt.contracts import typed
from jgpt.data.batches import batches, evaluation_windows, resident
from jgpt.data.dataset import Dataset, load_dataset
from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.hardware import (
    Platform,
    accelerators,
    current_platform,
    memory_limit,
    process_index,
    release_memory,
)
from jgpt.nn.loss import bits_per_character
from jgpt.nn.models import LanguageModel, Weights
from jgpt.nn.precision import for_platform, run_for_platform
from jgpt.runs.checkpoints import Checkpoints, Which, load
from jgpt.runs.directory import CONFIG, LOSS_PICTURE, PROFILE, RunDirectory
from jgpt.runs.metrics import MetricsLogger
from jgpt.runs.processes import Vote, require_same, together
from jgpt.runs.profiling import CompilationWatch, Profiler
from jgpt.runs.progress import Progress
from jgpt.runs.provenance import known_text, provenance
from jgpt.runs.resume import describe_learning_rate, fields_of, require_same_run
from jgpt.runs.trackers import open_tracker, require_tracker
from jgpt.sharding import current_mesh, shard_by_name, use_mesh
from jgpt.training.plan import (
    Plan,
    bytes_of,
    default_mesh,
    format_bytes,
    make_plan,
    require_feasible,
)
from jgpt.training.step import (
    TrainState,
    abstract_state,
    dropout_stream,
    init_state,
    make_eval_step,
    make_train_steps,
    stacked_state,
)

ESTIMATE_TOKENS = 2048
"""The validation tokens of an estimate, at least: shorter ones say little."""


@dataclass(frozen=True)
class Run:
    """The result of `fit`: the best model and its loss."""

    directory: Path
    """The run directory."""
    model: LanguageModel
    """The model of the best checkpoint."""
    tokenizer: Tokenizer
    """The tokenizer of the text."""
    config: TrainConfig
    """The config, as the directory has it."""
    validation_loss: float
    """The model's exact validation loss in nats per token: the best of the run."""
    best_step: int
    """The step of the best checkpoint."""
    sample: str
    """Text that the model wrote."""
    seconds: float
    """How long the call took."""


class TrainingStopped(Exception):
    """Raised when training was asked to stop, after a checkpoint was saved."""

    def __init__(self, step: int, directory: Path) -> None:
        super().__init__(f"stopped after step {step}; its checkpoint is in {directory}")
        self.step, self.directory = step, directory


@typed
def fit(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    profile_steps: int = 0,
    platform: Platform | None = None,
) -> Run:
    """Train a config's run into its directory; return the run with its best model.

    It trains on the mesh of the config, or by default on all accelerators. Of many processes each
    calls it alike; process 0 writes and reports.

    `resume` continues from the directory's last checkpoint, or starts if there is none yet;
    `overwrite` deletes the run that is there. `should_stop` is polled after each call of steps;
    `profile_steps` are traced into the run's folder `profile`. `platform`, by default the current
    one, decides the config's `auto`.
    Raises ValueError or OSError before anything is written or deleted; later OSError if something
    can't be written, FloatingPointError for a loss or gradient that is not finite, and
    TrainingStopped, each with the last good state in a checkpoint.
    """
    started = time.perf_counter()
    if profile_steps < 0:
        raise ValueError(f"profile_steps={profile_steps} must not be negative")
    platform, first = platform or current_platform(), process_index() == 0
    progress = progress if progress and first else Progress()
    with together():
        saved, config, dataset, out = _prepare(config, resume, overwrite, progress, platform)
    line, asked = provenance(saved, dataset, 0), {"resume": resume, "overwrite": overwrite}
    facts = {name: line[name] for name in ("text_sha256", "corpus_sha256")} | line["versions"]
    steps = {"checkpoints": RunDirectory(out).checkpoint_steps()}
    require_same(dict(fields_of(config)) | asked | facts | steps)
    with use_mesh(config.mesh), contextlib.ExitStack() as stack:
        with together():
            if first:
                stack.enter_context(RunDirectory(out).locked())
                _open_run(out, saved, dataset, resume, overwrite)
        with together():
            run = RunDirectory.open(out)
            checkpoints = stack.enter_context(Checkpoints(run))
        state = checkpoints.restore(saved) if checkpoints.steps() else init_state(saved)
        first_step = int(state.step)
        trackers = []
        with together():
            if first:
                run.truncate_metrics(first_step)
                for name in saved.trackers:
                    trackers.append(open_tracker(name, run.path, first_step))
                    stack.callback(trackers[-1].close)
                run.append_provenance(line | {"step": first_step})
        progress.started(config, dataset, state, out)
        tokens, chips = len(dataset.train), max(current_mesh().size, 1)
        logger = MetricsLogger(config, run, trackers, tokens, chips, progress.stepped)
        profiler = stack.enter_context(Profiler(run.path / PROFILE, profile_steps))
        state = stacked_state(config, state)
        _train(config, dataset, state, checkpoints, logger, profiler, progress, should_stop)
        checkpoints.wait()
        release_memory()
        best = checkpoints.best()
        model, tokenizer, _ = load(run.path, platform=platform)
        prompt, key = jnp.asarray(default_prompt(tokenizer)), jax.random.key(np.uint32(saved.seed))
        drawn = generate(model, prompt[None], saved.sample_tokens, key=key, temperature=0.8)
        sample = tokenizer.decode(np.asarray(drawn[0]))
        release_memory()
        with together():
            if first:
                from jgpt.runs.plots import plot_losses  # 40 MiB that training doesn't need

                plot_losses(run.metrics(), run.path / LOSS_PICTURE)
                run.write_samples(sample)
    assert best.validation_loss is not None  # the last step is always evaluated
    seconds = time.perf_counter() - started
    return Run(run.path, model, tokenizer, saved, best.validation_loss, best.step, sample, seconds)


def plan(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Plan:
    """The plan of `fit`, which raises what `fit` would. Nothing is written."""
    progress, platform = progress or Progress(), platform or current_platform()
    _, config, dataset, out = _prepare(config, resume, overwrite, progress, platform)
    with use_mesh(config.mesh):
        return make_plan(config, dataset, out)


def _prepare(
    config: TrainConfig, resume: bool, overwrite: bool, progress: Progress, platform: Platform
) -> tuple[TrainConfig, TrainConfig, Dataset, Path]:
    """Load the data and check everything that can be checked before compiling and writing.

    The first config is the run's to save, the second has all that is decided for this machine.
    """
    out = _run_directory(config, resume=resume, overwrite=overwrite)
    for name in config.trackers:
        require_tracker(name)
    run = RunDirectory.open(out) if resume and RunDirectory.exists(out) else None
    before = run.config() if run else config
    known = known_text(run.provenance()) if run else None
    # a run's text stays as it was first read, in runs from before universal newlines too
    universal = config.dataset.universal_newlines and before.dataset.universal_newlines
    data = replace(config.dataset, universal_newlines=universal)
    tokenizer, size = run.tokenizer() if run else None, config.model.block_size
    dataset = load_dataset(data, size, tokenizer=tokenizer, known=known, warn=progress.warned)
    model = replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    # the run's config records the dtype that `auto` was resolved to
    model = replace(model, dtype=for_platform(model, platform).dtype)
    config = replace(config, model=model, dataset=data)
    if run:
        checkpoints, known_place = run.checkpoint_steps(), known is not None
        imported = checkpoints == [0]
        require_same_run(before, config, text_is_known=known_place, imported=imported)
        if config.steps < (done := max(checkpoints, default=0)):
            raise ValueError(
                f"steps={config.steps} is below the {done} steps that {out} has taken: give steps="
                f"{done} or more, or another directory"
            )
        if (changed := describe_learning_rate(before, config, checkpoints)) is not None:
            progress.warned(changed)
    mesh = config.mesh or default_mesh(config, accelerators(), memory_limit())
    decided = replace(run_for_platform(config, platform), mesh=mesh)
    require_feasible(decided, memory_limit())
    _require_room(config, out)
    return config, decided, dataset, out


def _require_room(config: TrainConfig, out: Path) -> None:
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    needed = bytes_of(abstract_state(config)) * (config.keep_best + config.keep_last + 1)
    if needed > free:
        raise OSError(
            f"{existing} has {format_bytes(free)} free, the checkpoints need "
            f"{format_bytes(needed)}: free some space, or lower keep_best and keep_last"
        )


def _run_directory(config: TrainConfig, *, resume: bool, overwrite: bool) -> Path:
    if resume and overwrite:
        raise ValueError("give resume=True or overwrite=True, not both")
    if config.out is None:
        if resume:
            raise ValueError("resume=True needs the run's out=DIRECTORY")
        names = (f"{config.name}-{n}" if n > 1 else config.name for n in itertools.count(1))
        return next(out for name in names if not (out := Path("runs") / name).exists())
    out = Path(config.out)
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise NotADirectoryError(f"{out} is a file: choose another directory")
        return out
    if RunDirectory.exists(out):
        RunDirectory.open(out).config()  # raises if it is damaged, or another program's
    elif not RunDirectory.is_unused(out):
        raise FileExistsError(
            f"{out} is not a run directory: it has files, but no {CONFIG}; choose another, such as "
            f"{out / config.name}"
        )
    if not resume and not overwrite:
        raise FileExistsError(
            f"{out} already exists: resume=True continues it, overwrite=True starts again"
        )
    return out


def _open_run(
    out: Path, config: TrainConfig, dataset: Dataset, resume: bool, overwrite: bool
) -> RunDirectory:
    if RunDirectory.exists(out) and resume:
        run = RunDirectory.open(out)
        run.write_config(config)
        return run
    if RunDirectory.exists(out) and not overwrite:
        raise FileExistsError(f"{out} was created by another process: choose another directory")
    RunDirectory(out).clear()
    return RunDirectory.create(out, config, dataset.tokenizer)


def _train(
    config: TrainConfig,
    dataset: Dataset,
    state: TrainState,
    checkpoints: Checkpoints,
    logger: MetricsLogger,
    profiler: Profiler,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    """Calls of many steps, with one in flight while the metrics of the last one are read."""
    train_steps, (evaluate, estimate) = make_train_steps(config), _evaluators(config, dataset)
    tokens, key = resident(dataset.train), dropout_stream(config.seed)
    sizes = config.steps_per_call, config.batch_size, config.model.block_size
    lines = checkpoints.run.metrics()
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    first_step = step = int(state.step)
    interval = config.eval_interval
    halves = {interval >> halvings for halvings in range(1, 5)}
    early = {at for at in halves if at > step} | ({0} if step == 0 and not lines else set())
    vote = Vote()
    with CompilationWatch(progress.warned) as watch:
        try:
            while step < config.steps and not _stops_early(losses, config.patience):
                if step in early:
                    logger.wait()
                    loss = estimate(state.weights)
                    if math.isfinite(loss):  # if not, the next step stops the run
                        logger.add_evaluation(validation_estimate=loss)
                        progress.estimated(step, loss)
                    if step > first_step:
                        logger.start_clock()
                if vote(should_stop() or checkpoints.have_failed()):
                    checkpoints.wait()
                    logger.finish()
                    checkpoints.save(state, None)
                    checkpoints.wait()
                    raise TrainingStopped(step, checkpoints.run.path)
                boundary = min((step // interval + 1) * interval, config.steps)
                pause = min({boundary} | {at for at in early if at > step})
                count = profiler.limit(min(config.steps_per_call, pause - step))
                windows = batches(tokens, config.seed, step, *sizes)
                if step == first_step:  # a call of no steps compiles, which isn't training's time
                    state, _ = train_steps(state, windows, key, 0, step)
                    release_memory()
                    logger.start_clock()
                state, metrics = train_steps(state, windows, key, count, step)
                call_start, step = step, step + count
                profiler.stepped(count, metrics)
                logger.add(call_start, count, metrics)
                if step == boundary:
                    logger.wait()
                    loss = evaluate(state.weights)
                    if not math.isfinite(loss):
                        raise FloatingPointError(f"the validation loss is {loss} after step {step}")
                    losses.append(loss)
                    logger.add_evaluation(validation_loss=loss)
                    logger.finish()
                    progress.evaluated(step, loss)
                    checkpoints.save(state, loss)
                    watch.arm()
                    logger.start_clock()
            if step < config.steps:
                progress.warned(
                    f"stopped at step {step} of {config.steps}: no better validation loss in "
                    f"patience={config.patience} evaluations"
                )
        except FloatingPointError as error:
            logger.finish()
            if int(state.step) < step:  # the step that was not finite was skipped
                checkpoints.save(state, None)
            checkpoints.wait()  # a pending one doesn't count yet
            good = checkpoints.steps()
            kept = f"checkpoint {good[-1]} is kept" if good else "nothing was saved yet"
            raise FloatingPointError(f"{error}: lower learning_rate; {kept}") from None


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
    which: Which = "best",
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Evaluation:
    """The exact loss of a run's model on its validation split."""
    platform, warn = platform or current_platform(), (progress or Progress()).warned
    model, tokenizer, config = load(run_directory, which=which, platform=platform)
    known, size = known_text(RunDirectory.open(run_directory).provenance()), config.model.block_size
    dataset = load_dataset(config.dataset, size, tokenizer=tokenizer, known=known, warn=warn)
    exact, _ = _evaluators(run_for_platform(config, platform), dataset)
    loss = exact(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    bits = bits_per_character(loss, dataset.characters_per_token)
    targets = len(dataset.validation[: config.eval_tokens]) - 1
    return Evaluation(loss, math.exp(loss), bits, targets)


def _evaluators(
    config: TrainConfig, dataset: Dataset
) -> tuple[Callable[[Weights], float], Callable[[Weights], float]]:
    """Functions from weights to the mean loss on the validation split: exact, and an estimate.

    The estimate is of batches that are spread over the split: few enough that the estimates of a
    run take about 1% of its time.
    """
    evaluate_windows = make_eval_step(config.model)
    held_out = dataset.validation[: config.eval_tokens]
    windows, counts = evaluation_windows(held_out, config.model.block_size, config.batch_size)
    few = max(config.steps // 200, -(-ESTIMATE_TOKENS // counts[0].size))
    spread = np.linspace(0, len(counts) - 1, min(few, len(counts))).astype(int)
    some = np.zeros_like(counts)
    some[spread] = counts[spread]
    inputs = shard_by_name(jnp.asarray(windows), None, "batch", None)

    def mean_loss(counted: np.ndarray) -> Callable[[Weights], float]:
        mask, total = shard_by_name(jnp.asarray(counted), None, "batch", None), int(counted.sum())
        return lambda weights: float(evaluate_windows(weights, inputs, mask)) / total

    return mean_loss(counts), mean_loss(some)
