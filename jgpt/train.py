"""`fit`: the training loop. It orchestrates; the maths is in step.py."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.checkpoint import LOSS_PICTURE, Checkpoints, RunDirectory, load, require_same_run
from jgpt.config import TrainConfig
from jgpt.contracts import typed
from jgpt.data import Dataset, batches, evaluation_windows, load_dataset, resident
from jgpt.generation import generate, opening
from jgpt.loss import bits_per_character
from jgpt.model import LanguageModel
from jgpt.report import plot_losses
from jgpt.step import (
    Metrics,
    TrainState,
    Weights,
    init_state,
    make_eval_step,
    make_train_steps,
)
from jgpt.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """A finished run: where it lies, what it learned, and how well."""

    directory: Path
    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig
    validation_loss: float
    """The best exact validation loss, in nats per token: the model's."""
    best_step: int
    sample: str
    seconds: float


class Progress:
    """Someone who wants to know how training goes; this one doesn't care."""

    @typed
    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Training begins, or goes on, at the state's step."""

    @typed
    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Steps were taken, the last of them with this loss."""

    @typed
    def evaluated(self, step: int, validation_loss: float) -> None:
        """The whole held-out split was evaluated."""

    @typed
    def downloaded(self, received: int, total: int | None) -> None:
        """So many bytes of a corpus have come."""


@typed
def fit(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train as the config says, into a run directory; return the run with its best model.

    `resume` goes on from the directory's last checkpoint, `overwrite` deletes what is there.
    Raises ValueError or OSError before anything is written or deleted, FloatingPointError when
    the loss stops being finite; the last checkpoint then stays as it is.
    """
    began = time.perf_counter()
    progress = progress or Progress()
    out = _run_directory(config, resume=resume, overwrite=overwrite)
    dataset = load_dataset(
        config.dataset,
        config.model.block_size,
        tokenizer=RunDirectory.open(out).tokenizer() if resume else None,
        on_download=progress.downloaded,
    )
    model_config = dataclasses.replace(config.model, vocab_size=dataset.tokenizer.vocab_size)
    config = dataclasses.replace(config, model=model_config)
    run = _open_run(out, config, dataset.tokenizer, resume=resume, overwrite=overwrite)
    with Checkpoints(run) as checkpoints:
        resumed = resume and checkpoints.step("last") is not None
        state = checkpoints.restore(config) if resumed else init_state(config)
        run.forget_metrics_after(int(state.step))
        progress.started(config, dataset, state, out)
        _train(config, dataset, state, run, checkpoints, progress)
    plot_losses(run.metrics(), run.path / LOSS_PICTURE)
    model, tokenizer, _ = load(run.path)
    sample = _sample(model, tokenizer, config)
    run.write_samples(sample)
    best = min(
        (line for line in run.metrics() if "validation_loss" in line),
        key=lambda line: line["validation_loss"],
    )
    return Run(
        directory=run.path,
        model=model,
        tokenizer=tokenizer,
        config=config,
        validation_loss=best["validation_loss"],
        best_step=best["step"],
        sample=sample,
        seconds=time.perf_counter() - began,
    )


def _run_directory(config: TrainConfig, *, resume: bool, overwrite: bool) -> Path:
    if resume and overwrite:
        raise ValueError("resume goes on with a run and overwrite deletes it: choose one")
    if config.out is None:
        if resume:
            raise ValueError("resume needs to know which run: give its directory as out")
        return _free_directory(Path("runs"), config.name)
    out = Path(config.out)
    if resume:
        RunDirectory.open(out)
    elif out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists already: --resume goes on, --overwrite starts again")
    elif out.exists() and any(out.iterdir()):
        RunDirectory.open(out).config()  # delete runs only, whatever the user has named
    return out


def _free_directory(parent: Path, name: str) -> Path:
    number, path = 1, parent / name
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _open_run(
    out: Path, config: TrainConfig, tokenizer: Tokenizer, *, resume: bool, overwrite: bool
) -> RunDirectory:
    if resume:
        require_same_run(RunDirectory.open(out).config(), config)
    elif overwrite and out.exists():
        RunDirectory(out).delete()
    return RunDirectory.create(out, config, tokenizer)


def _train(
    config: TrainConfig,
    dataset: Dataset,
    state: TrainState,
    run: RunDirectory,
    checkpoints: Checkpoints,
    progress: Progress,
) -> None:
    """Calls of many steps, one in flight while the last one's metrics are read."""
    train_steps, evaluate = make_train_steps(config), _evaluator(config, dataset)
    tokens = resident(dataset.train)
    reader = _MetricsReader(config, run, progress)
    step = int(state.step)
    while step < config.steps:
        boundary = min(step - step % config.eval_interval + config.eval_interval, config.steps)
        count = min(config.steps_per_call, boundary - step)
        windows = batches(
            tokens,
            config.seed,
            step,
            config.steps_per_call,
            config.batch_size,
            config.model.block_size,
        )
        state, metrics = train_steps(state, windows, count)
        reader.read()
        reader.pending = (step, count, metrics)
        step += count
        if step == boundary:
            reader.read()
            validation_loss = evaluate(state.weights)
            if not math.isfinite(validation_loss):
                raise FloatingPointError(
                    f"the validation loss is {validation_loss} after step {step}: "
                    "lower learning_rate; the last checkpoint is kept"
                )
            run.append_metrics([{"step": step, "validation_loss": validation_loss}])
            progress.evaluated(step, validation_loss)
            checkpoints.save(state, validation_loss)
            reader.restart_clock()


class _MetricsReader:
    """Reads a call's metrics while the next call runs, so that the device never waits."""

    @typed
    def __init__(self, config: TrainConfig, run: RunDirectory, progress: Progress) -> None:
        self.config, self.run, self.progress = config, run, progress
        self.pending: tuple[int, int, Metrics] | None = None
        self.restart_clock()

    @typed
    def restart_clock(self) -> None:
        """Don't count what was not training."""
        self.clock = time.perf_counter()

    @typed
    def read(self) -> None:
        """Wait for the pending call, and write down and report what it measured."""
        if self.pending is None:
            return
        first, count, metrics = self.pending
        self.pending = None
        rows = {
            name: np.asarray(getattr(metrics, name))[:count].tolist()
            for name in ("loss", "gradient_norm", "learning_rate")
        }
        now = time.perf_counter()
        tokens = count * self.config.batch_size * self.config.model.block_size
        tokens_per_second = tokens / (now - self.clock)
        self.clock = now
        lines = [
            {"step": first + i + 1, **{name: row[i] for name, row in rows.items()}}
            for i in range(count)
        ]
        for line in lines:
            if not math.isfinite(line["loss"]):
                raise FloatingPointError(
                    f"the loss is {line['loss']} at step {line['step']} (learning rate "
                    f"{line['learning_rate']:.3g}, gradient norm {line['gradient_norm']:.3g}): "
                    "lower learning_rate; the last checkpoint is kept"
                )
        self.run.append_metrics(lines)
        self.progress.stepped(first + count, rows["loss"][-1], tokens_per_second)


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text that it has not learned from."""

    loss: float
    """Exact: every held-out target once. Nats per token."""
    perplexity: float
    bits_per_character: float
    tokens: int
    """How many targets that were."""


@typed
def evaluate(
    run_directory: str | Path,
    *,
    which: Literal["best", "last"] = "best",
    progress: Progress | None = None,
) -> Evaluation:
    """The exact loss of a run's model on the text that its training held out."""
    model, tokenizer, config = load(run_directory, which=which)
    dataset = load_dataset(
        config.dataset,
        config.model.block_size,
        tokenizer=tokenizer,
        on_download=(progress or Progress()).downloaded,
    )
    loss = _evaluator(config, dataset)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_character=bits_per_character(loss, dataset.characters_per_token),
        tokens=len(dataset.validation[: config.eval_tokens]) - 1,
    )


def _evaluator(config: TrainConfig, dataset: Dataset) -> Callable[[Weights], float]:
    """The exact mean loss over the held-out split."""
    evaluate_windows = make_eval_step(config.model)
    held_out = dataset.validation[: config.eval_tokens]
    windows, counts = evaluation_windows(held_out, config.model.block_size, config.batch_size)
    on_device = jnp.asarray(windows), jnp.asarray(counts)
    return lambda weights: float(evaluate_windows(weights, *on_device)) / int(counts.sum())


def _sample(model: LanguageModel, tokenizer: Tokenizer, config: TrainConfig) -> str:
    prompt = jnp.asarray(opening(tokenizer))[None]
    key = jax.random.key(np.uint32(config.seed))
    tokens = generate(model, prompt, config.sample_tokens, key=key)
    return tokenizer.decode(np.asarray(tokens[0]))
