"""A model read from a run, and a model saved as a run."""

import dataclasses
import warnings
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from jgpt.config import ModelConfig, TrainConfig
from jgpt.data.tokenizers import Tokenizer
from jgpt.durable import new_directory
from jgpt.fields import Make
from jgpt.hardware import Platform, current_platform
from jgpt.interop.text_files import TextFiles
from jgpt.nn.models import (
    LanguageModel,
    abstract_model,
    is_built_in,
    named_parameters,
    weight_dimensions,
    weights_of,
)
from jgpt.nn.precision import run_for_platform
from jgpt.runs.checkpoints import Checkpoints, Which
from jgpt.runs.directory import RunDirectory
from jgpt.shapes.contract import typed
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import TrainState
from jgpt.user_code import changed_code, with_code


@typed
def load(
    run_directory: str | Path,
    *,
    which: Which = "best",
    model: Make | str = None,
    optimizer: Make | str = None,
    platform: Platform | None = None,
) -> tuple[LanguageModel, Tokenizer, TrainConfig]:
    """Load a run's model, tokenizer and config; nothing is written.

    A run of a user's own `model` needs it again, as itself or as FILE.py:NAME, and warns if it has
    changed; an own `optimizer` is needed to train further with the config. `platform`, by default
    the current one, decides the config's `auto`.
    Raises FileNotFoundError if there is no run or no checkpoint, and ValueError if one of their
    files is damaged.
    """
    run = RunDirectory.open(run_directory)
    saved = run.config()
    tokenizer = run.tokenizer()
    config = with_code(saved, model, optimizer)
    for line in changed_code(saved, config):
        warnings.warn(line, stacklevel=2)
    with Checkpoints(run, read_only=True) as checkpoints:
        decided = run_for_platform(config, platform or current_platform())
        weights = checkpoints.restore_weights(decided, which)
    return nnx.merge(nnx.graphdef(abstract_model(decided.model)), weights), tokenizer, config


@typed
def save(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer,
    config: TrainConfig | ModelConfig,
    text_files: TextFiles | None = None,
) -> Path:
    """Save a model as a run at step 0, atomically: to load, sample, evaluate or train further.

    The class of a user's own model is recorded as the model to give to `load`. `text_files` are
    what a Hugging Face folder says about its text, which an export writes again.
    Raises FileExistsError for a directory that exists, and ValueError for a model that is not of
    the config or the tokenizer.
    """
    path = Path(directory)
    if isinstance(config, ModelConfig):
        config = TrainConfig(model=config)
    config = dataclasses.replace(config, name=path.resolve().name, out=str(path))
    if config.model.make is None and not is_built_in(model):
        config = with_code(config, type(model))
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}"
        )
    model_config = dataclasses.replace(config.model, vocab_size=model.vocab_size)
    config = dataclasses.replace(config, model=model_config)
    # or `load` would fail, later and without a name
    expected_shapes = _shapes_by_path(abstract_model(config.model))
    shapes = _shapes_by_path(model)
    for name in expected_shapes | shapes:
        shape = shapes.get(name)
        expected_shape = expected_shapes.get(name)
        if shape != expected_shape:
            raise ValueError(
                f"{name} is {shape} in the model and {expected_shape} in one of the config"
            )
    with new_directory(path) as partial:
        weights = weights_of(model)
        dimensions = weight_dimensions(config.model)
        optimizer = make_optimizer(config.optimizer, config.steps, dimensions).init(weights)
        run = RunDirectory.create(partial, config, tokenizer, text_files)
        with Checkpoints(run) as checkpoints:
            checkpoints.save(TrainState(weights, optimizer, jnp.int32(0)), None)
    return path


def _shapes_by_path(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its path, such as blocks.0.attention.query.kernel."""
    return {name: parameter.shape for name, parameter in named_parameters(model).items()}
