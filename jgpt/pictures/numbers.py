"""The numbers on the page of `jgpt look`: a forward pass over a text, with changes."""

import base64
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jgpt.data.tokenizers import Tokenizer, text_of_token
from jgpt.pictures.anatomy import (
    Anatomy,
    RecordedCall,
    anatomy_of,
    attention_weights_of,
    is_real,
    record_calls,
)
from jgpt.refusal import Field, Message
from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.capture import edit
from jgpt.shapes.contract import typed
from jgpt.shapes.trace import Shape, ShapeTrace
from jgpt.words import counted

MOST_WEIGHTS = 4_000_000
"""The limit of attention weights on a page, which keeps a page below six megabytes."""
MOST_FINE_WEIGHTS = 1_000_000
"""The limit of attention weights, and of entries of the forward pass, that take two bytes each."""
MOST_LOGITS = 1 << 26
"""The limit of the logits after all layers on a page that computes, which has some arrays of them,
256 MiB each. GPT-2's logits for 64 tokens are that many, and for 128 they took 46 s in Chromium."""
MOST_CANDIDATES = 256
"""The number of candidates for the last token, from which the sampling parameters choose."""
CANDIDATES = 10
"""The number of candidates at every other position."""
SHORTEST = 16
"""The number of tokens in the shortest program; longer ones have powers of two."""


@typed
def encode_text(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " tokens"]:
    """Encode a prompt. Raises ValueError for an empty one."""
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one character")
    return tokens


@dataclass(frozen=True)
class Changes:
    """The changes inside a forward pass.

    Heads and blocks are multiplied by a factor; 0 switches them off. A patch replaces the output of
    a block at a position by that of the same position in another prompt.
    """

    heads: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Factors by layer and head."""
    blocks: Mapping[int, float] = field(default_factory=dict)
    """Factors by layer, for the part that the block adds to the residual stream."""
    patch: tuple[int, int, str] | None = None
    """A layer, a position and the other prompt."""

    def as_code(self, anatomy: Anatomy, prompt: str) -> str:
        """Return Python code that computes the changed logits with `jgpt.edit`."""
        if self == Changes():
            return "logits = model(tokens)"
        lines = [f"tokens = jnp.asarray(tokenizer.encode({prompt!r}))[None]"]
        edits: dict[str | None, str] = {}
        for (layer, head), factor in sorted(self.heads.items()):
            path = anatomy.head_outputs[layer]
            # The heads of one layer are changed in one expression.
            expression = edits.get(path, "x")
            edits[path] = f"{expression}.at[:, {head}].multiply({factor:g})"
        for layer, factor in sorted(self.blocks.items()):
            for path in anatomy.branches[layer]:
                edits[path] = f"{factor:g} * x"
        if self.patch is not None:
            layer, position, other_prompt = self.patch
            path = anatomy.blocks[layer]
            lines.append(f"other = jnp.asarray(tokenizer.encode({other_prompt!r}))[None]")
            lines.append(f'patch = jgpt.capture(model, "{path}")(other)["{path}"][:, {position}]')
            edits[path] = f"x.at[:, {position}].set(patch)"
        lines.append("edits = {")
        for path, expression in edits.items():
            lines.append(f'    "{path}": lambda x: {expression},')
        lines.append("}")
        lines.append("logits = jgpt.edit(model, edits)(tokens)")
        return "\n".join(lines)


Dimensions = tuple[tuple[str, Any], ...]
"""The name and the size of each dimension of an array."""


@dataclass(frozen=True)
class TracedArray:
    """An array of a forward pass: its first place, its shape and its value in the trace."""

    name: str
    path: str
    shape: Shape
    value: Any


@dataclass(frozen=True)
class ArrayRow:
    """The description of an array on the page, with the axes that grow with the tokens."""

    text: dict[str, Any]
    token_axes: tuple[int, ...]


def tokens_with_logits(blocks: int, vocab_size: int, most: int) -> int:
    """Return how many of at most `most` tokens a page can compute the logits of, at each depth.

    With a large vocabulary they are a power of two, since texts are padded to one.
    """
    depths = blocks + 1  # the embeddings, too
    fitting = max(1, MOST_LOGITS // (depths * vocab_size))
    if fitting >= most:
        return most
    return min(most, max(SHORTEST, 1 << (fitting.bit_length() - 1)))


class Look:
    """The numbers of a page, computed for one text after another.

    It reuses the compiled programs of `like`, which is the same model with other weights.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        name: str,
        *,
        like: "Look | None" = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self._graph, weights = nnx.split(model)
        self.weights = nnx.to_pure_dict(weights)
        if like is not None and self.has_programs_of(like):
            self.anatomy = like.anatomy
            self.rows = like.rows
            self._program = like._program
        else:
            self.anatomy = anatomy_of(model)
            self.rows = functools.cache(self._rows_of)
            self._program = jax.jit(self.forward)

    def has_programs_of(self, other: "Look") -> bool:
        """Return whether the model is that of `other` with other weights."""
        return self._graph == other._graph

    def __call__(
        self, tokens: list[int], prompt: int, changes: Changes = Changes()
    ) -> dict[str, Any]:
        """Compute the numbers for tokens, of which the first `prompt` are the prompt.

        Raises ValueError for too many tokens, and for a patch from a prompt of another length.
        """
        unchanged = None
        if changes != Changes():
            unchanged = self._run(tokens, Changes())
        other_streams = None
        if changes.patch is not None:
            _, _, other_prompt = changes.patch
            other_streams = self._streams_of(other_prompt, len(tokens))
        outputs = self._run(tokens, changes, other_streams)
        return self._page_data(tokens, prompt, outputs, unchanged)

    def _streams_of(self, other_prompt: str, time: int) -> Any:
        """Return what each block returns for a prompt that a patch is taken from."""
        tokens = encode_text(self.tokenizer, other_prompt).tolist()
        if len(tokens) != time:
            raise ValueError(
                f"the other prompt has {counted(len(tokens), 'token')} and this one "
                f"{time}: a patch needs as many"
            )
        return self._run(tokens, Changes())["streams"]

    def most_tokens(self) -> int:
        """Return the most tokens on a page of this model, as limited by its attention weights."""
        maps = len(self.anatomy.attention) * self.anatomy.heads
        if maps == 0:
            return self.model.block_size
        # A causal map of n tokens is a triangle of about n**2 / 2 weights.
        return min(self.model.block_size, math.isqrt(2 * MOST_WEIGHTS // maps))

    def most_computed_tokens(self) -> int:
        """Return the most tokens on a page that computes, which has logits after each layer."""
        blocks = len(self.anatomy.blocks)
        return tokens_with_logits(blocks, self.model.vocab_size, self.most_tokens())

    # --- the program ------------------------------------------------------------------------------

    def _run(
        self, tokens: list[int], changes: Changes, other_streams: Any = None
    ) -> dict[str, Any]:
        """Run the program for tokens, which are padded at the end to the program's length.

        Causal attention ignores the padding, so the outputs for the tokens don't depend on it.
        """
        time = len(tokens)
        self.require_room(time)
        # The next power of two, so that few programs are compiled for prompts of any length.
        power_of_two = 1 << (time - 1).bit_length()
        length = min(max(SHORTEST, power_of_two), self.model.block_size)
        inputs = self.neutral_inputs(length)
        inputs["tokens"][0, :time] = tokens
        for (layer, head), factor in changes.heads.items():
            inputs["heads"][layer, head] = factor
        for layer, factor in changes.blocks.items():
            inputs["blocks"][layer] = factor
        if changes.patch is not None:
            layer, position, _ = changes.patch
            inputs["replaced"][layer, position] = True
            inputs["streams"] = other_streams
        return self._program(self.weights, inputs)

    def require_room(self, time: int) -> None:
        """Raise ValueError for more tokens than the block or a page of one text has room for."""
        if time > self.model.block_size:
            raise ValueError(
                Message(
                    f"the prompt has {time} tokens, more than ",
                    Field("block_size", self.model.block_size),
                )
            )
        if time > self.most_tokens():
            layers = counted(len(self.anatomy.attention), "layer")
            heads = counted(self.anatomy.heads, "head")
            raise ValueError(f"{time} tokens are too many for a page: {layers}, {heads}")

    def neutral_inputs(self, length: int) -> dict[str, Any]:
        """Return the inputs of the program for `length` tokens, with no changes.

        Every change is a number in an array, so that one program computes all of them.
        """
        blocks = len(self.anatomy.blocks)
        return {
            "tokens": np.zeros((1, length), np.int32),
            "heads": np.ones((len(self.anatomy.attention), self.anatomy.heads), np.float32),
            "blocks": np.ones(blocks, np.float32),
            "replaced": np.zeros((blocks, length), bool),
            "streams": np.zeros((blocks, length, self.anatomy.width), np.float32),
        }

    def _record(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[ShapeTrace, dict[int, RecordedCall]]:
        """Record the calls of a forward pass with the changes in the inputs."""

        def scale(factor: Any, x: Any) -> Any:
            return (x * factor).astype(x.dtype)

        def replace(is_replaced: Any, stream: Any, x: Any) -> Any:
            return jnp.where(is_replaced[:, None], stream.astype(x.dtype), x)

        anatomy = self.anatomy
        edits: dict[str, Callable[[Any], Any]] = {}
        for path, factors in zip(anatomy.head_outputs, inputs["heads"], strict=True):
            if path is not None:
                edits[path] = functools.partial(scale, factors[:, None, None])
        for paths, factor in zip(anatomy.branches, inputs["blocks"], strict=True):
            for path in paths:
                edits[path] = functools.partial(scale, factor)
        for layer, path in enumerate(anatomy.blocks):
            is_replaced = inputs["replaced"][layer]
            edits[path] = functools.partial(replace, is_replaced, inputs["streams"][layer])
        return record_calls(model, inputs["tokens"], edits)

    def forward(self, weights: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Compute everything that a page draws, from one forward pass; this is the compiled
        program."""
        model = self.model_with(weights)
        tokens = inputs["tokens"]
        trace, calls = self._record(model, inputs)
        modules = {}
        for call in calls.values():
            if call.module is not None:
                modules[call.path] = call
        blocks = [modules[path] for path in self.anatomy.blocks]

        logits = calls[id(trace)].result
        if blocks:
            logits = self._logit_lens(model, tokens, blocks)
        predictions = self._predictions(logits, tokens)

        attention, products = self._attention(modules)
        streams = inputs["streams"]
        if blocks:
            streams = jnp.concatenate([block.result for block in blocks])
        return {
            "streams": streams,
            "attention": attention,
            "products": products,
            **predictions,
            "arrays": [array.value for array in _arrays_of(trace, calls)],
        }

    def _predictions(self, logits: Any, tokens: Any) -> dict[str, Any]:
        """Return the most likely tokens at each position, and how likely the text's own token is.

        The first axis of the logits is the depth at which the stream is read.
        """
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        log_probabilities = jax.nn.log_softmax(logits)  # depth time vocab
        # The last position predicts a token that the text doesn't have.
        predicting = log_probabilities[:, :-1]
        following = tokens[..., 1:, None]  # 1 time-1 1
        next_log_probabilities = jnp.take_along_axis(predicting, following, axis=-1)
        # rank 1 is the most likely token
        is_likelier = predicting > next_log_probabilities  # depth time-1 vocab
        next_ranks = 1 + is_likelier.sum(-1)
        candidates = min(MOST_CANDIDATES, self.model.vocab_size)
        best, best_tokens = jax.lax.top_k(log_probabilities, candidates)
        return {
            "log_probabilities": best,
            "candidates": best_tokens,
            "next_log_probabilities": next_log_probabilities[..., 0],
            "next_ranks": next_ranks,
        }

    def _logit_lens(self, model: Any, tokens: Any, blocks: list[RecordedCall]) -> Any:
        """Compute the logits from the stream before each block and after the last.

        This is the logit lens (nostalgebraist 2020, "interpreting GPT"): the stream is read without
        the blocks that follow. The model itself reads it, with its last block's result replaced, so
        that a custom model needs no head of a known name.
        """
        last_block = self.anatomy.blocks[-1]
        last = blocks[-1].result
        states = []
        for block in blocks:
            states.append(block.input.astype(last.dtype))
        states.append(last)

        def read(state):
            return edit(model, {last_block: lambda _: state})(tokens)

        return jax.vmap(read)(jnp.stack(states))[:, 0]  # depth time vocab

    def _attention(
        self, modules: dict[str, RecordedCall]
    ) -> tuple[list[Any], list[tuple[Any, Any, Any]]]:
        """Return the attention weights of each layer, and their factors: query, key and scale.

        There are no factors if a layer doesn't call `attention_weights`, as in some custom models.
        """
        products: list[tuple[Any, Any, Any]] = []

        def record(call: TypedCall) -> None:
            if call.function.__name__ != "attention_weights" or "query" not in call.arguments:
                return
            query = _joined_heads(call.arguments["query"])
            key = _joined_heads(call.arguments["key"])
            scale = call.arguments["scale"]
            if scale is None:
                head_dim = query.shape[-1]
                scale = head_dim**-0.5  # the default of attention_weights
            products.append((query, key, scale))

        attention = []
        with watching(record):
            for path in self.anatomy.attention:
                attention.append(attention_weights_of(modules[path]))
        if len(products) != len(attention):
            products = []
        return attention, products

    def named_weights(self) -> dict[str, Any]:
        """Return the weights by the names of the inputs of a page's programs."""
        named = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.weights):
            named["0/" + jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
        return named

    def model_with(self, weights: Any) -> Any:
        """Return the model with other weights."""
        return nnx.merge(self._graph, weights)

    def with_named_weights(self, named: Mapping[str, Any]) -> "Look":
        """Return the same model with other weights, by the names of `named_weights`."""
        structure = jax.tree.structure(self.weights)
        weights = jax.tree.unflatten(structure, [named[name] for name in self.named_weights()])
        return Look(self.model_with(weights), self.tokenizer, self.name, like=self)

    def traced_arrays(self, weights: Any, inputs: dict[str, Any]) -> list[Any]:
        """Return the arrays of a forward pass with the changes in the inputs; the logits are the
        last."""
        trace, calls = self._record(self.model_with(weights), inputs)
        return [array.value for array in _arrays_of(trace, calls)]

    def _rows_of(self, length: int) -> list[ArrayRow]:
        """Describe the arrays of a forward pass over `length` tokens.

        An axis may have that length by chance, such as 16 features beside 16 tokens. It grows with
        the tokens if it has another size for another number of tokens.
        """
        other_length = 2
        if length > 1:
            other_length = length - 1
        arrays = self._trace_arrays(length)
        other_arrays = []
        if other_length <= self.model.block_size:
            other_arrays = self._trace_arrays(other_length)
        # A model may make other calls for another number of tokens.
        is_comparable = _places_of(arrays) == _places_of(other_arrays)

        rows = []
        for index, array in enumerate(arrays):
            other_shape = None
            dimensions = [name for name, _ in array.shape.dimensions]
            if is_comparable:
                other_shape = other_arrays[index].shape
                # A name that an array has because of its size, by chance, isn't there twice.
                for axis, name in enumerate(dimensions):
                    other_name, _ = other_shape.dimensions[axis]
                    if name != other_name:
                        dimensions[axis] = ""
            token_axes = _token_axes(array.shape, other_shape, length)
            text = {"name": array.name, "path": array.path, "dimensions": dimensions}
            rows.append(ArrayRow(text, token_axes))
        return rows

    def _trace_arrays(self, length: int) -> list[TracedArray]:
        """Return the arrays of a forward pass over `length` tokens. Nothing is computed."""
        arrays: list[TracedArray] = []

        def trace(inputs: Any) -> None:
            # Shapes are kept after the trace has ended; the values are not to be used then.
            recorded, calls = self._record(self.model, inputs)
            arrays.extend(_arrays_of(recorded, calls))

        jax.eval_shape(trace, self.neutral_inputs(length))
        return arrays

    # --- the data of a page -----------------------------------------------------------------------

    def _page_data(
        self,
        tokens: list[int],
        prompt: int,
        outputs: dict[str, Any],
        unchanged: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the page's content as plain data, without the padding of the outputs."""
        anatomy = self.anatomy
        outputs = jax.device_get(outputs)
        time = len(tokens)
        last = time - 1
        last_candidates = outputs["candidates"][-1, last].tolist()
        last_log_probabilities = _rounded(outputs["log_probabilities"][-1, last])
        count = CANDIDATES
        if time == 1:  # a single token is the last one, which has all candidates
            count = MOST_CANDIDATES
        candidates = outputs["candidates"][:, :time, :count]
        log_probabilities = outputs["log_probabilities"][:, :time, :count]
        named_tokens = {*tokens, *candidates.ravel().tolist(), *last_candidates}
        data = {
            "name": self.name,
            "vocab_size": self.model.vocab_size,
            "block_size": self.model.block_size,
            "window": anatomy.window,
            "prompt": prompt,
            "tokens": tokens,
            "texts": self._texts(named_tokens),
            "candidates": candidates.tolist(),
            "log_probabilities": _rounded(log_probabilities),
            "next_ranks": outputs["next_ranks"][:, :last].tolist(),
            "next_log_probabilities": _rounded(outputs["next_log_probabilities"][:, :last]),
            "last": [last_candidates, last_log_probabilities],
            "blocks": anatomy.switchable_blocks(),
            "layers": anatomy.switchable_layers(),
            "heads": anatomy.heads,
            "attention": None,
            "products": None,
            "before": None,
        }
        if anatomy.attention:
            data["attention"] = _attention_data(outputs["attention"], time)
        if unchanged is not None:
            data["before"] = _unchanged_data(unchanged, time)

        arrays = self._page_arrays(outputs, time)
        # From tuples for each layer to stacks over layers: query, key, scale.
        products = [np.stack(factor) for factor in zip(*outputs["products"], strict=True)]
        entries = 0
        for _, array in arrays:
            entries += array.size
        for factor in products:
            entries += factor.size
        fits = entries <= MOST_FINE_WEIGHTS
        if products and fits:
            query, key, scale = products
            data["products"] = {
                "scale": float(scale[0]),
                "query": quantise_for_page(query[:, :, :time]),
                "key": quantise_for_page(key[:, :, :time]),
            }
        data["arrays"] = []
        for text, array in arrays:
            values = None  # of too many values, the page still lists the arrays and their sizes
            if fits:
                values = quantise_for_page(array)
            data["arrays"].append(text | {"values": values})
        return data

    def _texts(self, tokens: set[int]) -> dict[int, str]:
        texts = {}
        for token in sorted(tokens):
            texts[token] = text_of_token(self.tokenizer, token)
        return texts

    def _page_arrays(self, outputs: dict[str, Any], time: int) -> list[tuple[dict[str, Any], Any]]:
        """Return each array that grows with the tokens once, by token; parameters are not shown."""
        shown: dict[tuple[Any, bytes], tuple[dict[str, Any], Any]] = {}
        rows = self.rows(outputs["candidates"].shape[1])
        for row, array in zip(rows, outputs["arrays"], strict=True):
            if not row.token_axes:
                continue
            without_padding = [slice(None)] * array.ndim
            for axis in row.token_axes:
                without_padding[axis] = slice(time)
            values = np.asarray(array, np.float32)[tuple(without_padding)]
            # An array that a module returns unchanged is shown as the result of the outermost such
            # module. Arrays are compared by their values, since an edit makes an equal new array.
            identity = (values.shape, values.tobytes())
            if identity in shown:
                shown_text, _ = shown[identity]
                if _depth(shown_text["path"]) <= _depth(row.text["path"]):
                    continue
                del shown[identity]  # to get the outermost module's place in the order
            text = row.text | {"sizes": values.shape}
            by_token = np.moveaxis(values, row.token_axes[0], 0)
            shown[identity] = (text, by_token)
        return list(shown.values())


# --- the arrays of a forward pass -----------------------------------------------------------------


def _arrays_of(trace: ShapeTrace, calls: dict[int, RecordedCall]) -> list[TracedArray]:
    """Return the arrays of a trace, each at its first place; the logits are the last.

    An annotation has no names for some dimensions, as for `*batch`. There an array has the names
    that it has in another call. A result has those of the arguments, and any other array those in
    the call around it.
    """
    arrays: list[TracedArray] = []
    seen: set[int] = set()
    dimensions_of: dict[int, Dimensions] = {}

    def named(shapes: list[Shape], value: Any, *others: Dimensions) -> list[Shape]:
        if len(shapes) != 1:  # the argument is no array
            return shapes
        its_own = dimensions_of.get(id(value), ())
        shape = _with_names(shapes[0], its_own, *others)
        dimensions_of[id(value)] = shape.dimensions
        return [shape]

    def is_new(shapes: list[Shape], value: Any) -> bool:
        if not is_real(value) or len(shapes) != 1 or id(value) in seen:
            return False
        seen.add(id(value))
        return True

    def walk(traced: ShapeTrace, around: Sequence[Dimensions]) -> None:
        call = calls[id(traced)]
        name = short_name(traced.path)
        given = []
        for argument, annotated in traced.arguments.items():
            value = call.arguments.get(argument)
            shapes = named(annotated, value, *around)
            given += [shape.dimensions for shape in shapes]
            if is_new(shapes, value):
                arrays.append(TracedArray(f"{name}({argument})", traced.path, shapes[0], value))
        # Checked before the calls inside, one of which may return the same array.
        results = named(traced.results, call.result, *given)
        has_new_result = is_new(results, call.result)
        for inner in traced.calls:
            walk(inner, given)
        if has_new_result:
            arrays.append(TracedArray(name, traced.path, results[0], call.result))

    root = calls[id(trace)]
    given = []
    for argument, shapes in trace.arguments.items():
        shape = named(shapes, root.arguments[argument])[0]
        given.append(shape.dimensions)
    logits = root.result
    seen.add(id(logits))
    for inner in trace.calls:
        walk(inner, given)
    arrays.append(TracedArray("logits", "", trace.results[0], logits))
    return arrays


def _with_names(shape: Shape, *others: Dimensions) -> Shape:
    """Name the first dimensions, where they have no names, as in the first of some other arrays
    whose first dimensions have the same sizes."""
    names = [name for name, _ in shape.dimensions]
    unnamed = len(list(itertools.takewhile(operator.not_, names)))
    for other in others:
        count = min(unnamed, len(other))
        sizes = [size for _, size in shape.dimensions[:count]]
        if count and sizes == [size for _, size in other[:count]]:
            return Shape(shape.dtype, other[:count] + shape.dimensions[count:])
    return shape


def _places_of(arrays: list[TracedArray]) -> list[tuple[str, str]]:
    return [(array.name, array.path) for array in arrays]


def _token_axes(shape: Shape, other_shape: Shape | None, length: int) -> tuple[int, ...]:
    """Return the axes that grow with the tokens, for the shape of an array for `length` tokens.

    `other_shape` is its shape for another number of tokens. Without one, only the size can tell.
    """
    token_axes = []
    for axis, (_, size) in enumerate(shape.dimensions):
        grows = size == length
        if other_shape is not None:
            _, other_size = other_shape.dimensions[axis]
            grows = size != other_size
        if grows:
            token_axes.append(axis)
    return tuple(token_axes)


def _joined_heads(x: Any) -> Any:
    """Return queries or keys as (head, time, head_dim), whatever axes are before the last two."""
    return x.reshape(-1, *x.shape[-2:])


def _depth(path: str) -> int:
    return path.count(".")


def short_name(path: str) -> str:
    """Return the last name in a path, with the number behind it: `blocks.0` of `model.blocks.0`."""
    last_dot = path.rstrip(".0123456789").rfind(".")
    return path[last_dot + 1 :]


# --- arrays as plain data -------------------------------------------------------------------------


def _attention_data(attention: list[Any], time: int) -> dict[str, Any]:
    """Return the attention weights up to the diagonal, row by row; those above it are 0."""
    rows, columns = np.tril_indices(time)
    weights = np.stack(attention)[..., rows, columns].astype(np.float32)
    return quantise_for_page(weights, fine=weights.size <= MOST_FINE_WEIGHTS)


def _unchanged_data(outputs: dict[str, Any], time: int) -> dict[str, Any]:
    """Return the predictions of the unchanged model, to be drawn beside the changed ones."""
    log_probabilities = np.asarray(outputs["log_probabilities"])[-1, :time]
    next_log_probabilities = np.asarray(outputs["next_log_probabilities"])[-1, : time - 1]
    candidates = np.asarray(outputs["candidates"])[-1, :time]
    return {
        "log_probabilities": _rounded(log_probabilities),
        "next_log_probabilities": _rounded(next_log_probabilities),
        "candidates": candidates.tolist(),
    }


def quantise_for_page(array: Any, *, fine: bool = True) -> dict[str, Any]:
    """Quantise an array to one or two bytes per entry, evenly between its minimum and maximum."""
    dtype = "u1"
    if fine:
        dtype = "<u2"
    low = float(array.min())
    high = float(array.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("the forward pass is not finite: the model has diverged")
    most = np.iinfo(dtype).max
    extent = (high - low) or 1.0  # if all values are equal, the extent is 0
    steps = np.round((array - low) * (most / extent)).astype(dtype)
    data = base64.b64encode(steps.tobytes()).decode()
    return {"shape": array.shape, "low": low, "high": high, "bytes": steps.itemsize, "data": data}


def _rounded(array: Any) -> list[Any]:
    # float32 has about seven digits; more decimals would only make the page larger.
    return np.asarray(array, float).round(7).tolist()
