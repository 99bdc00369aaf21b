"""The compilation cache, and a watch for recompilations."""

import contextlib
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import platformdirs

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's monitoring event of a compilation."""


def enable_compilation_cache() -> None:
    """Use a persistent compilation cache in the user's cache directory.

    Does nothing if JAX has one already (`JAX_COMPILATION_CACHE_DIR`). Each machine has its own
    folder: a program compiled for one processor may not run on another.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(platformdirs.user_cache_dir("jgpt")) / "compiled" / platform.node()
        with contextlib.suppress(OSError):
            _complete_entries(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_compilation_cache_max_size", 1 << 30)
        # a folder that can't be written is no cache, and none is needed
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _complete_entries(folder: Path) -> None:
    """Write the time of use that an entry of the cache lacks.

    JAX keeps it in a file of its own, which a killed process or a cleaner of old files may leave
    out. JAX reads all of them before it stores a program, and without one it never stores again.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))


@contextlib.contextmanager
def compilations_watched(warn: Callable[[str], None]) -> Iterator[None]:
    """Call `warn` once, at the first compilation.

    With a JAX that has no monitoring event of that name it does nothing.
    """
    warned = False

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
