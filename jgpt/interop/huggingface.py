"""Hugging Face directories, read and written: JSON and safetensors."""

import contextlib
import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from jgpt.data.encode import Tokenizer
from jgpt.files import new_directory, prefix_errors, read_json, require_fetched
from jgpt.interop.formats import HF_FORMATS, hf_config, read_config
from jgpt.interop.names import (
    Entry,
    Tensors,
    plain_names,
    read_tensors,
    with_padding,
    write_tensors,
)
from jgpt.interop.text_files import (
    HF_CONFIG,
    TextFiles,
    parse_text_file,
    read_text_files,
    write_text_files,
    write_tokenizer,
)
from jgpt.nn.models import LanguageModel, abstract_model, named_parameters
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed

HF_WEIGHTS = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"


@typed
def load_hf(directory: str | Path, *, block_size: int | None = None) -> GPT:
    """Load a Hugging Face directory of GPT-2, Llama (SmolLM2, too), Qwen3 or Apertus, in float32.

    `block_size` replaces the config's context length, which requires rotary positions. Raises
    FileNotFoundError for a missing file, and ValueError for another format or an unsupported
    feature.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"there is no folder {directory}: give one with {HF_CONFIG} and {HF_WEIGHTS}; "
            "jgpt import fetches models of the hub by name"
        )
    with prefix_errors(directory / HF_CONFIG):
        values = read_json(directory / HF_CONFIG)
        kind = values.get("model_type", "gpt2")  # the oldest configs lack this field
        if kind not in HF_FORMATS:
            only = ", ".join(map(repr, HF_FORMATS))
            raise ValueError(f"model_type={kind!r} is not supported, only {only}")
        format = HF_FORMATS[kind]
        config = read_config(values, format)
    if block_size is not None:
        config = dataclasses.replace(config, block_size=block_size)
    # The files stay open until their tensors are read, one after the other.
    with prefix_errors(directory), contextlib.ExitStack() as stack:
        entries = _open_weights(directory, stack)
        return read_tensors(config, format, entries)


@typed
def save_hf(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    like: str | Path | None = None,
) -> None:
    """Save a directory for `transformers.AutoModelForCausalLM.from_pretrained`, atomically.

    The format is GPT-2's for learned positions, Apertus's for rotary ones without a gate, else
    Qwen3's for QK-norm and Llama's without it. `like` is the folder that the model was loaded from:
    its special tokens, chat template and generation options are saved, too. Raises ValueError for a
    model that the format can't express.
    """
    model = require_exportable(model)
    if tokenizer is not None:
        with_padding(tokenizer, model.vocab_size)  # raises for one that is not the model's
    files: TextFiles = {}
    if like is not None:
        files = read_text_files(Path(like), Path(like))
    source = parse_text_file(files, HF_CONFIG) or None
    files.pop(HF_CONFIG, None)  # it is written from the model
    config = hf_config(model.config, source)
    if source is None and tokenizer is not None and tokenizer.end_of_text is not None:
        config["bos_token_id"] = tokenizer.end_of_text
        config["eos_token_id"] = tokenizer.end_of_text
    # Before the folder is made, so that an error leaves nothing behind.
    entries = write_tensors(model, HF_FORMATS[config["model_type"]])
    tensors = {name: entry.read() for name, entry in entries.items()}
    with new_directory(Path(directory)) as partial:
        (partial / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(tensors, partial / HF_WEIGHTS)
        # safetensors writes with mode 0600: other users of the machine could read all files but
        # this.
        shutil.copymode(partial / HF_CONFIG, partial / HF_WEIGHTS)
        write_text_files(files, partial)
        if tokenizer is not None:
            write_tokenizer(tokenizer, files, partial)


def require_exportable(model: LanguageModel) -> GPT:
    """Return a model that a format describes. Raises ValueError for another, and for one that
    computes something else than the GPT of its config from the same weights."""
    if not isinstance(model, GPT):
        raise ValueError("`architecture='bigram'` can't be exported: no format describes it")
    hf_config(model.config)
    described = abstract_model(model.config)
    parameters = named_parameters(described)
    own = named_parameters(model)
    reason = "it has other parameters than its config"
    if _shapes(own) == _shapes(parameters):
        for name, parameter in parameters.items():
            parameter.set_value(own[name].get_value())
        tokens = jnp.arange(min(model.block_size, 8))[None] % model.vocab_size
        if jnp.allclose(model(tokens), described(tokens), rtol=1e-3, atol=1e-5, equal_nan=True):
            return model
        reason = "it computes something else than its config says"
    raise ValueError(f"the model can't be exported: {reason}, and no format describes that")


def _shapes(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in parameters.items()}


def _open_weights(directory: Path, stack: contextlib.ExitStack) -> dict[str, Entry]:
    """Open the tensors of one file, or of all shards that an index lists."""
    if (directory / HF_WEIGHTS).is_file() or not (directory / HF_INDEX).is_file():
        return _open_file(directory / HF_WEIGHTS, stack)
    with prefix_errors(directory / HF_INDEX):
        shard_of = read_json(directory / HF_INDEX)["weight_map"]
    entries = {}
    for shard in sorted(set(shard_of.values())):
        entries |= _open_file(directory / shard, stack)
    return entries


def _open_file(path: Path, stack: contextlib.ExitStack) -> dict[str, Entry]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: only safetensors weights are supported")
    with prefix_errors(Path(path.name)):
        require_fetched(path)
        try:
            # As JAX arrays, which support bfloat16.
            file: Any = stack.enter_context(safe_open(path, "flax"))
            entries = {}
            for short, name in plain_names(file.keys()).items():
                # The shape, without the values, which are read one tensor after the other.
                shape = file.get_slice(name).get_shape()
                entries[short] = Entry(shape, functools.partial(file.get_tensor, name))
            return entries
        except SafetensorError as error:
            raise ValueError(f"not a complete safetensors file: {error}") from None


@typed
def _write_weights(tensors: Tensors, path: Path) -> None:
    # safetensors 0.8.0 saves wrong values of arrays that are not C-contiguous, such as transposed
    # kernels (huggingface/safetensors#825)
    named = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    try:
        safetensors.numpy.save_file(named, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from None
