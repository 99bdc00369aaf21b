"""What generation, the page and the loss cost: arrays donated, programs compiled, rows computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt import CharTokenizer, generate
from jgpt.generation import decoding
from jgpt.nn.loss import cross_entropy_from, token_losses_from
from jgpt.page.numbers import Look
from tests.models import normal, random_gpt


@pytest.fixture
def draws(monkeypatch) -> list[dict[str, Any]]:
    """Of each call that draws, the positions in its cache, and which arrays were taken over."""
    calls: list[dict[str, Any]] = []
    compiled_draw = decoding._compiled_draw

    def noted(weights, window, length, cache, *others, **options):
        large = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim == 3]
        result = compiled_draw(weights, window, length, cache, *others, **options)
        donated = [leaf.is_deleted() for leaf in large]
        calls.append({"capacities": {leaf.shape[1] for leaf in large}, "donated": donated})
        return result

    monkeypatch.setattr(decoding, "_compiled_draw", noted)
    return calls


def test_the_cache_is_taken_over_and_not_copied(draws):
    model = random_gpt("nanogpt", num_layers=2)
    generate(model, jnp.ones((1, 3), jnp.int32), 2, key=jax.random.key(0))
    assert [call["donated"] for call in draws] == [[True] * 4]  # keys and values of two layers


def test_a_cache_is_no_larger_than_a_short_text_needs(draws):
    model = random_gpt("nanogpt", num_layers=1, block_size=256)
    generate(model, jnp.ones((1, 3), jnp.int32), 2, key=jax.random.key(0))
    generate(model, jnp.ones((1, 60), jnp.int32), 5, key=jax.random.key(0))
    assert [call["capacities"] for call in draws] == [{32}, {64}]


def test_the_next_call_is_dispatched_before_the_tokens_of_the_last_one_are_waited_for():
    events = []

    class Drawn:
        def __init__(self, number: int) -> None:
            self.number = number

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            events.append(f"waited {self.number}")
            return np.zeros((1, 3), np.int32)

    def calls():
        for number in range(3):
            events.append(f"dispatched {number}")
            yield Drawn(number), True, 2

    assert len(list(decoding._read_calls(calls()))) == 3
    assert events[:4] == ["dispatched 0", "dispatched 1", "waited 0", "dispatched 2"]
    assert events[4:] == ["waited 1", "waited 2"]


def test_a_page_compiles_once_for_all_short_texts():
    model = random_gpt("nanogpt", block_size=32, num_layers=1)
    page: Any = Look(model, CharTokenizer("\n !/<>abceiprst\u20ac\U0001f642"), "run")
    for length in (3, 5, 16):
        page.log_probabilities([1] * length, page.weights)

    assert page.program._cache_size() == 1


@pytest.mark.parametrize(
    ("at_once", "time"), [(1, 1), (6, 2), (8, 2), (15, 4), (20, 4), (21, 7), (99, 7)]
)
@pytest.mark.parametrize("function", [cross_entropy_from, token_losses_from])
def test_a_loss_computes_logits_of_as_few_rows_as_it_may(function, at_once, time):
    """Of 3 rows and 7 positions: in chunks of one size, with no more padding than they need."""
    computed = set()
    kernel = normal(1, 5, 11)

    def head(x):
        computed.add(x.shape[:2])
        return x @ kernel

    targets = jnp.zeros((3, 7), jnp.int32)
    jax.eval_shape(lambda x: function(x, targets, head, at_once), normal(0, 3, 7, 5))

    assert computed == {(3, time)}
