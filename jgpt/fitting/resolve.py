"""Decisions on what a config leaves open: dtypes, kernels, the mesh and micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jgpt.config import TrainConfig
from jgpt.hardware import Machine, Platform
from jgpt.nn.precision import for_platform, run_for_platform
from jgpt.parallel.mesh import abstract_mesh, default_mesh, use_mesh
from jgpt.training.memory import require_feasible, with_micro_batches
from jgpt.training.placement import bytes_of, parameters_without_names
from jgpt.training.state import abstract_state


@dataclass(frozen=True)
class ResolvedConfig:
    """A config with everything decided, and the version that the run's directory records."""

    recorded: TrainConfig
    """The config for config.json, unchanged except for this run's vocabulary and dtype, so that the
    run can be resumed on other hardware."""
    trained: TrainConfig
    """The config that is compiled. Only its `eval_tokens` may still be `auto`, which a plan
    decides."""


def with_vocabulary_and_dtype(
    config: TrainConfig, vocab_size: int, platform: Platform
) -> TrainConfig:
    """Return the config that a run records.

    A run keeps the dtype that it began with, even where another would be faster, since its losses
    would not continue consistently.
    """
    model = replace(config.model, vocab_size=vocab_size)
    model = replace(model, dtype=for_platform(model, platform).dtype)
    return replace(config, model=model)


def for_machine(recorded: TrainConfig, machine: Machine) -> TrainConfig:
    """Decide the mesh and everything that depends on the platform, except the micro-batches.

    Raises ValueError if the devices are too small; nothing is compiled for that check.
    """
    mesh = recorded.mesh
    if mesh is None and machine.devices > 1:
        state_bytes = bytes_of(abstract_state(recorded))
        mesh = default_mesh(machine.devices, state_bytes, machine.device_memory)
    config = replace(run_for_platform(recorded, machine.platform), mesh=mesh)
    require_feasible(config, machine.device_memory)
    return config


def resolve_micro_batches(
    recorded: TrainConfig, config: TrainConfig, machine: Machine, warn: Callable[[str], None]
) -> ResolvedConfig:
    """Decide the micro-batches; `auto` compiles steps to see which number fits."""
    if config.micro_batches == "auto":
        warn(
            f"`micro_batches={config.micro_batches!r}`: steps are compiled to see how many of "
            "them it takes"
        )
    with use_mesh(config.mesh):
        config = with_micro_batches(config, machine)
    return ResolvedConfig(recorded, config)


def describe_replicated(config: TrainConfig) -> str | None:
    """Return a warning of parameters that no mesh can shard, since their dimensions have no
    names."""
    unnamed = parameters_without_names(config.model, abstract_mesh(config.mesh))
    if not unnamed:
        return None
    return (
        f"`mesh={config.mesh!r}` replicates {len(unnamed)} parameters whose dimensions have "
        f"no names, such as {unnamed[0]}: nnx.Param(value, dimensions=('embed_dim', "
        "'hidden_dim')) has names"
    )
