"""Sight beside brute force: nothing is proven that a derivative or a changed input refutes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.shapes.reading import reads
from tests.sight.brute import SHAPE, dependences, outside
from tests.sight.programs import RIGHT, SEPARATE, UNSURE, WRONG

ALL = {**RIGHT, **WRONG, **UNSURE}
POSITION = np.arange(SHAPE[1])
LATER = POSITION[None] > POSITION[:, None]


def looks_ahead(found: np.ndarray) -> bool:
    """Whether an output depends on a later position, of any sequence."""
    return bool((found.any(axis=2) & LATER[None]).any())


def mixes_sequences(found: np.ndarray) -> bool:
    return bool(found[0, :, 1].any() or found[1, :, 0].any())


@pytest.mark.parametrize("name", ALL)
def test_a_verdict_is_that_of_brute_force(name: str) -> None:
    program = ALL[name]
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    sizes = {"t": SHAPE[1]}

    hull = reads(program, array, of={0: ("b", "t")})
    causal = jgpt.prove(program, "float32[b t 3]", causal="t", sizes=sizes)
    separate = jgpt.prove(program, "float32[b t 3]", separate="b", sizes=sizes)

    (found,) = dependences(program)
    assert not outside(hull, found).size
    assert bool(causal) == (name in RIGHT)
    if name not in UNSURE:
        assert looks_ahead(found) == (name in WRONG)
        assert bool(separate) == (name not in SEPARATE)
    assert mixes_sequences(found) == (name in SEPARATE)
