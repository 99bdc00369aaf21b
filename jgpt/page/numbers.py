"""The numbers on the page of `jgpt look`: a forward pass over a text, with changes."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jgpt.data.encode import Tokenizer
from jgpt.nn.precision import wider_dtype
from jgpt.page.anatomy import (
    RecordedCall,
    anatomy_of,
    attention_weights_of,
    is_real,
    record_calls,
)
from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.contract import typed
from jgpt.shapes.edits import edit
from jgpt.shapes.trace import Shape, ShapeTrace

MOST_WEIGHTS = 4_000_000
"""The limit of attention weights on a page, which draws all of them for each text."""
MOST_LOGITS = 1 << 26
"""The limit of the logits after all layers on a page, which has some arrays of them, 256 MiB
each. GPT-2's logits for 64 tokens are that many, and for 128 they took 46 s in Chromium."""
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
    """A model whose numbers a page shows: the program that computes them, and what it is of."""

    def __init__(self, model: Any, tokenizer: Tokenizer, name: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self._graph, weights = nnx.split(model)
        self.weights = nnx.to_pure_dict(weights)
        self.anatomy = anatomy_of(model)
        self.rows = functools.cache(self._rows_of)
        self.program = jax.jit(self.forward)

    def log_probabilities(self, tokens: list[int], weights: Any) -> list[float]:
        """Return those of the likeliest next tokens at each position, in a row, with some weights.

        They are what JAX computes of the numbers that a page shows. Raises ValueError if they are
        not finite.
        """
        time = len(tokens)
        count = CANDIDATES
        if time == 1:  # a single token is the last one, which has all candidates
            count = MOST_CANDIDATES
        outputs = self.program(weights, self.inputs(tokens))
        found = np.asarray(outputs["log_probabilities"], float)[-1, :time, :count]
        if not np.isfinite(found).all():
            raise ValueError("the forward pass is not finite: the model has diverged")
        # float32 has about seven digits; more decimals would only make the page larger.
        return found.round(7).ravel().tolist()

    def most_tokens(self) -> int:
        """Return the most tokens of a text on a page of this model."""
        blocks = len(self.anatomy.blocks)
        return tokens_with_logits(blocks, self.model.vocab_size, self._most_tokens_with_maps())

    def _most_tokens_with_maps(self) -> int:
        """Return the most tokens whose attention weights a page has room for."""
        maps = len(self.anatomy.attention) * self.anatomy.heads
        if maps == 0:
            return self.model.block_size
        # A causal map of n tokens is a triangle of about n**2 / 2 weights.
        return min(self.model.block_size, math.isqrt(2 * MOST_WEIGHTS // maps))

    def require_room(self, time: int) -> None:
        """Raise ValueError for more tokens than the block or a page has room for."""
        most = self.most_tokens()
        if time > most:
            raise ValueError(
                f"the prompt has {time} tokens, and a page of this model has room for {most}"
            )

    # --- the program ------------------------------------------------------------------------------

    def inputs(self, tokens: list[int]) -> dict[str, Any]:
        """Return the inputs of the program for a text, with no changes.

        It is padded at the end. Causal attention ignores the padding, so the outputs for the tokens
        don't depend on it.
        """
        time = len(tokens)
        # The next power of two, so that few programs are compiled for texts of any length.
        power_of_two = 1 << (time - 1).bit_length()
        length = min(max(SHORTEST, power_of_two), self.model.block_size)
        inputs = self.neutral_inputs(length)
        inputs["tokens"][0, :time] = tokens
        return inputs

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
            return (x * jax.lax.broadcast_to_rank(factor, x.ndim)).astype(x.dtype)

        def replace(is_replaced: Any, stream: Any, x: Any) -> Any:
            return jnp.where(is_replaced[None, :, None], stream[None].astype(x.dtype), x)

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
        logits = logits.astype(wider_dtype(logits.dtype))
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

    def weights_named(self, named: Mapping[str, Any]) -> Any:
        """Return weights as the program takes them: the inverse of `named_weights`."""
        structure = jax.tree.structure(self.weights)
        return jax.tree.unflatten(structure, [named[name] for name in self.named_weights()])

    def traced_arrays(self, weights: Any, inputs: dict[str, Any]) -> list[Any]:
        """Return the arrays of a forward pass with the changes in the inputs; the logits are the
        last."""
        trace, calls = self._record(self.model_with(weights), inputs)
        return [array.value for array in _arrays_of(trace, calls)]

    def _rows_of(self, length: int) -> list[ArrayRow]:
        """Describe the arrays of a forward pass over `length` tokens.

        An axis may have that length by chance, such as 16 features beside 16 tokens. It is one of
        tokens if it has as many entries as there are, also for another number of tokens: an axis of
        blocks of a window grows, too, and has another number of entries.
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
            traces = [(length, array.shape)]
            dimensions = [name for name, _ in array.shape.dimensions]
            if is_comparable:
                other_shape = other_arrays[index].shape
                traces.append((other_length, other_shape))
                # A name that an array has because of its size, by chance, isn't there twice.
                for axis, name in enumerate(dimensions):
                    other_name, _ = other_shape.dimensions[axis]
                    if name != other_name:
                        dimensions[axis] = ""
            token_axes = _token_axes(traces)
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


def _token_axes(traces: Sequence[tuple[int, Shape]]) -> tuple[int, ...]:
    """Return the axes of an array that have an entry for each token, in each of some traces with
    their numbers of tokens."""
    found = []
    for length, shape in traces:
        sizes = enumerate(shape.dimensions)
        found.append({axis for axis, (_, size) in sizes if size == length})
    return tuple(sorted(set.intersection(*found)))


def _joined_heads(x: Any) -> Any:
    """Return queries or keys as (head, time, head_dim), whatever axes are before the last two."""
    return x.reshape(-1, *x.shape[-2:])


def short_name(path: str) -> str:
    """Return the last name in a path, with the number behind it: `blocks.0` of `model.blocks.0`."""
    last_dot = path.rstrip(".0123456789").rfind(".")
    return path[last_dot + 1 :]
