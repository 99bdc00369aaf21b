"""The numbers on the page of `jgpt look`: a forward pass over a text, with changes."""

import base64
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jgpt.config import counted
from jgpt.data.tokenizers import Tokenizer, text_of_token
from jgpt.generation.decoding import generate
from jgpt.nn.models import LanguageModel
from jgpt.pictures.anatomy import Anatomy, Heard, anatomy_of, is_real, record_calls, weights_of
from jgpt.shapes.calls import TypedCall, watching
from jgpt.shapes.capture import edit
from jgpt.shapes.contract import typed
from jgpt.shapes.trace import Shape, ShapeTrace

MOST_WEIGHTS = 4_000_000
"""The limit of a page, in attention weights."""
MOST_FINE_WEIGHTS = 1_000_000
"""The limit of attention weights, and of entries of the forward pass, that take two bytes."""
MOST_CANDIDATES = 256
NEW_TOKENS = 48
"""How many tokens a page samples unless told, if they fit."""
SHORTEST = 16
"""Tokens of the shortest program; longer ones have powers of two."""


@typed
def encode_text(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " tokens"]:
    """The tokens of a prompt. Raises ValueError for an empty one."""
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one character")
    return tokens


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

    def as_code(self, anatomy: Anatomy, prompt: str) -> str:
        """Python that computes the changed logits with `jgpt.edit`."""
        if self == Changes():
            return "logits = model(tokens)"
        lines = [f"tokens = jnp.asarray(tokenizer.encode({prompt!r}))[None]"]
        edits: dict[str | None, str] = {}
        for (layer, head), factor in sorted(self.heads.items()):
            path = anatomy.by_head[layer]
            edits[path] = edits.get(path, "x") + f".at[:, {head}].multiply({factor:g})"
        for layer, factor in sorted(self.blocks.items()):
            edits |= dict.fromkeys(anatomy.branches[layer], f"{factor:g} * x")
        if self.patch:
            layer, position, other = self.patch
            path = anatomy.blocks[layer]
            lines += [
                f"other = jnp.asarray(tokenizer.encode({other!r}))[None]",
                f'patch = jgpt.capture(model, "{path}")(other)["{path}"][:, {position}]',
            ]
            edits[path] = f"x.at[:, {position}].set(patch)"
        body = [f'    "{path}": lambda x: {changed},' for path, changed in edits.items()]
        return "\n".join(
            [*lines, "edits = {", *body, "}", "logits = jgpt.edit(model, edits)(tokens)"]
        )


class Look:
    """Computes the numbers of a page, for one text after another.

    Reuses the compiled programs of `like`, the same model with other weights.
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
        self._weights = nnx.to_pure_dict(weights)
        if like is not None and like._graph == self._graph:
            self.anatomy = like.anatomy
            self._rows = like._rows
            self._program = like._program
        else:
            self.anatomy = anatomy_of(model)
            self._rows = functools.cache(self._rows_of)
            self._program = jax.jit(self._forward)

    def __call__(
        self, tokens: list[int], prompt: int, changes: Changes = Changes()
    ) -> dict[str, Any]:
        """The numbers for tokens; the first `prompt` of them are the prompt.

        Raises ValueError for too many tokens, and for a patch from a prompt of another length.
        """
        before = None
        streams = None
        if changes != Changes():
            before = self._run(tokens, Changes())
        if changes.patch is not None:
            other = encode_text(self.tokenizer, changes.patch[2])
            if len(other) != len(tokens):
                raise ValueError(
                    f"the other prompt has {counted(len(other), 'token')} and this one "
                    f"{len(tokens)}: a patch needs as many"
                )
            streams = self._run(other.tolist(), Changes())["streams"]
        return self._data(tokens, prompt, self._run(tokens, changes, streams), before)

    def most_tokens(self) -> int:
        """How many tokens a page of this model holds, as far as attention weights limit it."""
        each = len(self.anatomy.attention) * self.anatomy.heads
        if each == 0:
            return self.model.block_size
        return min(self.model.block_size, math.isqrt(2 * MOST_WEIGHTS // each))

    def _run(self, tokens: list[int], changes: Changes, streams: Any = None) -> dict[str, Any]:
        time = len(tokens)
        layers = len(self.anatomy.attention)
        heads = self.anatomy.heads
        if time > self.model.block_size:
            raise ValueError(
                f"the prompt has {time} tokens, more than block_size={self.model.block_size}"
            )
        if time > self.most_tokens():
            sizes = f"{counted(layers, 'layer')}, {counted(heads, 'head')}"
            raise ValueError(f"{time} tokens are too many for a page: {sizes}")
        length = min(max(SHORTEST, 1 << (time - 1).bit_length()), self.model.block_size)
        given = self._neutral_inputs(length)
        given["tokens"][0, :time] = tokens
        for at, factor in changes.heads.items():
            given["heads"][at] = factor
        for layer, factor in changes.blocks.items():
            given["blocks"][layer] = factor
        if changes.patch is not None:
            given["replaced"][changes.patch[:2]] = True
            given["streams"] = streams
        return self._program(self._weights, given)

    def _neutral_inputs(self, length: int) -> dict[str, Any]:
        """What the program is given, of so many tokens: nothing is changed."""
        anatomy = self.anatomy
        blocks = len(self.anatomy.blocks)
        return {
            "tokens": np.zeros((1, length), np.int32),
            "heads": np.ones((len(anatomy.attention), anatomy.heads), np.float32),
            "blocks": np.ones(blocks, np.float32),
            "replaced": np.zeros((blocks, length), bool),
            "streams": np.zeros((blocks, length, anatomy.width), np.float32),
        }

    def _hear(self, model: Any, given: dict[str, Any]) -> tuple[ShapeTrace, dict[int, Heard]]:
        """The calls of a forward pass with what is changed."""

        def scaled(factor: Any, x: Any) -> Any:
            return (x * factor).astype(x.dtype)

        def patched(where: Any, stream: Any, x: Any) -> Any:
            return jnp.where(where[:, None], stream.astype(x.dtype), x)

        anatomy = self.anatomy
        edits: dict[str, Callable[[Any], Any]] = {}
        for path, factors in zip(anatomy.by_head, given["heads"], strict=True):
            if path is not None:
                edits[path] = functools.partial(scaled, factors[:, None, None])
        for paths, factor in zip(anatomy.branches, given["blocks"], strict=True):
            edits |= dict.fromkeys(paths, functools.partial(scaled, factor))
        for path, *how in zip(anatomy.blocks, given["replaced"], given["streams"], strict=True):
            edits[path] = functools.partial(patched, *how)
        return record_calls(model, given["tokens"], edits)

    def _forward(self, weights: Any, given: dict[str, Any]) -> dict[str, Any]:
        model = nnx.merge(self._graph, weights)
        anatomy = self.anatomy
        tokens = given["tokens"]
        trace, heard = self._hear(model, given)
        calls = {call.path: call for call in heard.values() if call.module}
        blocks = [calls[path] for path in anatomy.blocks]
        logits = heard[id(trace)].result
        if blocks:
            # the logit lens (nostalgebraist 2020, "interpreting GPT"): what the model makes of the
            # stream without its last blocks
            last = blocks[-1].result
            states = jnp.stack([*(block.given.astype(last.dtype) for block in blocks), last])

            def read(state):
                return edit(model, {anatomy.blocks[-1]: lambda _: state})(tokens)

            logits = jax.vmap(read)(states)[:, 0]
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        lens = jax.nn.log_softmax(logits)
        following = jnp.take_along_axis(lens[:, :-1], tokens[..., 1:, None], axis=-1)
        best, candidates = jax.lax.top_k(lens, min(MOST_CANDIDATES, self.model.vocab_size))
        products: list[Any] = []

        def of_product(call: TypedCall) -> None:
            if call.function.__name__ == "attention_weights" and "query" in call.arguments:
                query, key, scale = (call.arguments[name] for name in ("query", "key", "scale"))
                both = [x.reshape(-1, *x.shape[-2:]) for x in (query, key)]
                products.append((*both, query.shape[-1] ** -0.5 if scale is None else scale))

        with watching(of_product):
            attention = [weights_of(calls[path]) for path in anatomy.attention]
        return {
            "streams": jnp.concatenate([block.result for block in blocks] or [given["streams"]]),
            "attention": attention,
            "products": products if len(products) == len(attention) else [],
            "log_probabilities": best,
            "candidates": candidates,
            "next_log_probabilities": following[..., 0],
            "next_ranks": 1 + (lens[:, :-1] > following).sum(-1),
            "arrays": [array for *_, array in _rows(trace, heard)],
        }

    def _rows_of(self, length: int) -> list[tuple[dict[str, Any], list[int]]]:
        """What to say of the arrays of a forward pass, and their axes that grow with the tokens."""

        def rows(length: int) -> list[Any]:
            found: list[Any] = []
            jax.eval_shape(
                lambda given: found.extend(_rows(*self._hear(self.model, given))),
                self._neutral_inputs(length),
            )
            return found

        first = rows(length)
        second = rows(length - 1 if length > 1 else 2)
        alike = [row[:2] for row in first] == [row[:2] for row in second]
        found = []
        for (name, path, shape, _), other in zip(first, second if alike else first, strict=True):
            pairs = zip(shape.dimensions, other[2].dimensions, strict=True)
            grows = [size != its if alike else size == length for (_, size), (_, its) in pairs]
            names = [dimension for dimension, _ in shape.dimensions]
            row = {"name": name, "path": path, "dimensions": names}
            found.append((row, [axis for axis, grown in enumerate(grows) if grown]))
        return found

    def _data(
        self, tokens: list[int], prompt: int, found: dict[str, Any], before: dict[str, Any] | None
    ) -> dict[str, Any]:
        """What the page draws, as plain data."""
        anatomy = self.anatomy
        time = len(tokens)
        count = 10 if time > 1 else MOST_CANDIDATES
        found = jax.device_get(found)
        last = found["candidates"][-1, time - 1].tolist()
        candidates = found["candidates"][:, :time, :count]
        ids = {*tokens, *candidates.ravel().tolist(), *last}
        data = {
            "name": self.name,
            "vocab_size": self.model.vocab_size,
            "block_size": self.model.block_size,
            "window": anatomy.window,
            "prompt": prompt,
            "tokens": tokens,
            "texts": {token: text_of_token(self.tokenizer, token) for token in sorted(ids)},
            "candidates": candidates.tolist(),
            "log_probabilities": _rounded(found["log_probabilities"][:, :time, :count]),
            "next_ranks": found["next_ranks"][:, : time - 1].tolist(),
            "next_log_probabilities": _rounded(found["next_log_probabilities"][:, : time - 1]),
            "last": [last, _rounded(found["log_probabilities"][-1, time - 1])],
            "blocks": [bool(paths) for paths in anatomy.branches],
            "layers": [path is not None for path in anatomy.by_head],
            "heads": anatomy.heads,
            "attention": None,
            "products": None,
            "before": None,
        }
        if anatomy.attention:
            weights = np.stack(found["attention"])[..., *np.tril_indices(time)].astype(np.float32)
            data["attention"] = quantise_for_page(weights, fine=weights.size <= MOST_FINE_WEIGHTS)
        if before is not None:
            lengths = ("log_probabilities", time), ("next_log_probabilities", time - 1)
            data["before"] = {name: _rounded(before[name][-1, :end]) for name, end in lengths}
            data["before"]["candidates"] = np.asarray(before["candidates"])[-1, :time].tolist()
        arrays = self._arrays(found, time)
        products = [np.stack(each) for each in zip(*found["products"], strict=True)]
        entries = sum(array.size for _, array in arrays) + sum(each.size for each in products)
        fits = entries <= MOST_FINE_WEIGHTS
        if products and fits:
            query, key, scale = products
            both = [quantise_for_page(each[:, :, :time]) for each in (query, key)]
            data["products"] = {"scale": float(scale[0]), "query": both[0], "key": both[1]}
        data["arrays"] = [
            row | {"values": quantise_for_page(array) if fits else None} for row, array in arrays
        ]
        return data

    def _arrays(self, found: dict[str, Any], time: int) -> list[tuple[dict[str, Any], Any]]:
        """The arrays that grow with the tokens, each once, by token: parameters are not shown."""
        shown: dict[tuple[Any, bytes], tuple[dict[str, Any], Any]] = {}
        rows = self._rows(found["candidates"].shape[1])
        for (row, axes), array in zip(rows, found["arrays"], strict=True):
            if not axes:
                continue
            part = tuple(slice(time if axis in axes else None) for axis in range(array.ndim))
            kept = np.asarray(array, np.float32)[part]
            same = kept.shape, kept.tobytes()
            if same in shown and shown[same][0]["path"].count(".") <= row["path"].count("."):
                continue
            shown.pop(same, None)  # what a module returns as it got it is shown as the module's
            shown[same] = row | {"sizes": kept.shape}, np.moveaxis(kept, axes[0], 0)
        return list(shown.values())


def _rows(trace: ShapeTrace, heard: dict[int, Heard]) -> list[tuple[str, str, Shape, Any]]:
    """The arrays of a trace, each where it first appears: name, path, shape, and the array."""
    rows: list[tuple[str, str, Shape, Any]] = []
    seen: set[int] = set()

    def is_new(shapes: list[Shape], value: Any) -> bool:
        if not is_real(value) or len(shapes) != 1 or id(value) in seen:
            return False
        seen.add(id(value))
        return True

    def walk(traced: ShapeTrace) -> None:
        call = heard[id(traced)]
        name = traced.path[traced.path.rstrip(".0123456789").rfind(".") + 1 :]
        for argument, shapes in traced.arguments.items():
            if is_new(shapes, call.arguments.get(argument)):
                row = f"{name}({argument})", traced.path, shapes[0], call.arguments[argument]
                rows.append(row)
        own = is_new(traced.results, call.result)  # before the calls, of which one may return it
        for inner in traced.calls:
            walk(inner)
        if own:
            rows.append((name, traced.path, traced.results[0], call.result))

    logits = heard[id(trace)].result
    seen.add(id(logits))
    for inner in trace.calls:
        walk(inner)
    return [*rows, ("logits", "", trace.results[0], logits)]


def quantise_for_page(array: Any, *, fine: bool = True) -> dict[str, Any]:
    """An array in two bytes an entry, or one, evenly between its least and its largest value."""
    dtype = "<u2" if fine else "u1"
    low = float(array.min())
    high = float(array.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("the forward pass is not finite: the model has diverged")
    most = np.iinfo(dtype).max
    steps = np.round((array - low) * (most / ((high - low) or 1.0))).astype(dtype)
    data = base64.b64encode(steps.tobytes()).decode()
    return {"shape": array.shape, "low": low, "high": high, "bytes": steps.itemsize, "data": data}


def _rounded(array: Any) -> list[Any]:
    return np.asarray(array, float).round(7).tolist()


def look_page(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int | None, name: str
) -> str:
    """An HTML page of the forward pass over a prompt and what the model samples after it.

    Sampling is deterministic and stops at `block_size`; None samples up to `NEW_TOKENS` that a page
    has room for. Raises ValueError as `encode_text`, and for more tokens than the block or a page
    holds.
    """
    given = encode_text(tokenizer, prompt)
    look = Look(model, tokenizer, name)
    tokens = jnp.asarray(given)[None]
    if max_new_tokens is None:
        room = look.most_tokens() - len(given)
        max_new_tokens = max(0, min(NEW_TOKENS, room))
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    new = max(0, min(max_new_tokens, model.block_size - len(given)))
    if new:
        tokens = generate(model, tokens, new, key=jax.random.key(1337))
    return page_of(look(np.asarray(tokens[0]).tolist(), len(given)))


def page_of(data: dict[str, Any], *, live: bool = False) -> str:
    """The page of some data; a live one may ask its server, any other no host at all."""
    # nothing in a text may end the script element that holds it
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = Path(__file__).with_name("page")
    page, style, *scripts = (
        path.read_text(encoding="utf-8")
        for path in (folder / "page.html", folder / "page.css", *sorted(folder.glob("*.js")))
    )
    page = page.replace("connect-src 'none'", f"connect-src '{'self' if live else 'none'}'")
    parts = {"style": style, "script": "\n".join(scripts), "data": script}
    # in one pass: a prompt may contain the name of a part, and is not a template
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


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
