"""Generation: prefill, and the decoding loop with a KV cache."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int8, Key, PyTree

from jgpt.config import DEFAULT_TEMPERATURE
from jgpt.generation.sampling import PRNGKey, Sampling, next_token, typed_key
from jgpt.nn.cache import KVCache
from jgpt.nn.models import CachedLanguageModel, LanguageModel
from jgpt.nn.module import require_in_vocabulary
from jgpt.shapes.contract import typed

TOKENS_PER_CALL = 32
"""The number of tokens that one call of the compiled loop draws for each row."""


@typed
def generate(
    model: LanguageModel,
    prompt: Int[Array | np.ndarray, "batch time"],
    max_new_tokens: int,
    *,
    key: PRNGKey,
    lengths: Int[np.ndarray, " batch"] | None = None,
    temperature: float = DEFAULT_TEMPERATURE,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "batch {prompt.shape[1]+max_new_tokens}"]:
    """Return each prompt of tokens with its continuation of `max_new_tokens` sampled tokens.

    A row is the prompt, the continuation, and zeros as padding. Prompts of different `lengths` are
    right-padded. `key` is the PRNG key for sampling. A row depends only on its prompt, the key and
    the row's index, up to rounding. Raises ValueError for an empty prompt or an invalid sampling
    parameter.

    The context is the last `block_size` tokens. When it is full, models with rotary positions
    continue with a rolling cache. Models with learned positions recompute the whole context for
    each token, in all rows as soon as the longest one is full. Custom models without a KV cache
    always recompute it.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if lengths is None:
        lengths = np.full(prompt.shape[0], prompt.shape[1])
    pieces = stream(model, prompt, lengths, max_new_tokens, sampling, key=key)
    no_tokens = np.zeros((len(lengths), 0), np.int32)  # for max_new_tokens=0
    new_tokens = np.concatenate([no_tokens, *pieces], axis=1)
    continued = np.pad(np.asarray(prompt), ((0, 0), (0, max_new_tokens)))
    for row, length in enumerate(lengths):
        end = length + max_new_tokens
        continued[row, length:end] = new_tokens[row]
        continued[row, end:] = 0  # the caller's padding may be any token
    return jax.device_put(continued)


@typed
def stream(
    model: LanguageModel,
    prompt: Int[Array | np.ndarray, "batch time"],
    lengths: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    key: PRNGKey,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """Return an iterator over the tokens that `generate` appends, in pieces, as they are sampled.

    An invalid request raises here rather than when the first piece is read.
    """
    graph, weights = nnx.split(model)
    key = typed_key(key)
    # On the host: a conversion on the device would compile a program, and the processes of a mesh
    # can't move a prompt that they share to the device of one.
    tokens = np.asarray(prompt)
    _require_valid(tokens, lengths, max_new_tokens, model.vocab_size)

    size = model.block_size
    window = _left_padded(tokens.astype(np.int32), lengths, size)
    length = np.minimum(lengths, size).astype(np.int32)
    width, capacity = _cache_sizes(int(length.max()), max_new_tokens, size)
    window, length, cache = _prefill(
        weights, window, length, graph=graph, width=width, capacity=capacity
    )
    recomputes = _must_recompute(model, prompt.shape[1] + max_new_tokens)
    draw = functools.partial(_compiled_draw, graph=graph, recomputes=recomputes)
    # Numbers of one dtype, since a Python int and a float would each compile a program.
    sampling = jax.tree.map(np.float32, sampling)

    def dispatch_calls(window, length, cache):
        for start in range(0, max_new_tokens, TOKENS_PER_CALL):
            count = min(TOKENS_PER_CALL, max_new_tokens - start)
            window, length, cache, drawn, finite = draw(
                weights, window, length, cache, start, count, key, sampling
            )
            yield drawn, finite, count

    return _read_calls(dispatch_calls(window, length, cache))


@typed
def _read_calls(calls: Iterator[Any]) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """Yield the tokens of calls of the decoding loop, which are dispatched one call ahead.

    JAX returns from a call before its result is computed. While the host waits for the tokens of
    one call and decodes them, the device computes the next call, so that it is never idle.
    """
    call = next(calls, None)
    while call is not None:
        drawn, is_finite, count = call
        call = next(calls, None)  # dispatched before the next line waits
        if not is_finite:
            raise FloatingPointError(
                "the model's logits are not finite: its weights have diverged or are damaged"
            )
        yield np.asarray(drawn)[:, :count]


def _must_recompute(model: LanguageModel, tokens: int) -> bool:
    """Return whether one of `tokens` tokens needs the whole context recomputed without the cache.

    Learned positions shift with the context, which invalidates the cache. A full context allows one
    more token before that. Rotary positions are relative, so their cache can roll.
    """
    if not isinstance(model, CachedLanguageModel):
        return True
    if model.supports_rolling_cache:
        return False
    return tokens > model.block_size + 1


@typed
def _require_valid(
    prompt: Int[np.ndarray, "batch time"],
    lengths: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    vocab_size: int,
) -> None:
    if not 0 <= max_new_tokens < 2**31:
        raise ValueError(f"`max_new_tokens={max_new_tokens!r}` must be 0 or more, below 2**31")
    if prompt.size == 0 or lengths.min() < 1:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    require_in_vocabulary(prompt, vocab_size, "the prompt's token")


@typed
def _left_padded(
    prompt: Int[np.ndarray, "batch time"], lengths: Int[np.ndarray, " batch"], block_size: int
) -> Int[np.ndarray, "batch {block_size}"]:
    """Left-pad the last tokens of right-padded prompts, so that all rows end together."""
    window = np.zeros((len(prompt), block_size), np.int32)
    for row, length in enumerate(lengths):
        whole_prompt = prompt[row, :length]
        tokens = whole_prompt[-block_size:]
        start = block_size - len(tokens)
        window[row, start:] = tokens
    return window


@typed
def _cache_sizes(length: int, max_new_tokens: int, block_size: int) -> tuple[int, int]:
    """Return the width of the prefill and the capacity of the cache for a prompt of `length`
    tokens.

    Both are powers of two, so that few programs serve prompts of all lengths.
    """
    context = length - 1  # without the last token, with which the decoding loop starts
    width = 0
    if context > 0:
        width = min(block_size, _next_power_of_two(context))
    # Every token reads the whole cache, so it is no larger than necessary.
    longest = max(context + max_new_tokens, width, TOKENS_PER_CALL)
    capacity = min(block_size, _next_power_of_two(longest))
    return width, capacity


@typed
def _next_power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


# With all weights kept, the results are committed to devices if the weights are, like the results
# of the decoding loop. Otherwise the loop would be compiled for both.
@functools.partial(jax.jit, static_argnames=("graph", "width", "capacity"), keep_unused=True)
@typed
def _prefill(
    weights: PyTree[Float[Array, "..."] | Int8[Array, "..."]],
    window: Int[Array, "batch time"],
    length: Int[Array, " batch"],
    *,
    graph: nnx.GraphDef,
    width: int,
    capacity: int,
) -> tuple[Int[Array, "batch time"], Int[Array, " batch"], KVCache]:
    """Return the left-padded prompts, their lengths, and the KV cache without the last token.

    The cache holds the last `width` tokens before that token.
    """
    model = nnx.merge(graph, weights)
    batch, size = window.shape
    if not isinstance(model, CachedLanguageModel):
        return window, length, KVCache((), batch=batch)
    prefill_capacity = width
    if width == 0:  # prompts of one token need no prefill
        prefill_capacity = capacity
    # As large as the prompt, since attention with a full cache skips the keys after each query.
    cache = model.empty_cache(batch, prefill_capacity)
    cache.set_lengths(length - 1 - width)  # negative: the number of padding slots
    if width == 0:
        return window, length, cache
    # With a column of padding, the slice ends before the last token even if `width` is a block.
    tokens = jnp.pad(window, ((0, 0), (1, 0)))[:, size - width : size]  # batch width
    model.hidden(tokens, cache=cache)
    for layer in cache.layers:
        layer.grow(capacity)
    return window, length, cache


@typed
def _draw(
    weights: PyTree[Float[Array, "..."] | Int8[Array, "..."]],
    window: Int[Array, "batch time"],
    length: Int[Array, " batch"],
    cache: KVCache,
    start: Int[Array, ""],
    count: Int[Array, ""],
    key: Key[Array, ""],
    sampling: Sampling,
    *,
    graph: nnx.GraphDef,
    recomputes: bool,
) -> tuple[
    Int[Array, "batch time"],
    Int[Array, " batch"],
    KVCache,
    Int[Array, f"batch {TOKENS_PER_CALL}"],
    Bool[Array, ""],
]:
    """Sample `count` tokens. Rows of `window` are left-padded.

    `count` and `start` are traced, so that one program serves calls of all lengths; its result has
    room for `TOKENS_PER_CALL` tokens. Returns the window, the lengths and the cache after these
    tokens, the tokens, and whether all logits were finite.
    """
    model = nnx.merge(graph, weights)
    batch, size = window.shape

    def last_hidden(whole_window, window, cache, known):  # batch 1 features
        if not isinstance(model, CachedLanguageModel):
            # Right-padded, since a causal model ignores tokens after a position, but not those
            # before it.
            tokens = jax.vmap(jnp.roll)(window, known)
            hidden = model.hidden(tokens)  # batch time features
            last = known[:, None, None] - 1  # batch 1 1
            return jnp.take_along_axis(hidden, last, axis=1)
        if whole_window:  # learned positions have shifted
            empty = model.empty_cache(batch)
            empty.set_lengths(known - size)  # negative: the number of padding slots
            hidden = model.hidden(window, cache=empty)
        else:  # the cache has the tokens before the last one
            last_token = window[:, -1:]
            hidden = model.hidden(last_token, cache=cache)
        return hidden[:, -1:]

    def step(whole_window, i, carry):
        window, cache, drawn, finite = carry
        known = jnp.minimum(length + i, size)  # the number of tokens of each row in the window
        x = last_hidden(whole_window, window, cache, known)
        logits = model.logits(x)[:, 0]  # batch vocab
        # The key depends on the token's number, so that calls of any length draw the same tokens.
        token_key = jax.random.fold_in(key, start + i)
        token = next_token(logits, token_key, sampling)  # batch
        # All rows end together, so one shift of the window appends the token to each.
        without_first = window[:, 1:]
        new_column = token[:, None].astype(window.dtype)
        window = jnp.concatenate([without_first, new_column], axis=1)
        drawn = drawn.at[:, i].set(token)
        # A compiled loop can't raise, so the host reads this flag with the tokens.
        finite = finite & jnp.isfinite(logits).all()
        return window, cache, drawn, finite

    drawn = jnp.zeros((batch, TOKENS_PER_CALL), jnp.int32)
    carry = (window, cache, drawn, jnp.array(True))
    count = count.astype(jnp.int32)
    from_cache = count
    if not isinstance(model, CachedLanguageModel):
        from_cache = jnp.int32(0)
    elif recomputes:
        # A full context allows one more token from the cache; then learned positions shift.
        from_cache = jnp.clip(size + 1 - length.max(), 0, count)
    carry = jax.lax.fori_loop(0, from_cache, functools.partial(step, False), carry)
    # Two loops instead of a condition in one: `recomputes` is static, so a program for a text that
    # fits into the block has no second pass over the model.
    if recomputes:
        carry = jax.lax.fori_loop(from_cache, count, functools.partial(step, True), carry)
    window, cache, drawn, finite = carry
    return window, length + count, cache, drawn, finite


_compiled_draw = jax.jit(
    _draw,
    static_argnames=("graph", "recomputes"),
    donate_argnames=("window", "cache"),
    # With AVX-512, a product of one row then reads weights faster; other platforms ignore the
    # option. A decorator can't set it: JAX rejects compiler options under another trace, in which
    # the shapes of `_draw` are proven.
    compiler_options={"xla_cpu_prefer_vector_width": 512},
)
