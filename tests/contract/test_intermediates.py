"""Every `check` inside a callable fires on every wrong shape, in the scope it runs in."""

import inspect
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import jgpt
from jgpt.contracts import check
from tests.contract.calls import shape_mutations
from tests.contract.inspection import modules, with_arrays
from tests.contract.programs import calls_of

CHECKS = {
    "jgpt.nn.attention.attention_weights",
    "jgpt.nn.heads.MultiHeadAttention.__call__",
    "jgpt.nn.transformer.FeedForward.__call__",
}
"""What checks an intermediate."""


class Probe:
    """Stands in for `check`: tries wrong values too, and counts a callable's own checks."""

    def __init__(self, function: Any):
        self.code = inspect.unwrap(function).__code__
        self.own = 0

    def __call__(self, value: Any, annotation: Any) -> Any:
        self.own += sys._getframe(1).f_code is self.code
        wrong = [(shape, value.dtype) for shape in shape_mutations(value.shape)]
        for shape, dtype in [*wrong, (value.shape, jnp.int32), (value.shape, jnp.bool)]:
            with pytest.raises(TypeCheckError, match="computed a wrong intermediate"):
                check(jnp.zeros(shape, dtype), annotation)
        return check(value, annotation)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_intermediates_are_checked(name: str, monkeypatch: pytest.MonkeyPatch):
    call = calls_of(name)[0]
    probe = Probe(call.written)
    for module in modules(jgpt):
        if getattr(module, "check", None) is check and module.__name__ != "jgpt.contracts":
            monkeypatch.setattr(module, "check", probe)
    call.again(call.good)
    assert probe.own == 1


def test_no_other_callable_checks_one():
    codes = {name: calls_of(name)[0].written.__code__ for name in with_arrays(jgpt)}
    assert {name for name, code in codes.items() if "check" in code.co_names} == CHECKS
