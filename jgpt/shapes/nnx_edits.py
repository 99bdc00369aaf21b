"""Modules of Flax NNX whose results inside are replaced; `edit` imports this for such a module."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jgpt.shapes.calls import TypedCall, called_in, watching
from jgpt.shapes.changes import Edits, call_changed, call_edited, fits, in_turn
from jgpt.shapes.contract import typed


class EditedModule(nnx.Module):
    """An NNX module whose results inside are replaced when it is called."""

    @typed
    def __init__(self, model: nnx.Module, edits: Edits) -> None:
        self.model = model
        self.edits = edits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and replace the results of the edited paths."""
        return call_edited(self.model, self.edits, *args, **kwargs)


class EditedLanguageModel(EditedModule):
    """An edited language model, whose `logits(hidden(tokens))` is a call of the model."""

    @typed
    def __init__(self, model: Any, edits: Edits) -> None:
        super().__init__(model, edits)
        self.vocab_size = model.vocab_size
        self.block_size = model.block_size

    def hidden(self, tokens: Any, *, rngs: nnx.Rngs | None = None) -> Any:
        """Return the final hidden states, as the model does."""
        self._require_paths(tokens)
        model = in_turn(self.model)
        with called_in(model), watching(self._watch), jax.disable_jit():
            return model.hidden(tokens, rngs=rngs)

    def logits(self, x: Any) -> Any:
        """Return the logits of final hidden states."""
        model = in_turn(self.model)
        with called_in(model), watching(self._watch), jax.disable_jit():
            logits = model.logits(x)
        # The model's own call isn't made.
        edit_of_model = self._edit_of(type(model).__name__)
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
        complete_call = functools.partial(call_changed, self.model, patterns, change_nothing)
        jax.eval_shape(complete_call, tokens)

    def _watch(self, call: TypedCall) -> Callable[[Any], Any] | None:
        return self._edit_of(call.name)

    def _edit_of(self, path: str) -> Callable[[Any], Any] | None:
        """Return the function of the first pattern that matches a path, to replace its result."""
        for pattern, function in self.edits:
            if fits(pattern, path):
                return function
        return None
