"""Every argument of every callable, wrong in every way: it is refused, or it is fine."""

import pytest

import jgpt
from tests.contract.calls import Call, Value, mutations
from tests.contract.inspection import with_arrays
from tests.contract.programs import GENERIC, SIZES, calls_of

NAMES = with_arrays(jgpt)
JUDGES = (
    "jgpt.nn.cache.KVCache.append_tokens",
    "jgpt.nn.cache.LayerCache.positions",
    "jgpt.nn.heads._Attention._normalise_and_rotate",
)
"""What may refuse an array first: a cache of another batch, positions of other keys."""
ANY_TREE = {
    "jgpt.training.plan.bytes_of",
    "jgpt.training.stacking.stack_blocks",
    "jgpt.training.stacking.unstack_blocks",
}
"""What takes trees of any arrays."""


def verdict(call: Call, values: dict[str, Value]) -> str:
    return "contract" if call.sizes(values) is None else "ok"


@pytest.mark.parametrize("name", NAMES)
def test_a_good_call_passes_and_names_mean_one_thing(name: str):
    for call in calls_of(name):
        assert call.outcome(call.good) == "ok"
        sizes = call.sizes(call.good)
        assert sizes is not None
        named = {dim: size for dim, size in sizes.items() if dim.isidentifier()}
        odd = {d: n for d, n in named.items() if d not in GENERIC and n not in SIZES[d]}
        assert not odd, f"sizes that programs.py doesn't have for these names: {odd}"


@pytest.mark.parametrize("name", NAMES)
def test_each_mutated_argument_is_judged_by_the_contract(name: str):
    wrong = []
    for call in calls_of(name):
        for values in mutations(call.good):
            outcome, expected = call.outcome(values, JUDGES), verdict(call, values)
            if outcome != expected:
                changed = {
                    each: value for each, value in values.items() if value != call.good[each]
                }
                wrong.append(f"{changed}: {outcome}, not {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ANY_TREE])
def test_a_tree_of_another_dtype_is_refused(name: str):
    for call in calls_of(name):
        for tree in call.trees():
            other = call.with_tree(tree, lambda leaf: Value(leaf.shape, "uint8").like(leaf))
            assert other.outcome(call.good) == "contract", tree


def test_the_mutations_are_many():
    """So that a broken generator of mutations can't make the suite green."""
    heard = [call for name in NAMES if ".nn." in name for call in calls_of(name)]
    judged = [verdict(call, each) for call in heard for each in mutations(call.good)]
    assert len(judged) > 2000
    assert judged.count("ok") > 400
    assert judged.count("contract") > 1500
