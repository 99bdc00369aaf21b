"""Capturing and editing of results inside a call, by their path."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jgpt.shapes.calls import is_nnx
from jgpt.shapes.changes import Edits, call_changed, call_edited
from jgpt.shapes.contract import typed


@typed
def capture(model: Callable[..., Any], *paths: str) -> Callable[..., dict[str, Any]]:
    """Return a function that calls the model and returns results of typed calls inside, by path.

    The model is a module of NNX or of another library, or a function. In an NNX module
    `blocks.1.attention` is the path of a module, `blocks.1.attention.merge_heads` of a function
    that it calls, `final_norm.__call__` that of a base class's call, by `super()`, and the class of
    the model (`GPT`) that of its own call. Elsewhere a path is the class of a module, or the name
    of a function. `*` stands for any one part. Repeated calls of a path are numbered:
    `split_heads[1]`. Blocks run in a loop, even if the config scans them, and programs of `jit`
    inside run operation by operation. Raises ValueError for a path that no call has, and under a
    mesh.
    """

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if not jax.sharding.get_abstract_mesh().empty:
            raise ValueError(
                "capture results without a mesh, because under a mesh each device has only a part"
            )
        found: dict[str, Any] = {}
        num_calls: dict[str, int] = {}

        def keep(path: str, result: Any) -> Any:
            earlier_calls = num_calls.get(path, 0)
            num_calls[path] = earlier_calls + 1
            name = path
            if earlier_calls > 0:
                name = f"{path}[{earlier_calls}]"
            found[name] = result
            return result

        def keeping(path: str, _: Any) -> Callable[[Any], Any]:
            return functools.partial(keep, path)

        # A replacement that changes nothing, since a watcher itself is called before there is a
        # result.
        call_changed(model, paths, keeping, *args, **kwargs)
        return found

    return call


@typed
def edit(model: Callable[..., Any], edits: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return a copy of the model in which functions replace results inside.

    Models and paths are those of `capture`. A new result is checked like the old one. `generate`
    can sample an edited language model. It does so without a KV cache, so that the functions
    receive the whole context for each token, padded to `block_size` at its end. Raises ValueError
    for a path that no call has, and for a call inside `jax.checkpoint`, or inside `cond` or `while`
    of a traced program, where JAX would cache the new result.
    """
    fixed_edits = tuple(edits.items())
    if not is_nnx(model, "Module"):
        return _EditedFunction(model, fixed_edits)
    module: Any = model

    from jgpt.shapes.nnx_edits import EditedLanguageModel, EditedModule

    # `generate` calls these two methods, and an edited MLP or head lacks them.
    is_language_model = hasattr(model, "hidden") and hasattr(model, "logits")
    if is_language_model:
        return EditedLanguageModel(module, fixed_edits)
    return EditedModule(module, fixed_edits)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model"], meta_fields=["edits"])
@dataclasses.dataclass(frozen=True, eq=False)
class _EditedFunction:
    """A function, or another library's module, whose results inside are replaced."""

    model: Any
    edits: Edits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_edited(self.model, self.edits, *args, **kwargs)
