"""The compilation cache, a watch for recompilations, and profiler traces."""

import contextlib
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.monitoring
import platformdirs
from jaxtyping import Array, PyTree, Shaped

from jgpt.contracts import typed
from jgpt.hardware import process_index


def enable_compilation_cache() -> None:
    """Use a persistent compilation cache in the user's cache directory.

    Does nothing if JAX has one already (`JAX_COMPILATION_CACHE_DIR`). Each machine has its own
    folder: a program compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(platformdirs.user_cache_dir("jgpt")) / "compiled" / platform.node()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_compilation_cache_max_size", 1 << 30)
        # a folder that can't be written is no cache, and none is needed
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


class CompilationWatch:
    """Calls `warn` once, at the first compilation after warm-up. Use it as a context manager.

    With a JAX that has no monitoring event of that name it does nothing.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn: Callable[[str], None] | None = warn
        self._armed = False

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def arm(self) -> None:
        """End the warm-up."""
        self._armed = True

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        if self._armed and event == self.EVENT and self._warn is not None:
            warn, self._warn = self._warn, None
            warn(
                f"compiled again after warm-up: {details.get('fun_name', 'a function')}; "
                "JAX_EXPLAIN_CACHE_MISSES=1 says why"
            )


class Profiler(contextlib.ExitStack):
    """Traces `steps` steps after the first, which compiles. Use it as a context manager."""

    def __init__(self, directory: Path, steps: int) -> None:
        super().__init__()
        self._directory, self._left = directory, steps
        self._warm = self._tracing = False

    def limit(self, count: int) -> int:
        """How many of the next `count` steps to take in a call; starts the trace if it is due."""
        if self._left == 0:
            return count
        if not self._warm:
            return 1
        if not self._tracing:
            self._tracing = True
            if process_index() == 0:
                self.enter_context(jax.profiler.trace(self._directory))
        return min(count, self._left)

    @typed
    def stepped(self, count: int, result: PyTree[Shaped[Array, "..."]]) -> None:
        """Steps were dispatched; stops the trace when the last traced one is done."""
        if self._tracing and self._left:
            self._left -= count
            if self._left == 0:
                jax.block_until_ready(result)
                self.close()
        self._warm = True
