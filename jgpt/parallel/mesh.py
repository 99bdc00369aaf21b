"""The device mesh: making it from text, setting it, and asking for it."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jgpt.config import MESH_AXES, mesh_sizes
from jgpt.machine import device_kinds


def make_mesh(mesh: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of all `devices` from text such as `data=2,fsdp=4`, for `jax.set_mesh`."""
    sizes = mesh_sizes(mesh)
    product = math.prod(sizes.values())
    if devices is None:
        count = len(device_kinds())
    else:
        count = len(devices)
    if product != count:
        raise ValueError(
            f"`mesh={mesh!r}` needs {product} devices, but JAX has {count}: give sizes whose "
            f"product is {count}"
        )
    # Automatic axes: XLA's partitioner decides what the rules leave open.
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types, devices=devices)


def use_mesh(mesh: str | None) -> contextlib.AbstractContextManager:
    """Set the mesh of a text such as `data=2,fsdp=4`; None sets none."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.set_mesh(make_mesh(mesh))


def require_mesh(mesh: str | None) -> None:
    """Raise ValueError if a config names a mesh of several devices and none is set."""
    if mesh is not None and math.prod(mesh_sizes(mesh).values()) > 1 and current_mesh().empty:
        raise ValueError(
            f"`mesh={mesh!r}` is set by `fit` alone: use jax.set_mesh(make_mesh({mesh!r})) of "
            "jgpt.parallel.mesh, or leave it out"
        )


def abstract_mesh(mesh: str | None) -> AbstractMesh:
    """Make a mesh without devices, to compute shardings; None means one device."""
    sizes = mesh_sizes(mesh or "data=1")  # axes of size 1 shard nothing
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def current_mesh() -> AbstractMesh:
    """Return the mesh that is set, also while tracing, or an empty mesh.

    Raises ValueError if it has explicit axes, which is the default of `jax.make_mesh`: XLA's
    partitioner has to shard what the rules leave open.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        axes = ", ".join(str(axis) for axis in mesh.explicit_axes)
        raise ValueError(
            f"the mesh has explicit axes ({axes}): make it with "
            "jgpt.parallel.mesh.make_mesh, or give jax.make_mesh axis_types of AxisType.Auto"
        )
    return mesh


def default_mesh(devices: int, state_bytes: int, device_memory: int | None) -> str:
    """Return a mesh of all devices: over data if each can hold the whole train state, else over
    fsdp."""
    # Twice the size, since activations and gradients need room, too. Data comes first, because each
    # device then has all weights and gathers none.
    if device_memory is None or 2 * state_bytes < device_memory:
        return f"data={devices}"
    return f"fsdp={devices}"
