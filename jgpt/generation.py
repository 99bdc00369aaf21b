"""Sampling: the next token, many of them, and their text as it comes."""

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree

from jgpt.contracts import typed
from jgpt.model import LanguageModel
from jgpt.tokenizer import Tokenizer

TOKENS_PER_CALL = 32


@typed
def next_token(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    top_k: int | None,
    top_p: Float[Array, ""] | None,
) -> Int[Array, " batch"]:
    """Draw a token for each row: of the `top_k` likeliest, of the fewest that hold `top_p`.

    Temperature 0 takes the likeliest. Nucleus sampling is Holtzman et al. 2020, section 3.1; it
    looks at the probabilities after temperature and top_k, as most libraries do.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greedy = jnp.argmax(logits, axis=-1)
    warm = temperature >= jnp.finfo(temperature.dtype).tiny  # what is less divides as zero does
    # the likeliest becomes 0 and the others less: no temperature makes them overflow
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / jnp.where(warm, temperature, 1)
    if top_k is not None:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None:
        descending = jnp.sort(logits, axis=-1)[:, ::-1]
        probability = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = (before < top_p).at[:, 0].set(True)
        smallest = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    sampled = jax.random.categorical(key, logits, axis=-1)
    return jnp.where(warm, sampled, greedy)


@typed
def generate(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "batch {prompt.shape[1]+max_new_tokens}"]:
    """The prompts, each continued by `max_new_tokens` tokens.

    Past `block_size` the window slides: the model reads the last `block_size` tokens. The key
    alone decides what is drawn. Raises ValueError for an empty prompt or a bad sampling parameter.
    """
    pieces = stream(
        model, prompt, max_new_tokens, key=key, temperature=temperature, top_k=top_k, top_p=top_p
    )
    return jnp.concatenate([prompt, *pieces], axis=1, dtype=prompt.dtype)


@typed
def stream(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    max_new_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """What `generate` appends, piece by piece as it is drawn, each (batch, tokens)."""
    for name, value, fine in (
        ("temperature", temperature, 0 <= temperature < float("inf")),
        ("top_k", top_k, top_k is None or top_k >= 1),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1),
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0),
    ):
        if not fine:
            wanted = {"temperature": "0 or more", "top_k": "at least 1", "top_p": "in (0, 1]"}
            raise ValueError(f"{name}={value} must be {wanted.get(name, '0 or more')}")
    if prompt.size == 0:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    outside = np.asarray(prompt)[np.asarray((prompt < 0) | (prompt >= model.vocab_size))]
    if outside.size:
        raise ValueError(
            f"the prompt holds token {outside[0]}, outside the vocabulary of {model.vocab_size}"
        )
    return _pieces(model, prompt, max_new_tokens, key, temperature, top_k, top_p)


@typed
def _pieces(
    model: LanguageModel,
    prompt: Int[Array, "batch time"],
    max_new_tokens: int,
    key: Key[Array, ""],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    graph, weights = nnx.split(model)
    cropped = prompt[:, -model.block_size :]
    length = cropped.shape[1]
    window = jnp.pad(cropped, ((0, 0), (0, model.block_size - length))).astype(jnp.int32)
    for start in range(0, max_new_tokens, TOKENS_PER_CALL):
        count = min(TOKENS_PER_CALL, max_new_tokens - start)
        window, drawn, finite = _draw(
            weights,
            window,
            length,
            start,
            count,
            key,
            jnp.float32(temperature),
            None if top_p is None else jnp.float32(top_p),
            graph=graph,
            top_k=top_k,
        )
        if not finite:
            raise FloatingPointError("the model's logits are not finite: its weights are broken")
        length = min(length + count, model.block_size)
        yield np.asarray(drawn[:, :count])


@functools.partial(jax.jit, static_argnames=("graph", "top_k"))
@typed
def _draw(
    weights: PyTree[Float[Array, "..."]],
    window: Int[Array, "batch time"],
    length: Int[Array, ""],
    start: Int[Array, ""],
    count: Int[Array, ""],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    *,
    graph: nnx.GraphDef,
    top_k: int | None,
) -> tuple[Int[Array, "batch time"], Int[Array, f"batch {TOKENS_PER_CALL}"], Bool[Array, ""]]:
    """Draw `count` tokens into a window whose first `length` are read; the rest is padding."""
    model = nnx.merge(graph, weights)
    batch, size = window.shape

    def body(i, carry):
        window, length, drawn, finite = carry
        logits = jax.lax.dynamic_index_in_dim(model(window), length - 1, axis=1, keepdims=False)
        draw_key = jax.random.fold_in(key, start + i)
        token = next_token(logits, draw_key, temperature, top_k, top_p).astype(window.dtype)
        full = length == size
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        length = jnp.where(full, length, length + 1)
        window = jax.lax.dynamic_update_index_in_dim(window, token, length - 1, axis=1)
        return window, length, drawn.at[:, i].set(token), finite & jnp.isfinite(logits).all()

    drawn = jnp.zeros((batch, TOKENS_PER_CALL), window.dtype)
    carry = (window, length, drawn, jnp.array(True))
    window, _, drawn, finite = jax.lax.fori_loop(0, count, body, carry)
    return window, drawn, finite


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
