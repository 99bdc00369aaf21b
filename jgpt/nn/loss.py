"""Cross entropy, whole or in chunks, and bits per character."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jgpt.nn.module import require_in_vocabulary
from jgpt.nn.precision import at_least_float32
from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import shards_of
from jgpt.shapes.contract import typed

LOGITS_BYTES = 1 << 30
"""The largest float32 logits that a loss materialises; beyond it computes in chunks."""

LanguageModelHead = Callable[
    [Float[Array, "batch time embed_dim"]], Float[Array, "batch time vocab"]
]
"""Hidden states to logits, as a model's `logits`."""


@typed
def token_losses(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Each target's negative log likelihood in nats, in at least float32.

    Raises ValueError for a target outside the vocabulary. Under `jit`, where values aren't known,
    its loss is NaN, and so is its gradient: PyTorch's -100 ignores nothing.
    """
    losses = _losses_of_known_targets(logits, targets)
    # A negative index counts from the end of an array: -100 would be a token of a large vocabulary.
    outside = (targets < 0) | (targets >= logits.shape[-1])
    return losses * jnp.where(outside, jnp.nan, jnp.ones_like(losses))


@typed
def _losses_of_known_targets(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """`token_losses` of targets from a dataset, which are in the vocabulary: nothing is masked."""
    require_in_vocabulary(targets, logits.shape[-1], "target")
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = _target_logits(logits, targets)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@typed
def _target_logits(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


@typed
def cross_entropy(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, ""]:
    """The mean negative log likelihood of the targets in nats, in at least float32.

    Raises ValueError without targets, and for one outside the vocabulary; under `jit`, where values
    aren't known, the loss is then NaN.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    return token_losses(logits, targets).mean()


def rows_at_once(vocab_size: int) -> int:
    """The rows of logits that a loss materialises at once, over all devices of the mesh set."""
    shards = shards_of("batch", current_mesh())
    return max(1, LOGITS_BYTES // (4 * vocab_size)) * shards


@typed
def token_losses_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    at_once: int,
) -> Float[Array, "batch time"]:
    """`token_losses(head(x), targets)`, materialising at most `at_once` rows of logits.

    For targets of a dataset, which are known to be in the vocabulary.
    """
    if targets.size <= at_once:
        return _losses_of_known_targets(head(x), targets)
    xs, parts, _ = _chunked(x, targets, at_once)
    losses = jax.lax.map(
        lambda chunk: _losses_of_known_targets(head(chunk[0]), chunk[1]), (xs, parts)
    )
    return jnp.moveaxis(losses, 0, 1).reshape(x.shape[0], -1)[:, : targets.shape[1]]


@typed
def cross_entropy_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    at_once: int,
) -> Float[Array, ""]:
    """`cross_entropy(head(x), targets)`, materialising at most `at_once` rows of logits.

    Fused linear cross entropy (Hsu et al. 2024): a chunk's gradient is computed with its loss, so
    its logits are neither kept nor recomputed for the backward pass. For targets of a dataset,
    which are known to be in the vocabulary.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    if targets.size <= at_once:
        return _losses_of_known_targets(head(x), targets).mean()
    rows = targets.size
    xs, parts, counts = _chunked(x, targets, at_once)
    # closed-over weights get a gradient only as arguments
    head, weights = jax.closure_convert(head, xs[0])

    def loss_of(x, weights, targets, counts):
        losses = _losses_of_known_targets(head(x, *weights), targets)
        return jnp.where(counts, losses, 0).sum() / rows

    def loss_and_gradients(xs, weights, parts, counts):
        def add(total, chunk):
            value, (of_x, of_weights) = jax.value_and_grad(loss_of, argnums=(0, 1))(
                chunk[0], weights, *chunk[1:]
            )
            return jax.tree.map(jnp.add, total, of_weights), (value, of_x)

        # in float32 also for 16-bit weights: small gradients would be lost in a large sum
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        of_weights, (values, of_xs) = jax.lax.scan(add, zeros, (xs, parts, counts))
        return values.sum(), (of_xs, of_weights)

    def gradients(saved, cotangent):
        scaled = jax.tree.map(
            lambda leaf, primal: (leaf * cotangent).astype(primal.dtype), saved, (xs, weights)
        )
        return *scaled, None, None

    differentiable = jax.custom_vjp(lambda *arrays: loss_and_gradients(*arrays)[0])
    differentiable.defvjp(loss_and_gradients, gradients)
    return differentiable(xs, weights, parts, counts)


@typed
def _chunked(
    x: Float[Array, "batch time embed_dim"], targets: Int[Array, "batch time"], at_once: int
) -> tuple[
    Float[Array, "chunks batch chunk embed_dim"],
    Int[Array, "chunks batch chunk"],
    Bool[Array, "chunks batch chunk"],
]:
    """A batch cut along time into chunks of at most `at_once` rows, and which of them are real.

    Along time, so that a batch sharded over devices stays sharded.
    """
    batch, time = targets.shape
    size = max(1, at_once // batch)
    chunks = -(-time // size)
    size = -(-time // chunks)  # balance the chunks
    padding = chunks * size - time

    def cut(array):
        padded = jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, chunks, size, *array.shape[2:]), 1, 0)

    return cut(x), cut(targets), cut(jnp.ones_like(targets, bool))


def bits_per_character(loss: float, characters_per_token: float) -> float:
    """A loss in nats per token as bits per character of the text."""
    return loss / (characters_per_token * math.log(2))
