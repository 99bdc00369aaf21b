"""Drawing the next token: how often each one is drawn, and which never are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.generation.sampling import Sampling, next_token

KEY = jax.random.key(8)


def drawn_tokens(logits, count, temperature=1.0, **sampling):
    """So many independent draws from one row of logits."""
    row = jnp.asarray(logits, jnp.float32)
    rows = jnp.tile(row, (count, 1))
    return np.asarray(next_token(rows, KEY, Sampling(temperature, **sampling)))


def probabilities(logits, count=20_000, **sampling):
    """How often each token is drawn."""
    drawn = drawn_tokens(logits, count, **sampling)
    return np.bincount(drawn, minlength=len(logits)) / count


def log_weights(weights):
    """Logits of such weights, where a weight of zero is a logit of minus infinity."""
    with np.errstate(divide="ignore"):
        return np.log(weights)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 1e-44}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
        # the nucleus is taken of what temperature and top_k have left
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
        # and so is the fraction of the likeliest: 1/16, 1, 1/4 and 9/16
        ({"temperature": 0.5, "min_p": 0.26}, [0, 16 / 25, 0, 9 / 25]),
        ({"top_k": 2, "min_p": 0.01}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(options, expected):
    logits = np.log([0.1, 0.4, 0.2, 0.3])

    drawn = probabilities(logits, **options)

    # of 20,000 draws, 0.015 is more than four standard deviations of any frequency
    np.testing.assert_allclose(drawn, expected, atol=0.015)
    # what is excluded is never drawn, which a tolerance would not notice
    excluded = np.array(expected) == 0
    assert (drawn[excluded] == 0).all()


@pytest.mark.parametrize(
    ("weights", "options", "kept"),
    [
        ([1, 1, 1, 1, 1], {"top_k": 1}, [0]),
        ([1, 2, 1, 2, 1], {"top_k": 3}, [0, 1, 3]),
        ([1, 1, 1, 1, 1], {"top_p": 0.3}, [0, 1]),
        ([0.3, 0.1, 0.1, 0.5, 0], {"top_p": 0.8}, [0, 3]),
        ([0, 1, 1, 1, 1], {"top_k": 3, "top_p": 0.5}, [1, 2]),
        # a fraction of the highest probability is no number of tokens: ties stay
        ([1, 4, 1, 4, 1], {"min_p": 1.0}, [1, 3]),
        ([1, 4, 1, 4, 1], {"temperature": 0}, [1]),
    ],
)
def test_of_equally_likely_tokens_the_first_are_kept(weights, options, kept):
    """`top_k` and `top_p` keep a number of tokens, however many have the last one's logit."""
    # the rarest token that is kept is one of ten: 500 draws without it do not happen
    drawn = drawn_tokens(log_weights(weights), 500, **options)

    assert np.unique(drawn).tolist() == kept


def test_each_of_many_tokens_is_drawn_as_often_as_it_should():
    """Over several blocks, the last of which is not full, and one of which is of no weight."""
    count = 200_000
    weights = np.random.default_rng(3).exponential(size=53) ** 2
    weights[14:28] = 0
    expected = weights / weights.sum()
    possible = expected > 0

    drawn = probabilities(log_weights(weights), count)

    assert (drawn[~possible] == 0).all()
    # within five standard deviations of a binomial distribution, for 39 tokens
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (abs(drawn - expected)[possible] < 5 * deviation[possible]).all()
    assert expected[-1] > 0.001  # of the last block, which is padded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "`temperature=-0.1` must be 0 or more"),
        ({"temperature": float("nan")}, "`temperature=nan` must be 0 or more"),
        ({"top_k": 0}, "`top_k=0` must be at least 1"),
        ({"top_p": 0.0}, r"`top_p=0.0` must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"`top_p=1.1` must be in \(0, 1\]"),
        ({"min_p": -0.1}, r"`min_p=-0.1` must be in \[0, 1\]"),
        ({"min_p": 1.5}, r"`min_p=1.5` must be in \[0, 1\]"),
    ],
)
def test_a_bad_parameter_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_under_jit_only_top_k_and_what_is_absent_make_another_program():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    programs: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_k": 2}, {"min_p": 0.1}]
    traces = []

    @jax.jit
    def sample(logits, sampling):
        traces.append(sampling)  # Python runs once for each program that is compiled
        return next_token(logits, KEY, sampling)

    for temperature in (0.5, 1.0):
        for options in programs:
            sampling = Sampling(temperature, **options)
            arrays = jax.tree.map(jnp.float32, sampling)
            sample(logits, arrays)

    assert len(traces) == 4
