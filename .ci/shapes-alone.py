"""`jgpt.shapes` from the wheel, where JAX, jaxtyping and beartype are installed and Flax is not."""

import sys
from importlib.util import find_spec

import jax.numpy as jnp
from jaxtyping import Array, Float

from jgpt.shapes import (
    annotated_source,
    capture,
    check,
    edit,
    prove,
    reads,
    shape_trace,
    typed,
    watching,
)


@typed
def totals(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    """Return the sum of each entry and of those before it."""
    total = jnp.cumsum(x, axis=1)
    return total


def ahead(x):
    """Read each entry's later neighbour."""
    return jnp.roll(x, -1, axis=1)


assert find_spec("flax") is None
x = jnp.ones((2, 5))
try:
    totals(jnp.ones(5))
    sys.exit("a wrong shape passed")
except TypeError as error:
    print(error)
check(x, Float[Array, "batch time"])
assert "float32[batch=2 time=5]" in str(shape_trace(totals, x))
assert "total" in str(annotated_source(totals, x))
assert prove(totals, "float32[b t]")
assert prove(totals, "float32[b t]", causal="t", sizes={"t": 6, "b": 1})
assert not prove(ahead, "float32[b t]", causal="t", sizes={"t": 6, "b": 1})
assert callable(reads)
with watching(lambda call: None):
    totals(x)
assert capture(totals, "totals")(x)["totals"].shape == (2, 5)
assert edit(totals, {"totals": jnp.negative})(x)[0, 0] == -1
assert not [name for name in sys.modules if name.split(".")[0] in ("flax", "optax", "orbax")]
print("jgpt.shapes works without Flax")
