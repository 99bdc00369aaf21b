"""Sampling: the next token, many of them, and their text as it comes."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree

from jgpt.contracts import typed
from jgpt.model import KeyValueCache, LanguageModel
from jgpt.tokenizer import Tokenizer

TOKENS_PER_CALL = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rules:
    """How to draw: what may change from call to call without another compilation."""

    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None


@typed
def next_token(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    rules: Rules,
    top_k: int | None = None,
) -> Int[Array, " batch"]:
    """Draw a token for each row, row i with the key folded with i.

    `top_k` keeps the likeliest tokens, then `top_p` the fewest that hold it (Holtzman et al. 2020,
    section 3.1), then `min_p` those at least that fraction as likely as the likeliest (Nguyen et
    al. 2024, section 3); all after temperature. Temperature 0 takes the likeliest.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greedy = jnp.argmax(logits, axis=-1)
    warm = rules.temperature >= jnp.finfo(rules.temperature.dtype).tiny  # less divides as zero does
    # the likeliest becomes 0 and the others less: no temperature makes them overflow
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / jnp.where(warm, rules.temperature, 1)
    if top_k is not None:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if rules.top_p is not None:
        descending = jnp.sort(logits, axis=-1)[:, ::-1]
        probability = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = (before < rules.top_p).at[:, 0].set(True)
        smallest = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if rules.min_p is not None:
        logits = jnp.where(logits < jnp.log(rules.min_p), -jnp.inf, logits)  # the likeliest is 0
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits.shape[0]))
    sampled = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.where(warm, sampled, greedy).astype(jnp.int32)


@typed
def generate(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    lengths: Int[np.ndarray, " batch"] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "batch {prompt.shape[1]+max_new_tokens}"]:
    """The prompts, each continued by `max_new_tokens` tokens.

    Prompts of different `lengths` are filled up at their ends; a continuation begins where its
    prompt ends, and what is beyond it is 0. Past `block_size` the window slides: the model reads
    the last `block_size` tokens. A row depends on its own prompt, the key and its index alone.
    Raises ValueError for an empty prompt or a bad sampling parameter.
    """
    pieces = stream(
        model,
        prompt,
        max_new_tokens,
        key=key,
        lengths=lengths,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    batch, time = prompt.shape
    ends = np.full(batch, time) if lengths is None else lengths
    new = np.concatenate([np.zeros((batch, 0), np.int32), *pieces], axis=1)
    whole = np.zeros((batch, time + max_new_tokens), np.int32)
    for row, end in enumerate(ends):
        whole[row, :end] = prompt[row, :end]
        whole[row, end : end + max_new_tokens] = new[row]
    return jnp.asarray(whole, prompt.dtype)


@typed
def stream(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    lengths: Int[np.ndarray, " batch"] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """What `generate` appends, piece by piece as it is drawn, each (batch, tokens)."""
    for name, value, fine, wanted in (
        ("temperature", temperature, 0 <= temperature < float("inf"), "0 or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "in (0, 1]"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "in [0, 1]"),
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0, "0 or more"),
    ):
        if not fine:
            raise ValueError(f"{name}={value} must be {wanted}")
    ends = np.full(prompt.shape[0], prompt.shape[1]) if lengths is None else lengths
    if prompt.size == 0 or ends.min() < 1:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    if ends.max() > prompt.shape[1]:
        raise ValueError(f"lengths reach {ends.max()}, beyond the prompt's {prompt.shape[1]}")
    outside = np.asarray(prompt)[np.asarray((prompt < 0) | (prompt >= model.vocab_size))]
    if outside.size:
        raise ValueError(
            f"the prompt holds token {outside[0]}, outside the vocabulary of {model.vocab_size}"
        )
    rules = Rules(
        jnp.float32(temperature),
        None if top_p is None else jnp.float32(top_p),
        None if min_p is None else jnp.float32(min_p),
    )
    return _pieces(model, prompt, ends, max_new_tokens, key, rules, top_k)


@typed
def _pieces(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    ends: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    key: Key[Array, ""],
    rules: Rules,
    top_k: int | None,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    graph, weights = nnx.split(model)
    size = model.block_size
    kept = np.minimum(ends, size)
    cropped = np.zeros((len(ends), size), np.int32)
    for row, (end, length) in enumerate(zip(ends, kept, strict=True)):
        cropped[row, :length] = prompt[row, end - length : end]
    window, length = jnp.asarray(cropped), jnp.asarray(kept, jnp.int32)
    cache = _prefill(weights, window, graph=graph)
    # a window that is full can be read from the cache once more; learned positions then move
    cached = max_new_tokens if model.slides else size - int(kept.max()) + 1
    position = length - 1
    start = 0
    while start < max_new_tokens:
        count = min(TOKENS_PER_CALL, max_new_tokens - start)
        if start < cached:
            count = min(count, cached - start)
            window, length, position, cache, drawn, finite = _draw_cached(
                weights,
                window,
                length,
                position,
                cache,
                start,
                count,
                key,
                rules,
                graph=graph,
                top_k=top_k,
            )
        else:
            window, length, drawn, finite = _draw_rereading(
                weights, window, length, start, count, key, rules, graph=graph, top_k=top_k
            )
        if not finite:
            raise FloatingPointError("the model's logits are not finite: its weights are broken")
        yield np.asarray(drawn[:, :count])
        start += count


@functools.partial(jax.jit, static_argnames="graph")
@typed
def _prefill(
    weights: PyTree[Float[Array, "..."]], window: Int[Array, "batch time"], *, graph: nnx.GraphDef
) -> KeyValueCache:
    """The windows' cache; what lies beyond a length is overwritten before it is read."""
    model = nnx.merge(graph, weights)
    position = jnp.broadcast_to(jnp.arange(window.shape[1]), window.shape)
    return model.continued(window, position, model.empty_cache(window.shape[0]))[1]


@functools.partial(jax.jit, static_argnames=("graph", "top_k"), donate_argnames="cache")
@typed
def _draw_cached(
    weights: PyTree[Float[Array, "..."]],
    window: Int[Array, "batch time"],
    length: Int[Array, " batch"],
    position: Int[Array, " batch"],
    cache: KeyValueCache,
    start: Int[Array, ""],
    count: Int[Array, ""],
    key: Key[Array, ""],
    rules: Rules,
    *,
    graph: nnx.GraphDef,
    top_k: int | None,
) -> tuple[
    Int[Array, "batch time"],
    Int[Array, " batch"],
    Int[Array, " batch"],
    KeyValueCache,
    Int[Array, f"batch {TOKENS_PER_CALL}"],
    Bool[Array, ""],
]:
    """Draw `count` tokens, each from its predecessor and the cache alone."""
    model = nnx.merge(graph, weights)

    def body(i, carry):
        window, length, position, cache, drawn, finite = carry
        last = jnp.take_along_axis(window, length[:, None] - 1, axis=1)
        logits, cache = model.continued(last, position[:, None], cache)
        token = next_token(logits[:, 0], jax.random.fold_in(key, start + i), rules, top_k)
        window, length = _append(window, length, token)
        finite &= jnp.isfinite(logits).all()
        return window, length, position + 1, cache, drawn.at[:, i].set(token), finite

    drawn = jnp.zeros((window.shape[0], TOKENS_PER_CALL), window.dtype)
    carry = (window, length, position, cache, drawn, jnp.array(True))
    return jax.lax.fori_loop(0, count, body, carry)


@functools.partial(jax.jit, static_argnames=("graph", "top_k"))
@typed
def _draw_rereading(
    weights: PyTree[Float[Array, "..."]],
    window: Int[Array, "batch time"],
    length: Int[Array, " batch"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    key: Key[Array, ""],
    rules: Rules,
    *,
    graph: nnx.GraphDef,
    top_k: int | None,
) -> tuple[
    Int[Array, "batch time"],
    Int[Array, " batch"],
    Int[Array, f"batch {TOKENS_PER_CALL}"],
    Bool[Array, ""],
]:
    """Draw `count` tokens, each by reading the whole window: its positions move as it slides."""
    model = nnx.merge(graph, weights)

    def body(i, carry):
        window, length, drawn, finite = carry
        logits = jnp.take_along_axis(model(window), length[:, None, None] - 1, axis=1)[:, 0]
        token = next_token(logits, jax.random.fold_in(key, start + i), rules, top_k)
        window, length = _append(window, length, token)
        finite &= jnp.isfinite(logits).all()
        return window, length, drawn.at[:, i].set(token), finite

    drawn = jnp.zeros((window.shape[0], TOKENS_PER_CALL), window.dtype)
    return jax.lax.fori_loop(0, count, body, (window, length, drawn, jnp.array(True)))


@typed
def _append(
    window: Int[Array, "batch time"], length: Int[Array, " batch"], token: Int[Array, " batch"]
) -> tuple[Int[Array, "batch time"], Int[Array, " batch"]]:
    """Put a token behind each row's last; a full row first drops its oldest."""
    full = length == window.shape[1]
    window = jnp.where(full[:, None], jnp.roll(window, -1, axis=1), window)
    length = jnp.where(full, length, length + 1)
    here = jnp.arange(window.shape[1]) == length[:, None] - 1
    return jnp.where(here, token[:, None].astype(window.dtype), window), length


@typed
def opening(tokenizer: Tokenizer) -> Integer[np.ndarray, " tokens"]:
    """Where a sample without a prompt begins: a new line, or the first token if there is none."""
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return np.zeros(1, np.int32)


@typed
def decode_stream(
    tokenizer: Tokenizer, pieces: Iterable[Integer[np.ndarray, " _"]]
) -> Iterator[str]:
    """The text of one sequence's pieces, as soon as its characters are whole."""
    tokens: list[int] = []
    said = 0
    for piece in pieces:
        tokens.extend(piece.tolist())
        text = tokenizer.decode(tokens)
        # bytes of an unfinished character decode to the replacement character: wait for the rest
        whole = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        if whole > said:
            yield text[said:whole]
            said = whole
    if tokens:
        yield tokenizer.decode(tokens)[said:]
