"""A warning for recompilations during training."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's monitoring event of a compilation."""


@contextlib.contextmanager
def compilations_watched(warn: Callable[[str], None]) -> Iterator[None]:
    """Call `warn` once, at the first compilation.

    If this version of JAX has no monitoring event of that name, this does nothing.
    """
    warned = False  # only once, since the recompilation may repeat at each call

    def on_event(event: str, duration_secs: float, **details: Any) -> None:
        nonlocal warned
        if event == COMPILED and not warned:
            warned = True
            warn(
                f"compiled again after warm-up: {details.get('fun_name', 'a function')}; "
                "JAX_EXPLAIN_CACHE_MISSES=1 says why"
            )

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
