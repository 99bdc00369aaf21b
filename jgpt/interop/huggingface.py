"""Hugging Face's GPT-2 directories: JSON and safetensors, in and out."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from jgpt.config import Activation, ModelConfig
from jgpt.contracts import typed
from jgpt.data.tokenizers import BPETokenizer, Tokenizer
from jgpt.interop.names import (
    SIZES,
    Tensors,
    from_gpt2,
    plain_names,
    prefix_errors,
    require_names,
    sizes_of,
    to_gpt2,
)
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT

HF_CONFIG, HF_WEIGHTS, HF_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


_PRECISIONS = ("F32", "F16", "BF16", "F64")


_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


_ONLY = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Fields whose other values mean another transformer."""


@typed
def load_gpt2(directory: str | Path) -> GPT:
    """Load a Hugging Face GPT-2 directory, in float32.

    Raises FileNotFoundError for a missing file, and ValueError for another format or a feature that
    jgpt doesn't have.
    """
    directory = Path(directory)
    config = _read_json(directory / HF_CONFIG, _config_from_gpt2)
    with prefix_errors(directory):
        return from_gpt2(config, _read_tensors(directory), linear=False)


@typed
def save_gpt2(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    zero_biases: bool = False,
) -> None:
    """Save a directory for `transformers.GPT2LMHeadModel.from_pretrained`, atomically.

    A byte-pair tokenizer is saved too, as `vocab.json` and `merges.txt`. `zero_biases` saves zeros
    for biases that the model lacks. Raises ValueError for a model that the format can't express.
    """
    directory = Path(directory)
    if not isinstance(model, GPT):
        raise ValueError("GPT-2's format doesn't support architecture='bigram'")
    config = _config_to_gpt2(model.config, zero_biases)
    if isinstance(tokenizer, BPETokenizer):
        config["bos_token_id"] = config["eos_token_id"] = tokenizer.end_of_text
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} already exists: choose another directory")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write_tensors(to_gpt2(model), partial / HF_WEIGHTS)
        shutil.copymode(
            partial / HF_CONFIG, partial / HF_WEIGHTS
        )  # safetensors writes with mode 0600
        if isinstance(tokenizer, BPETokenizer):
            tokenizer.save_gpt2(partial)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_json(path: Path, parse: Callable[[dict[str, Any]], Any]) -> Any:
    with prefix_errors(path):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"not an object, but {type(values).__name__}")
        return parse(values)


def _read_tensors(directory: Path) -> dict[str, Any]:
    """The tensors of one file, or of all shards of an index, by name."""
    if (directory / HF_WEIGHTS).is_file() or not (directory / HF_INDEX).is_file():
        return _read_file(directory / HF_WEIGHTS)
    tensors, shard_of = {}, _read_json(directory / HF_INDEX, _shards)
    for shard in sorted(set(shard_of.values())):
        its_tensors = _read_file(directory / shard)
        listed = plain_names(name for name, its in shard_of.items() if its == shard)
        with prefix_errors(Path(shard)):
            require_names(set(its_tensors), set(listed))
        tensors |= its_tensors
    return tensors


def _shards(index: dict[str, Any]) -> dict[str, str]:
    shard_of = index.get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError("it has no weight_map")
    for shard in shard_of.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"weight_map names {shard!r}, which is not a file in this directory")
    return shard_of


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: only safetensors weights are supported")
    with prefix_errors(Path(path.name)):
        try:
            # as JAX arrays, which support bfloat16
            with safe_open(path, "flax") as file:
                names = plain_names(file.keys())
                for name in names.values():
                    precision = file.get_slice(name).get_dtype()
                    if precision not in _PRECISIONS:
                        raise ValueError(f"{name} is {precision}, not {', '.join(_PRECISIONS)}")
                return {short: file.get_tensor(name) for short, name in names.items()}
        except SafetensorError as error:
            raise ValueError(f"not a complete safetensors file: {error}") from None


@typed
def _write_tensors(tensors: Tensors, path: Path) -> None:
    # safetensors 0.8.0 saves wrong values for arrays that are not C-contiguous, such as transposed
    # kernels (huggingface/safetensors#825)
    named = {
        name if name.startswith("lm_head.") else f"transformer.{name}": np.ascontiguousarray(tensor)
        for name, tensor in tensors.items()
    }
    try:
        safetensors.numpy.save_file(named, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from None


def _config_from_gpt2(values: dict[str, Any]) -> ModelConfig:
    for name, only in _ONLY.items():
        if values.get(name, only) != only:
            raise ValueError(f"{name}={values[name]!r} is not supported, only {only!r}")
    activation = values.get("activation_function", "gelu_new")
    if activation not in [*_ACTIVATIONS]:
        raise ValueError(
            f"activation_function={activation!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    dropouts = {name: values.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(map(str, dropouts.values()))) > 1:
        rates = ", ".join(f"{name}={rate!r}" for name, rate in dropouts.items())
        raise ValueError(f"{rates}: jgpt has one dropout rate; make them equal")
    return ModelConfig(
        **sizes_of(values, "n_positions"),
        hidden_dim=values.get("n_inner"),
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        use_bias=True,
        tie_embeddings=values.get("tie_word_embeddings", True),
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
        dropout=dropouts["resid_pdrop"],
    )


def _config_to_gpt2(config: ModelConfig, zero_biases: bool) -> dict[str, Any]:
    supported = {
        "positions": ["learned"],
        "norm": ["layer"],
        "norm_scale": [True],
        "qk_norm": [False],
        "num_kv_heads": [None, config.num_heads],
        "attention_window": [None],
        "ngram_sizes": [()],
        "attention_scale": [None, (config.embed_dim // config.num_heads) ** -0.5],
        "embedding_shortcut": [False],
        "logit_softcap": [None],
        "head_bias": [False],
    }
    for name, values in supported.items():
        if getattr(config, name) not in values:
            raise ValueError(
                f"GPT-2's format doesn't support {name}={getattr(config, name)!r}, "
                f"only {name}={values[0]!r}"
            )
    for name in ("qkv_bias", "use_bias"):
        if not getattr(config, name) and not zero_biases:
            raise ValueError(
                f"GPT-2's format doesn't support {name}=False: "
                "zero_biases=True writes zeros for the missing biases"
            )
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "n_positions": config.block_size,
        "n_inner": config.hidden_dim,
        "activation_function": activations[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": jnp.promote_types(config.param_dtype, jnp.float32).name,
    }
