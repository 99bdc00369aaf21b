"""Every annotated result, around a body that returns something else: the blame is the return's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import TypeCheckError

from jgpt.contracts import typed
from tests.contract.cases import CASES, WEIGHTS
from tests.contract.contract import DTYPES, KEY, Case, Value, shape_mutations

TREES = {"weights", "gradients", "tensors", "like"}
RETURNING = [case for case in CASES if case.returns is not None]


def unwrapped(function: Any) -> Any:
    """The function as it was written, below `typed` and `jit`."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def lying(case: Case, answer: Any) -> Any:
    """A function with the case's annotations, and this answer."""
    real = unwrapped(case.callable)

    @functools.wraps(real)
    def fake(*args: Any, **kwargs: Any) -> Any:
        return answer()

    return typed(fake)


def like(leaf: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    made = Value(shape, str(dtype))
    return made.numpy() if isinstance(leaf, np.ndarray) else made.jax()


def good_result(case: Case) -> Any:
    return case.call(case.good) if case.result is None else case.result


def is_module(value: Any) -> bool:
    """A cache, say: it checks its own arrays."""
    return isinstance(value, nnx.Module)


def wrong_arrays(leaf: Any, loose: bool) -> list[tuple[tuple[int, ...], Any]]:
    shapes = shape_mutations(leaf.shape)
    if loose:
        shapes = [shape for shape in shapes if len(shape) != len(leaf.shape)]
    family = "int" if "int" in str(leaf.dtype) else "float"
    dtypes = [KEY, *DTYPES]
    others = [each for each in dtypes if not (family in str(each) and family in str(leaf.dtype))]
    return [(shape, leaf.dtype) for shape in shapes] + [
        (leaf.shape, dtype) for dtype in others if dtype != str(leaf.dtype) and dtype != leaf.dtype
    ]


@pytest.mark.parametrize("case", RETURNING, ids=str)
def test_the_good_result_has_the_promised_shape(case: Case):
    leaves = jax.tree.leaves(good_result(case), is_leaf=is_module)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape")]
    promised = case.returns if isinstance((*case.returns, 0)[0], tuple) else (case.returns,)
    assert tuple(leaf.shape for leaf in arrays) == promised


@pytest.mark.parametrize("case", RETURNING, ids=str)
def test_a_wrong_result_is_blamed_on_the_return(case: Case):
    leaves, structure = jax.tree.flatten(good_result(case), is_leaf=is_module)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    alike: dict[tuple[int, ...], list[int]] = {}
    for i in arrays:
        alike.setdefault(leaves[i].shape, []).append(i)
    tried = 0
    # those of one shape together too: they must not only agree with each other
    together = [group for group in alike.values() if len(group) > 1]
    for changed in [*([i] for i in arrays), *together]:
        for shape, dtype in wrong_arrays(leaves[changed[0]], case.loose):

            def answer(changed=changed, shape=shape, dtype=dtype):
                made = list(leaves)
                for i in arrays:
                    leaf = leaves[i]
                    wrong = (shape, dtype if i == changed[0] else leaf.dtype)
                    made[i] = like(leaf, *(wrong if i in changed else (leaf.shape, leaf.dtype)))
                return jax.tree.unflatten(structure, made)

            with pytest.raises(TypeCheckError) as caught:
                case.call(case.good, lying(case, answer))
            assert str(caught.value).startswith(f"{case.target}() returned a wrong result."), (
                shape,
                dtype,
            )
            tried += 1
    assert tried


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        ("jgpt.training.optimizer.decay_mask", {"table": {"embedding": 1.0}}),
        ("jgpt.training.optimizer.decay_mask", {"table": True}),
        ("jgpt.training.optimizer.partition", {"table": {"embedding": "sgd"}}),
        ("jgpt.training.optimizer.partition", {"table": "adamw"}),
        ("jgpt.generation.decoding._prefill", (jnp.zeros((3, 7, 17)),)),
        (
            "jgpt.training.optimizer.clip_by_global_norm.<locals>.clip",
            {"table": jnp.zeros((17, 17))},
        ),
        (
            "jgpt.training.optimizer.average_weights.<locals>.update",
            ({"table": jnp.zeros((17, 17))}, ()),
        ),
        ("jgpt.training.optimizer.trained_weights", {"table": jnp.zeros((17, 17))}),
        ("jgpt.runs.checkpoints.Checkpoints.restore_weights", {"table": jnp.zeros(3, int)}),
        ("jgpt.interop.names.to_torch", {"table.weight": np.zeros(3, int)}),
        ("jgpt.interop.names.to_torch", {"table.weight": jnp.zeros(3)}),
        ("jgpt.interop.names.from_torch", {"table": jnp.zeros(3, int)}),
        ("jgpt.interop.names.write_tensors", {"wte.weight": np.zeros(3, int)}),
        ("jgpt.nn.int8.quantise", (jnp.zeros((4, 26), "int8"), jnp.zeros(4))),  # of other rows
        ("jgpt.data.dataset._digest", b""),
        (
            "jgpt.data.batches.resident",
            np.zeros(30, np.int32),
        ),  # where they were, but one is missing
        ("jgpt.data.batches.resident", np.zeros((31, 1), np.int32)),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_a_wrong_tree_or_value_is_blamed_on_the_return(target: str, answer: Any):
    case = next(case for case in CASES if case.target == target)
    with pytest.raises(TypeCheckError, match="returned a wrong result"):
        case.call(case.good, lying(case, lambda: answer))


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if jax.tree.leaves([case.static.get(name) for name in TREES])],
    ids=str,
)
def test_a_tree_with_a_leaf_of_another_dtype_is_refused(case: Case):
    for name in TREES & set(case.static):
        tree = case.static[name]
        wrong = jax.tree.map(lambda leaf: leaf.astype(np.int32), tree)
        broken = Case(**{**vars_of(case), "static": {**case.static, name: wrong}})
        assert broken.outcome(case.good) == "contract", name


def test_an_optimizer_s_state_is_of_floats_and_counts():
    case = next(case for case in CASES if case.target == "jgpt.training.step.TrainState.__init__")

    def outcome(**tree):
        return Case(**{**vars_of(case), "static": {**case.static, "optimizer": tree}}).outcome(
            case.good
        )

    count, means = jnp.zeros((), jnp.int32), jnp.zeros((2, 3))
    assert outcome(count=count, means=means) == "ok"
    assert outcome(count=count, means=means.astype(jnp.int32)) == "contract"
    assert outcome(count=count.astype(bool), means=means) == "contract"


def test_gradients_of_another_tree_than_the_weights_are_refused():
    case = next(case for case in CASES if case.target.endswith(".clip"))
    reshaped = jax.tree.map(lambda leaf: leaf[:, :5], WEIGHTS)
    for wrong in ({"other": jnp.zeros((17, 17))}, reshaped):
        static = {"gradients": WEIGHTS, "weights": wrong}
        assert Case(**{**vars_of(case), "static": static}).outcome({}) == "contract"


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}
