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
            _remove_incomplete_entries(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_compilation_cache_max_size", 1 << 30)
        # a folder that can't be written is no cache, and none is needed
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _remove_incomplete_entries(folder: Path) -> None:
    """Remove the programs whose time of use is missing.

    JAX writes a program and then the time of its use, in a file of its own. A process that is
    killed in between, or a full disk, leaves a program that may be cut off: JAX would fail to read
    it in each later process and would not replace it. A cleaner of old files may remove the time
    alone. JAX reads the times of all programs before it stores one, so that without one of them it
    would never store again.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        if not used.exists():
            program.unlink()


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
