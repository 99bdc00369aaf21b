"""Hugging Face's directories of GPT-2, Llama and Qwen3: JSON and safetensors, in and out."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
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
    GPT2,
    LLAMA,
    Tensors,
    our_fields,
    plain_names,
    prefix_errors,
    read_tensors,
    require_names,
    write_tensors,
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
    "silu": "silu",
}


@dataclass(frozen=True)
class _Format:
    """What a model type of Hugging Face's says, and how."""

    name: str
    architecture: str
    modules: dict[str, str]
    linear: bool
    """Whether kernels are (out, in), as in PyTorch's Linear, or (in, out), as in GPT-2's Conv1D."""
    fields: dict[str, str]
    """The config's fields, and ours."""
    defaults: dict[str, Any]
    """Of fields that may be missing. Another value of those that jgpt lacks, for any layer, is
    another transformer."""
    implied: dict[str, Any]
    """Fields of ours that it lacks and that aren't our defaults."""


_GPT2 = _Format(
    "GPT-2", "GPT2LMHeadModel", GPT2, linear=False,
    fields={
        "vocab_size": "vocab_size", "n_positions": "block_size", "n_layer": "num_layers",
        "n_head": "num_heads", "n_embd": "embed_dim", "n_inner": "hidden_dim",
        "activation_function": "activation", "layer_norm_epsilon": "norm_epsilon",
        "resid_pdrop": "dropout", "embd_pdrop": "dropout", "attn_pdrop": "dropout",
        "tie_word_embeddings": "tie_embeddings",
    },
    defaults={
        "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    implied={"positions": "learned", "norm": "layer", "qkv_bias": True, "use_bias": True},
)  # fmt: skip
_LLAMA = _Format(
    "Llama", "LlamaForCausalLM", LLAMA, linear=True,
    fields={
        "vocab_size": "vocab_size", "max_position_embeddings": "block_size",
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "hidden_size": "embed_dim",
        "intermediate_size": "hidden_dim", "hidden_act": "activation",
        "rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base",
        "tie_word_embeddings": "tie_embeddings",
    },
    defaults={
        "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "rope_parameters": {"rope_type": "default"}, "rope_scaling": None,
        "rope_interleaved": False, "tie_word_embeddings": False, "attention_bias": False,
        "attention_dropout": 0.0, "mlp_bias": False, "layer_types": "full_attention",
        "quantization_config": None,
    },
    implied={"positions": "rotary", "norm": "rms", "gated": True},
)  # fmt: skip
_QWEN3 = _Format(
    "Qwen3", "Qwen3ForCausalLM", LLAMA, linear=True,
    # all norms have its epsilon, and ours of queries and keys is fixed
    fields={name: ours for name, ours in _LLAMA.fields.items() if name != "rms_norm_eps"},
    defaults={
        **_LLAMA.defaults, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False,
    },
    implied=_LLAMA.implied | {"qk_norm": True, "qk_norm_scale": True, "norm_epsilon": 1e-6},
)  # fmt: skip
_FORMATS = {"gpt2": _GPT2, "llama": _LLAMA, "qwen3": _QWEN3}
_ANYTHING = (
    "architecture", "ngram_rows", "ngram_dropout", "zero_init", "dropout", "dtype",
    "activation_dtype", "attention_kernel", "param_dtype", "rematerialise", "scan_layers",
)  # fmt: skip
"""Fields of ours that a format needn't say: whatever they are, it is the same function."""


@typed
def load_hf(
    directory: str | Path, *, block_size: int | None = None, model_type: str | None = None
) -> GPT:
    """Load a Hugging Face directory of GPT-2, Llama (SmolLM2, too) or Qwen3, in float32.

    `block_size` replaces the config's context length, where positions are rotary; `model_type` is
    the only one that will do. Raises FileNotFoundError for a missing file, and ValueError for
    another format or a feature that jgpt doesn't have.
    """
    directory = Path(directory)
    known = [*_FORMATS] if model_type is None else [model_type]
    parse = functools.partial(_config_from_hf, known=known)
    format, config = _read_json(directory / HF_CONFIG, parse)
    if block_size is not None:
        config = dataclasses.replace(config, block_size=block_size)
    with prefix_errors(directory):
        return read_tensors(config, _read_weights(directory), format.modules, format.linear)


@typed
def load_gpt2(directory: str | Path) -> GPT:
    """`load_hf` of GPT-2 alone."""
    return load_hf(directory, model_type="gpt2")


@typed
def save_hf(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    zero_biases: bool = False,
    model_type: str | None = None,
) -> None:
    """Save a directory for `transformers.AutoModelForCausalLM.from_pretrained`, atomically.

    By default the `model_type` is gpt2 for learned positions, else qwen3 for QK-norm, else llama. A
    byte-pair tokenizer is saved too. `zero_biases` saves zeros for biases that the model lacks and
    GPT-2 has. Raises ValueError for a model that the format can't express.
    """
    if not isinstance(model, GPT):
        raise ValueError("Hugging Face's format doesn't support architecture='bigram'")
    if model_type is None:
        rotary = "qwen3" if model.config.qk_norm else "llama"
        model_type = rotary if model.config.positions == "rotary" else "gpt2"
    directory, format = Path(directory), _FORMATS[model_type]
    config = {"model_type": model_type, **_config_to_hf(model.config, format, zero_biases)}
    if isinstance(tokenizer, BPETokenizer):
        config["bos_token_id"] = config["eos_token_id"] = tokenizer.end_of_text
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} already exists: choose another directory")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(write_tensors(model, format.modules, format.linear), partial / HF_WEIGHTS)
        # safetensors writes with mode 0600
        shutil.copymode(partial / HF_CONFIG, partial / HF_WEIGHTS)
        if isinstance(tokenizer, BPETokenizer):
            (tokenizer.save_gpt2 if model_type == "gpt2" else tokenizer.save_hf)(partial)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@typed
def save_gpt2(model: LanguageModel, directory: str | Path, **options: Any) -> None:
    """`save_hf` as GPT-2."""
    save_hf(model, directory, model_type="gpt2", **options)


def _read_json(path: Path, parse: Callable[[dict[str, Any]], Any]) -> Any:
    with prefix_errors(path):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"not an object, but {type(values).__name__}")
        return parse(values)


def _read_weights(directory: Path) -> dict[str, Any]:
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
def _write_weights(tensors: Tensors, path: Path) -> None:
    # safetensors 0.8.0 saves wrong values for arrays that are not C-contiguous, such as transposed
    # kernels (huggingface/safetensors#825)
    named = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    try:
        safetensors.numpy.save_file(named, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from None


def _config_from_hf(values: dict[str, Any], known: list[str]) -> tuple[_Format, ModelConfig]:
    kind, rope = values.get("model_type", "gpt2"), values.get("rope_parameters")
    if kind not in known:
        only = ", ".join(map(repr, known))
        raise ValueError(f"model_type={kind!r} is not supported, only {only}")
    format = _FORMATS[kind]
    if isinstance(rope, dict):  # transformers has the base in it since version 5
        base = {name: rope[name] for name in rope.keys() & {"rope_theta"}}
        values = values | base | {"rope_parameters": dict(rope.items() - base.items())}
    fields = our_fields(values, format.fields, format.defaults)
    for name in format.defaults.keys() - format.fields.keys():
        value, only = values.get(name, format.defaults[name]), format.defaults[name]
        if any(each != only for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name}={value!r} is not supported, only {only!r}")
    if fields["activation"] not in [*_ACTIVATIONS]:
        name = next(name for name, ours in format.fields.items() if ours == "activation")
        raise ValueError(
            f"{name}={fields['activation']!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    fields["activation"] = _ACTIVATIONS[fields["activation"]]
    return format, ModelConfig(**fields, **format.implied)


def _config_to_hf(config: ModelConfig, format: _Format, zero_biases: bool) -> dict[str, Any]:
    ours, default = dataclasses.asdict(config), ModelConfig(**format.implied)
    meant = {  # by None
        "num_kv_heads": config.num_heads,
        "head_dim": config.embed_dim / config.num_heads,
        "attention_scale": config.head_size**-0.5,
    }
    for name in dict.fromkeys([*format.implied, *ours]):
        value, only = ours[name], getattr(default, name)
        said = name in format.fields.values() or name in _ANYTHING
        if said or value in (only, meant.get(name, only)):
            continue
        refused = f"{format.name}'s format doesn't support {name}={value!r}"
        if only is not True or not name.endswith("_bias"):
            raise ValueError(f"{refused}, only {name}={only!r}")
        if not zero_biases:
            raise ValueError(f"{refused}: zero_biases=True writes zeros for the missing biases")
    theirs = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    ours["activation"] = theirs[config.activation]
    ours["num_kv_heads"] = config.num_kv_heads or config.num_heads
    ours["head_dim"] = config.head_size
    ours["hidden_dim"] = config.hidden_dim or 4 * config.embed_dim
    return {
        "architectures": [format.architecture],
        **{name: ours[its] for name, its in format.fields.items()},
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": jnp.promote_types(config.param_dtype, jnp.float32).name,
    }
