"""Scaled dot-product attention: masks, weights, rotary embedding, head reshapes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from jgpt.nn.layers import apply_dropout
from jgpt.nn.precision import wider_dtype
from jgpt.shapes.contract import check, typed


@typed
def causal_mask(time: int, window: int | None = None) -> Bool[Array, "{time} {time}"]:
    """Return True where a query (row) may attend to a key (column), for `time` positions: itself
    and the past.

    With a `window`, a query may attend only to the last `window` positions, its own included
    (sliding-window attention). Raises ValueError for a window below 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"`window={window}` must be positive: it includes the query")
    mask = jnp.tril(jnp.ones((time, time), dtype=bool))
    if window is None:
        return mask
    # the diagonal `window` places below the main one, and everything below it
    too_long_ago = jnp.tril(mask, -window)
    return mask & ~too_long_ago


@typed
def document_mask(documents: Int[Array, "batch time"]) -> Bool[Array, "batch 1 time time"]:
    """Return True where a query (row) and a key (column) belong to the same document.

    `documents` are the numbers of each position's document. The axis of size 1 is for heads.
    """
    of_query = documents[:, :, None]  # batch time 1
    of_key = documents[:, None, :]  # batch 1 time
    return (of_query == of_key)[:, None]


@typed
def positions_in_documents(documents: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Return each position's distance from the beginning of its document."""
    position = jnp.arange(documents.shape[1])  # time
    before = jnp.roll(documents, 1, axis=1)  # of the first position, the last one's
    begins = (documents != before) | (position == 0)[None]  # batch time
    first = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
    return position[None] - first


@typed
def attention_weights(
    query: Float[Array, "*batch query head_dim"],
    key: Float[Array, "*batch key head_dim"],
    mask: Bool[Array, "*leading query key"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "*batch query key"]:
    """Return the weights of scaled dot-product attention: the softmax over keys of each query's
    scores.

    Scores are scaled by `head_dim ** -0.5`, or by `scale`; the softmax is computed in at least
    float32 (Vaswani et al. 2017, section 3.2.1). The mask may have leading axes, which are
    broadcast to those of the queries. A fully masked row gets uniform weights.

    Raises ValueError for a mask with other leading axes.
    """
    at_least_float32 = wider_dtype(query.dtype)
    # Accumulated in float32 and never rounded to 16 bits: scores whose difference bfloat16 can't
    # represent must still give different weights.
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=at_least_float32)
    check(scores, Float[Array, "*batch query key"])
    if scale is None:
        # A score is a sum over head_dim features, so its variance would grow with their number
        # (Vaswani et al. 2017, footnote 4).
        scores = scores * query.shape[-1] ** -0.5
    else:
        scores = scores * scale
    if mask is not None:
        _require_broadcast(mask.shape[:-2], query.shape[:-2])
        # The lowest finite number, since a softmax over a row of only -inf is NaN.
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    # Rounded only now, because the product with the values needs operands of one dtype.
    return weights.astype(query.dtype)


def _require_broadcast(leading: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Raise ValueError for a mask whose leading axes do not broadcast to those of the queries."""
    try:
        shape = jnp.broadcast_shapes(leading, batch)
    except ValueError:
        shape = None
    if shape != batch:
        raise ValueError(
            f"mask has the leading axes {leading}, which do not broadcast to those of the "
            f"queries, {batch}"
        )


@typed
def attend(
    query: Float[Array, "*batch query head_dim"],
    key: Float[Array, "*batch key head_dim"],
    value: Float[Array, "*batch key value_dim"],
    mask: Bool[Array, "*leading query key"] | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "*batch query value_dim"]:
    """Scaled dot-product attention: the values averaged with `attention_weights`, under its mask.

    With a `dropout_key`, dropout at the rate `dropout` is applied to the weights.
    """
    weights = attention_weights(query, key, mask, scale=scale)  # *batch query key
    weights = apply_dropout(weights, dropout, dropout_key)
    return jnp.einsum("...qk,...kv->...qv", weights, value)


@typed
def apply_rotary(
    x: Float[Array, "*batch time head_dim"], position: Int[Array, " time"], base: float = 10_000.0
) -> Float[Array, "*batch time head_dim"]:
    """Apply rotary position embedding (Su et al. 2021, section 3.2.2).

    Feature i is paired with feature i + head_dim / 2, as in GPT-NeoX. Raises ValueError for an odd
    head size.
    """
    head_dim = x.shape[-1]
    half = head_dim // 2
    if head_dim % 2:
        raise ValueError(f"`head_dim={head_dim}` must be even for rotary position embedding")
    # The angle in radians for each position: 1 for the first pair, down to about 1 / base for the
    # last.
    frequency = base ** -(jnp.arange(half) / half)  # head_dim/2
    # Computed in float32 and rounded afterwards: bfloat16 has no odd positions above 256.
    angle = position.astype(frequency.dtype)[:, None] * frequency[None]  # time head_dim/2
    # the same for all heads
    angle = jax.lax.broadcast_to_rank(angle, x.ndim)
    cosine = jnp.cos(angle).astype(x.dtype)
    sine = jnp.sin(angle).astype(x.dtype)
    # A pair of features is a point in the plane, rotated by its angle. The product of a query and a
    # key then depends only on the difference of their positions.
    first = x[..., :half]  # *batch time head_dim/2
    second = x[..., half:]
    rotated_first = first * cosine - second * sine
    rotated_second = first * sine + second * cosine
    return jnp.concatenate([rotated_first, rotated_second], axis=-1)


@typed
def split_heads(
    x: Shaped[Array, "batch time features"], heads: int
) -> Shaped[Array, "batch {heads} time {x.shape[-1]//heads}"]:
    """Reshape (batch, time, features) to (batch, heads, time, features // heads)."""
    batch, time, features = x.shape
    if heads < 1 or features % heads:
        raise ValueError(f"{features} features must be divisible by `heads={heads}`")
    separate = x.reshape(batch, time, heads, features // heads)
    # Heads before time, since attention treats heads like the sequences of a batch.
    return separate.transpose(0, 2, 1, 3)


@typed
def merge_heads(
    x: Shaped[Array, "batch heads time value_dim"],
) -> Shaped[Array, "batch time heads*value_dim"]:
    """Return the inverse of `split_heads`, with heads concatenated."""
    batch, heads, time, value_dim = x.shape
    time_first = x.transpose(0, 2, 1, 3)  # batch time heads value_dim
    return time_first.reshape(batch, time, heads * value_dim)
