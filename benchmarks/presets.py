"""Write the record of the presets' sizes; `tables.py` makes the tables of docs/train.md from it.

    JAX_PLATFORMS=cpu python benchmarks/presets.py

The figures are those of `jgpt info PRESET`. Presets that no CPU trains have no memory.
"""

from typing import Any

import runner
from tables import ON_A_CPU

from jgpt.machine import this_machine
from jgpt.nn.costs import parts_of
from jgpt.presets import PRESETS
from jgpt.training.complete import complete
from jgpt.training.memory import training_memory

COMPILED = (*ON_A_CPU, "nanogpt-char")
"""The presets whose train step is compiled, for its memory."""


def sizes(name: str) -> dict[str, Any]:
    """Return the parameters, the steps, the tokens of a step and the memory of a preset."""
    _, config = PRESETS[name]
    found: dict[str, Any] = {
        "parameters": sum(part.parameters for part in parts_of(config.model)),
        "steps": config.steps,
        "tokens_per_step": config.batch_size * config.model.block_size,
    }
    if name in COMPILED:
        # as `jgpt info`: what the machine decides is decided first, or it is another program
        memory = training_memory(complete(config, this_machine()))
        if memory is not None:
            found["training_bytes"] = memory.state + memory.working
    return found


def main() -> None:
    print(runner.write("presets", {"presets": {name: sizes(name) for name in PRESETS}}))


if __name__ == "__main__":
    main()
