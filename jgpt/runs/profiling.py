"""Compiled programs kept and watched, and traces of steps."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.monitoring
import platformdirs
from jaxtyping import Array, PyTree, Shaped

from jgpt.contracts import typed

_MAX_COMPILED_BYTES = 1 << 30


def keep_compilations() -> None:
    """Read compiled programs from the user's cache, and put new ones there.

    Nothing changes where JAX was told already what to do (`JAX_COMPILATION_CACHE_DIR`). A machine
    has a folder of its own: what is compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(platformdirs.user_cache_dir("jgpt")) / "compiled" / platform.node()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_compilation_cache_max_size", _MAX_COMPILED_BYTES)


class CompilationWatch:
    """Hears JAX compile something after warm-up, and tells of it once.

    Use it as a context manager, and `arm` it when all that a run needs has been compiled. It
    listens to JAX's monitoring events; where a JAX has none of that name it hears nothing.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Tell through a function, which is called at most once."""
        self._tell: Callable[[str], None] | None = tell
        self._armed = False

    def __enter__(self) -> Self:
        """Listen."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def arm(self) -> None:
        """From now on, whatever is compiled is one compilation too many."""
        self._armed = True

    def _hear(self, event: str, duration_secs: float, **details: Any) -> None:
        if self._armed and event == self.EVENT and self._tell is not None:
            tell, self._tell = self._tell, None
            tell(
                f"compiled again after warm-up: {details.get('fun_name', 'a function')}; "
                "JAX_EXPLAIN_CACHE_MISSES=1 says why"
            )


class Profiler:
    """Traces some steps after the first, which compiles; use it as a context manager."""

    def __init__(self, directory: Path, steps: int) -> None:
        """Trace so many steps, or none, into a directory."""
        self._directory, self._left = directory, steps
        self._warm = self._tracing = False

    def __enter__(self) -> Self:
        """Nothing to do before the first steps."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, if training ended before all of its steps."""
        if self._tracing:
            jax.profiler.stop_trace()

    def limit(self, count: int) -> int:
        """How many of these steps to take at once; the trace begins where they do."""
        if self._left == 0:
            return count
        if not self._warm:
            return 1
        if not self._tracing:
            self._tracing = True
            jax.profiler.start_trace(self._directory)
        return min(count, self._left)

    @typed
    def stepped(self, count: int, result: PyTree[Shaped[Array, "..."]]) -> None:
        """The steps were started, with this result; the trace ends when its last one is done."""
        if self._tracing:
            self._left -= count
            if self._left == 0:
                jax.block_until_ready(result)
                jax.profiler.stop_trace()
                self._tracing = False
        self._warm = True
