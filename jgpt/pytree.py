"""Records that JAX can take apart."""

from dataclasses import fields
from typing import TypeVar

import jax

from jgpt.contracts import typed

Record = TypeVar("Record")


@typed
def pytree(kind: type[Record]) -> type[Record]:
    """Let JAX take a record apart, and rebuild it unchecked: in a tree, leaves may be anything."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    def flatten(made):
        return [(jax.tree_util.GetAttrKey(name), getattr(made, name)) for name in names], None

    def unflatten(_, values):
        made = object.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    return kind
