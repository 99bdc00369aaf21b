"""What machine this is."""

import importlib
import resource
import types
from typing import Any

import jax
import jax.monitoring
import pytest

from jgpt.hardware import (
    _LOWERING_CACHES,
    Platform,
    accelerators,
    current_platform,
    memory_in_use,
    memory_limit,
    peak_flops,
    release_memory,
)
from tests.flags import known_flags


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v9", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_peak_is_the_maker_s_or_unknown(monkeypatch, kind, peak):
    monkeypatch.setattr("jax.devices", lambda: [types.SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr("jax.device_count", lambda: 8)
    assert peak_flops() == peak  # of one device, however many the host has


@pytest.mark.parametrize(
    ("platform", "version", "capability", "expected"),
    [
        ("gpu", "PJRT C API\ncuda 12090", "9.0", Platform("gpu", 9.0)),
        ("gpu", "PJRT C API\nrocm 60300", "gfx90a", Platform("gpu", None)),
        ("gpu", "PJRT C API\nrocm 60300", "9.0", Platform("gpu", None)),
        ("tpu", "PJRT C API\nTFRT TPU v5 lite", None, Platform("tpu", None)),
    ],
    ids=["NVIDIA", "AMD", "AMD, numbered", "TPU"],
)
def test_only_cuda_gpus_have_a_cuda_capability(
    monkeypatch, platform, version, capability, expected
):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr("jax.devices", lambda: [device])
    monkeypatch.setattr("jax.default_backend", lambda: platform)

    assert current_platform() == expected


def test_only_accelerators_are_all_trained_on(monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [None] * 8)
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert accelerators() == 1  # whose cores they would share
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    assert accelerators() == 8


def test_memory_is_the_device_s_if_it_says_so(monkeypatch):
    said = {"peak_bytes_in_use": 11, "bytes_limit": 13}
    device = types.SimpleNamespace(memory_stats=lambda: said)
    monkeypatch.setattr("jax.local_devices", lambda: [device])
    assert (memory_in_use(), memory_limit()) == (11, 13)
    said.clear()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # which Linux says in KiB
    assert memory_in_use() == pytest.approx(resident, rel=0.1)
    assert memory_limit() is None


@pytest.mark.parametrize(
    ("system", "has", "trims"),
    [("linux", True, True), ("linux", False, False), ("darwin", True, False)],
    ids=["glibc", "another C library", "another system"],
)
def test_freed_memory_is_given_back_after_garbage_was_collected(monkeypatch, system, has, trims):
    calls = []
    library = types.SimpleNamespace()
    if has:
        library.malloc_trim = lambda kept: calls.append(f"keep {kept}")
    monkeypatch.setattr("ctypes.CDLL", lambda name: {None: library}[name])
    monkeypatch.setattr("gc.collect", lambda: calls.append("collect"))
    monkeypatch.setattr("sys.platform", system)
    release_memory()
    monkeypatch.undo()  # the suite's own fixtures look at the system too

    assert calls == ["collect", "keep 0"][: 1 + trims]


@pytest.fixture
def lowering_caches() -> list[Any]:
    """The two private caches, found without the code that is tested."""
    caches = []
    for module_name, name in _LOWERING_CACHES:
        module = importlib.import_module(module_name)
        assert hasattr(module, name), f"JAX {jax.__version__} has no {module_name}.{name}"
        caches.append(getattr(module, name))
    assert len(caches) == 2
    return caches


def test_what_was_lowered_is_forgotten_and_what_was_compiled_is_kept(lowering_caches):
    programs = []
    for number in range(40):
        program = jax.jit(lambda x, number=number: x + number)
        program(1.0)
        programs.append(program)
    for cache in lowering_caches:
        assert cache.cache_info().currsize >= 40
    compiled = []

    def record(event: str, duration_secs: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details)

    release_memory()

    for cache in lowering_caches:
        assert cache.cache_info().currsize == 0
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for number, program in enumerate(programs):
            assert float(program(1.0)) == 1.0 + number
        assert not compiled
        jax.jit(lambda x: x - 1)(1.0)  # the control
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


@pytest.mark.parametrize("lacks", ["module", "name", "method"])
def test_a_jax_without_one_of_these_caches_gives_the_rest_of_the_memory_back(
    monkeypatch, lowering_caches, lacks
):
    program = jax.jit(lambda x: x * 3)  # the caches hold it weakly
    program(1.0)
    lacking, other = lowering_caches
    module, name = _LOWERING_CACHES[0]
    match lacks:
        case "module":
            changed = ("jax._src.no_such_module", name)
            monkeypatch.setattr("jgpt.hardware._LOWERING_CACHES", (changed, _LOWERING_CACHES[1]))
        case "name":
            monkeypatch.delattr(f"{module}.{name}")
        case "method":
            monkeypatch.setattr(f"{module}.{name}", lambda: None)
    trimmed = []
    library = types.SimpleNamespace(malloc_trim=trimmed.append)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr("sys.platform", "linux")

    assert other.cache_info().currsize >= 1
    release_memory()
    left = lacking.cache_info().currsize
    monkeypatch.undo()  # the suite's own fixtures trim, too

    assert other.cache_info().currsize == 0
    assert left >= 1  # it was really not there
    assert trimmed == [0]


def test_a_flag_that_xla_lacks_is_left_out():
    lacking = "--xla_no_such_flag=7"
    known = "--xla_cpu_parallel_codegen_split_count=1"

    assert known_flags([lacking, known, "--xla_nor_this"]) == [known]
    assert known_flags([known]) == [known]


def test_another_failure_of_xla_is_no_answer_about_its_flags():
    with pytest.raises(RuntimeError, match=r"can't ask XLA which flags it knows:\n.*many"):
        known_flags(["--xla_cpu_parallel_codegen_split_count=many"])
