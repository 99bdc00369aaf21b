"""Every `check` inside a callable fires on every wrong shape, in the scope it runs in."""

import inspect
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import jgpt
from jgpt.contracts import check
from tests.contract.cases import CASES
from tests.contract.contract import Case, shape_mutations
from tests.contract.inspection import modules


class Probe:
    """Stands in for `check`: tries wrong values too, and counts a callable's own checks."""

    def __init__(self, case: Case):
        self.code = inspect.unwrap(case.callable).__code__
        self.own = 0

    def __call__(self, value: Any, annotation: Any) -> Any:
        self.own += sys._getframe(1).f_code is self.code
        wrong = [(shape, value.dtype) for shape in shape_mutations(value.shape)]
        for shape, dtype in [*wrong, (value.shape, jnp.int32), (value.shape, jnp.bool)]:
            with pytest.raises(TypeCheckError, match="computed a wrong intermediate"):
                check(jnp.zeros(shape, dtype), annotation)
        return check(value, annotation)


@pytest.mark.parametrize("case", [case for case in CASES if case.result is None], ids=str)
def test_intermediates_are_checked(case: Case, monkeypatch: pytest.MonkeyPatch):
    probe = Probe(case)
    for module in modules(jgpt):
        if getattr(module, "check", None) is check and module.__name__ != "jgpt.contracts":
            monkeypatch.setattr(module, "check", probe)
    case.call(case.good)
    assert probe.own == case.checks
