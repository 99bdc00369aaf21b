"""Models read from runs, and saved as runs."""

import dataclasses
import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jgpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.characters import OwnTokenizer
from jgpt.data.encode import Tokenizer
from jgpt.fields import Make, to_json
from jgpt.files import make_directory, new_directory, write_file
from jgpt.interop.hub import find_model
from jgpt.interop.huggingface import load_hf
from jgpt.interop.names import with_padding
from jgpt.interop.text_files import TextFiles, read_folder_tokenizer, write_text_files
from jgpt.machine import current_platform
from jgpt.nn.models import (
    LanguageModel,
    abstract_model,
    is_built_in,
    named_parameters,
    weights_of,
)
from jgpt.nn.precision import at_least_float32, for_platform
from jgpt.nn.stacking import stack_blocks, stack_specs, unstack_blocks, uses_stacked_blocks
from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import abstract_arrays, specs_like, weight_specs
from jgpt.runs.checkpoints import Checkpoints, Which, choose, load_checkpoint, loss_of
from jgpt.runs.directory import CHECKPOINTS, CONFIG, IMPORTED, TOKENIZER, RunDirectory
from jgpt.runs.run import Run, copy_code, quiet_orbax
from jgpt.shapes.contract import typed
from jgpt.training.state import first_state
from jgpt.user_code import files_of_code, with_code


@typed
def load(
    run_directory: str | Path,
    *,
    which: Which = "best",
    model: Make | str = None,
    optimizer: Make | str = None,
    tokenizer: Any = None,
) -> Run:
    """Load a run's model, tokenizer and config; nothing is written.

    A run with a custom `model` needs it again, as an object or as FILE.py:NAME; a warning says if
    it has changed. A run with a tokenizer of the user's own needs the `tokenizer` again. Pass a
    custom `optimizer` only to train further with the config. Raises FileNotFoundError if there is
    no run or no checkpoint, and ValueError if one of their files is damaged.
    """
    run = RunDirectory.open(run_directory)
    config = with_code(run.config(), model, optimizer)
    loaded_tokenizer = _tokenizer_of(run, tokenizer)
    for line in run.changed_code(files_of_code(config)):
        warnings.warn(line, stacklevel=2)
    decided = replace(config, model=for_platform(config.model, current_platform()))
    step, loaded = load_model(run, decided, which)
    return Run(run.path, loaded, loaded_tokenizer, config, loss_of(run.checkpoints, step))


def load_model(run: RunDirectory, config: TrainConfig, which: Which) -> tuple[int, LanguageModel]:
    """Load the model of a checkpoint, onto the mesh that is set, and return its step, too."""
    step = choose(run.checkpoints, which)
    # An average that a training keeps beside its weights is the model to use.
    part = "model"
    if (run.checkpoints / str(step) / "average").is_dir():
        part = "average"
    model = abstract_model(config.model)
    state = nnx.state(model)
    as_saved = jax.eval_shape(functools.partial(_as_saved, config), nnx.to_pure_dict(state))
    specs = weight_specs(model, current_mesh())
    forms = [specs]
    is_stacked = uses_stacked_blocks(config.model)
    if is_stacked:
        forms.append(stack_specs(specs))
    like = abstract_arrays(as_saved, specs_like(as_saved, *forms))
    step, loaded = load_checkpoint(run.checkpoints, which, {part: like})
    weights = loaded[part]
    if is_stacked:
        weights = jax.jit(unstack_blocks)(weights)
    narrowed = jax.tree.map(
        lambda leaf, own: leaf.astype(own.dtype) if leaf.dtype != own.dtype else leaf,
        weights,
        nnx.to_pure_dict(state),
    )
    nnx.replace_by_pure_dict(state, narrowed)
    nnx.update(model, state)
    return step, model


def _as_saved(config: TrainConfig, weights: Any) -> Any:
    """Return weights in the form in which a run saves them."""
    if config.optimizer.ema_decay > 0:
        weights = jax.tree.map(at_least_float32, weights)
    if uses_stacked_blocks(config.model):
        weights = stack_blocks(weights)
    return weights


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
def load_pretrained(source: str | Path, *, block_size: int | None = None) -> Run:
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
    tokenizer = with_padding(tokenizer, model.vocab_size)
    return Run(None, model, tokenizer, fine_tuning_config(model.config, DataConfig()))


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
    with new_directory(path) as partial, quiet_orbax():
        write_file(partial / TOKENIZER, tokenizer.to_json())
        if text_files:
            make_directory(partial / IMPORTED)
            write_text_files(text_files, partial / IMPORTED)
        copy_code(files_of_code(config), partial)
        make_directory(partial / CHECKPOINTS)
        checkpoints = Checkpoints(partial / CHECKPOINTS, keep_last=1, keep_best=1, keep_every=None)
        checkpoints.save(0, first_state(config, weights_of(model)), None)
        checkpoints.close()
        write_file(partial / CONFIG, to_json(config))
    return path


def _shapes_by_path(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its path, such as blocks.0.attention.query.kernel."""
    return {name: parameter.shape for name, parameter in named_parameters(model).items()}
