"""The rules of sharding: which dimensions are split over which axes of a mesh."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jgpt.parallel.mesh import abstract_mesh, make_mesh
from jgpt.parallel.rules import spec_of, split_batch
from tests.models import tokens_of

MESH = "data=2,fsdp=3,tensor=5"


@pytest.mark.parametrize(
    ("dimensions", "shape", "mesh", "exclude", "spec"),
    [
        (("embed_dim", "hidden_dim"), (9, 10), MESH, "", P(("fsdp",), ("tensor",))),
        (("batch", "time", None), (12, 7, 9), MESH, "", P(("data", "fsdp"), None, None)),
        (("vocab_size", "embed_dim"), (65, 8), MESH, "", P(("tensor",), None)),  # 8 isn't divided
        ((("num_heads", 5), "embed_dim"), (20, 6), MESH, "", P(("tensor",), ("fsdp",))),
        ((("num_heads", 4), "embed_dim"), (20, 6), MESH, "", P(None, ("fsdp",))),  # heads whole
        (("embed_dim",), (9,), MESH, "", P(None)),  # a vector is too small to gather
        (("hidden_dim",), (10,), MESH, "", P(("tensor",))),
        (("batch",), (12,), MESH, "", P(("data", "fsdp"))),  # nothing of it is gathered
        (("embed_dim", "hidden_dim"), (9, 10), MESH, "fsdp", P(None, ("tensor",))),
        (("batch", "embed_dim"), (7, 9), "fsdp=3", "", P(None, ("fsdp",))),  # data has size one
        (("batch", "embed_dim"), (7, 9), None, "", P(None, None)),
    ],
)
def test_dimensions_are_split_where_the_axes_divide_them(dimensions, shape, mesh, exclude, spec):
    found = spec_of(dimensions, shape, abstract_mesh(mesh), exclude=exclude)

    assert found == spec


def test_all_devices_take_part_in_each_part_of_a_batch():
    """The numbers would be the same if a device had whole parts, one after the other."""
    with jax.set_mesh(make_mesh("data=4,tensor=2")):
        parts = split_batch(tokens_of(1, batch=96), 12)

    assert parts.shape[:2] == (12, 8)
    assert parts.sharding.shard_shape(parts.shape)[:2] == (12, 8 // 4)


def test_a_mesh_of_another_size_than_the_machine_is_rejected():
    message = "`mesh='data=2,fsdp=3'` needs 6 devices, but JAX has 8: give sizes .* 8"

    with pytest.raises(ValueError, match=message):
        make_mesh("data=2,fsdp=3")
