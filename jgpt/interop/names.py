"""Weights with the names and layouts of other projects."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from jgpt.config import ModelConfig
from jgpt.data.byte_pairs import BPETokenizer
from jgpt.data.encode import Tokenizer
from jgpt.interop.formats import Format
from jgpt.nn.models import abstract_model, named_parameters
from jgpt.nn.precision import wider_dtype
from jgpt.nn.transformer import GPT
from jgpt.shapes.contract import typed

# by name; unlike in a dict annotation, all leaves are checked
Tensors = PyTree[Float[np.ndarray, "..."]]
_HEAD = "lm_head.weight"
"""The name of the head, which is outside of the prefix in all formats."""
_OUTER_MODULES = re.compile(r"^((_orig_mod|module)\.)*((transformer|model)\.)?")
"""torch.compile and DistributedDataParallel wrap a model in a module of their own."""
_QUERY_OR_KEY = re.compile(r"\.attention\.(query|key)\.(kernel|bias)$")
"""The parameters that QK-norm sees: a factor of them changes nothing but its epsilon."""
_NO_PARAMETER = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\..*\.inv_freq")
"""Buffers with constants: GPT-2's causal mask, and the frequencies of rotary positions."""


class Entry(NamedTuple):
    """A tensor in a file."""

    shape: Sequence[int]
    read: Callable[[], Any]


class _Stored(NamedTuple):
    """Parameters of jgpt that another project stores as one tensor, concatenated along the last
    axis."""

    sizes: dict[str, int]
    """The sizes of the parameters along the last axis, by their names."""
    shape: tuple[int, ...]
    transposed: bool


def read_tensors(config: ModelConfig, format: Format, entries: dict[str, Entry]) -> GPT:
    """Make a model from the tensors of another project, which are read one by one.

    Raises ValueError for a missing or unexpected tensor, or a wrong shape, before any is read; and
    for one that is not finite.
    """
    layout = _layout(config, format)
    if config.tie_embeddings and _HEAD in entries:
        # Both parameters share one tensor, which a file may have under either name or under both.
        entries = dict(entries)
        head = entries.pop(_HEAD)
        entries.setdefault(f"{format.modules['token_embedding']}.weight", head)
    require_names(found=set(entries), wanted=set(layout))
    # All shapes are checked before any tensor is read, since a large one may take minutes.
    for name, stored in layout.items():
        shape = list(entries[name].shape)
        if shape != list(stored.shape):
            raise ValueError(f"{name} has shape {shape}, not {list(stored.shape)}")
    model = abstract_model(config)
    assert isinstance(model, GPT)
    parameters = named_parameters(model)
    for name, stored in layout.items():
        for part, value in _split(name, stored, entries[name]).items():
            parameters[part].set_value(value.astype(parameters[part].dtype))
    return model


def _split(name: str, stored: _Stored, entry: Entry) -> dict[str, Any]:
    """Split a tensor of a file into the parameters that it holds, by their names in jgpt."""
    tensor = jnp.asarray(entry.read())
    if not jnp.isfinite(tensor).all():
        raise ValueError(f"{name} has NaN or infinity: the model diverged, or the file is damaged")
    if stored.transposed:
        tensor = tensor.T
    # Split after each parameter but the last.
    *ends, _ = itertools.accumulate(stored.sizes.values())
    parameters = jnp.split(tensor, ends, axis=-1)
    return dict(zip(stored.sizes, parameters, strict=True))


def write_tensors(model: GPT, format: Format) -> dict[str, Entry]:
    """Return the inverse of `read_tensors`, in at least float32; a tensor is made when it is read.

    Three things that the model computes and the format has no place for are written into
    weights: a norm's scale or a bias that is missing becomes ones or zeros, an epsilon of QK-norm
    becomes a factor of queries and keys, and the bias of the head one of the last norm.
    """
    config = model.config
    parameters = named_parameters(model)
    dtype = wider_dtype(config.param_dtype)

    def value_of(name: str, size: int) -> np.ndarray:
        if name not in parameters:
            return np.full(size, float(name.endswith(".scale")), dtype)
        value = np.asarray(parameters[name].get_value(), dtype)
        if config.qk_norm and _QUERY_OR_KEY.search(name):
            return value * dtype.type(_factor_for_epsilon(config))
        if config.head_bias and name == "final_norm.bias":
            return value + _before_head(parameters, dtype)
        return value

    def tensor_of(stored: _Stored) -> np.ndarray:
        values = [value_of(name, size) for name, size in stored.sizes.items()]
        tensor = np.concatenate(values, axis=-1)
        if stored.transposed:
            return tensor.T
        return tensor

    entries = {}
    with_all_parts = dataclasses.replace(config, **_all_parts(format))
    for name, stored in _layout(with_all_parts, format).items():
        if name != _HEAD:
            name = f"{format.prefix}.{name}"
        entries[name] = Entry(stored.shape, functools.partial(tensor_of, stored))
    return entries


def _all_parts(format: Format) -> dict[str, bool]:
    """Return the fields of the biases and scales of a format's models."""
    parts = {"norm_scale": True, "head_bias": False}
    for name, value in format.implied.items():
        if name.endswith(("_bias", "norm_scale")):
            parts[name] = value
    return parts


def _factor_for_epsilon(config: ModelConfig) -> float:
    """Return the factor of queries and keys with which QK-norm has the epsilon of other norms.

    norm(s x) with the epsilon e is norm(x) with the epsilon e / s^2.
    """
    return math.sqrt(config.norm_epsilon / config.qk_norm_epsilon)


@typed
def _before_head(parameters: dict[str, Any], dtype: Any) -> Float[np.ndarray, " features"]:
    """Return what the last norm adds for the head to add its bias, up to a number that is the same
    for all tokens, which no probability depends on."""
    kernel = parameters["head.kernel"].get_value()
    rows = np.asarray(kernel, np.float64).T  # token feature
    bias = np.asarray(parameters["head.bias"].get_value(), np.float64)
    with_constant = np.hstack([rows, np.ones((len(rows), 1))])
    solution, *_ = np.linalg.lstsq(with_constant, bias)
    return solution[:-1].astype(dtype)


def require_its_tokenizer(model: GPT, tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer from elsewhere that is hardly that of a model.

    Where neither names the other, only their sizes can tell. The sizes are equal, or the model's
    is padded up to a multiple of 64, by fewer than 512 tokens.
    """
    padding = model.vocab_size - tokenizer.vocab_size
    is_padded = model.vocab_size % 64 == 0 and 0 < padding < 512
    if padding != 0 and not is_padded:
        raise _other_vocabulary(tokenizer, model.vocab_size)


def with_padding(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Return a tokenizer with as many tokens as a model of this vocabulary.

    The model's may be padded: byte-pairs get tokens without a text. Raises ValueError for more
    tokens than the model has, and for other tokenizers of another size.
    """
    if tokenizer.vocab_size == vocab_size:
        return tokenizer
    if tokenizer.vocab_size < vocab_size and isinstance(tokenizer, BPETokenizer):
        return tokenizer.padded_to(vocab_size)
    raise _other_vocabulary(tokenizer, vocab_size)


def _other_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> ValueError:
    return ValueError(
        f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
        f"`vocab_size={vocab_size!r}`: they don't belong together"
    )


def require_names(found: set[str], wanted: set[str]) -> None:
    """Raise ValueError naming missing and unexpected tensors."""
    for problem, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            shown = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                shown += ", …"
            raise ValueError(f"{problem} tensors ({len(names)}): {shown}")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map parameter names without the outer module's to the names in the file; skip buffers."""
    plain: dict[str, str] = {}
    for name in names:
        short = _OUTER_MODULES.sub("", name)
        if not _NO_PARAMETER.fullmatch(short):
            plain[short] = name
    return plain


def _layout(config: ModelConfig, format: Format) -> dict[str, _Stored]:
    """Return the tensors of another project for the parameters of a model."""
    parameters = named_parameters(abstract_model(config))
    layout = {}
    for tensor, names in _names_by_tensor(config, format, set(parameters)).items():
        # PyTorch's nn.Linear stores (out, in), GPT-2's Conv1D doesn't; the head of all formats is
        # an nn.Linear.
        is_linear = format.linear or tensor == _HEAD
        transposed = is_linear and names[0].endswith(".kernel")
        sizes = {name: parameters[name].shape[-1] for name in names}
        shared_axes = parameters[names[0]].shape[:-1]
        shape = (*shared_axes, sum(sizes.values()))
        if transposed:
            shape = shape[::-1]
        layout[tensor] = _Stored(sizes, shape, transposed)
    return layout


def _names_by_tensor(
    config: ModelConfig, format: Format, parameters: set[str]
) -> dict[str, list[str]]:
    """Return the names of jgpt's parameters in each tensor of another project.

    GPT-2 has one tensor for queries, keys and values, so several parameters share it.
    """
    names_in: dict[str, list[str]] = {}
    for module, their_module in format.modules.items():
        copies = 1
        if "{}" in module:  # the number of the block
            copies = config.num_layers
        for index in range(copies):
            for kind in ("kernel", "scale", "embedding", "bias"):
                name = f"{module}.{kind}".format(index)
                if name not in parameters:
                    continue
                ending = "weight"  # as PyTorch calls every parameter but a bias
                if kind == "bias":
                    ending = "bias"
                tensor = f"{their_module}.{ending}".format(index)
                names_in.setdefault(tensor, []).append(name)
    return names_in
