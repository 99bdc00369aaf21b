"""Optimizers, plans and placements in words."""

from collections.abc import Mapping

import jax

from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.fields import Code
from jgpt.interop.formats import hf_config, natural_format
from jgpt.machine import device_kinds
from jgpt.nn.models import Weights
from jgpt.parallel.mesh import abstract_mesh
from jgpt.parallel.rules import Dimensions
from jgpt.shapes.contract import typed
from jgpt.training.ahead import CompiledStep
from jgpt.training.evaluation import describe_targets
from jgpt.training.optimizer import partition
from jgpt.training.placement import bytes_on_each, placements, replicated_dimensions
from jgpt.training.plan import Plan
from jgpt.training.state import abstract_state, state_specs
from jgpt.words import counted, format_bytes


@typed
def describe_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    dimensions: Mapping[str, Dimensions] | None = None,
) -> str:
    """A line that says which rule moves how many parameters, and how fast."""
    if config.make is not None:
        return f"custom optimizer {Code.of(config.make).named}"
    sizes: dict[str, int] = {}
    groups = jax.tree.leaves(partition(config, weights, dimensions))
    for leaf, group in zip(jax.tree.leaves(weights), groups, strict=True):
        sizes[group] = sizes.get(group, 0) + leaf.size
    rates = {
        "muon": config.muon_learning_rate,
        "adamw": config.learning_rate,
        "embedding": config.embedding_learning_rate,
    }
    first, *others = [group for group in rates if group in sizes]
    line = f"{first} moves {sizes[first]:,} parameters (learning rate up to {rates[first]:g})"
    for group in others:
        line += f", {group} {sizes[group]:,} ({rates[group]:g})"
    return line


def describe_objective(config: TrainConfig) -> list[str]:
    """A line that names a custom objective; none for the cross-entropy."""
    if config.objective is None:
        return []
    named = Code.of(config.objective).named
    return [f"custom objective {named}; validation losses are cross-entropies"]


def describe_run(
    config: TrainConfig, parameters: int, training_tokens: int, validation_tokens: int
) -> list[str]:
    """The first lines of a run and of a plan: the model, the device and the data."""
    return [
        f"{config.name}: {parameters:,} parameters, vocabulary {config.model.vocab_size}, on "
        f"{device_kinds()[0]}",
        f"data: {' '.join(config.dataset.data)}: {training_tokens:,} training and "
        f"{validation_tokens:,} validation tokens",
    ]


def describe_batch(config: TrainConfig) -> str:
    """The size of a step, such as 12 x 64 tokens, in 2 micro-batches."""
    parts = _parts(config.micro_batches)
    return f"{config.batch_size} x {config.model.block_size} tokens{parts}"


def _parts(micro_batches: int) -> str:
    if micro_batches == 1:
        return ""
    return f", in {micro_batches} micro-batches"


def describe(plan: Plan) -> list[str]:
    """A plan as lines of text."""
    config = plan.config
    tokens = config.batch_size * config.model.block_size
    epochs = config.steps * tokens / plan.training_tokens
    lines = [
        *describe_run(config, plan.parameters, plan.training_tokens, plan.validation_tokens),
        f"{counted(config.steps, 'step')} of {describe_batch(config)} into {plan.out}: "
        f"{epochs:.1f} epochs, {plan.flops:.3g} FLOPs",
        f"an evaluation and a checkpoint every {counted(config.eval_interval, 'step')}"
        f"{describe_targets(plan.evaluation_targets, plan.validation_tokens - 1)}",
    ]
    if config.mesh is not None:
        replicated = replicated_dimensions(config.model, abstract_mesh(config.mesh))
        lines += [f"mesh: {config.mesh}", *replicated]
    if plan.memory is not None:
        lines.append(f"device memory: {plan.memory}")
    lines.append(describe_export(config.model))
    return [*lines, "no run was written: leave out --dry-run to train"]


def describe_export(config: ModelConfig) -> str:
    """As what a model can be exported, or why it can't."""
    try:
        hf_config(config)
    except ValueError as error:
        return f"no other program can read it: {error}"
    return f"other programs can read it, as {natural_format(config).name}: jgpt export"


def describe_ahead(step: CompiledStep) -> list[str]:
    """A step compiled for other hardware as lines of text."""
    chip = step.chip
    verdict = "NOT enough"
    if step.fits:
        verdict = "enough"

    def row(resource: str, seconds: float, amount: str, peak: float) -> str:
        return f"  {resource:<8} {1e3 * seconds:9.3f} ms  {amount} at {peak / 1e12:g} T/s"

    flops = f"{step.flops / 1e12:.3g} TFLOP"
    return [
        f"{step.chips} x {chip.kind} ({step.on}), mesh {step.mesh}{_parts(step.micro_batches)}",
        f"memory of each chip: {step.memory}; it has {format_bytes(chip.memory)}, which is "
        f"{verdict}",
        "a step takes each chip at least, from published peaks and without what chips send:",
        row("compute", step.compute_seconds, flops, chip.peak_flops),
        row("memory", step.memory_seconds, "all of that memory twice", chip.memory_bandwidth),
    ]


def describe_placements(config: TrainConfig) -> list[str]:
    """A line per parameter: how the config's mesh shards it."""
    mesh = abstract_mesh(config.mesh)
    state = abstract_state(config)
    specs = state_specs(config, mesh)
    parameters = format_bytes(bytes_on_each(state["model"], specs["model"], mesh))
    everything = format_bytes(bytes_on_each(state, specs, mesh))
    lines = []
    for placement in placements(config.model, mesh):
        size = format_bytes(placement.on_each)
        lines.append(f"{placement.name:<40} {placement.sharding:<26} {size:>11}")
    lines.append(
        f"on each device: {parameters} of parameters, {everything} with the optimizer's state"
    )
    lines += replicated_dimensions(config.model, mesh)
    return lines
