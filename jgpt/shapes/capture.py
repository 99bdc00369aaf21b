"""Capturing and editing of results inside a call, by their path."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from jgpt.shapes.calls import TypedCall, called_in, watching
from jgpt.shapes.contract import typed


@typed
def capture(model: Callable[..., Any], *paths: str) -> Callable[..., dict[str, Any]]:
    """Return a function that calls the model and returns results of typed calls inside, by path.

    The model is an NNX module, a function, or a model of another library. In an NNX module
    `blocks.1.attention` is the path of a module, and `blocks.1.attention.merge_heads` of a function
    that it calls. Elsewhere a path is the name of a typed method or function. `*` stands for any
    one part. Repeated calls of a path are numbered: `split_heads[1]`. Blocks run in a loop, even if
    the config scans them. Raises ValueError for a path that no call has, and under a mesh.
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
        _call_watched(model, paths, keeping, *args, **kwargs)
        return found

    return call


@typed
def edit(model: nnx.Module, edits: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return a copy of the model in which functions replace results inside.

    Paths are those of `capture`. A new result is checked like the old one. `generate` can sample an
    edited language model. It does so without a KV cache, so that the functions receive the whole
    context for each token, padded to `block_size` at its end. Raises ValueError for a path that no
    call has.
    """
    # `generate` calls these two methods, and an edited MLP or head lacks them.
    is_language_model = hasattr(model, "hidden") and hasattr(model, "logits")
    if is_language_model:
        return _EditedLanguageModel(model, edits)
    return _Edited(model, edits)


class _Edited(nnx.Module):
    """A module whose results inside are replaced when it is called."""

    @typed
    def __init__(self, model: nnx.Module, edits: Mapping[str, Callable[[Any], Any]]) -> None:
        self.model = model
        # A tuple rather than a dictionary, since NNX compares and hashes this for `jit`'s cache.
        self.edits = tuple(edits.items())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        edits = dict(self.edits)

        def replacing(_: str, pattern: str) -> Callable[[Any], Any]:
            return edits[pattern]

        return _call_watched(self.model, edits, replacing, *args, **kwargs)


class _EditedLanguageModel(_Edited):
    """An edited language model, whose `logits(hidden(tokens))` is a call of the model."""

    @typed
    def __init__(self, model: Any, edits: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__(model, edits)
        self.vocab_size = model.vocab_size
        self.block_size = model.block_size

    def hidden(self, tokens: Any, *, rngs: nnx.Rngs | None = None) -> Any:
        self._require_paths(tokens)
        model = _in_turn(self.model)
        with called_in(model), watching(self._watch):
            return model.hidden(tokens, rngs=rngs)

    def logits(self, x: Any) -> Any:
        model = _in_turn(self.model)
        with called_in(model), watching(self._watch):
            logits = model.logits(x)
        # The model's own call, whose path is empty, isn't made.
        edit_of_model = dict(self.edits).get("")
        if edit_of_model is None:
            return logits
        return edit_of_model(logits)

    def _require_paths(self, tokens: Any) -> None:
        """Raise ValueError for a path that no call has.

        A path may be only in `logits`, so only a complete call has all paths. It is traced, and
        nothing is computed.
        """

        def unchanged(result: Any) -> Any:
            return result

        def change_nothing(*_: Any) -> Callable[[Any], Any]:
            return unchanged

        patterns = dict(self.edits)
        complete_call = functools.partial(_call_watched, self.model, patterns, change_nothing)
        jax.eval_shape(complete_call, tokens)

    def _watch(self, call: TypedCall) -> Callable[[Any], Any] | None:
        """Return the function of the first pattern that matches a call, to replace its result."""
        for pattern, function in self.edits:
            if _fits(pattern, call.path):
                return function
        return None


def _fits(pattern: str, path: str) -> bool:
    """Return whether a path matches a pattern, in which `*` stands for one part."""
    escaped = re.escape(pattern)  # which writes `*` as `\*`
    expression = escaped.replace(r"\*", r"[^.]+")
    return re.fullmatch(expression, path) is not None


def _call_watched(
    model: Callable[..., Any],
    patterns: Iterable[str],
    change: Callable[[str, str], Callable[[Any], Any]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the model with `args` and `kwargs`, and change results whose paths match patterns.

    `change(path, pattern)` returns the function that replaces such a result. The first matching
    pattern applies. Raises ValueError for a pattern that matches no path.
    """
    # `/` in the signature, since the model's own call may have arguments `model` or `patterns`.
    patterns = list(patterns)
    paths: set[str] = set()  # of all calls, for a suggestion
    used: set[str] = set()

    def watch(call: TypedCall) -> Callable[[Any], Any] | None:
        paths.add(call.path)
        for pattern in patterns:
            if _fits(pattern, call.path):
                used.add(pattern)
                return change(call.path, pattern)
        return None

    model_in_turn = _in_turn(model)
    with watching(watch):
        result = model_in_turn(*args, **kwargs)
    # Known only now, since a model decides at run time which calls it makes.
    for pattern in patterns:
        if pattern not in used:
            suggestion = _suggestion(pattern, paths)
            raise ValueError(f"no typed call has the path {pattern!r}{suggestion}")
    return result


def _suggestion(pattern: str, paths: Iterable[str]) -> str:
    """Return a similar path as a suggestion at the end of a message, or an empty string."""
    similar_paths = difflib.get_close_matches(pattern, paths, n=1)
    if not similar_paths:
        return ""
    return f" (did you mean {similar_paths[0]!r}?)"


def _in_turn(model: Callable[..., Any]) -> Any:
    """Return a copy of the model that runs its blocks in a loop, so that no inner trace holds a
    result."""
    if not isinstance(model, nnx.Module):
        return model
    # A custom model may have no config, or a config without these fields.
    config: Any = getattr(model, "config", None)
    scans = getattr(config, "scan_layers", False)
    rematerialises = getattr(config, "remat", False)
    if not scans and not rematerialises:
        return model
    # A copy of the module's structure, with the same arrays.
    graph, arrays = nnx.split(model)
    copy: Any = nnx.merge(graph, arrays)
    copy.config = dataclasses.replace(config, scan_layers=False, remat=False)
    return copy
