"""Weight names: those of PyTorch's modules and of GPT-2's files."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jgpt.config import ModelConfig
from jgpt.contracts import typed
from jgpt.nn.models import LanguageModel, Weights, abstract_model
from jgpt.nn.transformer import GPT

Tensors = PyTree[Float[np.ndarray, "..."]]  # by name: unlike a dict's, all leaves are checked


@typed
def to_torch(weights: Weights) -> Tensors:
    """Weights, or gradients, with the names and layouts of PyTorch modules."""
    return {
        torch_name(name): np.ascontiguousarray(_kernel_transposed(name, leaf))
        for name, leaf in _by_name(weights).items()
    }


@typed
def from_torch(
    tensors: Tensors, like: PyTree[Float[Array | jax.ShapeDtypeStruct, "..."]]
) -> Weights:
    """The inverse of `to_torch`, with the structure, shapes and dtypes of `like`.

    Raises ValueError for a missing or unexpected tensor, or another shape.
    """
    names = {name: torch_name(name) for name in _by_name(like)}
    require_names(set(tensors), set(names.values()))
    leaves = {name: _kernel_transposed(name, tensors[torch]) for name, torch in names.items()}
    return _from_names(leaves, like)


def torch_name(name: str) -> str:
    """PyTorch's name of a parameter: kernels, scales and embeddings are called weight."""
    return re.sub(r"(kernel|scale|embedding)$", "weight", name)


def from_gpt2(config: ModelConfig, tensors: dict[str, Any], *, linear: bool) -> GPT:
    """A model with GPT-2's tensors, which are removed from `tensors` one by one.

    `linear`: kernels are (out, in), as in nanoGPT, not (in, out) as in Hugging Face's Conv1D.
    Raises ValueError for a missing or unexpected tensor, or another shape.
    """
    blocks = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    if len(blocks) != config.num_layers:  # before a wrong config makes a huge layout
        raise ValueError(f"n_layer={config.num_layers}, but the weights have {len(blocks)} blocks")
    if config.tie_embeddings and {"lm_head.weight", "wte.weight"} <= tensors.keys():
        head = tensors.pop("lm_head.weight")
        if not np.array_equal(head, tensors["wte.weight"]):
            raise ValueError("lm_head.weight differs from wte.weight, but tie_word_embeddings=True")
    layout = _gpt2_layout(config)
    require_names(set(tensors), set(layout))
    leaves = {}
    for name, parts in layout.items():
        tensor = jnp.asarray(tensors.pop(name))
        if _is_transposed(name, parts, linear):
            tensor = tensor.T
        if tensor.ndim == 0 or tensor.shape[-1] % len(parts):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, which can't be split into {len(parts)}"
            )
        leaves |= zip(parts, jnp.split(tensor, len(parts), axis=-1), strict=True)
    return _model(config, leaves)


@typed
def to_gpt2(model: GPT) -> Tensors:
    """A model's weights as GPT-2's tensors in at least float32, with zeros for missing biases."""
    config, leaves = model.config, _by_name(_weights(model))
    dtype = jnp.promote_types(config.param_dtype, jnp.float32)
    tensors = {}
    for name, parts in _gpt2_layout(config).items():
        tensor = np.concatenate([np.asarray(leaves[part], dtype) for part in parts], axis=-1)
        tensors[name] = tensor.T if _is_transposed(name, parts, linear=False) else tensor
    for name in [*tensors]:
        bias = name.removesuffix("weight") + "bias"
        has_bias = name.startswith(("h.", "ln_f.")) and name.endswith("weight")
        if has_bias and bias not in tensors:
            tensors[bias] = np.zeros(tensors[name].shape[-1], dtype)
    return tensors


def crop_vocabulary(model: GPT, vocab_size: int) -> GPT:
    """Remove the padding of a model's vocabulary.

    Raises ValueError unless the padding is up to a multiple of 64 or 128.
    """
    if vocab_size == model.vocab_size:
        return model
    if model.vocab_size not in {-(-vocab_size // multiple) * multiple for multiple in (64, 128)}:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the model vocab_size={model.vocab_size}: "
            "they don't belong together"
        )
    leaves = _by_name(_weights(model))
    leaves["token_embedding.embedding"] = leaves["token_embedding.embedding"][:vocab_size]
    for name in leaves.keys() & {"head.kernel", "head.bias"}:
        leaves[name] = leaves[name][..., :vocab_size]
    return _model(dataclasses.replace(model.config, vocab_size=vocab_size), leaves)


def require_names(found: set[str], wanted: set[str]) -> None:
    """Raise ValueError naming missing and unexpected tensors."""
    for problem, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise ValueError(f"{problem} tensors ({len(names)}): {shown}")


def _gpt2_layout(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """GPT-2's tensors, each with our parameters that are concatenated in it on the last axis.

    Only those of parameters that the model has.
    """
    modules = {
        "wte": ("token_embedding",),
        "wpe": ("position_embedding",),
        "ln_f": ("final_norm",),
        "lm_head": ("head",),
    }
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        qkv = tuple(f"{block}.attention.{name}" for name in ("query", "key", "value"))
        modules |= {
            f"h.{index}.ln_1": (f"{block}.attention_norm",),
            f"h.{index}.attn.c_attn": qkv,
            f"h.{index}.attn.c_proj": (f"{block}.attention.projection",),
            f"h.{index}.ln_2": (f"{block}.feed_forward_norm",),
            f"h.{index}.mlp.c_fc": (f"{block}.feed_forward.expansion",),
            f"h.{index}.mlp.c_proj": (f"{block}.feed_forward.projection",),
        }
    leaves = _by_name(_weights(abstract_model(config)))
    return {
        f"{part}.{torch_name(kind)}": tuple(f"{module}.{kind}" for module in its_modules)
        for part, its_modules in modules.items()
        for kind in ("kernel", "scale", "embedding", "bias")
        if f"{its_modules[0]}.{kind}" in leaves
    }


def _is_transposed(name: str, parts: tuple[str, ...], linear: bool) -> bool:
    # the head is nn.Linear in both formats; GPT-2's other kernels are (in, out), as ours are
    return parts[0].endswith(".kernel") and (linear or name == "lm_head.weight")


def _kernel_transposed(name: str, leaf: Any) -> Any:
    return leaf.T if name.endswith("kernel") else leaf


def _weights(model: LanguageModel) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _model(config: ModelConfig, leaves: dict[str, Any]) -> GPT:
    abstract = abstract_model(config)
    model = nnx.merge(nnx.graphdef(abstract), _from_names(leaves, _weights(abstract)))
    assert isinstance(model, GPT)
    return model


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by dotted names, such as blocks.0.attention.query.kernel."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _from_names(leaves: dict[str, Any], like: Any) -> Any:
    """The inverse of `_by_name`. Raises ValueError for a shape that differs from `like`."""
    for name, wanted in _by_name(like).items():
        if leaves[name].shape != wanted.shape:
            raise ValueError(
                f"{torch_name(name)} has shape {list(leaves[name].shape)}, not {list(wanted.shape)}"
            )
    named = [jnp.asarray(leaves[name], wanted.dtype) for name, wanted in _by_name(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), named)


_STORED_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
SIZES = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "embed_dim",
}


@contextlib.contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Prefix ValueErrors with the file that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names without the prefix `transformer.`, to those in the file; stored masks are left out."""
    plain = {name.removeprefix("transformer."): name for name in names}
    return {short: name for short, name in plain.items() if not _STORED_MASK.fullmatch(short)}


def sizes_of(values: dict[str, Any], context: str) -> dict[str, Any]:
    """A config's sizes with our names. Raises ValueError for a missing one."""
    names = {**SIZES, context: "block_size"}
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    return {ours: values[theirs] for theirs, ours in names.items()}
