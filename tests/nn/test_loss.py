"""The loss by hand, and tokens and targets outside the vocabulary."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import cross_entropy
from jgpt.nn.layers import Embedding
from jgpt.nn.loss import bits_per_character, cross_entropy_from, token_losses, token_losses_from
from jgpt.nn.module import require_in_vocabulary
from tests.models import SIZES, compiled, normal, random_model


def test_a_shift_of_all_logits_changes_nothing_and_large_ones_are_finite():
    logits = jnp.array([[1000.0, 998.0]])
    targets = jnp.array([1])
    # what the other token adds to the logarithm of the sum
    rest = math.log1p(math.exp(-2))

    below = cross_entropy(logits, targets)
    above = cross_entropy(-logits, targets)

    assert float(below) == pytest.approx(2 + rest, rel=1e-4)
    assert float(above) == pytest.approx(rest, rel=1e-3)


def test_bits_per_character():
    assert bits_per_character(math.log(2), 1.0) == pytest.approx(1)
    assert bits_per_character(3 * math.log(2), 4.0) == pytest.approx(0.75)


BATCH = 3
TIME = 7
EMBED_DIM = 5
VOCAB = 11


def features(time=TIME, embed_dim=EMBED_DIM, vocab=VOCAB, batch=BATCH):
    """Features, targets, and the kernel and the bias of a head."""
    random = np.random.default_rng(1)
    targets = jnp.asarray(random.integers(vocab, size=(batch, time)))
    x = normal(0, batch, time, embed_dim)
    kernel = normal(2, embed_dim, vocab)
    bias = normal(3, vocab)
    return x, targets, kernel, bias


@pytest.mark.parametrize("at_once", [1, 6, 20, 22])
def test_in_chunks_the_loss_and_its_gradients_are_the_same(at_once):
    """Chunks of one position, of some with a rest, and all at once."""
    x, targets, kernel, bias = features()

    # three times the loss: a gradient that begins at 1 wouldn't show whether it is multiplied
    def plain(x, kernel, bias):
        logits = x @ kernel + bias
        return 3 * cross_entropy(logits, targets)

    def chunked(x, kernel, bias):
        loss = cross_entropy_from(x, targets, lambda x: x @ kernel + bias, at_once)
        return 3 * loss

    def everything(x, kernel, bias):
        arguments = (x, kernel, bias)
        logits = x @ kernel + bias
        return {
            "plain with gradients": jax.value_and_grad(plain, (0, 1, 2))(*arguments),
            "chunked with gradients": jax.value_and_grad(chunked, (0, 1, 2))(*arguments),
            "chunked without gradients": chunked(*arguments),
            "losses": token_losses(logits, targets),
            "chunked losses": token_losses_from(x, targets, lambda x: x @ kernel + bias, at_once),
        }

    results = compiled(everything, x, kernel, bias)

    expected, expected_gradients = results["plain with gradients"]
    loss, gradients = results["chunked with gradients"]
    loss_alone = results["chunked without gradients"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(loss_alone, expected, rtol=1e-6)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
    np.testing.assert_allclose(results["chunked losses"], results["losses"], rtol=1e-5)


# --- tokens and targets outside the vocabulary ---------------------------------------------------

TOKENS = SIZES["vocab_size"]
OUTSIDE = [TOKENS, TOKENS + 1, 1000, -1, -TOKENS, -1000]


@pytest.mark.parametrize("token", OUTSIDE)
@pytest.mark.parametrize("family", ["nanogpt", "bigram"])
def test_a_token_outside_the_vocabulary_is_rejected_with_its_place(family, token):
    model = random_model(family)
    tokens = jnp.array(
        [
            [0, 0, 0, 0, 0],
            [0, 0, 0, token, -7],  # only the first of two is named
        ]
    )
    logits = jnp.zeros((2, 5, TOKENS))
    where = f"{token} at batch index 1, position 3 is outside the vocabulary of 17: 0 to 16"

    for call in (model, model.hidden):
        with pytest.raises(ValueError, match=f"^token {where}$"):
            call(tokens)
    with pytest.raises(ValueError, match=f"^target {where}$"):
        cross_entropy(logits, tokens)

    first_and_last = jnp.array([[0, TOKENS - 1]])
    require_in_vocabulary(first_and_last, TOKENS)


def test_a_compiled_embedding_is_nan_for_a_token_outside():
    """As documented: negative tokens count from the end."""
    values = jnp.arange(1.0, TOKENS + 1)
    embedding = Embedding(TOKENS, 1, rngs=nnx.Rngs(0))
    embedding.embedding[...] = values[:, None]

    looked_up = compiled(embedding, jnp.array(OUTSIDE))

    nan = np.nan
    np.testing.assert_allclose(looked_up[:, 0], [nan, nan, nan, TOKENS, 1, nan])


@pytest.mark.parametrize("target", [-100, -1, 101, 1000])
def test_a_compiled_loss_is_nan_for_a_target_outside_and_so_is_its_gradient(target):
    """PyTorch's mark of a target to ignore is a token of a vocabulary of 101, counted from the end.

    Nothing may be learned from it in silence.
    """
    logits = normal(0, 3, 101)
    targets = jnp.array([7, target, 100])

    def second_loss(logits, targets):
        return token_losses(logits, targets)[1]

    def losses_and_gradient(logits, targets):
        losses = token_losses(logits, targets)
        mean = cross_entropy(logits, targets)
        gradient = jax.grad(second_loss)(logits, targets)
        return losses, mean, gradient

    losses, mean, gradient = compiled(losses_and_gradient, logits, targets)

    assert np.isnan(losses).tolist() == [False, True, False]  # and nothing else is
    assert np.isnan(mean)
    assert np.isnan(gradient[1]).all()
    with pytest.raises(ValueError, match=f"^target {target} at position 1 is outside"):
        cross_entropy(logits, targets)


def test_in_chunks_the_logits_are_never_held_together():
    """Features and logits of sizes that tell them apart in the compiler's sum."""
    x, targets, kernel, _ = features(time=64, embed_dim=8, vocab=4096, batch=4)
    positions = 4 * 64
    logits_bytes = positions * 4096 * 4

    def temporary_bytes(at_once):
        def loss(x, kernel):
            return cross_entropy_from(x, targets, lambda x: x @ kernel, at_once)

        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        program = step.lower(x, kernel).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(positions) > logits_bytes
    assert temporary_bytes(16) < logits_bytes / 4
