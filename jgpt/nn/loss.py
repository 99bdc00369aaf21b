"""Cross entropy, computed at once or in chunks, and bits per character."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jgpt.nn.module import require_in_vocabulary
from jgpt.nn.precision import at_least_float32, wider_dtype
from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import shards_of
from jgpt.shapes.contract import typed

LOGITS_BYTES = 1 << 30
"""The largest float32 logits in bytes that a loss materialises; larger ones are computed in
chunks."""

LanguageModelHead = Callable[
    [Float[Array, "batch time embed_dim"]], Float[Array, "batch time vocab"]
]
"""A function from hidden states to logits, such as a model's `logits`."""


@typed
def token_losses(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Return each target's negative log likelihood in nats, in at least float32.

    Raises ValueError for a target outside the vocabulary. Under `jit`, where values are unknown,
    its loss and gradient are NaN instead. Unlike in PyTorch, a target of -100 is not ignored.
    """
    losses = _losses_of_known_targets(logits, targets)
    # A negative index counts from the end of an array: -100 would be a token of a large vocabulary.
    outside = (targets < 0) | (targets >= logits.shape[-1])
    return losses * jnp.where(outside, jnp.nan, jnp.ones_like(losses))


@typed
def _losses_of_known_targets(
    logits: Float[Array, "*rows vocab"], targets: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Return the `token_losses` of a dataset's targets, which are in the vocabulary, so none is
    masked."""
    require_in_vocabulary(targets, logits.shape[-1], "target")
    logits = logits.astype(wider_dtype(logits.dtype))
    chosen = _target_logits(logits, targets)  # *rows
    # This is -log softmax(logits)[target], without an array of all other log probabilities.
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

    Raises ValueError without targets, and for a target outside the vocabulary. Under `jit`, where
    values are unknown, the loss is NaN instead.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    return token_losses(logits, targets).mean()


def rows_at_once(vocab_size: int) -> int:
    """Return the rows of logits that a loss materialises at once, over all devices of the mesh."""
    shards = shards_of("batch", current_mesh())  # each device has its own rows
    rows = max(1, LOGITS_BYTES // (4 * vocab_size))  # float32 has 4 bytes
    return rows * shards


@typed
def token_losses_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    max_rows: int,
) -> Float[Array, "batch time"]:
    """Compute `token_losses(head(x), targets)`, materialising at most `max_rows` rows of logits.

    The targets must be in the vocabulary, as those of a dataset are.
    """
    if targets.size <= max_rows:
        return _losses_of_known_targets(head(x), targets)

    def losses_of_chunk(chunk):
        x, targets = chunk
        return _losses_of_known_targets(head(x), targets)

    x_chunks, target_chunks, _ = _chunked(x, targets, max_rows)
    losses = jax.lax.map(losses_of_chunk, (x_chunks, target_chunks))  # chunks batch chunk
    flat = jnp.moveaxis(losses, 0, 1).reshape(x.shape[0], -1)  # batch chunks*chunk
    return flat[:, : targets.shape[1]]  # without the padding of the last chunk


@typed
def cross_entropy_from(
    x: Float[Array, "batch time embed_dim"],
    targets: Int[Array, "batch time"],
    head: LanguageModelHead,
    max_rows: int,
) -> Float[Array, ""]:
    """Compute `cross_entropy(head(x), targets)`, materialising at most `max_rows` rows of logits.

    This is fused linear cross entropy (Hsu et al. 2024): a chunk's gradient is computed with its
    loss, so its logits are neither stored nor recomputed for the backward pass. The targets must be
    in the vocabulary, as those of a dataset are.
    """
    if targets.size == 0:
        raise ValueError("there are no targets, so their mean loss is undefined")
    if targets.size <= max_rows:
        return _losses_of_known_targets(head(x), targets).mean()
    rows = targets.size
    x_chunks, target_chunks, is_counted = _chunked(x, targets, max_rows)
    # Closed-over weights get a gradient only as arguments.
    head, weights = jax.closure_convert(head, x_chunks[0])

    def chunk_loss(x, weights, targets, is_counted):
        losses = _losses_of_known_targets(head(x, *weights), targets)  # batch chunk
        return jnp.where(is_counted, losses, 0).sum() / rows

    # The forward pass computes the gradients with the loss and stores them in place of the logits;
    # the backward pass only scales them.
    def forward(x_chunks, weights, target_chunks, is_counted):
        def add_chunk(weight_gradients, chunk):
            x, targets, is_counted = chunk  # batch chunk embed_dim; batch chunk; batch chunk
            loss_and_gradients = jax.value_and_grad(chunk_loss, argnums=(0, 1))
            loss, (x_gradient, gradients) = loss_and_gradients(x, weights, targets, is_counted)
            gradients = jax.tree.map(at_least_float32, gradients)
            return jax.tree.map(jnp.add, weight_gradients, gradients), (loss, x_gradient)

        # In float32 even for 16-bit weights, since small gradients would vanish in a large sum.
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(at_least_float32(leaf)), weights)
        weight_gradients, (losses, x_gradients) = jax.lax.scan(
            add_chunk, zeros, (x_chunks, target_chunks, is_counted)
        )
        return losses.sum(), (x_gradients, weight_gradients)

    def backward(gradients, cotangent):
        # The chain rule: the factor of the loss is known only in the backward pass.
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
    """Cut a batch along time into chunks of at most `max_rows` rows; also return which rows are
    real.

    The cut is along time, so that a batch sharded over devices stays sharded.
    """
    batch, time = targets.shape
    longest = max(1, max_rows // batch)
    chunks = -(-time // longest)  # rounded up
    # equal sizes for the same number of chunks, so that the last has little padding
    size = -(-time // chunks)
    padding = chunks * size - time

    def cut(array):
        features = array.shape[2:]  # none, for targets
        of_features = [(0, 0)] * len(features)
        padded = jnp.pad(array, ((0, 0), (0, padding), *of_features))
        chunked = padded.reshape(batch, chunks, size, *features)
        return jnp.moveaxis(chunked, 1, 0)  # a scan goes over the first axis

    return cut(x), cut(targets), cut(jnp.ones_like(targets, bool))


def bits_per_character(loss: float, characters_per_token: float) -> float:
    """Convert a loss in nats per token to bits per character of the text.

    Unlike a loss per token, it can be compared between tokenizers.
    """
    return loss / (characters_per_token * math.log(2))
