"""Generation: prefill, and the decode loop over a KV cache."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Int8, Key, PyTree

from jgpt.generation.sampling import Sampling, next_token
from jgpt.nn.cache import KVCache
from jgpt.nn.models import CachedLanguageModel, LanguageModel
from jgpt.nn.module import require_in_vocabulary
from jgpt.shapes.contract import typed

TOKENS_PER_CALL = 32


@typed
def generate(
    model: LanguageModel,
    prompt: Int[Array | np.ndarray, "batch time"],
    max_new_tokens: int,
    *,
    key: Key[Array, ""] | nnx.Rngs,
    lengths: Int[np.ndarray, " batch"] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Int[Array, "batch {prompt.shape[1]+max_new_tokens}"]:
    """Continue each prompt by `max_new_tokens` sampled tokens, with a KV cache.

    Prompts of different `lengths` are right-padded. Each continuation follows its prompt, and 0
    fills the rest. A row depends only on its prompt, the key and the row's index, up to rounding.
    Raises ValueError for an empty prompt or an invalid sampling parameter.

    The context is the last `block_size` tokens. Past it, models with rotary positions go on with a
    rolling cache; models with learned positions recompute the whole context for each token, for
    all rows as soon as the longest one needs it. So do a user's models without a KV cache, always.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    ends = np.full(prompt.shape[0], prompt.shape[1]) if lengths is None else lengths
    pieces = stream(model, prompt, ends, max_new_tokens, sampling, key=key)
    new = np.concatenate([np.zeros((len(ends), 0), np.int32), *pieces], axis=1)
    whole = np.pad(np.asarray(prompt), ((0, 0), (0, max_new_tokens)))
    for row, end in enumerate(ends):
        whole[row, end:] = 0
        whole[row, end : end + max_new_tokens] = new[row]
    return jax.device_put(whole)


@typed
def stream(
    model: LanguageModel,
    prompt: Int[Array | np.ndarray, "batch time"],
    lengths: Int[np.ndarray, " batch"],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    key: Key[Array, ""] | nnx.Rngs,
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """The tokens that `generate` appends, in pieces, as they are sampled."""
    graph, weights = nnx.split(model)
    key = key() if isinstance(key, nnx.Rngs) else key
    prompt = jnp.asarray(prompt)
    arrays = jax.tree.leaves((weights, prompt, key, jax.device_put(0)))  # under jit all are traced
    if any(isinstance(array, Tracer) for array in arrays):
        raise ValueError(
            "generate can't be called under jit, vmap or grad: its loop is compiled already"
        )
    if not 0 <= max_new_tokens < 2**31:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more, below 2**31")
    if prompt.size == 0 or lengths.min() < 1:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    if lengths.max() > prompt.shape[1]:
        raise ValueError(
            f"lengths={lengths.max()} is more than the prompt's {prompt.shape[1]} tokens"
        )
    require_in_vocabulary(prompt, model.vocab_size, "the prompt's token")
    sampling = jax.tree.map(jnp.float32, sampling)
    size = model.block_size
    rows = [row[:n][-size:] for row, n in zip(np.asarray(prompt, np.int32), lengths, strict=True)]
    length = np.minimum(lengths, size).astype(np.int32)
    window = np.stack([np.pad(row, (size - len(row), 0)) for row in rows])
    context = int(length.max()) - 1  # without the last token, which the decode loop starts with
    # padded to a power of two, so that few programs serve prompts of all lengths
    width = min(size, 1 << (context - 1).bit_length()) if context else 0
    # every token reads the whole cache: no larger than this text needs, by powers of two again
    longest = max(context + max_new_tokens, width, TOKENS_PER_CALL)
    sizes = {"width": width, "capacity": min(size, 1 << (longest - 1).bit_length())}
    window, length, cache = _prefill(weights, window, length, graph=graph, **sizes)
    recomputes = not isinstance(model, CachedLanguageModel) or (
        not model.supports_rolling_cache and prompt.shape[1] + max_new_tokens > size + 1
    )
    draw = functools.partial(_compiled_draw, graph=graph, recomputes=recomputes)

    def calls(window, length, cache):
        for start in range(0, max_new_tokens, TOKENS_PER_CALL):
            count = min(TOKENS_PER_CALL, max_new_tokens - start)
            window, length, cache, drawn, finite = draw(
                weights, window, length, cache, start, count, key, sampling
            )
            yield drawn, finite, count

    def pieces(calls):
        call = next(calls, None)
        while call is not None:
            # dispatched before waiting
            drawn, finite, count = call
            call = next(calls, None)
            if not finite:
                raise FloatingPointError(
                    "the model's logits are not finite: its weights have diverged or are damaged"
                )
            yield np.asarray(drawn)[:, :count]

    return pieces(calls(window, length, cache))


# With all weights kept, the results are committed to devices if these are, as those of the decode
# loop will be: it would be compiled for both.
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
    """The left-padded prompts, their lengths, and the KV cache of all but the last token.

    The cache is of the last `width` tokens before that one.
    """
    model = nnx.merge(graph, weights)
    batch, size = window.shape
    if not isinstance(model, CachedLanguageModel):
        return window, length, KVCache((), batch=batch)
    cache = model.empty_cache(batch, width or capacity)
    cache.set_lengths(length - 1 - width)
    if width:
        tokens = jnp.pad(window, ((0, 0), (1, 0)))[:, size - width : size]
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
    """Sample `count` tokens. Rows of `window` are left-padded."""
    model = nnx.merge(graph, weights)
    batch, size = window.shape

    def step(whole_window, i, carry):
        window, cache, drawn, finite = carry
        known = jnp.minimum(length + i, size)
        if not isinstance(model, CachedLanguageModel):  # what follows a causal model ignores
            tokens = jax.vmap(jnp.roll)(window, known)
            hidden = model.hidden(tokens)
            x = jnp.take_along_axis(hidden, known[:, None, None] - 1, axis=1)
        else:
            tokens = window[:, -1:]
            past = cache
            if whole_window:
                tokens = window
                past = model.empty_cache(batch)
                past.set_lengths(known - size)
            x = model.hidden(tokens, cache=past)[:, -1:]
        logits = model.logits(x)[:, 0]
        token = next_token(logits, jax.random.fold_in(key, start + i), sampling)
        window = jnp.concatenate([window[:, 1:], token[:, None].astype(window.dtype)], axis=1)
        return window, cache, drawn.at[:, i].set(token), finite & jnp.isfinite(logits).all()

    drawn = jnp.zeros((batch, TOKENS_PER_CALL), jnp.int32)
    carry = (window, cache, drawn, jnp.array(True))
    # a full context is good for one more token from the cache; then learned positions shift
    count = count.astype(jnp.int32)
    cached = jnp.clip(size + 1 - length.max(), 0, count) if recomputes else count
    cached = cached if isinstance(model, CachedLanguageModel) else jnp.int32(0)
    carry = jax.lax.fori_loop(0, cached, functools.partial(step, False), carry)
    if recomputes:
        carry = jax.lax.fori_loop(cached, count, functools.partial(step, True), carry)
    window, cache, drawn, finite = carry
    return window, length + count, cache, drawn, finite


_compiled_draw = jax.jit(
    _draw,
    static_argnames=("graph", "recomputes"),
    donate_argnames=("window", "cache"),
    # With AVX-512, a product of one row then reads weights faster; other platforms ignore it.
    # Not a decorator: JAX refuses compiler options under another trace, where the shapes of
    # `_draw` are proven.
    compiler_options={"xla_cpu_prefer_vector_width": 512},
)
