"""Leaks that were found in public models, as small programs in their manner: wrong, and mended."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.sight.programs import KEYS, V, W, scores_of, tril

Array = jax.Array


# transformers#48745: RoFormer, BigBird and two others made the mask of an encoder, of padding
# alone, for decoders as well.
def of_padding(x: Array, is_mended: bool) -> Array:
    time = x.shape[1]
    mask = np.ones((time, time), bool)  # nothing is padding
    if is_mended:
        mask = tril(x)
    scores = jnp.where(mask, scores_of(x), jnp.finfo(x.dtype).min)
    return jax.nn.softmax(scores) @ (x @ V)


# transformers#48748: Doge adds a bias that data makes to its scores, and folded the causal mask
# into it only if there was one; the fast kernel needs none, and was then not told "causal", since
# it got the bias for a mask.
def doge(x: Array, is_mended: bool) -> Array:
    lowest = jnp.finfo(x.dtype).min
    gates = jnp.exp(jax.nn.softplus(x @ W[:, 0]))
    bias = jnp.broadcast_to(gates[:, None], (*gates.shape, gates.shape[1]))
    if is_mended:
        bias = jnp.where(tril(x), bias, lowest)
    smallest = lax.top_k(bias, min(3, x.shape[1]))[0][..., -1:]
    bias = jnp.where(bias >= smallest, bias, lowest)
    return jax.nn.softmax(scores_of(x) + bias) @ (x @ V)


# transformers#45820: the indexer of DeepSeek V4 chooses among all summaries of two positions, also
# those of later ones.
def indexed(x: Array, is_mended: bool) -> Array:
    batch, time, width = x.shape
    summaries = x[:, : time // 2 * 2].reshape(batch, -1, 2, width).mean(2)
    scores = (x @ W) @ summaries.mT
    if is_mended:
        last_of_summary = 2 * jnp.arange(time // 2) + 1
        scores = jnp.where(last_of_summary <= jnp.arange(time)[:, None], scores, -jnp.inf)
    smallest = lax.top_k(scores, 1)[0]
    chosen = jnp.where(scores >= smallest, scores, -jnp.inf)
    own = jnp.square(x).sum(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.concatenate([chosen, own], -1))
    return weights[..., :-1] @ summaries + weights[..., -1:] * x


# keras#23038: with `use_causal_mask` the fused kernel is told "causal", and no mask is made; with
# dropout or with scores returned the layer takes another path, which had no mask then.
def two_paths(x: Array, is_mended: bool) -> Array:
    q, k, v = ((x @ w)[:, :, None] for w in (W, V, W.T))
    without_dropout = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if is_mended:
        scores = jnp.where(tril(x), scores, -1e9)
    weights = jax.nn.softmax(scores)
    weights = weights * jax.random.bernoulli(KEYS[7], 0.9, weights.shape)
    with_dropout = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return (without_dropout + with_dropout)[:, :, 0]


# nanoGPT#331: with the kernel the loss is right, with the attention that is written out it falls
# too far. Its cause was not found there; this one masks an array which nothing reads.
def written_out(x: Array, is_mended: bool) -> Array:
    scores = scores_of(x)
    masked = jnp.where(tril(x), scores, -jnp.inf)
    if is_mended:
        scores = masked
    weights = jax.nn.softmax(scores)
    return weights @ (x @ V)


LEARNED = -1000 * jnp.eye(3)


# minGPT#75: a training drove scores below the number that stands for "masked".
def filled(x: Array, fill: float) -> Array:
    scores = jnp.where(tril(x), (x @ LEARNED) @ x.mT, fill)
    return jax.nn.softmax(scores) @ (x @ V)


BUGS: dict[str, tuple[Callable[[Array, bool], Array], str]] = {
    "transformers#48745": (of_padding, "return jax.nn.softmax(scores) @ (x @ V)"),
    "transformers#48748": (doge, "return jax.nn.softmax(scores_of(x) + bias) @ (x @ V)"),
    "transformers#45820": (
        indexed,
        "summaries = x[:, : time // 2 * 2].reshape(batch, -1, 2, width).mean(2)",
    ),
    "keras#23038": (two_paths, 'with_dropout = jnp.einsum("bhqk,bkhd->bqhd", weights, v)'),
    "nanoGPT#331": (written_out, "return weights @ (x @ V)"),
    "minGPT#75": (
        lambda x, is_mended: filled(x, -jnp.inf if is_mended else -1e3),
        "return jax.nn.softmax(scores) @ (x @ V)",
    ),
}
"""Each program, wrong or mended, and the line by which a later position comes in."""
