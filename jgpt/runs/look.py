"""The numbers on the page of `jgpt look`: a forward pass over a text, with changes."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jgpt.contracts import TypedCall, typed, watching
from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.inside import ShapeTrace, edit, heard_trace
from jgpt.nn.bigram import BigramLM
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT

MOST_WEIGHTS = 4_000_000
"""The limit of a page, in attention weights."""
MOST_FINE_WEIGHTS = 1_000_000
"""The limit of attention weights, and of entries of the forward pass, that take two bytes."""
MOST_CANDIDATES = 256
SHORTEST = 16
"""Tokens of the shortest program; longer ones have powers of two."""


@typed
def encode_prompt(
    model: LanguageModel, tokenizer: Tokenizer, text: str
) -> tuple[GPT, Int[np.ndarray, " tokens"]]:
    """A GPT and its prompt's tokens. Raises ValueError for another model or an empty prompt."""
    if not isinstance(model, GPT):
        kind = "a bigram model" if isinstance(model, BigramLM) else "a model of your own"
        raise ValueError(f"{kind} has no attention weights: choose a GPT run")
    return model, encode_text(tokenizer, text)


@typed
def encode_text(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " tokens"]:
    """The tokens of a prompt. Raises ValueError for an empty one and for half of a character."""
    try:
        tokens = tokenizer.encode(text)
    except UnicodeEncodeError:
        raise ValueError("the prompt contains half of a character (a lone surrogate)") from None
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one character")
    return tokens


@typed
def logit_lens(
    model: GPT, tokens: Int[Array, " time"]
) -> Float[Array, "{len(model.blocks)+1} time {model.vocab_size}"]:
    """Log-probabilities of the next token in nats, decoded from each block's input and the output.

    The logit lens: nostalgebraist 2020, "interpreting GPT".
    """
    return _lens(model, jnp.concatenate(model.hidden_states(tokens[None])))


def _lens(model: GPT, states: Any) -> Any:
    logits = model.logits(model.final_norm(states))
    return jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))


@dataclass(frozen=True)
class Changes:
    """What is changed inside a forward pass.

    Heads and blocks are multiplied by a factor: 0 switches them off. A patch replaces the output
    of a block at a position by that of the same position in another prompt.
    """

    heads: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By layer and head."""
    blocks: Mapping[int, float] = field(default_factory=dict)
    """By layer: a factor for what the block adds to the residual stream."""
    patch: tuple[int, int, str] | None = None
    """A layer, a position and the other prompt."""

    def as_code(self, prompt: str) -> str:
        """Python that computes the changed logits with `jgpt.edit`."""
        if self == Changes():
            return "logits = model(tokens)"
        lines = [
            f'"blocks.{layer}.attention.merge_heads": lambda x: '
            f"x.at[..., {head} * size : {head + 1} * size].multiply({factor:g}),"
            for (layer, head), factor in sorted(self.heads.items())
        ]
        merged: dict[str, list[str]] = {}
        for line in lines:  # one edit for a path
            path, _, function = line.partition(": lambda x: x")
            merged.setdefault(path, []).append(function.rstrip(","))
        edits = [f"{path}: lambda x: x{''.join(each)}," for path, each in merged.items()]
        for layer, factor in sorted(self.blocks.items()):
            for part in ("attention", "feed_forward"):
                edits.append(f'"blocks.{layer}.{part}": lambda x: {factor:g} * x,')
        lines = [f"tokens = jnp.asarray(tokenizer.encode({prompt!r}))[None]"]
        if self.heads:
            lines.append("size = model.config.head_size")
        if self.patch:
            layer, position, other = self.patch
            path = f'"blocks.{layer}"'
            lines += [
                f"other = jnp.asarray(tokenizer.encode({other!r}))[None]",
                f"patch = jgpt.capture(model, {path})(other)[{path}][:, {position}]",
            ]
            edits.append(f"{path}: lambda x: x.at[:, {position}].set(patch),")
        body = "\n".join(f"    {each}" for each in edits)
        return "\n".join(
            [*lines, f"edits = {{\n{body}\n}}", "logits = jgpt.edit(model, edits)(tokens)"]
        )


class Look:
    """Computes the numbers of a page, for one text after another.

    Reuses the compiled programs of `like`, the same model with other weights.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, name: str, *, like: "Look | None" = None
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._graph, weights = nnx.split(model)
        self._weights = nnx.to_pure_dict(weights)
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._lasting: dict[int, list[list[int]]] = {}
        self._program = jax.jit(self._forward)
        if like is not None and like._graph == self._graph:
            self._program, self._rows, self._lasting = like._program, like._rows, like._lasting

    def __call__(
        self, tokens: list[int], prompt: int, changes: Changes = Changes()
    ) -> dict[str, Any]:
        """The numbers for tokens; the first `prompt` of them are the prompt.

        Raises ValueError for too many tokens, and for a patch from a prompt of another length.
        """
        before = None
        if changes != Changes():
            before = self._run(tokens, Changes(), {})
        streams: dict[str, Any] = {}
        if changes.patch is not None:
            _, other = encode_prompt(self.model, self.tokenizer, changes.patch[2])
            if len(other) != len(tokens):
                raise ValueError(
                    f"the other prompt has {len(other)} tokens and this one {len(tokens)}: "
                    "a patch needs as many"
                )
            streams = self._run(other.tolist(), Changes(), {})
        return self._data(tokens, prompt, changes, self._run(tokens, changes, streams), before)

    def _run(self, tokens: list[int], changes: Changes, other: dict[str, Any]) -> dict[str, Any]:
        config, time = self.model.config, len(tokens)
        if time > self.model.block_size:
            raise ValueError(
                f"the prompt has {time} tokens, more than block_size={self.model.block_size}"
            )
        if config.num_layers * config.num_heads * time**2 > 2 * MOST_WEIGHTS:
            sizes = f"{config.num_layers} layers, {config.num_heads} heads"
            raise ValueError(f"{time} tokens are too many for a page: {sizes}")
        length = min(max(SHORTEST, 1 << (time - 1).bit_length()), self.model.block_size)
        heads = np.ones((config.num_layers, config.num_heads), np.float32)
        blocks = np.ones(config.num_layers, np.float32)
        replaced = np.zeros((config.num_layers, length), bool)
        for at, factor in changes.heads.items():
            heads[at] = factor
        for layer, factor in changes.blocks.items():
            blocks[layer] = factor
        if changes.patch is not None:
            replaced[changes.patch[:2]] = True
        streams = other.get("streams")
        if streams is None:
            streams = np.zeros((config.num_layers, length, config.embed_dim), np.float32)
        padded = np.pad(np.array(tokens, np.int32), (0, length - time))[None]
        given = {"tokens": padded, "heads": heads, "blocks": blocks}
        return self._program(self._weights, given | {"replaced": replaced, "streams": streams})

    def _forward(self, weights: Any, given: dict[str, Any]) -> dict[str, Any]:
        tokens, heads, blocks = given["tokens"], given["heads"], given["blocks"]
        replaced, streams = given["replaced"], given["streams"]
        model = nnx.merge(self._graph, weights)
        edits: dict[str, Any] = {}

        def add(layer: int) -> None:
            def of_heads(merged):
                each = merged.reshape(*merged.shape[:2], heads.shape[1], -1)
                return (each * heads[layer][:, None]).reshape(merged.shape).astype(merged.dtype)

            def of_block(x):
                return (x * blocks[layer]).astype(x.dtype)

            def patched(x):
                return jnp.where(replaced[layer][:, None], streams[layer].astype(x.dtype), x)

            path = f"blocks.{layer}"
            edits[f"{path}.attention.merge_heads"] = of_heads
            # the last products of both parts: what a block adds is theirs
            edits[f"{path}.attention.projection"] = of_block
            edits[f"{path}.feed_forward.projection"] = of_block
            edits[path] = patched

        for layer in range(len(model.blocks)):
            add(layer)
        outputs = [f"blocks.{layer}" for layer in range(len(model.blocks))]
        found: dict[str, Any] = {}
        values: dict[int, Any] = {}

        def hear(traced: ShapeTrace, call: TypedCall, result: Any) -> None:
            values[id(traced)] = (call.arguments, result)

        def watch(call: TypedCall) -> Any:
            if call.path in ("hidden_states", *outputs):
                return lambda result: found.setdefault(call.path, result)
            return None

        with watching(watch):
            trace = heard_trace(edit(model, edits), hear, tokens)
        states = found["hidden_states"]
        lens = _lens(model, jnp.concatenate(states))
        following = jnp.take_along_axis(lens[:, :-1], tokens[..., 1:, None], axis=-1)
        products: list[Any] = []

        def of_product(call: TypedCall) -> None:
            if call.function.__name__ == "attention_weights" and "query" in call.arguments:
                products.append([call.arguments[name][0] for name in ("query", "key")])

        pairs = [*zip(model.blocks, states, strict=False)]
        with watching(of_product):
            attention = [block.attention.weights(block.attention_norm(x))[0] for block, x in pairs]
        rows, arrays = _rows(trace, values)
        self._rows[tokens.shape[1]] = rows
        best, candidates = jax.lax.top_k(lens, min(MOST_CANDIDATES, model.vocab_size))
        queries, keys = zip(*products, strict=True)
        return {
            "streams": jnp.concatenate([found[path] for path in outputs]),
            "attention": jnp.stack(attention),
            "queries": jnp.stack(queries),
            "keys": jnp.stack(keys),
            "log_probabilities": best,
            "candidates": candidates,
            "next_log_probabilities": following[..., 0],
            "next_ranks": 1 + (lens[:, :-1] > following).sum(-1),
            "arrays": arrays,
        }

    def _time_axes(self, length: int) -> list[list[int]]:
        """The axes of each array of the forward pass that grow with the tokens."""
        if length not in self._lasting:
            config, other = self.model.config, length - 1 if length > 1 else 2
            layers, heads = config.num_layers, config.num_heads
            given = {
                "tokens": ((1, other), jnp.int32),
                "heads": ((layers, heads), jnp.float32),
                "blocks": ((layers,), jnp.float32),
                "replaced": ((layers, other), bool),
                "streams": ((layers, other, config.embed_dim), jnp.float32),
            }
            structs = {name: jax.ShapeDtypeStruct(*each) for name, each in given.items()}
            jax.eval_shape(self._forward, self._weights, structs)
            first, second = self._rows[length], self._rows[other]
            alike = [each["name"] for each in first] == [each["name"] for each in second]
            self._lasting[length] = [
                [
                    axis
                    for axis, (_, size) in enumerate(row["dimensions"])
                    if (size != its["dimensions"][axis][1] if alike else size == length)
                ]
                for row, its in zip(first, second if alike else first, strict=True)
            ]
        return self._lasting[length]

    def _data(
        self,
        tokens: list[int],
        prompt: int,
        changes: Changes,
        found: dict[str, Any],
        before: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """What the page draws, as plain data."""
        config, time, length = self.model.config, len(tokens), found["streams"].shape[1]
        scale = config.attention_scale
        count = 10 if time > 1 else MOST_CANDIDATES
        last = np.asarray(found["candidates"])[-1, time - 1].tolist()
        candidates = np.asarray(found["candidates"])[:, :time, :count]
        ids = {*tokens, *candidates.ravel().tolist(), *last}
        weights = np.asarray(found["attention"])[..., :time, :time]
        weights = weights[..., *np.tril_indices(time)].astype(np.float32)
        data = {
            "name": self.name,
            "vocab_size": self.model.vocab_size,
            "block_size": self.model.block_size,
            "head_size": config.head_size,
            "scale": config.head_size**-0.5 if scale is None else scale,
            "window": config.attention_window,
            "prompt": prompt,
            "tokens": tokens,
            "texts": {token: self.tokenizer.decode([token]) for token in sorted(ids)},
            "candidates": candidates.tolist(),
            "log_probabilities": _rounded(found["log_probabilities"][:, :time, :count]),
            "next_ranks": np.asarray(found["next_ranks"])[:, : time - 1].tolist(),
            "next_log_probabilities": _rounded(found["next_log_probabilities"][:, : time - 1]),
            "last": [last, _rounded(found["log_probabilities"][-1, time - 1])],
            "attention": packed(weights, fine=weights.size <= MOST_FINE_WEIGHTS),
            "layers": config.num_layers,
            "heads": config.num_heads,
            "arrays": [],
            "before": None,
        }
        if before is not None:
            data["before"] = {
                "candidates": np.asarray(before["candidates"])[-1, :time].tolist(),
                "log_probabilities": _rounded(before["log_probabilities"][-1, :time]),
                "next_log_probabilities": _rounded(
                    before["next_log_probabilities"][-1, : time - 1]
                ),
            }
        rows = [*zip(self._rows[length], self._time_axes(length), found["arrays"], strict=True)]
        rows = [row for row in rows if row[1]]  # parameters are no part of the picture
        products = [np.asarray(found[name])[:, :, :time] for name in ("queries", "keys")]
        entries = sum(row[2].size for row in rows) + 2 * products[0].size
        fits = entries * time // length <= MOST_FINE_WEIGHTS
        data["products"] = [packed(each) for each in products] if fits else None
        shown: dict[tuple[Any, bytes], dict[str, Any]] = {}
        for row, axes, array in rows:
            kept = np.asarray(array, np.float32)[
                tuple(slice(time if axis in axes else None) for axis in range(array.ndim))
            ]
            same = kept.shape, kept.tobytes()
            if same in shown and shown[same]["level"] <= row["level"]:
                continue
            shown.pop(same, None)  # what a module returns as it got it is shown as the module's
            names = [name for name, _ in row["dimensions"]]
            sizes = [list(each) for each in zip(names, kept.shape, strict=True)]
            values = packed(kept) if fits else None
            shown[same] = row | {"dimensions": sizes, "time": axes, "values": values}
        data["arrays"] = list(shown.values())
        return data


def _rows(trace: ShapeTrace, values: dict[int, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """A description and the value of each array of a trace, where it first appears."""
    rows: list[dict[str, Any]] = []
    arrays: list[Any] = []
    seen: set[int] = set()

    def is_new(shapes: Any, value: Any) -> bool:
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
            return False
        new = len(shapes) == 1 and id(value) not in seen
        seen.add(id(value))
        return new

    def add(level: int, name: str, path: str, shapes: Any, value: Any) -> None:
        dimensions = [[str(each), int(size)] for each, size in shapes[0].dimensions]
        rows.append({"level": level, "name": name, "path": path, "dimensions": dimensions})
        arrays.append(value)

    def walk(traced: ShapeTrace, level: int) -> None:
        arguments, result = values.get(id(traced), ({}, None))
        name = traced.name if level == 0 else traced.name.rpartition(".")[2]
        for argument, shapes in traced.arguments.items():
            if is_new(shapes, arguments.get(argument)):
                add(level, f"{name}({argument})", traced.path, shapes, arguments[argument])
        own = is_new(traced.results, result)  # before the calls, of which one may return it
        for call in traced.calls:
            walk(call, level + 1)
        if own:
            add(level, name, traced.path, traced.results, result)

    logits = values[id(trace)][1]
    is_new(trace.results, logits)
    for call in trace.calls:
        walk(call, 0)
    add(0, "logits", "", trace.results, logits)
    return rows, arrays


def packed(array: Any, *, fine: bool = True) -> dict[str, Any]:
    """An array in two bytes an entry, or one, evenly between its least and its largest value."""
    dtype, low, high = "<u2" if fine else "u1", float(array.min()), float(array.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("the forward pass is not finite: the model has diverged")
    most = np.iinfo(dtype).max
    steps = np.round((array - low) * (most / ((high - low) or 1.0))).astype(dtype)
    data = base64.b64encode(steps.tobytes()).decode()
    return {"shape": array.shape, "low": low, "high": high, "bytes": steps.itemsize, "data": data}


def _rounded(array: Any) -> list[Any]:
    return np.asarray(array, float).round(7).tolist()


def look_page(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, name: str
) -> str:
    """An HTML page of the forward pass over a prompt and what the model samples after it.

    Sampling is deterministic and stops at `block_size`. Raises ValueError as `encode_prompt`, and
    for more tokens than the block or a page holds.
    """
    model, given = encode_prompt(model, tokenizer, prompt)
    new = max(0, min(max_new_tokens, model.block_size - len(given)))
    look, tokens = Look(model, tokenizer, name), jnp.asarray(given)[None]
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    if new:
        tokens = generate(model, tokens, new, key=jax.random.key(1337))
    return page_of(look(np.asarray(tokens[0]).tolist(), len(given)))


def page_of(data: dict[str, Any], *, live: bool = False) -> str:
    """The page of some data; a live one may ask its server, any other no host at all."""
    # nothing in a text may end the script element that holds it
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("look.html").read_text(encoding="utf-8")
    template = template.replace("connect-src 'none'", f"connect-src '{'self' if live else 'none'}'")
    return template.replace("{{data}}", script)


@dataclass(frozen=True)
class Page:
    """An HTML page, which a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        source = self.html.replace("&", "&amp;").replace('"', "&quot;")
        style = "width: 100%; height: 900px; border: 0"
        return f'<iframe srcdoc="{source}" style="{style}" sandbox="allow-scripts"></iframe>'


@typed
def look(model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 0) -> Page:
    """The page of `jgpt look`, shown in a notebook. Raises ValueError as the command."""
    return Page(look_page(model, tokenizer, prompt, max_new_tokens, type(model).__name__))
