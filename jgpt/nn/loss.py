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
    chosen = _target_logits(logits, targets)  # *rows
    # -log softmax(logits)[target], without an array of all the other log probabilities
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@typed
def _target_logits(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)  # *rows 1
    return chosen[..., 0]


@typed
def cross_entropy(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, ""]:
    """Return the mean negative log likelihood of the targets in nats, in at least float32.

    Raises ValueError without targets, and for one outside the vocabulary; under `jit`, where values
    aren't known, the loss is then NaN.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    return token_losses(logits, targets).mean()


def rows_at_once(vocab_size: int) -> int:
    """Return the rows of logits that a loss materialises at once, over all devices of the mesh
    set."""
    shards = shards_of("batch", current_mesh())  # each device has rows of its own
    rows = max(1, LOGITS_BYTES // (4 * vocab_size))  # float32 has 4 bytes
    return rows * shards


@typed
def token_losses_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    max_rows: int,
) -> Float[Array, "batch time"]:
    """`token_losses(head(x), targets)`, materialising at most `max_rows` rows of logits.

    For targets of a dataset, which are known to be in the vocabulary.
    """
    if targets.size <= max_rows:
        return _losses_of_known_targets(head(x), targets)

    def losses_of_chunk(chunk):
        x, targets = chunk
        return _losses_of_known_targets(head(x), targets)

    x_chunks, target_chunks, _ = _chunked(x, targets, max_rows)
    losses = jax.lax.map(losses_of_chunk, (x_chunks, target_chunks))  # chunks batch chunk
    flat = jnp.moveaxis(losses, 0, 1).reshape(x.shape[0], -1)  # batch chunks*chunk
    return flat[:, : targets.shape[1]]  # without padding of the last chunk


@typed
def cross_entropy_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    max_rows: int,
) -> Float[Array, ""]:
    """`cross_entropy(head(x), targets)`, materialising at most `max_rows` rows of logits.

    Fused linear cross entropy (Hsu et al. 2024): a chunk's gradient is computed with its loss, so
    its logits are neither kept nor recomputed for the backward pass. For targets of a dataset,
    which are known to be in the vocabulary.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    if targets.size <= max_rows:
        return _losses_of_known_targets(head(x), targets).mean()
    rows = targets.size
    x_chunks, target_chunks, is_counted = _chunked(x, targets, max_rows)
    # closed-over weights get a gradient only as arguments
    head, weights = jax.closure_convert(head, x_chunks[0])

    def chunk_loss(x, weights, targets, is_counted):
        losses = _losses_of_known_targets(head(x, *weights), targets)  # batch chunk
        return jnp.where(is_counted, losses, 0).sum() / rows

    # Forward, the gradients are computed with the loss and saved in place of the logits: the
    # backward pass only scales them.
    def forward(x_chunks, weights, target_chunks, is_counted):
        def add_chunk(weight_gradients, chunk):
            x, targets, is_counted = chunk  # batch chunk embed_dim; batch chunk; batch chunk
            loss_and_gradients = jax.value_and_grad(chunk_loss, argnums=(0, 1))
            loss, (x_gradient, gradients) = loss_and_gradients(x, weights, targets, is_counted)
            return jax.tree.map(jnp.add, weight_gradients, gradients), (loss, x_gradient)

        # in float32 also for 16-bit weights: small gradients would be lost in a large sum
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        weight_gradients, (losses, x_gradients) = jax.lax.scan(
            add_chunk, zeros, (x_chunks, target_chunks, is_counted)
        )
        return losses.sum(), (x_gradients, weight_gradients)

    def backward(gradients, cotangent):
        # by the chain rule: what the loss is multiplied by later is known only here
        def scale(gradient, primal):
            return (gradient * cotangent).astype(primal.dtype)

        x_gradients, weight_gradients = jax.tree.map(scale, gradients, (x_chunks, weights))
        return x_gradients, weight_gradients, None, None  # targets and mask have no gradient

    @jax.custom_vjp
    def loss(x_chunks, weights, target_chunks, is_counted):
        value, _ = forward(x_chunks, weights, target_chunks, is_counted)
        return value

    loss.defvjp(forward, backward)
    return loss(x_chunks, weights, target_chunks, is_counted)


@typed
def _chunked(
    x: Float[Array, "batch time embed_dim"], targets: Int[Array, "batch time"], max_rows: int
) -> tuple[
    Float[Array, "chunks batch chunk embed_dim"],
    Int[Array, "chunks batch chunk"],
    Bool[Array, "chunks batch chunk"],
]:
    """Return a batch cut along time into chunks of at most `max_rows` rows, and which of them are
    real.

    Along time, so that a batch sharded over devices stays sharded.
    """
    batch, time = targets.shape
    longest = max(1, max_rows // batch)
    chunks = -(-time // longest)  # rounded up
    size = -(-time // chunks)  # as few chunks, but of equal size: less of the last one is padding
    padding = chunks * size - time

    def cut(array):
        features = array.shape[2:]
        padded = jnp.pad(array, ((0, 0), (0, padding), *[(0, 0)] * len(features)))
        chunked = padded.reshape(batch, chunks, size, *features)
        return jnp.moveaxis(chunked, 1, 0)  # a scan goes over the first axis

    return cut(x), cut(targets), cut(jnp.ones_like(targets, bool))


def bits_per_character(loss: float, characters_per_token: float) -> float:
    """Return a loss in nats per token as bits per character of the text.

    Unlike a loss per token it can be compared between tokenizers.
    """
    return loss / (characters_per_token * math.log(2))
