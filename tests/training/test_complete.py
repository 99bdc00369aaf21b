"""A config is complete before training starts: mesh and micro-batches, and the room for them."""

import contextlib
import dataclasses

import pytest

from jgpt import ModelConfig, TrainConfig, preset
from jgpt.machine import Machine, Platform
from jgpt.training.complete import complete, require_memory
from jgpt.training.memory import TrainingMemory

GIB = 1 << 30
MODEL = ModelConfig(vocab_size=21, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
GPT2 = dataclasses.replace(preset("gpt2"), batch_size=8, micro_batches=1)
STATE = 3 * 4 * 124_439_808 + 8  # of gpt2: parameters, two moments of each, and two counts


def machine(devices: int = 1, memory: int | None = None, host: int = 64 * GIB) -> Machine:
    return Machine(Platform("cpu"), devices, memory, host)


@pytest.mark.parametrize(
    ("mesh", "batch_size", "micro_batches", "divided"),
    [
        (None, 480, 40, 40),
        ("data=8", 480, 40, 5),
        ("data=2,fsdp=4", 480, 40, 5),
        ("data=2,fsdp=2,tensor=2", 480, 40, 10),  # tensor splits no rows
        ("tensor=8", 480, 40, 40),
        ("data=8", 480, 1, 1),
        ("data=8", 480, 32, 4),
        ("data=3", 480, 40, 16),  # neither 14 nor 15 divide 160 rows
        ("fsdp=8", 24, 24, 3),
        ("data=2", 24, 3, 2),  # at most as many rows at a time
    ],
)
def test_micro_batches_are_divided_by_the_parts_of_a_batch(
    mesh, batch_size, micro_batches, divided
):
    config = TrainConfig(MODEL, mesh=mesh, batch_size=batch_size, micro_batches=micro_batches)

    assert complete(config, machine()).micro_batches == divided


@pytest.mark.parametrize(
    ("devices", "memory", "mesh"),
    [
        (1, None, None),
        (8, None, "data=8"),
        (8, 2 * STATE + 1, "data=8"),
        (8, 2 * STATE, "fsdp=8"),
        (8, STATE - 1, "fsdp=8"),  # which one device could not hold
    ],
)
def test_all_accelerators_are_used_by_default(devices, memory, mesh):
    assert complete(GPT2, machine(devices, memory)).mesh == mesh


def test_a_batch_that_the_devices_do_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match="which don't divide `batch_size=8`: give a multiple of 3"):
        complete(GPT2, machine(devices=3))


@pytest.mark.parametrize(
    ("mesh", "memory", "refused"),
    [
        (None, None, None),
        (None, STATE, None),
        (None, STATE - 1, r"1\.4 GiB, .* 1\.4 GiB"),
        ("fsdp=2", STATE * 51 // 100, None),
        ("fsdp=2", STATE * 3 // 10, r"712\.7 MiB, the device has 427\.2 MiB: .*`mesh=fsdp=N`"),
    ],
)
def test_a_state_that_no_device_holds_is_refused(mesh, memory, refused):
    config = dataclasses.replace(GPT2, mesh=mesh)
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        complete(config, machine(memory=memory))


def test_steps_that_need_too_much_memory_are_refused_by_micro_batches():
    config = TrainConfig(MODEL, batch_size=8, micro_batches=2)
    needed = TrainingMemory(state=3 * GIB, working=2 * GIB)
    require_memory(needed, config, machine(memory=5 * GIB))
    require_memory(needed, config, machine(host=5 * GIB))
    require_memory(None, config, machine(memory=1))  # a compiler that says nothing

    for too_small in (machine(memory=5 * GIB - 1), machine(host=5 * GIB - 1)):
        with pytest.raises(ValueError, match=r"needs 5\.0 GiB .*: raise `micro_batches=2`, which"):
            require_memory(needed, config, too_small)


def test_the_devices_of_a_cpu_share_its_memory():
    config = TrainConfig(MODEL, batch_size=8, mesh="data=4")
    needed = TrainingMemory(state=GIB, working=GIB)
    host = machine(host=4 * GIB)
    require_memory(needed, config, dataclasses.replace(host, processes=2))

    with pytest.raises(ValueError, match=r"needs 8\.0 GiB and there are 4\.0 GiB"):
        require_memory(needed, config, host)
