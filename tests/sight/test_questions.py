"""What one is told: what is proven, which way an input takes, and what can't be asked."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import pallas as pl

import jgpt
from tests.commands import jgpt as command
from tests.commands import worked
from tests.sight.programs import FLOAT_MASK, MIXING, attend

Array = jax.Array


def test_the_lengths_that_are_proven_are_told_and_no_others() -> None:
    def shorter_than_6(x: Array) -> Array:
        if x.shape[1] > 5:
            raise ValueError(f"{x.shape[1]} is more than 5")
        return attend()(x)

    def proven(function: Any, **sizes: Any) -> str:
        return str(jgpt.prove(function, "float32[b t 3]", causal="t", **sizes)).splitlines()[0]

    some = {"t": [1, 2, 3, 7, 9, 10]}
    backwards = proven(lambda x: x[:, ::-1], sizes={"t": 4})
    assert backwards == "not proven: output 0 can depend on input 2"
    assert proven(attend(), sizes={"t": 4}) == "proven for t = 4"
    assert proven(attend(), sizes=some) == "proven for t = 1 to 3, 7 and 9 to 10"
    assert proven(jnp.negative) == "proven for t = 1 to 64"
    refusing = proven(shorter_than_6)
    assert refusing == "proven for t = 1 to 5; it refuses t = 6: 6 is more than 5"


def test_a_way_goes_from_the_output_to_the_input() -> None:
    def program(x: Array) -> Array:
        early = x[:, ::-1]
        late = jnp.exp(early)
        return late + x

    text = str(jgpt.prove(program, "float32[b t 3]", causal="t"))

    assert text.startswith(
        "not proven: output 0 can depend on input 4\n  along t, at b = 2, t = 5\n"
    )
    assert re.search(r"it comes in at rev +test_questions\.py:\d+: early = x\[:, ::-1\]", text)
    ways = text.partition("from the output to the input:\n")[2].splitlines()
    names = [way.split("[")[0].strip() for way in ways]
    assert names == ["add", "exp", "rev", "input at"]
    assert ways[-1].strip() == "input at [0,4,0]"


def test_what_is_known_and_assumed_is_told() -> None:
    mask = np.tril(np.ones((9, 9), bool))

    def with_numpy(x: Array) -> Array:
        return attend(lambda x: mask[: x.shape[1], : x.shape[1]], fill=-1e9)(x)

    proof = jgpt.prove(with_numpy, "float32[b t 3]", causal="t", sizes={"t": 5})

    assert "unmasked scores are below 6.763e+07 in size" in proof.assumptions
    assert "arrays of the closure keep their values: bool[5,5]" in proof.assumptions


def test_a_proof_that_rests_on_a_mask_made_by_data_says_so_at_once() -> None:
    def by_data(x: Array) -> Array:
        is_text = x[..., 0] > 0
        scores = jnp.where(is_text[:, None] & jgpt.causal_mask(x.shape[1]), x @ x.mT, -1e9)
        return jax.nn.softmax(scores) @ x

    proof = jgpt.prove(by_data, "float32[b t 3]", causal="t", sizes={"t": 5})

    assert str(proof).splitlines()[0] == (
        "proven for t = 5, if each row of a mask that data makes keeps an entry"
    )


def printing(x: Array) -> Array:
    jax.debug.print("{}", x.sum())
    return x


def in_place(x: Array) -> Array:
    ref = jax.new_ref(x)
    ref[...] = 2 * x
    return ref[...]


@pytest.mark.parametrize(
    ("function", "array", "options", "message"),
    [
        (lambda x: None, "float32[b t]", {"causal": "t"}, "the function returns no array"),
        (jnp.sum, "float32[b t]", {"causal": "t"}, "output 0 has no axis t, but the shape []"),
        (jnp.cumsum, "float32[b t]", {"causal": "q"}, "no array has an axis 'q', such as"),
        (jnp.negative, "float32[t t]", {"causal": "t"}, "an array has two axes 't'"),
        (jnp.negative, "float32[b t]", {"sizes": {"t": 3}}, "`sizes` needs `causal` or `separate`"),
        (printing, "float32[b t]", {"causal": "t"}, "the function has side effects"),
        (in_place, "float32[b t]", {"causal": "t"}, "changes an array in place"),
        (
            linen.Dense(3),
            "float32[b t 3]",
            {"causal": "t"},
            "a Linen module has no weights of its own: give functools.partial(module.apply,",
        ),
    ],
)
def test_what_can_t_be_asked_is_refused(
    function: Callable[..., Any], array: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        jgpt.prove(function, array, **options)


PEEK = """
import jgpt


class Peek(jgpt.GPT):
    def hidden(self, tokens, **options):
        x = super().hidden(tokens, **options)
        return x + 0.1 * x.mean(axis=1, keepdims=True)


class OnPurpose(Peek):
    causal = False
"""


def test_the_command_says_where_a_model_looks_ahead(tmp_path: Any) -> None:
    (tmp_path / "peek.py").write_text(PEEK)

    assert worked("shapes", "tiny", "--causal", "--time", "3").startswith("proven for t = 3\n")
    refuted = command("shapes", "peek.py:Peek", "--causal", "--time", "5", cwd=tmp_path)
    assert refuted.code == 1
    assert "it comes in at reduce_sum   peek.py:8: return x + 0.1 * x.mean(" in refuted.stdout


@pytest.mark.slow
def test_a_training_says_that_its_model_looks_ahead(tmp_path: Any, poem: Any) -> None:
    (tmp_path / "peek.py").write_text(PEEK)
    small = ("--num-layers", "1", "--embed-dim", "8", "--num-heads", "1", "--block-size", "5")
    train = ("train", "tiny", *small, "--steps", "1", "--data", poem, "--sample-tokens", "0")
    done = command(*train, "--model", "peek.py:Peek", "--out", "peeking", cwd=tmp_path)
    said = "the model is not proven causal: output 0 can depend on input 4; it comes in at"
    assert said in done.stdout + done.stderr

    done = command(*train, "--model", "peek.py:OnPurpose", "--out", "purpose", cwd=tmp_path)
    assert "causal" not in done.stdout + done.stderr


@pytest.mark.parametrize("mask", [FLOAT_MASK, MIXING])
def test_a_float_array_that_looks_like_a_mask_is_named(mask: Array) -> None:
    def program(x: Array) -> Array:
        return mask[: x.shape[1], : x.shape[1]] @ x

    text = str(jgpt.prove(program, "float32[b t 3]", causal="t"))

    assert text.startswith("not proven")
    advice = "has the values of a mask, and is taken for a parameter: keep a mask in booleans"
    assert (advice in text) == (mask is FLOAT_MASK)


def copied(x: Array) -> Array:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def test_an_operation_without_a_rule_is_named() -> None:
    text = str(jgpt.prove(copied, "float32[b t 3]", causal="t"))

    assert text.startswith("not proven: output 0 can depend on input 4")
    assert re.search(r"pallas_call \(test_questions\.py:\d+\) has no rule", text)
