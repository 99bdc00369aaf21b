"""Every callable with arrays, called again with each thing wrong in turn, is blamed for it."""

import functools
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer, TypeCheckError

import jgpt
from jgpt.shapes.contract import check, typed
from tests.contract.calls import DTYPES, KEY, Call, Value, array_hint, mutations, shape_mutations
from tests.contract.inspection import (
    annotations,
    new_annotations,
    parts,
    unbraced,
    with_arrays,
)
from tests.contract.programs import GENERIC, PROGRAMS, SIZES, calls_of, heard
from tests.quick import only

NAMES = with_arrays(jgpt)
NEW_ANNOTATIONS = new_annotations(jgpt)
JUDGES = (
    "jgpt.nn.cache.KVCache.append_tokens",
    "jgpt.nn.cache.LayerCache.positions",
    "jgpt.nn.heads._Attention._normalise_and_rotate",
)
"""What may refuse an array first: a cache of another batch, positions
of other keys."""
CHECKS = {
    "jgpt.nn.attention.attention_weights",
    "jgpt.nn.heads.MultiHeadAttention.__call__",
    "jgpt.nn.transformer.FeedForward.__call__",
}
"""What checks an intermediate."""
LOOSE = {
    "data.byte_pairs.BPETokenizer.encode",
    "data.byte_pairs.BPETokenizer.encode_ordinary",
    "data.byte_pairs.BPETokenizer.encode_part",
    "data.characters.ByteTokenizer.encode",
    "data.characters.CharTokenizer.encode",
    "data.characters.NumberTokenizer.encode",
    "data.characters.OwnTokenizer.encode",
    "data.dataset.load_text",
    "data.prepared._mapped",
    "data.prepared._open_tokens",
    "generation.decoding._read_calls",
    "generation.decoding.stream",
    "generation.text._encode_prompt",
    "generation.text.default_prompt",
    "nn.loss._chunked",
    "runs.evaluate._tokens_of",
    "runs.plots._column",
    "page.anatomy.record_calls.<locals>.__call__",
    "page.numbers.encode_text",
}
"""Where sizes of the result depend on what is in the arguments: its ranks and dtypes are left."""
STEPS = Float[Array, "steps"]
SAMPLE: dict[str, dict[str, Any]] = {
    "nn.attention.attend": {
        "query": Float[Array, "*batch query head_dim"],
        "key": Float[Array, "*batch key head_dim"],
        "value": Float[Array, "*batch key value_dim"],
        "mask": Bool[Array, "*leading query key"],
    },
    "nn.loss.token_losses": {
        "logits": Float[Array, "*rows vocab"],
        "targets": Int[Array, "*rows"],
    },
    "training.step.Metrics.__init__": {
        "loss": STEPS,
        "gradient_norm": STEPS,
        "learning_rate": STEPS,
        "taken": Int[Array, ""],
    },
    "data.characters.CharTokenizer.decode": {"tokens": Integer[Any, "tokens"]},
}
"""A few contracts a second time by hand: what the tests read off annotations is this."""


@pytest.mark.slow
def test_every_callable_with_arrays_is_called_by_a_program():
    called = set().union(*map(heard, PROGRAMS))
    assert not set(NAMES) - called, "let a program in tests/contract/programs.py do so"


@pytest.mark.parametrize("name", NAMES)
def test_names_mean_one_thing(name: str):
    for call in calls_of(name):
        named = {dim: sizes[0] for dim, sizes in call.sizes().items() if dim.isidentifier()}
        odd = {d: n for d, n in named.items() if d not in GENERIC and n not in SIZES[d]}
        assert not odd, f"sizes that programs.py doesn't have for these names: {odd}"


@pytest.mark.parametrize("name", only(NEW_ANNOTATIONS, NAMES))
def test_a_good_call_passes(name: str):
    for call in calls_of(name):
        assert call.outcome(call.good) == "ok"


def judged(call: Call, hints: dict[str, Any], arguments: set[str] | None = None) -> int:
    """Make a call with each change of its arrays; return how many of them keep the annotations.

    With arguments: each change of one of these.
    """
    fitting = 0
    for values in mutations(call.good):
        changed = {name: value for name, value in values.items() if value != call.good[name]}
        if arguments is not None and arguments.isdisjoint(changed):
            continue
        fits = call.fits(values, hints)
        assert call.outcome(values, JUDGES) == ("ok" if fits else "contract"), changed
        fitting += fits
    return fitting


@pytest.mark.parametrize("name", NEW_ANNOTATIONS)
def test_each_new_annotation_judges_a_mutated_argument(name: str):
    arguments = NEW_ANNOTATIONS[name] - {"return"}
    for call in calls_of(name):
        present = arguments & set(call.good)
        if present:
            judged(call, call.hints, present)
        arguments -= present


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_mutated_argument_is_judged_by_the_contract(name: str):
    for call in calls_of(name):
        judged(call, call.hints)


@pytest.mark.parametrize(("name", "hints"), SAMPLE.items(), ids=SAMPLE)
def test_the_annotations_say_what_is_meant(name: str, hints: dict[str, Any]):
    calls = (call for call in calls_of(f"jgpt.{name}") if set(call.good) == set(hints))
    fitting = judged(call := next(calls), hints)

    assert fitting >= 1
    assert len(list(mutations(call.good))) - fitting > 8


# --- results -------------------------------------------------------------------------------------


def lying(call: Call, answer: Any) -> Any:
    """A function with the call's annotations, and this answer."""

    @functools.wraps(call.written)
    def fake(*args: Any, **kwargs: Any) -> Any:
        return answer

    return typed(fake)


def names_in(hint: Any) -> set[str]:
    """The dimensions that an annotation names, its braces left out."""
    leaves = (getattr(each, "leaftype", each) for each in parts(hint))
    each = (unbraced(getattr(leaf, "dim_str", "")) for leaf in leaves)
    return {name for dimensions in each for name in re.findall(r"[a-z_]+", dimensions)}


def test_the_sizes_of_a_result_are_those_of_arguments():
    """Or of what is in the arguments, in these."""
    free = set()
    for name in NAMES:
        hints = annotations(calls_of(name)[0].written)
        known = set().union(*(names_in(hint) for key, hint in hints.items() if key != "return"))
        if names_in(hints["return"]) - known:
            free.add(name.removeprefix("jgpt."))
    assert free == LOOSE


def wrong_values(hint: Any, value: Any, loose: bool) -> Iterator[Any]:
    """Others than an annotation says: another object, and each array with each change."""
    if hint is Any:
        return
    yield object()
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        yield value[:-1]
        for place, part in enumerate(get_args(hint)):
            for wrong in wrong_values(part, value[place], loose):
                yield (*value[:place], wrong, *value[place + 1 :])
    elif array_hint(hint, value) is not None and hasattr(value, "dtype"):
        for wrong in wrong_arrays(value, loose):
            if wrong.shape != value.shape or "Shaped" not in str(hint):
                yield wrong
    elif getattr(hint, "leaftype", None):
        yield from wrong_trees(hint, value)


def wrong_arrays(value: Any, loose: bool) -> Iterator[Any]:
    """With another shape, of as many dimensions only if it isn't loose, or of another kind."""
    name = value.dtype.name
    for shape in shape_mutations(value.shape):
        if not loose or len(shape) != value.ndim:
            yield Value(shape, name).like(value)
    kind = name
    for common in ("int", "float"):
        if common in name:
            kind = common
            break
    for dtype in (*DTYPES, KEY.name):
        if kind not in dtype:
            yield Value(value.shape, dtype).like(value)


def wrong_trees(hint: Any, value: Any) -> Iterator[Any]:
    if not jax.tree.leaves(value):  # such as None for an objective without metrics
        return

    def in_bytes(leaf: Any) -> Any:
        return Value(np.shape(leaf), "uint8").like(leaf)

    def with_one_more_axis(leaf: Any) -> Any:
        return Value((*leaf.shape, 1), leaf.dtype.name).like(leaf)

    yield jax.tree.map(lambda leaf: 1.5, value)
    if not isinstance(value, Tracer) and "Shaped" not in str(hint.leaftype):
        yield jax.tree.map(in_bytes, value)
    if hint.structure:
        yield {"other": value}
    if getattr(hint.leaftype, "dim_str", "...") != "...":
        yield jax.tree.map(with_one_more_axis, value)


def judge_results(call: Call) -> None:
    """Make a call whose result is wrong in each way."""
    loose = call.name.removeprefix("jgpt.") in LOOSE
    result = call.again(call.good)
    for answer in wrong_values(call.signature.return_annotation, result, loose):
        with pytest.raises(TypeCheckError) as caught:
            call.again(call.good, lying(call, answer))
        assert str(caught.value).startswith(f"{call.name}() returned a wrong result."), answer


NAMES_WITH_RESULTS = [name for name in NAMES if not name.endswith("__init__")]


@pytest.mark.parametrize(
    "name", [name for name in NAMES_WITH_RESULTS if "return" in NEW_ANNOTATIONS.get(name, set())]
)
def test_a_wrong_result_of_a_new_annotation_is_blamed_on_the_return(name: str):
    judge_results(calls_of(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_WITH_RESULTS)
def test_a_wrong_result_is_blamed_on_the_return(name: str):
    for call in calls_of(name):
        judge_results(call)


@pytest.mark.parametrize("axis", [0, 2], ids=["chunks", "chunk"])
@pytest.mark.parametrize("index", range(3))
def test_the_chunks_of_a_batch_are_as_many_and_as_long_in_each_result(index: int, axis: int):
    call = calls_of("jgpt.nn.loss._chunked")[0]
    answer = list(call.again(call.good))
    shape = list(answer[index].shape)
    dtype = answer[index].dtype.name
    shape[axis] += 1
    answer[index] = Value(tuple(shape), dtype).like(answer[index])

    with pytest.raises(TypeCheckError, match="returned a wrong result"):
        call.again(call.good, lying(call, tuple(answer)))


def test_what_is_written_is_on_the_host():
    call = calls_of("jgpt.interop.names.write_tensors")[0]
    with pytest.raises(TypeCheckError, match="returned a wrong result"):
        call.again(call.good, lying(call, {"wte.weight": jnp.zeros(3)}))


# --- trees and intermediates ---------------------------------------------------------------------


def test_gradients_of_another_tree_than_the_weights_are_rejected():
    clip = calls_of("jgpt.training.optimizer.clip_by_global_norm.<locals>.clip")[0].function
    table = jnp.zeros((17, 17))
    for wrong in ({"other": table}, {"table": table[:, :5]}):
        with pytest.raises(TypeCheckError, match="got a wrong argument `weights`"):
            clip({"table": table}, wrong)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_wrong_intermediate_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch):
    call = calls_of(name)[0]
    own = []

    def probe(value: Any, annotation: Any) -> Any:
        own.append(sys._getframe(1).f_code is call.written.__code__)
        wrong = [(shape, value.dtype) for shape in shape_mutations(value.shape)]
        for shape, dtype in [*wrong, (value.shape, jnp.int32), (value.shape, jnp.bool)]:
            with pytest.raises(TypeCheckError, match="computed a wrong intermediate"):
                check(jnp.zeros(shape, dtype), annotation)
        return check(value, annotation)

    monkeypatch.setattr(sys.modules[call.written.__module__], "check", probe)
    call.again(call.good)

    assert own.count(True) == 1


def test_no_other_callable_checks_one():
    codes = {name: calls_of(name)[0].written.__code__ for name in NAMES}
    assert {name for name, code in codes.items() if "check" in code.co_names} == CHECKS
