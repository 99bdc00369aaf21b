"""Every argument of every callable, wrong in every way: it is refused, or it is fine."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.contract.cases import CASES
from tests.contract.contract import DTYPES, KEY, Case, Value, mutations

REAL = [case for case in CASES if case.result is None]
TAKING_ARRAYS = [case for case in REAL if case.arrays]


@pytest.mark.parametrize("case", REAL, ids=str)
def test_a_good_call_passes(case: Case):
    assert case.accepts(case.good)
    assert case.outcome(case.good) == "ok"


def test_positions_are_judged_where_they_are_given():
    """A wrong source may be found further in, as its case says; a wrong position may not."""
    (case,) = (each for each in CASES if str(each).endswith("_project-positions"))
    case = dataclasses.replace(case, blames="")
    changed = [
        values
        for values in mutations(case.good)
        if values["position"] != case.good["position"] and not case.accepts(values)
    ]
    assert len(changed) > 5
    assert {case.outcome(values) for values in changed} == {"contract"}


@pytest.mark.parametrize("case", TAKING_ARRAYS, ids=str)
def test_each_mutated_argument_is_judged_by_the_contract(case: Case):
    wrong = []
    for values in mutations(case.good):
        outcome = case.outcome(values)
        expected = "ok" if case.accepts(values) else "contract"
        if outcome != expected:
            changed = {name: value for name, value in values.items() if value != case.good[name]}
            wrong.append(f"{changed}: {outcome}, not {expected}")
    assert not wrong, "\n".join(wrong)


def test_the_mutations_are_many():
    """So that a broken generator of mutations can't make the suite green."""
    judged = [case.accepts(each) for case in TAKING_ARRAYS for each in mutations(case.good)]
    assert len(judged) > 2000
    assert judged.count(True) > 400
    assert judged.count(False) > 1500


sizes = st.sampled_from([1, 2, 3, 4, 5, 7, 10, 11, 12, 13, 15, 17, 22, 26, 30])
shapes = st.lists(sizes, max_size=5).map(tuple)


@st.composite
def edited(draw: st.DrawFn, case: Case) -> dict[str, Value]:
    """Good arguments after a few edits: a size set, an axis dropped, added or swapped, a dtype."""
    values = dict(case.good)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(values)))
        shape, dtype = list(values[name].shape), values[name].dtype
        at = draw(st.integers(0, max(len(shape) - 1, 0)))
        match draw(st.sampled_from(["set", "drop", "add", "swap", "dtype"])):
            case "set" if shape:
                shape[at] = draw(sizes)
            case "drop" if shape:
                del shape[at]
            case "add":
                shape.insert(at, draw(sizes))
            case "swap" if shape:
                shape[0], shape[at] = shape[at], shape[0]
            case "dtype":
                dtype = draw(st.sampled_from((*DTYPES, KEY.name)))
        values[name] = Value(tuple(shape), dtype)
    return values


TRACED = [case for case in TAKING_ARRAYS if case.takes == "traced"]


@pytest.mark.slow
@pytest.mark.parametrize("case", TRACED, ids=str)
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_arguments_are_judged_by_the_contract(case: Case, data: st.DataObject):
    values = data.draw(edited(case))
    hypothesis.note(str(values))
    assert case.outcome(values) == ("ok" if case.accepts(values) else "contract")
