"""`jgpt info`: the size and cost of a model."""

import dataclasses
from typing import Annotated

from jgpt.cli import runs, terminal
from jgpt.cli.arguments import Lines, MeshOption, ModelOption, What
from jgpt.cli.options import OptionSpec


def info(
    what: What,
    model: ModelOption = None,
    optimizer: Annotated[
        str | None, OptionSpec("FILE:NAME", "The custom optimizer that the run was trained with.")
    ] = None,
    mesh: MeshOption = None,
) -> Lines:
    """Show a model's parameters, bytes, FLOPs and training memory."""
    with terminal.importing() as status:
        from jgpt.cli import report
        from jgpt.machine import this_machine
        from jgpt.nn.costs import Part, flops_per_token, parts_of
        from jgpt.training.complete import complete
        from jgpt.training.memory import training_memory
        from jgpt.words import format_bytes

        config = runs.config_of(what, model, optimizer)
        if mesh is not None:
            return report.describe_placements(dataclasses.replace(config, mesh=mesh))
        status.update("compiling")
        # one device, completed as `fit` does, or the memory would be another program's
        machine = dataclasses.replace(this_machine(), devices=1)
        decided = complete(dataclasses.replace(config, mesh=None), machine)
        memory = training_memory(decided)
    parts = list(parts_of(config.model))
    parameters = sum(part.parameters for part in parts)
    total_bytes = sum(part.size for part in parts)
    parts.append(Part("all", parameters=parameters, size=total_bytes))
    lines = []
    for part in parts:
        size = format_bytes(part.size)
        lines.append(f"{part.name:<28} {part.parameters:>13,} parameters {size:>12}")
    flops = flops_per_token(config.model)
    lines.append(f"FLOPs per token at full context: {flops:,} forward, {3 * flops:,} in training")
    if memory is not None:
        setting = f"batch_size={config.batch_size}"
        if decided.micro_batches != 1:
            setting += f", micro_batches={decided.micro_batches}"
        lines.append(f"training memory at {setting}: {memory}")
    lines.append(report.describe_export(config.model))
    return lines
