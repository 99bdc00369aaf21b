"""What the checks of lesson 21 call: each says what is wrong.

A measurement is made on random weights, and compared with what is right. If it
differs, it is compared with what common mistakes give, and the message names
the mistake.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jgpt

BATCH = 2
HEADS = 3
TIME = 14
PERIOD = 5

SAME_TOKEN = (
    "the weight on the same token in the copy before: look at the token after"
)
TWO_AFTER = "the weight two tokens after the same token: look one after it"
Mistakes = dict[str, Any]
"""What a mistake is, and the numbers that it gives."""


def problem_of_previous_score(score: Callable[..., Any]) -> str:
    """What is wrong with a previous-token score; an empty text if right."""
    weights = _random_weights()
    right = _on_diagonal(weights, 1)
    mistakes = {
        "the weight on the token itself: look one back": _on_diagonal(
            weights, 0
        ),
        "the weight two tokens back: look one back": _on_diagonal(weights, 2),
        "the weight on the next token, which is masked: the rows are queries, "
        "the columns are keys": _on_diagonal(weights.swapaxes(-2, -1), 1),
        "the weight on the first token of the text": weights[:, :, 1:, 0].mean(
            axis=(0, 2)
        ),
        "a sum over the queries: take their mean": right * (TIME - 1),
        "a mean that counts the first query, which has no token before it": (
            right * (TIME - 1) / TIME
        ),
    }
    return _difference(score(weights), right, mistakes)


def problem_of_prefix_score(score: Callable[..., Any]) -> str:
    """What is wrong with a prefix-matching score; an empty text if right."""
    weights = _random_weights()
    right = _on_diagonal(weights, PERIOD - 1, first_query=PERIOD)
    mistakes = {
        SAME_TOKEN: _on_diagonal(weights, PERIOD),
        # without the first entry of the diagonal, too
        f"{SAME_TOKEN} ": _on_diagonal(weights, PERIOD, PERIOD + 1),
        TWO_AFTER: _on_diagonal(weights, PERIOD - 2, PERIOD),
        f"{TWO_AFTER} ": _on_diagonal(weights, PERIOD - 2, PERIOD - 1),
        "a mean that counts a query of the first copy, whose token has no copy "
        "before it": _on_diagonal(weights, PERIOD - 1),
        "the second copy alone: later queries have a copy before them too": (
            _on_diagonal(weights[:, :, : 2 * PERIOD], PERIOD - 1, PERIOD)
        ),
        "a sum over the queries: take their mean": right * (TIME - PERIOD),
        "a mean that counts the queries of the first copy": (
            right * (TIME - PERIOD) / TIME
        ),
    }
    return _difference(score(weights, PERIOD), right, mistakes)


def problem_of_patch(
    patched: Callable[[str], Any],
    model: Any,
    tokens: Int[Array, "batch time"],
    head: int,
) -> str:
    """What is wrong with patched paths; an empty text if they're right.

    `patched(part)` is the model in which one of `query`, `key` and `value` of
    the second layer reads a stream without this head of the first layer.
    """
    for part in ("key", "query", "value"):
        path = f"layers.1.{part}"
        off = _without_head(model, head)
        right = _with_result(model, path, jgpt.capture(off, path)(tokens)[path])
        zeros = jgpt.edit(model, {path: jnp.zeros_like})
        mistakes = {
            "those of the model itself: nothing is replaced": model(tokens),
            "those of the model without the head: replace the "
            f"{part} alone, in the whole model": off(tokens),
            f"those of a model whose {part} is 0: replace it by what it is "
            "without the head": zeros(tokens),
        }
        for other in ("key", "query", "value"):
            if other != part:
                its_path = f"layers.1.{other}"
                found = jgpt.capture(off, its_path)(tokens)[its_path]
                instead = _with_result(model, its_path, found)
                name = f"those of a patched {other}: the part is {part}"
                mistakes[name] = instead(tokens)
        problem = _difference(patched(part)(tokens), right(tokens), mistakes)
        if problem:
            return f"patched({part!r}): {problem}"
    return ""


def _without_head(model: Any, head: int) -> Any:
    def off(heads: Float[Array, "batch heads time head_dim"]):
        return heads.at[:, head].set(0.0)

    return jgpt.edit(model, {"layers.0.attend_windowed": off})


def _with_result(model: Any, path: str, result: Array) -> Any:
    return jgpt.edit(model, {path: lambda _: result})


def _random_weights() -> Float[np.ndarray, "batch heads query key"]:
    """Causal weights of attention whose rows sum to 1."""
    shape = (BATCH, HEADS, TIME, TIME)
    scores = 2 * jax.random.normal(jax.random.key(0), shape)
    masked = jnp.where(jgpt.causal_mask(TIME), scores, -jnp.inf)
    return np.asarray(jax.nn.softmax(masked, axis=-1))


def _on_diagonal(
    weights: Float[np.ndarray, "batch heads query key"],
    back: int,
    first_query: int = 0,
) -> Float[np.ndarray, " heads"]:
    """The mean weight so many keys back, over the queries that have such."""
    queries = np.arange(max(first_query, back), weights.shape[2])
    return weights[:, :, queries, queries - back].mean(axis=(0, 2))


def _difference(found: Any, right: Any, mistakes: Mistakes) -> str:
    found = np.asarray(found)
    if found.shape != np.shape(right):
        return f"the result has the shape {found.shape}, not {np.shape(right)}"
    if np.allclose(found, right, atol=1e-4):
        return ""
    for name, values in mistakes.items():
        if np.allclose(found, values, atol=1e-4):
            return f"the values are {name.strip()}"
    apart = float(np.abs(found - right).max())
    return f"the values differ from the right ones by up to {apart:.2g}"
