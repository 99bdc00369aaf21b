"""What machine this is."""

import types

import pytest

from jgpt.hardware import peak_flops


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
