"""Every annotated result, around a body that returns something else: the blame is the return's."""

import functools
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jaxtyping import TypeCheckError

import jgpt
from jgpt.contracts import typed
from tests.contract.calls import DTYPES, KEY, Call, Value, array_hint, is_whole, shape_mutations
from tests.contract.inspection import with_arrays
from tests.contract.programs import calls_of

NAMES = with_arrays(jgpt)
LOOSE = (
    "jgpt.data.dataset._open_prepared",
    "jgpt.data.dataset._open_tokens",
    "jgpt.data.tokenizers.BPETokenizer.encode",
    "jgpt.data.tokenizers.BPETokenizer.encode_ordinary",
    "jgpt.data.tokenizers.ByteTokenizer.encode",
    "jgpt.data.tokenizers.CharTokenizer.encode",
    "jgpt.generation.text.default_prompt",
    "jgpt.nn.loss._chunked",
    "jgpt.runs.anatomy.hear.<locals>.__call__",
    "jgpt.runs.look.encode_text",
)
"""Where sizes of the result depend on what is in the arguments: its ranks and dtypes are left."""


def lying(call: Call, answer: Any) -> Any:
    """A function with the call's annotations, and this answer."""

    @functools.wraps(call.written)
    def fake(*args: Any, **kwargs: Any) -> Any:
        return answer

    return typed(fake)


def promised(hint: Any, value: Any) -> Iterator[bool]:
    """Of each leaf of a result, whether its annotation says what shape it has."""
    if get_origin(hint) is tuple and isinstance(value, tuple) and len(get_args(hint)) == len(value):
        for each, item in zip(get_args(hint), value, strict=True):
            yield from promised(each, item)
        return
    leaf = getattr(hint, "leaftype", hint)
    said = getattr(
        leaf, "dim_str", "..." if leaf is not hint or array_hint(hint, value) is None else ""
    )
    yield from [said != "..."] * len(jax.tree.leaves(value, is_leaf=is_whole))


def wrong_arrays(leaf: Any, loose: bool) -> list[Value]:
    shapes = shape_mutations(leaf.shape)
    if loose:
        shapes = [shape for shape in shapes if len(shape) != len(leaf.shape)]
    name = leaf.dtype.name
    family = next((each for each in ("int", "float") if each in name), "")
    others = [each for each in (*DTYPES, KEY.name) if not family or family not in each]
    return [Value(shape, name) for shape in shapes] + [
        Value(leaf.shape, each) for each in others if each != name
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_result_is_blamed_on_the_return(name: str):
    for call in calls_of(name):
        result = call.again(call.good)
        leaves, structure = jax.tree.flatten(result, is_leaf=is_whole)
        says = list(promised(call.signature.return_annotation, result))
        arrays = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array | np.ndarray) and len(says) == len(leaves) and says[i]
        ]
        alike: dict[tuple[int, ...], list[int]] = {}
        for i in arrays:
            alike.setdefault(leaves[i].shape, []).append(i)
        # those of one shape together too: they must not only agree with each other
        together = [group for group in alike.values() if len(group) > 1]
        for changed in [*([i] for i in arrays), *together]:
            for wrong in wrong_arrays(leaves[changed[0]], name in LOOSE):
                made = list(leaves)
                for i in arrays:
                    good = Value(leaves[i].shape, leaves[i].dtype.name)
                    kept = wrong if i == changed[0] else good._replace(shape=wrong.shape)
                    made[i] = (kept if i in changed else good).like(leaves[i])
                answer = jax.tree.unflatten(structure, made)
                with pytest.raises(TypeCheckError) as caught:
                    call.again(call.good, lying(call, answer))
                assert str(caught.value).startswith(f"{name}() returned a wrong result."), wrong


def wrong_values(hint: Any, value: Any) -> Iterator[Any]:
    """Other objects than what a result's annotation says, whole and in each part."""
    if hint is Any:
        return
    yield object()
    if isinstance(value, tuple) and get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        yield value[:-1]
        for i, each in enumerate(get_args(hint)):
            for wrong in wrong_values(each, value[i]):
                yield (*value[:i], wrong, *value[i + 1 :])
    if leaf := getattr(hint, "leaftype", None):
        yield jax.tree.map(lambda leaf: 1.5, value)
        if not isinstance(value, Tracer) and "Shaped" not in str(leaf):
            yield jax.tree.map(lambda leaf: Value(np.shape(leaf), "uint8").like(leaf), value)
        if hint.structure:
            yield {"other": value}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("__init__")])
def test_a_wrong_tree_or_value_is_blamed_on_the_return(name: str):
    for call in calls_of(name):
        result = call.again(call.good)
        for wrong in wrong_values(call.signature.return_annotation, result):
            with pytest.raises(TypeCheckError, match="returned a wrong result"):
                call.again(call.good, lying(call, wrong))


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        ("jgpt.interop.names.write_tensors", {"wte.weight": jnp.zeros(3)}),  # not on the host
        ("jgpt.nn.int8.quantise", (jnp.zeros((4, 26), "int8"), jnp.zeros(4))),  # of other rows
        ("jgpt.data.batches.resident", np.zeros(30, np.int32)),  # one token is missing
        ("jgpt.data.batches.resident", np.zeros((31, 1), np.int32)),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_a_chosen_wrong_result_is_blamed_on_the_return(target: str, answer: Any):
    call = calls_of(target)[0]
    with pytest.raises(TypeCheckError, match="returned a wrong result"):
        call.again(call.good, lying(call, answer))


def test_an_optimizer_s_state_is_of_floats_counts_flags_and_keys():
    made = calls_of("jgpt.training.step.TrainState.__init__")[0].function
    count, means, weights = jnp.zeros((), jnp.int32), jnp.zeros((2, 3)), {"a": jnp.zeros(2)}
    of_others = {"done": count.astype(bool), "noise": jax.random.key(0)}  # optax's add_noise
    made(weights, {"count": count, "means": means, **of_others}, count)
    for wrong in ({"means": means.astype(jnp.uint8)}, {"count": count.astype(jnp.complex64)}):
        with pytest.raises(TypeCheckError, match="got a wrong argument `optimizer`"):
            made(weights, {"count": count, "means": means, **wrong}, count)


def test_gradients_of_another_tree_than_the_weights_are_refused():
    clip = calls_of("jgpt.training.optimizer.clip_by_global_norm.<locals>.clip")[0].function
    table = jnp.zeros((17, 17))
    for wrong in ({"other": table}, {"table": table[:, :5]}):
        with pytest.raises(TypeCheckError, match="got a wrong argument `weights`"):
            clip({"table": table}, wrong)
