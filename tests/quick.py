"""What `make test` leaves to `make test-all`: cases of a test that is about many."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def only(quick: Callable[[Any], bool] | Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, those that are not quick marked as slow."""
    is_quick = quick if callable(quick) else set(quick).__contains__
    marked = []
    for case in cases:
        if is_quick(case):
            marked.append(case)
            continue
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.slow))
    return marked
