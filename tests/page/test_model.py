"""The page's own record of a text is that of JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgpt.generation.decoding import generate
from jgpt.nn.int8 import quantise
from jgpt.page.model import page_model
from jgpt.page.numbers import Look
from jgpt.page.weights import pack_weights
from tests.javascript import needs_javascript, run_model, run_unpacking
from tests.models import random_model
from tests.page.records import Changes, record_of
from tests.page.test_program import TOKENIZER, TOKENS, look_of
from tests.quick import only

OTHER = "tab <tip"


@functools.cache
def described(name: str) -> dict[str, Any]:
    return page_model(look_of(name))


def records_of(name: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    return run_model(described(name), look_of(name).named_weights(), requests)


def values_of(array: dict[str, Any]) -> np.ndarray:
    """The numbers of an array in a record of the page."""
    return np.array(array["numbers"], np.float32).reshape(array["shape"])


def assert_close_values(found: dict[str, Any], wanted: np.ndarray) -> None:
    """Within a part of the largest number."""
    tolerance = 1e-5 * max(1.0, abs(wanted).max())
    np.testing.assert_allclose(values_of(found), wanted, rtol=0, atol=tolerance)


NUMBERS = ("vocab_size", "block_size", "window", "prompt", "tokens", "candidates", "next_ranks")
EXACT = ("name", *NUMBERS, "blocks", "layers", "heads")


def assert_close(found: Any, wanted: Any, key: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5, err_msg=key)


def assert_same_record(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in EXACT:
        assert found[key] == wanted[key], key
    for key in ("log_probabilities", "next_log_probabilities"):
        assert_close(found[key], wanted[key], key)

    tokens, log_probabilities = found["last"]
    wanted_tokens, wanted_log_probabilities = wanted["last"]
    assert tokens == wanted_tokens
    assert_close(log_probabilities, wanted_log_probabilities, "last")

    for key in ("before", "attention", "products"):
        assert (found[key] is None) == (wanted[key] is None), key
    if wanted["before"] is not None:
        assert found["before"].keys() == wanted["before"].keys()
        for key, numbers in wanted["before"].items():
            assert_close(found["before"][key], numbers, key)
    if wanted["attention"] is not None:
        assert_close_values(found["attention"], wanted["attention"])
    if wanted["products"] is not None:
        assert found["products"]["scale"] == pytest.approx(wanted["products"]["scale"])
        for key in ("query", "key"):
            assert_close_values(found["products"][key], wanted["products"][key])

    for array, wanted_array in zip(found["arrays"], wanted["arrays"], strict=True):
        for key in ("name", "path", "dimensions", "sizes"):
            assert list(array[key]) == list(wanted_array[key]), (key, array["name"])
        assert_close_values(array["values"], wanted_array["values"])


@pytest.mark.slow
@needs_javascript
@pytest.mark.parametrize(
    "name", only(["default preset"], ["default preset", "qwen3", "bigram", "one's own"])
)
def test_the_record_is_that_of_python(name):
    look = look_of(name)
    # a bigram model's block has one token
    tokens: list[int] = list(TOKENS[: look.model.block_size])
    asked: list[tuple[dict[str, Any], Changes]] = [
        ({"tokens": tokens, "prompt": 3}, Changes()),
        ({"tokens": tokens[:1]}, Changes()),
    ]
    if look.anatomy.blocks:
        scales = {"heads": [[0, 1, 0.0], [1, 2, 2.0]], "blocks": [[0, 0.5]]}
        scaled = Changes(heads={(0, 1): 0.0, (1, 2): 2.0}, blocks={0: 0.5})
        other = {"layer": 1, "position": 2, "tokens": TOKENIZER.encode(OTHER).tolist()}
        asked.append(({"tokens": tokens, "changes": scales}, scaled))
        patched = Changes(patch=(1, 2, OTHER))
        asked.append(({"tokens": tokens, "changes": {"patch": other}}, patched))

    records = records_of(name, *(request for request, _ in asked))

    for record, (request, change) in zip(records, asked, strict=True):
        assert "error" not in record, record
        prompt = request.get("prompt", len(request["tokens"]))
        assert_same_record(record, record_of(look, request["tokens"], prompt, change))
    if look.anatomy.blocks:
        with pytest.raises(AssertionError):
            assert_same_record(records[0], record_of(look, tokens, 3, asked[2][1]))


@needs_javascript
def test_a_request_that_can_t_be_computed_says_why():
    patch = {"layer": 0, "position": 2, "tokens": [1, 2]}

    records = records_of(
        "default preset",
        {"tokens": []},
        {"tokens": [1] * 12},
        {"tokens": [1, 17]},
        {"tokens": [1, 2, 3], "changes": {"patch": patch}},
        {"tokens": [1, 2], "changes": {"patch": patch | {"tokens": [1, 2, 3]}}},
        {"tokens": [1], "gradient": True},
        {"tokens": [1, 2]},
    )

    assert [record.get("error") for record in records] == [
        "the prompt is empty: give at least one character",
        "the prompt has 12 tokens, more than the block of 11",
        "token 17 is not in the vocabulary of 17",
        "the other prompt has 2 tokens: a patch at position 2 needs at least 3",
        "the text has no token at position 2",
        "a gradient needs a second token: the loss is its",
        None,
    ]


@needs_javascript
@pytest.mark.parametrize("name", only(["default preset"], ["default preset", "one's own"]))
def test_a_text_is_written_on_with_the_tokens_of_generate(name):
    look = look_of(name)
    prompt = list(TOKENS[:4])
    room = look.model.block_size - len(prompt)
    draws: list[dict[str, Any]] = [
        {"seed": 5, "count": 99, "temperature": 0.8},
        {"seed": 6, "count": 99, "temperature": 0.8},
        {"seed": 5, "count": 3, "temperature": 0},
        {"seed": 3, "count": 7, "temperature": 1.3, "min_p": 0.4},
        {"seed": 3, "count": 7, "temperature": 1.3, "top_k": 5, "top_p": 0.8},
    ]

    found = records_of(name, *({"tokens": prompt, **options} for options in draws))

    assert found[0] != found[1]
    for tokens, options in zip(found, draws, strict=True):
        key = jax.random.key(options.pop("seed"))
        count = min(options.pop("count"), room)
        expected = generate(look.model, jnp.asarray(prompt)[None], count, key=key, **options)
        assert tokens == expected[0, len(prompt) :].tolist()


@needs_javascript
def test_packed_weights_are_unpacked_in_javascript():
    weights = {
        "0/a": np.linspace(-2, 3, 7, dtype=np.float32),
        "0/b": np.arange(-3, 3, dtype=np.int8).reshape(2, 3),
        "0/same": np.linspace(-2, 3, 7, dtype=np.float32),
        "0/wide": np.array([1e30, -1.0], np.float32),
    }
    full = pack_weights(weights)
    small = pack_weights(weights, most_full_bytes=10)

    for packed, relative in ((full, 0.0), (small, 4e-3)):
        unpacked_weights = run_unpacking(packed.as_data())
        assert unpacked_weights.keys() == weights.keys()
        for name, (dtype, shape, numbers) in unpacked_weights.items():
            assert dtype == weights[name].dtype.name
            assert tuple(shape) == weights[name].shape
            expected = weights[name].ravel()
            np.testing.assert_allclose(numbers, expected, rtol=relative, atol=relative / 10)
            np.testing.assert_array_equal(numbers, packed.unpacked[name].ravel())
    assert [row["start"] for row in full.table] == [0, 28, 0, 36]  # equal arrays are stored once
    assert [row["stored"] for row in small.table] == ["float16", "int8", "float16", "bfloat16"]
    assert full.precision == "int8"


@needs_javascript
def test_large_weights_are_in_int8_with_scales_as_those_of_the_command(monkeypatch):
    monkeypatch.setattr("jgpt.page.weights.FEWEST_QUANTISED", 12)
    random = np.random.default_rng(3)
    spread = np.exp(random.standard_normal(5)).astype(np.float32)  # of each output feature
    weights = {
        "0/layer/kernel": random.standard_normal((3, 5)).astype(np.float32) * spread,
        "0/table/embedding": random.standard_normal((5, 3)).astype(np.float32) * spread[:, None],
        "0/layers/kernel": random.standard_normal((2, 3, 5)).astype(np.float32) * spread,
        "0/small/kernel": random.standard_normal((2, 5)).astype(np.float32),
        "0/bias": random.standard_normal(15).astype(np.float32),
    }
    packed = pack_weights(weights, most_full_bytes=10, most_half_bytes=10)
    found = run_unpacking(packed.as_data())

    assert packed.precision == "int8"
    stored = [row["stored"] for row in packed.table]
    assert stored == ["int8", "int8", "int8", "float16", "float16"]
    for name, array in packed.unpacked.items():
        np.testing.assert_array_equal(found[name][2], array.ravel())
    rows, scales = quantise(jnp.asarray(weights["0/layer/kernel"].T))
    expected = (rows * scales[:, None]).T
    np.testing.assert_array_equal(packed.unpacked["0/layer/kernel"], expected)
    rows, scales = quantise(jnp.asarray(weights["0/table/embedding"]))
    np.testing.assert_array_equal(packed.unpacked["0/table/embedding"], rows * scales[:, None])
    stacked = weights["0/layers/kernel"]
    for index in range(2):
        (alone,) = pack_weights({"0/kernel": stacked[index]}, 10, 10).unpacked.values()
        np.testing.assert_array_equal(packed.unpacked["0/layers/kernel"][index], alone)


@needs_javascript
def test_every_array_has_its_gradient():
    predictions = len(TOKENS) - 1

    (record,) = records_of("default preset", {"tokens": list(TOKENS), "gradient": True})

    log_probabilities = np.array(record["next_log_probabilities"][-1])
    assert record["loss"] == pytest.approx(-log_probabilities.mean(), rel=1e-5)
    for array in record["arrays"]:
        gradient = values_of(array["gradient"])
        assert gradient.shape == values_of(array["values"]).shape
    logits = record["arrays"][-1]
    scores = values_of(logits["values"])[:, 0]
    # Softmax minus one-hot, over the number of predictions.
    exponentials = np.exp(scores)
    expected = exponentials / exponentials.sum(-1, keepdims=True)
    expected[np.arange(predictions), TOKENS[1:]] -= 1
    expected[-1] = 0
    gradient = values_of(logits["gradient"])[:, 0]
    np.testing.assert_allclose(gradient, expected / predictions, rtol=0, atol=1e-6)


@needs_javascript
def test_a_record_doesn_t_depend_on_the_texts_before_it():
    """The worker remembers programs and the predictions of the last text."""
    tokens = list(TOKENS)
    other = TOKENIZER.encode(OTHER).tolist()
    requests = [
        {"tokens": tokens[:6]},
        {"tokens": tokens[:7]},
        {"tokens": [*tokens[:3], 5, *tokens[3:6]]},
        {"tokens": tokens[:6], "changes": {"heads": [[1, 2, 0.0]]}},
        {"tokens": tokens[:6], "changes": {"patch": {"layer": 0, "position": 4, "tokens": other}}},
        {"tokens": tokens[1:], "gradient": True},
        {"tokens": tokens},
    ]

    records = records_of("default preset", *requests)
    in_reverse = records_of("default preset", *reversed(requests))

    assert not any("error" in record for record in records)
    assert records == in_reverse[::-1]
    assert records[0]["log_probabilities"] != records[3]["log_probabilities"]


@needs_javascript
def test_hidden_arrays_have_no_numbers_and_are_finite_all_the_same():
    look = look_of("default preset")
    request: dict[str, Any] = {"tokens": list(TOKENS)}
    (shown,) = records_of("default preset", request)
    paths = [array["path"] for array in shown["arrays"]]
    hidden = paths[3]
    weights = {path: np.array(array) for path, array in look.named_weights().items()}
    weights["0/head/kernel"][0, 0] = np.inf  # the logits', which no map of attention depends on

    (without,) = records_of("default preset", request | {"hidden": [hidden]})
    (diverged,) = run_model(described("default preset"), weights, [request | {"hidden": paths}])

    for array, other in zip(without["arrays"], shown["arrays"], strict=True):
        values = other["values"]
        if array["path"] == hidden:
            values = None
        assert array == other | {"values": values}
    assert 0 < paths.count(hidden) < len(paths)
    assert diverged == {"error": "the forward pass is not finite: the model has diverged"}


@needs_javascript
def test_axes_of_windows_are_not_read_as_tokens():
    """Local attention cuts a text into blocks of a window, here into 16 / 3 rounded up."""
    config = {"attention_window": 3, "block_size": 16, "vocab_size": TOKENIZER.vocab_size}
    look = Look(random_model("qwen3", **config), TOKENIZER, "a window")
    texts = [list(TOKENS[:7]), list(TOKENS[:7]) * 2 + [1, 2]]
    requests = [{"tokens": tokens} for tokens in texts]

    records = run_model(page_model(look), look.named_weights(), requests)

    for record, tokens in zip(records, texts, strict=True):
        assert "error" not in record, record
        assert_same_record(record, record_of(look, tokens))


@needs_javascript
def test_writing_on_with_the_cache_draws_the_tokens_of_whole_passes():
    """A factor of 1.000001 is a change, so that the text is read again for each token."""
    prompt = list(TOKENS[:4])
    request = {"tokens": prompt, "count": 7, "temperature": 0.8, "seed": 5}
    unchanged = {"heads": [[0, 1, 1.0]]}
    nearly = {"heads": [[0, 1, 1.0 + 1e-6]]}
    changed = {"heads": [[0, 0, 0.0], [0, 1, 0.0], [1, 0, 0.0], [1, 1, 0.0]]}

    cached, whole, other = records_of(
        "default preset",
        request | {"changes": unchanged},
        request | {"changes": nearly},
        request | {"changes": changed},
    )

    assert cached == whole
    assert other != whole
