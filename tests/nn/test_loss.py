"""The loss by hand, and tokens and targets outside the vocabulary."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgpt import cross_entropy
from jgpt.nn.layers import Embedding
from jgpt.nn.loss import (
    LOGITS_BYTES,
    bits_per_character,
    cross_entropy_from,
    rows_at_once,
    token_losses,
    token_losses_from,
)
from jgpt.nn.module import require_in_vocabulary
from jgpt.parallel.mesh import make_mesh
from tests.models import SIZES, compiled, normal, random_model


def test_a_shift_of_all_logits_changes_nothing_and_large_ones_are_finite():
    logits = jnp.array([[1000.0, 998.0]])
    targets = jnp.array([1])

    assert float(cross_entropy(logits, targets)) == pytest.approx(
        2 + math.log1p(math.exp(-2)), rel=1e-4
    )
    assert float(cross_entropy(-logits, targets)) == pytest.approx(
        math.log1p(math.exp(-2)), rel=1e-3
    )


def test_the_loss_of_bfloat16_logits_is_float32():
    # 1 + 2 ** -9 is not a bfloat16: a sum in it would be lost
    logits = jnp.array([[0.0, -math.log(512)]], jnp.bfloat16)
    loss = cross_entropy(logits, jnp.array([0]))
    assert loss.dtype == jnp.float32
    expected = math.log1p(math.exp(float(logits[0, 1])))
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_bits_per_character():
    assert bits_per_character(math.log(2), 1.0) == pytest.approx(1)
    assert bits_per_character(3 * math.log(2), 4.0) == pytest.approx(0.75)


BATCH, TIME, EMBED_DIM, VOCAB = 3, 7, 5, 11


def features(time=TIME, embed_dim=EMBED_DIM, vocab=VOCAB, batch=BATCH):
    """Features, targets, and the kernel and the bias of a head."""
    targets = jnp.asarray(np.random.default_rng(1).integers(vocab, size=(batch, time)))
    kernel = normal(2, embed_dim, vocab)
    bias = normal(3, vocab)
    return normal(0, batch, time, embed_dim), targets, kernel, bias


@pytest.mark.parametrize("at_once", [1, 6, 20, 22])
def test_in_chunks_the_loss_and_its_gradients_are_the_same(at_once):
    """Chunks of one position, of some with a rest, and all at once."""
    x, targets, kernel, bias = features()

    def plain(x, kernel, bias):
        return 3 * cross_entropy(x @ kernel + bias, targets)

    def chunked(x, kernel, bias):
        return 3 * cross_entropy_from(x, targets, lambda x: x @ kernel + bias, at_once)

    def everything(*head):
        pairs = [jax.value_and_grad(each, (0, 1, 2))(*head) for each in (chunked, plain)]
        x, kernel, bias = head
        losses = token_losses_from(x, targets, lambda x: x @ kernel + bias, at_once)
        return *pairs, chunked(*head), (losses, token_losses(x @ kernel + bias, targets))

    (loss, found), (expected, gradients), alone, losses = compiled(everything, x, kernel, bias)

    np.testing.assert_allclose([loss, alone], [expected] * 2, rtol=1e-6)
    for got, wanted in zip(found, gradients, strict=True):
        assert np.abs(got - wanted).max() < 1e-6 * np.abs(wanted).max()
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("function", [cross_entropy_from, token_losses_from])
def test_what_fits_is_not_cut_into_chunks(function):
    x, targets, kernel, _ = features()

    def loops(at_once):
        loss = jax.make_jaxpr(lambda x: function(x, targets, lambda x: x @ kernel, at_once))(x)
        return "scan[" in str(loss)

    assert [loops(BATCH * TIME + more) for more in (-1, 0, 1)] == [True, False, False]


def test_in_chunks_the_logits_are_never_held_together():
    """Features and logits of sizes that tell them apart in the compiler's sum."""
    x, targets, kernel, _ = features(time=64, embed_dim=8, vocab=4096, batch=4)
    logits = 4 * 64 * 4096 * 4

    def temporary(at_once):
        def loss(x, kernel):
            return cross_entropy_from(x, targets, lambda x: x @ kernel, at_once)

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, kernel).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(4 * 64) > logits
    assert temporary(16) < logits / 4


def test_few_logits_are_held_at_once():
    assert rows_at_once(65) * 65 * 4 > LOGITS_BYTES - 65 * 4
    assert rows_at_once(50257) * 50257 * 4 <= LOGITS_BYTES
    assert rows_at_once(1 << 40) == 1
    with jax.set_mesh(make_mesh("data=2,fsdp=2,tensor=2")):  # each device has a quarter of the rows
        shards = rows_at_once(50257)
        whole = LOGITS_BYTES // (4 * 50257)
    assert shards == 4 * whole


# --- tokens and targets outside the vocabulary ---------------------------------------------------

TOKENS = SIZES["vocab_size"]
OUTSIDE = [TOKENS, TOKENS + 1, 1000, -1, -TOKENS, -1000]


@pytest.mark.parametrize("token", OUTSIDE)
@pytest.mark.parametrize("family", ["nanogpt", "bigram"])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(family, token):
    model = random_model(family)
    tokens = jnp.array([[0] * 5, [0, 0, 0, token, -7]])
    where = f"{token} at batch index 1, position 3 is outside the vocabulary of 17: 0 to 16"
    for call in (model, model.hidden):
        with pytest.raises(ValueError, match=f"^token {where}$"):
            call(tokens)
    with pytest.raises(ValueError, match=f"^target {where}$"):
        cross_entropy(jnp.zeros((2, 5, TOKENS)), tokens)
    require_in_vocabulary(jnp.array([[0, TOKENS - 1]]), TOKENS)


def test_the_place_of_a_target_follows_its_axes_and_no_targets_have_no_mean():
    for targets, message in (
        (jnp.array(9), "target 9 at position 0 is outside"),
        (jnp.array([2, 9]), "target 9 at position 1 is outside"),
        (
            jnp.zeros((2, 3, 4), int).at[1, 2, 3].set(9),
            "target 9 at batch index 1, batch index 2, position 3 is outside",
        ),
        (jnp.zeros(0, int), "there are no targets"),
        (jnp.zeros((2, 0), int), "there are no targets"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(jnp.zeros((*targets.shape, 9)), targets)


def test_compiled_embedding_and_loss_treat_it_alike():
    """As documented: NaN outside; in an embedding negative tokens count from the end."""
    tokens = jnp.array(OUTSIDE)
    table = jnp.arange(1.0, TOKENS + 1)[:, None]
    embedding = Embedding(TOKENS, 1, rngs=nnx.Rngs(0))
    embedding.embedding[...] = table
    looked_up = jax.jit(lambda tokens: embedding(tokens)[:, 0])(tokens)
    losses = jax.vmap(lambda token: cross_entropy(-table[:, 0], token))(tokens)
    chosen = losses - jax.nn.logsumexp(-table)

    np.testing.assert_allclose(looked_up, [np.nan, np.nan, np.nan, TOKENS, 1, np.nan])
    np.testing.assert_allclose(chosen, [np.nan] * 6)


@pytest.mark.parametrize("target", [-100, -1, 101, 1000])
def test_a_compiled_loss_is_nan_for_a_target_outside_and_so_is_its_gradient(target):
    """PyTorch's mark of a target to ignore is a token of a vocabulary of 101, counted from the end.

    Nothing may be learned from it in silence.
    """
    logits = normal(0, 3, 101)
    targets = jnp.array([7, target, 100])

    def both(logits, targets):
        gradient = jax.grad(lambda logits: token_losses(logits, targets)[1])(logits)
        return token_losses(logits, targets), gradient

    losses, gradient = compiled(both, logits, targets)

    assert np.isnan(losses).tolist() == [False, True, False]  # and nothing else is
    assert np.isnan(gradient[1]).all()
    assert np.isnan(jax.jit(cross_entropy)(logits, targets))
    with pytest.raises(ValueError, match=f"^target {target} at position 1 is outside"):
        cross_entropy(logits, targets)
