"""What is compiled is kept and heard of, and steps are traced."""

import contextlib
import platform
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.lru_cache import LRUCache

from jgpt import fit
from jgpt.fitting import fit as fit_module
from jgpt.fitting import loop, profiling
from jgpt.fitting.profiling import compilations_watched
from jgpt.hardware import enable_compilation_cache
from tests.runs.harness import BIGRAM, recorded, with_changes

COMPILATION_CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)


@pytest.fixture
def compilation_cache():
    """What JAX is told of it, which a test may change."""

    def settings():
        return [getattr(jax.config, name) for name in COMPILATION_CACHE]

    before = settings()
    yield settings
    for name, value in zip(COMPILATION_CACHE, before, strict=True):
        jax.config.update(name, value)


def test_compilations_are_kept_in_a_folder_of_the_machine_in_the_users_cache(
    compilation_cache, user_cache
):
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    warnings.warn(
        "Error writing persistent compilation cache entry for 'f': no space", stacklevel=1
    )
    folder, seconds, size = compilation_cache()
    assert Path(folder) == user_cache / "compiled" / platform.node()
    assert seconds == 0  # JAX would leave out what compiles in less than a second
    assert size == 2**30
    enable_compilation_cache()
    assert compilation_cache() == [folder, seconds, size]


def test_programs_that_lack_the_time_of_their_use_are_compiled_and_stored_again(
    compilation_cache, user_cache
):
    """JAX reads the times of all entries before it stores one."""
    folder = user_cache / "compiled" / platform.node()
    folder.mkdir(parents=True)
    (folder / "cut-off-cache").write_bytes(b"prog")
    (folder / "kept-cache").write_bytes(b"program")
    (folder / "kept-atime").write_bytes(b"12345678")
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    cache = LRUCache(str(folder), max_size=1000)
    cache.put("new", b"program")
    assert cache.get("new") == b"program"
    assert cache.get("cut-off") is None
    cache.put("cut-off", b"program")
    assert cache.get("cut-off") == b"program"
    assert cache.get("kept") == b"program"


def test_a_compilation_cache_that_was_chosen_is_left_alone(compilation_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    chosen = compilation_cache()
    enable_compilation_cache()

    assert compilation_cache() == chosen
    assert chosen[0] == str(tmp_path)


def test_a_recompilation_is_told_once_by_name_while_it_is_watched(monkeypatch):
    told: list[str] = []
    double = jax.jit(lambda x: 2 * x)
    small, larger, largest = (jnp.zeros(size) for size in (3, 4, 5))
    double(small)
    with compilations_watched(told.append):
        double(small)
        assert told == []
        double(larger)
        double(largest)
    assert told == [
        "compiled again after warm-up: jit(<lambda>); JAX_EXPLAIN_CACHE_MISSES=1 says why"
    ]
    jax.jit(lambda x: 3 * x)(jnp.zeros(3))  # after the watch
    monkeypatch.setattr(profiling, "COMPILED", "/jax/renamed")
    with compilations_watched(told.append):
        jax.jit(lambda x: 4 * x)(jnp.zeros(3))
    assert len(told) == 1


@pytest.fixture
def events(monkeypatch):
    """The numbers of steps in calls, and where a trace begins and ends."""
    events: list[int | str] = []
    trace = jax.profiler.trace
    make = fit_module.make_train_steps

    @contextlib.contextmanager
    def recorded_trace(directory):
        events.append("trace")
        with trace(directory):
            yield
        events.append("done")

    def recorded_steps(config):
        return recorded(events, lambda *arguments: arguments[3], make(config))

    monkeypatch.setattr(jax.profiler, "trace", recorded_trace)
    monkeypatch.setattr(fit_module, "make_train_steps", recorded_steps)
    return events


def test_the_steps_after_the_first_are_traced_and_compilations_watched_after_an_evaluation(
    small_run, tmp_path, monkeypatch, events
):
    waits = jax.block_until_ready
    watches = loop.compilations_watched
    monkeypatch.setattr(jax, "block_until_ready", recorded(events, "waited", waits))
    monkeypatch.setattr(loop, "compilations_watched", recorded(events, "watched", watches))
    calls = {"steps": 70, "steps_per_call": 50, "eval_interval": 32}
    config = with_changes(small_run, **BIGRAM | calls, out=str(tmp_path / "run"))
    run = fit(config, profile_steps=5)
    assert list((run.directory / "profile").rglob("*.xplane.pb"))
    # calls end where there is an estimate, after 2, 4, 8 and 16, or an evaluation, after 32 and 64;
    # steps are only dispatched: a trace that doesn't wait for the last of them ends before it
    traced = ["trace", 1, 2, 2, "waited", "done"]
    assert events == [0, 1, *traced, 2, 8, 16, "watched", 32, 6]


def test_a_resumed_run_compiles_without_a_step_and_traces_after_its_own_first_step(
    small_run, tmp_path, events
):
    config = with_changes(small_run, **BIGRAM, steps=4, out=str(tmp_path / "run"))
    fit(config)
    events.clear()

    fit(with_changes(config, steps=12), resume=True, profile_steps=2)

    # from step 4; evaluated after steps 8 and 12, with three steps in a call at most
    assert events == [0, 1, "trace", 2, "done", 1, 3, 1]
