"""Weights under the names and in the layouts of other projects."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from jgpt.config import ModelConfig
from jgpt.data.tokenizers import BPETokenizer, Tokenizer
from jgpt.interop.formats import Format
from jgpt.nn.models import abstract_model, named_parameters
from jgpt.nn.transformer import GPT
from jgpt.refusal import Field, Message
from jgpt.shapes.contract import typed

Tensors = PyTree[Float[np.ndarray, "..."]]  # by name: unlike a dict's, all leaves are checked
_BLOCK = re.compile(r"(h|layers)\.\d+\.")
_NO_PARAMETER = re.compile(r"h\.\d+\.attn\.(masked_)?bias|layers\.\d+\..*\.inv_freq")


class Entry(NamedTuple):
    """A tensor in a file."""

    shape: Sequence[int]
    read: Callable[[], Any]


class _Stored(NamedTuple):
    """Parameters of ours, concatenated along the last axis, as a tensor of another project."""

    parts: dict[str, int]
    """Their names, and their sizes along the last axis."""
    shape: tuple[int, ...]
    transposed: bool


def read_tensors(config: ModelConfig, format: Format, entries: dict[str, Entry]) -> GPT:
    """A model with the tensors of another project, read one by one.

    Raises ValueError for a missing or unexpected tensor, or another shape, before any is read.
    """
    blocks = _blocks_of(entries)
    # before the layout is made, which a config with far too many layers would make huge
    if len(blocks) != config.num_layers:
        raise ValueError(f"the config has {config.num_layers} layers, the weights {len(blocks)}")
    layout = _layout(config, format)
    head = "lm_head.weight"
    table = f"{format.modules['token_embedding']}.weight"
    copies = {}
    if config.tie_embeddings and head in entries:
        if table in entries:
            copies[head] = layout[table]
        else:  # a tied table may be stored as the head alone
            entries = {**entries, table: entries[head]}
            del entries[head]
    require_names(set(entries), {*layout, *copies})
    # all shapes before any tensor: a large one may take minutes to read
    for name, stored in (layout | copies).items():
        shape = list(entries[name].shape)
        if shape != list(stored.shape):
            raise ValueError(f"{name} has shape {shape}, not {list(stored.shape)}")
    if copies and not np.array_equal(entries[head].read(), entries[table].read()):
        raise ValueError(f"{head} differs from {table}, but tie_word_embeddings=True")
    leaves = {}
    for name, stored in layout.items():
        leaves |= _split(name, stored, entries[name])
    return _model(config, leaves)


def _blocks_of(names: Iterable[str]) -> set[str]:
    """The blocks that tensors belong to, as their names begin."""
    blocks = set()
    for name in names:
        found = _BLOCK.match(name)
        if found:
            blocks.add(found[0])
    return blocks


def _split(name: str, stored: _Stored, entry: Entry) -> dict[str, Any]:
    """The parameters that one tensor of a file holds, by their names here."""
    try:
        tensor = jnp.asarray(entry.read())
    except MemoryError:
        raise ValueError(f"{name} of shape {list(stored.shape)} exceeds the memory") from None
    if stored.transposed:
        tensor = tensor.T
    *ends, _ = itertools.accumulate(stored.parts.values())
    return dict(zip(stored.parts, jnp.split(tensor, ends, axis=-1), strict=True))


@typed
def write_tensors(model: GPT, format: Format) -> Tensors:
    """The inverse of `read_tensors`, in at least float32, with zeros for biases that GPT-2 has."""
    config = model.config
    leaves = named_parameters(model)
    dtype = jnp.promote_types(config.param_dtype, jnp.float32)
    tensors = {}
    for name, stored in _layout(config, format).items():
        parts = [np.asarray(leaves[part].get_value(), dtype) for part in stored.parts]
        tensor = np.concatenate(parts, axis=-1)
        if stored.transposed:
            tensor = tensor.T
        tensors[name] = tensor
    for name in list(tensors):
        bias = name.removesuffix("weight") + "bias"
        has_bias = name.startswith(("h.", "ln_f.")) and name.endswith("weight")
        if has_bias and bias not in tensors:
            tensors[bias] = np.zeros(tensors[name].shape[-1], dtype)
    # the head is beside the model that the prefix names, in all formats
    head = tensors.pop("lm_head.weight", None)
    prefixed = {f"{format.prefix}.{name}": tensor for name, tensor in tensors.items()}
    if head is not None:
        prefixed["lm_head.weight"] = head
    return prefixed


def with_one_vocabulary(model: GPT, tokenizer: Tokenizer) -> tuple[GPT, Tokenizer]:
    """A model and its tokenizer with equally many tokens, where the model's are padded.

    Byte-pairs get tokens without a text, so that the model computes and exports what came in. For
    characters and bytes the model loses the padding.
    Raises ValueError unless the padding is up to a multiple of 64, and below 512.
    """
    size = tokenizer.vocab_size
    if size == model.vocab_size:
        return model, tokenizer
    if model.vocab_size % 64 or not 0 < model.vocab_size - size < 512:
        raise ValueError(
            Message(
                f"the tokenizer has {size} tokens and the model ",
                Field("vocab_size", model.vocab_size),
                ": they don't belong together",
            )
        )
    if isinstance(tokenizer, BPETokenizer):
        return model, tokenizer.padded_to(model.vocab_size)
    return _crop_vocabulary(model, size), tokenizer


def _crop_vocabulary(model: GPT, vocab_size: int) -> GPT:
    """A model of the first tokens of another."""
    leaves = {name: leaf.get_value() for name, leaf in named_parameters(model).items()}
    leaves["token_embedding.embedding"] = leaves["token_embedding.embedding"][:vocab_size]
    for name in leaves.keys() & {"head.kernel", "head.bias"}:
        leaves[name] = leaves[name][..., :vocab_size]
    return _model(dataclasses.replace(model.config, vocab_size=vocab_size), leaves)


def require_names(found: set[str], wanted: set[str]) -> None:
    """Raise ValueError naming missing and unexpected tensors."""
    for problem, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            shown = ", ".join(sorted(names)[:3])
            if len(names) > 3:
                shown += ", …"
            raise ValueError(f"{problem} tensors ({len(names)}): {shown}")


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Parameter names without the outer module's, to those in the file; buffers are left out.

    Raises ValueError for two names of one parameter: which of them counts depends on the reader.
    """
    plain: dict[str, str] = {}
    for name in names:
        short = re.sub(r"^(transformer|model)\.", "", name)
        if _NO_PARAMETER.fullmatch(short):
            continue
        if short in plain:
            raise ValueError(
                f"{plain[short]} and {name} are two names of one tensor: remove one of them"
            )
        plain[short] = name
    return plain


def _layout(config: ModelConfig, format: Format) -> dict[str, _Stored]:
    """The tensors of another project for the parameters that a model has."""
    leaves = named_parameters(abstract_model(config))
    # GPT-2 has one tensor for queries, keys and values, so that several names of ours share one
    names_in: dict[str, list[str]] = {}
    for ours, theirs in format.modules.items():
        count = 1
        if "{}" in ours:
            count = config.num_layers
        for index in range(count):
            for kind in ("kernel", "scale", "embedding", "bias"):
                name = f"{ours}.{kind}".format(index)
                if name not in leaves:
                    continue
                ending = "weight"
                if kind == "bias":
                    ending = "bias"
                names_in.setdefault(f"{theirs}.{ending}".format(index), []).append(name)
    layout = {}
    for tensor, names in names_in.items():
        # PyTorch's nn.Linear keeps (out, in), which GPT-2's Conv1D doesn't; the head of all formats
        # is an nn.Linear
        is_linear = format.linear or tensor == "lm_head.weight"
        transposed = is_linear and names[0].endswith(".kernel")
        sizes = {name: leaves[name].shape[-1] for name in names}
        shape = (*leaves[names[0]].shape[:-1], sum(sizes.values()))
        if transposed:
            shape = shape[::-1]
        layout[tensor] = _Stored(sizes, shape, transposed)
    return layout


def _model(config: ModelConfig, leaves: dict[str, Any]) -> GPT:
    """The model with these parameters by name, in its dtypes."""
    model = abstract_model(config)
    assert isinstance(model, GPT)
    for name, parameter in named_parameters(model).items():
        parameter.set_value(jnp.asarray(leaves[name], parameter.dtype))
    return model
