"""What machine this is."""

import resource
import types

import pytest

from jgpt.machine import (
    Platform,
    accelerators,
    current_platform,
    memory_in_use,
    memory_limit,
    peak_flops,
)


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
