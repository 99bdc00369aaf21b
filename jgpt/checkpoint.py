"""The run directory: what a run leaves behind, and how to load it again."""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
)

from jgpt.config import TrainConfig, from_json, to_json
from jgpt.contracts import typed
from jgpt.model import LanguageModel, abstract_model
from jgpt.step import TrainState, Weights, abstract_state
from jgpt.tokenizer import Tokenizer, tokenizer_from_json

CONFIG, TOKENIZER, METRICS = "config.json", "tokenizer.json", "metrics.jsonl"
CHECKPOINTS, SAMPLES, LOSS_PICTURE = "checkpoints", "samples.txt", "loss.png"
_MAY_DIFFER = {"steps", "eval_interval", "steps_per_call", "sample_tokens", "out", "name"}

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs each save at length


_RunDirectory = TypeVar("_RunDirectory", bound="RunDirectory")  # it can't name itself yet


@dataclass(frozen=True)
class RunDirectory:
    """One run's files: config, tokenizer, metrics, checkpoints, samples and the loss picture."""

    path: Path

    @classmethod
    @typed
    def create(
        cls: type[_RunDirectory], path: Path, config: TrainConfig, tokenizer: Tokenizer
    ) -> _RunDirectory:
        """Make the directory and write what never changes."""
        path.mkdir(parents=True, exist_ok=True)
        _write(path / TOKENIZER, tokenizer.to_json())
        _write(path / CONFIG, to_json(config))
        return cls(path)

    @classmethod
    @typed
    def open(cls: type[_RunDirectory], path: str | Path) -> _RunDirectory:
        """An existing run. Raises FileNotFoundError where there is none."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path} is not a run directory: it has no {CONFIG}")
        return cls(path)

    @typed
    def config(self) -> TrainConfig:
        """The run's config, the tokenizer's vocabulary size in it."""
        return _read(self.path / CONFIG, lambda text: from_json(TrainConfig, text))

    @typed
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return _read(self.path / TOKENIZER, tokenizer_from_json)

    @typed
    def append_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Append objects to the metrics, one a line."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    @typed
    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics so far; a line that a crash cut short is passed over."""
        path = self.path / METRICS
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    @typed
    def forget_metrics_after(self, step: int) -> None:
        """Drop metrics of steps that will be taken again."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        _write(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))

    @typed
    def write_samples(self, text: str) -> None:
        """The sample at the end of training."""
        _write(self.path / SAMPLES, text)

    @typed
    def delete(self) -> None:
        """Remove what a run consists of, as `--overwrite` asks, and nothing else."""
        if (self.path / CHECKPOINTS).is_dir():
            shutil.rmtree(self.path / CHECKPOINTS)
        for name in (TOKENIZER, METRICS, SAMPLES, LOSS_PICTURE, CONFIG):
            (self.path / name).unlink(missing_ok=True)


class Checkpoints:
    """A run's train states on disk, by Orbax: the best by validation loss, and the last."""

    @typed
    def __init__(self, run: RunDirectory, *, read_only: bool = False) -> None:
        """Open the run's checkpoints. Use it as a context manager: saves finish at its end."""
        self._path = (run.path / CHECKPOINTS).resolve()
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: -metrics["validation_loss"],
            preservation_policy=AnyPreservationPolicy(
                [
                    LatestN(1),
                    BestN(get_metric_fn=lambda metrics: -metrics["validation_loss"], n=1),
                ]
            ),
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            self._path, options=options, item_names=("weights", "optimizer")
        )

    def __enter__(self) -> Self:
        """Nothing to do: the constructor has opened them."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for saves under way."""
        self._manager.close()

    @typed
    def save(self, state: TrainState, validation_loss: float) -> None:
        """Save the state under its step, in the background."""
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                weights=ocp.args.StandardSave(state.weights),
                optimizer=ocp.args.StandardSave(state.optimizer),
            ),
            metrics={"validation_loss": validation_loss},
        )

    @typed
    def step(self, which: Literal["best", "last"]) -> int | None:
        """The step of the best or the last checkpoint, or None where there is none."""
        best = self._manager.best_step() if which == "best" else None
        return self._manager.latest_step() if best is None else best

    @typed
    def restore(self, config: TrainConfig) -> TrainState:
        """The last state. Raises ValueError where it is damaged or another model's."""
        step = self._require_step("last")
        abstract = abstract_state(config)
        items = self._restore(step, {"weights": abstract.weights, "optimizer": abstract.optimizer})
        return TrainState(items["weights"], items["optimizer"], jnp.int32(step))

    @typed
    def restore_weights(self, config: TrainConfig, which: Literal["best", "last"]) -> Weights:
        """The weights alone, of the best or the last checkpoint."""
        abstract = nnx.to_pure_dict(nnx.state(abstract_model(config.model), nnx.Param))
        return self._restore(self._require_step(which), {"weights": abstract})["weights"]

    def _require_step(self, which: Literal["best", "last"]) -> int:
        step = self.step(which)
        if step is None:
            raise FileNotFoundError(f"{self._path} holds no checkpoint: the run never saved one")
        return step

    def _restore(self, step: int, abstract: dict[str, Any]) -> Any:
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
                ),
            )
            items = {name: restored[name] for name in abstract}
        except Exception as error:  # Orbax raises whatever its parts do
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise ValueError(
                f"checkpoint {self._path / str(step)} can't be read: it is damaged, or of another "
                f"model than the config's ({reason[:200]})"
            ) from error
        for path, wanted in jax.tree_util.tree_leaves_with_path(abstract):
            found = _at(items, path)
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"checkpoint {self._path / str(step)} does not match the config: "
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')} is "
                    f"{found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
                )
        return items


def _at(tree: Any, path: Any) -> Any:
    return dict(jax.tree_util.tree_leaves_with_path(tree))[path]


@typed
def load(
    run_directory: str | Path, *, which: Literal["best", "last"] = "best"
) -> tuple[LanguageModel, Tokenizer, TrainConfig]:
    """A trained model with its tokenizer and config.

    Raises FileNotFoundError where there is no run or no checkpoint, ValueError where it is damaged.
    """
    run = RunDirectory.open(run_directory)
    config, tokenizer = run.config(), run.tokenizer()
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"{run.path}: its tokenizer has {tokenizer.vocab_size} tokens, its config "
            f"vocab_size={config.model.vocab_size}; they are not of the same run"
        )
    if not (run.path / CHECKPOINTS).is_dir():
        raise FileNotFoundError(f"{run.path} holds no checkpoint: the run never saved one")
    with Checkpoints(run, read_only=True) as checkpoints:
        weights = checkpoints.restore_weights(config, which)
    return nnx.merge(nnx.graphdef(abstract_model(config.model)), weights), tokenizer, config


@typed
def require_same_run(saved: TrainConfig, given: TrainConfig) -> None:
    """Raise ValueError naming each field in which a config can't go on with a saved run."""
    differences = [
        f"{name}={old!r} there, {new!r} here"
        for (name, old), (_, new) in zip(_flat(saved), _flat(given), strict=True)
        if old != new and name not in _MAY_DIFFER and name != "model.vocab_size"
    ]
    if differences:
        raise ValueError(
            "the config doesn't match the run to resume: "
            + "; ".join(differences)
            + ". Use the same values, or another --out"
        )


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _read(path: Path, parse: Any) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
