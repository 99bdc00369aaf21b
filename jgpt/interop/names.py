"""Weight names: those of PyTorch's modules, and of the files of GPT-2 and Llama."""

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
_MODULES = (
    ("token_embedding", "wte", "embed_tokens"),
    ("position_embedding", "wpe", ""),
    ("blocks.{}.attention_norm", "h.{}.ln_1", "layers.{}.input_layernorm"),
    ("blocks.{}.attention.query", "h.{}.attn.c_attn", "layers.{}.self_attn.q_proj"),
    ("blocks.{}.attention.key", "h.{}.attn.c_attn", "layers.{}.self_attn.k_proj"),
    ("blocks.{}.attention.value", "h.{}.attn.c_attn", "layers.{}.self_attn.v_proj"),
    ("blocks.{}.attention.query_norm", "", "layers.{}.self_attn.q_norm"),
    ("blocks.{}.attention.key_norm", "", "layers.{}.self_attn.k_norm"),
    ("blocks.{}.attention.projection", "h.{}.attn.c_proj", "layers.{}.self_attn.o_proj"),
    ("blocks.{}.feed_forward_norm", "h.{}.ln_2", "layers.{}.post_attention_layernorm"),
    ("blocks.{}.feed_forward.gate", "", "layers.{}.mlp.gate_proj"),
    ("blocks.{}.feed_forward.expansion", "h.{}.mlp.c_fc", "layers.{}.mlp.up_proj"),
    ("blocks.{}.feed_forward.projection", "h.{}.mlp.c_proj", "layers.{}.mlp.down_proj"),
    ("final_norm", "ln_f", "norm"),
    ("head", "lm_head", "lm_head"),
)
"""Our modules, GPT-2's, where some are concatenated, and those of Llama and Qwen3."""
GPT2 = {ours: name for ours, name, _ in _MODULES if name}
LLAMA = {ours: name for ours, _, name in _MODULES if name}
_BLOCK = re.compile(r"(h|layers)\.\d+\.")
_NO_PARAMETER = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\..*\.inv_freq")


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


def read_tensors(
    config: ModelConfig, tensors: dict[str, Any], modules: dict[str, str], linear: bool
) -> GPT:
    """A model with another project's tensors, which are removed from `tensors` one by one.

    `modules` are its names of ours; `linear` says that its kernels are (out, in). Raises ValueError
    for a missing or unexpected tensor, or another shape.
    """
    blocks = {found[0] for name in tensors if (found := _BLOCK.match(name))}
    if len(blocks) != config.num_layers:  # before a wrong config makes a huge layout
        raise ValueError(f"the config has {config.num_layers} layers, the weights {len(blocks)}")
    table = f"{modules['token_embedding']}.weight"
    if config.tie_embeddings and {"lm_head.weight", table} <= tensors.keys():
        head = tensors.pop("lm_head.weight")
        if not np.array_equal(head, tensors[table]):
            raise ValueError(f"lm_head.weight differs from {table}, but tie_word_embeddings=True")
    layout = _layout(config, modules)
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
def write_tensors(model: GPT, modules: dict[str, str], linear: bool) -> Tensors:
    """The inverse of `read_tensors`, in at least float32, with zeros for biases that GPT-2 has."""
    config, leaves = model.config, _by_name(_weights(model))
    dtype = jnp.promote_types(config.param_dtype, jnp.float32)
    tensors = {}
    for name, parts in _layout(config, modules).items():
        tensor = np.concatenate([np.asarray(leaves[part], dtype) for part in parts], axis=-1)
        tensors[name] = tensor.T if _is_transposed(name, parts, linear) else tensor
    for name in [*tensors]:
        bias = name.removesuffix("weight") + "bias"
        has_bias = name.startswith(("h.", "ln_f.")) and name.endswith("weight")
        if has_bias and bias not in tensors:
            tensors[bias] = np.zeros(tensors[name].shape[-1], dtype)
    outer = "transformer." if modules is GPT2 else "model."
    prefixed = {name: outer + name for name in tensors} | {"lm_head.weight": "lm_head.weight"}
    return {prefixed[name]: tensor for name, tensor in tensors.items()}


def crop_vocabulary(model: GPT, vocab_size: int) -> GPT:
    """Remove the padding of a model's vocabulary.

    Raises ValueError unless the padding is up to a multiple of 64, and below 512.
    """
    if vocab_size == model.vocab_size:
        return model
    if model.vocab_size % 64 or not 0 < model.vocab_size - vocab_size < 512:
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


def _layout(config: ModelConfig, modules: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Another project's tensors, each with our parameters that are concatenated in it.

    Only those of parameters that the model has.
    """
    leaves, layout = _by_name(_weights(abstract_model(config))), {}
    for ours, theirs in modules.items():
        for index in range(config.num_layers if "{}" in ours else 1):
            for kind in ("kernel", "scale", "embedding", "bias"):
                if (name := f"{ours}.{kind}".format(index)) in leaves:
                    tensor = f"{theirs}.{torch_name(kind)}".format(index)
                    layout[tensor] = (*layout.get(tensor, ()), name)
    return layout


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


@contextlib.contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Prefix ValueErrors with the file that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names without the outer module's, to those in the file; what is no parameter is left out."""
    plain = {re.sub(r"^(transformer|model)\.", "", name): name for name in names}
    return {short: name for short, name in plain.items() if not _NO_PARAMETER.fullmatch(short)}


def our_fields(
    values: dict[str, Any], names: dict[str, str], defaults: dict[str, Any]
) -> dict[str, Any]:
    """A config's fields by our `names` for them. Raises ValueError for a missing one."""
    values = defaults | values
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    fields = {}
    for theirs, ours in names.items():
        if fields.setdefault(ours, values[theirs]) != values[theirs]:
            raise ValueError(
                f"{theirs}={values[theirs]!r}: jgpt has one {ours} rate, and another is "
                f"{fields[ours]!r}; make them equal"
            )
    return fields
