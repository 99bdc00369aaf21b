"""Models read from runs, and saved as runs."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from jgpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.characters import OwnTokenizer
from jgpt.data.encode import Tokenizer
from jgpt.durable import new_directory
from jgpt.fields import Make
from jgpt.generation.text import Texts, generate_text
from jgpt.hardware import Platform, current_platform
from jgpt.interop.hub import find_model
from jgpt.interop.huggingface import load_hf
from jgpt.interop.names import with_one_vocabulary
from jgpt.interop.text_files import TextFiles, read_folder_tokenizer
from jgpt.nn.models import (
    LanguageModel,
    abstract_model,
    is_built_in,
    named_parameters,
    weight_dimensions,
    weights_of,
)
from jgpt.nn.module import describe_model
from jgpt.nn.precision import run_for_platform
from jgpt.runs.checkpoints import Checkpoints, Which
from jgpt.runs.directory import RunDirectory
from jgpt.shapes.contract import typed
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import TrainState
from jgpt.user_code import changed_code, with_code
from jgpt.words import counted


class Loaded(NamedTuple):
    """A model with its tokenizer and config."""

    model: LanguageModel
    """The model, with the loaded weights."""
    tokenizer: Tokenizer
    """The tokenizer of the model."""
    config: TrainConfig
    """The config with which the model was trained, or can be trained further."""

    def __repr__(self) -> str:
        return f"Loaded(\n    {describe_loaded(self.model, self.tokenizer, self.config)}\n)"

    def generate(self, prompts: Texts = "", max_new_tokens: int = 200, **options: Any) -> Texts:
        """Return what `jgpt.generate_text` returns: the continuation, without the prompt.

        `options` are the keyword arguments of `jgpt.generate_text`: `key`, `stop` and the sampling
        parameters. Raises the errors of `generate_text`.
        """
        return generate_text(self.model, self.tokenizer, prompts, max_new_tokens, **options)


def describe_loaded(model: LanguageModel, tokenizer: Tokenizer, config: TrainConfig) -> str:
    """Describe a model, its tokenizer and its config in three lines, not by all that they hold."""
    return (
        f"model: {describe_model(model)}\n"
        f"    tokenizer: {type(tokenizer).__name__} with {counted(tokenizer.vocab_size, 'token')}\n"
        f"    config: {config.name}, {counted(config.steps, 'step')} of "
        f"{counted(config.batch_size, 'sequence')}"
    )


@typed
def load(
    run_directory: str | Path,
    *,
    which: Which = "best",
    model: Make | str = None,
    optimizer: Make | str = None,
    tokenizer: Any = None,
    platform: Platform | None = None,
) -> Loaded:
    """Load a run's model, tokenizer and config; nothing is written.

    A run with a custom `model` needs it again, as an object or as FILE.py:NAME; a warning says if
    it has changed. A run with a tokenizer of the user's own needs the `tokenizer` again. Pass a
    custom `optimizer` only to train further with the config. `platform`, by default the current
    one, decides the config's `auto`. Raises FileNotFoundError if there is no run or no checkpoint,
    and ValueError if one of their files is damaged.
    """
    run = RunDirectory.open(run_directory)
    saved = run.config()
    config = with_code(saved, model, optimizer)
    loaded_tokenizer = _tokenizer_of(run, tokenizer)
    for line in changed_code(saved, config):
        warnings.warn(line, stacklevel=2)
    with Checkpoints(run, read_only=True) as checkpoints:
        decided = run_for_platform(config, platform or current_platform())
        weights = checkpoints.restore_weights(decided, which)
    model_with_weights = nnx.merge(nnx.graphdef(abstract_model(decided.model)), weights)
    return Loaded(model_with_weights, loaded_tokenizer, config)


def _tokenizer_of(run: RunDirectory, given: Any) -> Tokenizer:
    """Return a run's tokenizer, or the `given` object if it is one of the user's own.

    Raises ValueError if the object is missing, or has another size.
    """
    tokenizer = run.tokenizer()
    if not isinstance(tokenizer, OwnTokenizer):
        if given is not None:
            raise ValueError(f"{run.path} has its tokenizer: leave out `tokenizer`")
        return tokenizer
    if given is None:
        raise ValueError(
            f"the tokenizer of {run.path} is {tokenizer.name}, an object of your own, which no "
            "command can read: use Python, as in jgpt.load(RUN, tokenizer=...)"
        )
    own = OwnTokenizer.of(given)
    if own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"`tokenizer` has a vocab_size of {own.vocab_size}, but that of {run.path} has "
            f"{tokenizer.vocab_size}"
        )
    return own


@typed
def load_pretrained(source: str | Path, *, block_size: int | None = None) -> Loaded:
    """Load a model and its tokenizer from a Hugging Face folder, or from the hub.

    `source` is a folder with config.json, model.safetensors and a tokenizer; or `hub:OWNER/NAME`;
    or gpt2, smollm2, smollm2-chat or qwen3, which are fetched from the hub. `block_size` is the
    context length, by default that of the folder's config; another one requires rotary positions.
    The returned config is one to fine-tune the model with, in float32. Raises ValueError for
    another format or a missing tokenizer, and OSError if the hub can't be reached.
    """
    folder = find_model(str(source))
    model = load_hf(folder, block_size=block_size)
    tokenizer = read_folder_tokenizer(folder, model.vocab_size)
    # A model may have more rows than its tokenizer has tokens.
    model, tokenizer = with_one_vocabulary(model, tokenizer)
    return Loaded(model, tokenizer, fine_tuning_config(model.config, DataConfig()))


def fine_tuning_config(model: ModelConfig, dataset: DataConfig) -> TrainConfig:
    """Return a config to evaluate a pretrained model, or to train it further."""
    # A small and constant rate, as is usual for fine-tuning.
    optimizer = OptimizerConfig(
        learning_rate=3e-5, min_learning_rate=3e-5, schedule="constant", warmup_steps=0
    )
    return TrainConfig(model, optimizer, dataset)


@typed
def save(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer,
    config: TrainConfig | ModelConfig,
    text_files: TextFiles | None = None,
) -> Path:
    """Save a model as a run at step 0, atomically, so that it can be loaded, sampled and trained.

    The class of a custom model is recorded, and must be passed to `load`. `text_files` are a
    Hugging Face folder's files about text, which an export writes again. Raises FileExistsError for
    a directory that exists, and ValueError for a model that does not match the config or the
    tokenizer.
    """
    path = Path(directory)
    if isinstance(config, ModelConfig):
        config = TrainConfig(model=config)
    config = dataclasses.replace(config, name=path.resolve().name, out=str(path))
    if config.model.make is None and not is_built_in(model):
        config = with_code(config, type(model))
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: "
            "give the tokenizer of this model"
        )
    model_config = dataclasses.replace(config.model, vocab_size=model.vocab_size)
    config = dataclasses.replace(config, model=model_config)
    # Otherwise `load` would fail later, without naming the parameter.
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
        optimizer = make_optimizer(config.optimizer, config.steps, dimensions, config.model).init(
            weights
        )
        run = RunDirectory.create(partial, config, tokenizer, text_files)
        with Checkpoints(run) as checkpoints:
            checkpoints.save(TrainState(weights, optimizer, jnp.int32(0)), None)
    return path


def _shapes_by_path(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its path, such as blocks.0.attention.query.kernel."""
    return {name: parameter.shape for name, parameter in named_parameters(model).items()}
