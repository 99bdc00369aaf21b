"""Train each rung of lesson 20 with three seeds; record its losses and what it writes.

    python benchmarks/ladder.py

Each run takes 5,000 steps of 256 characters of tiny Shakespeare.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tyro
from runner import ROOT, Figures, Measured, Rounds, Variant, call, compare, printed_by

CHARACTERS_WRITTEN = 160


def main(rounds: int = 3, only: tuple[str, ...] = ()) -> None:
    """Train each rung once in each round, and write the record `ladder`.

    Args:
        rounds: The number of seeds.
        only: Only rungs whose names contain one of these; no record is written.
    """
    options = Rounds(rounds, only)
    # in another process: this one imports no jax, which would count as memory of each variant
    budget = json.loads(printed_by(*call("ladder", "budget")))
    samples: dict[str, str] = {}

    def variant(name: str) -> Variant:
        def read(printed: str, out: Path) -> Figures:
            figures = json.loads(printed.splitlines()[-1])
            text = figures.pop("sample")
            samples.setdefault(name, text)  # that of the first seed
            return figures

        return Variant(name, call("ladder", "climb", name=name, seed="{seed}"), read)

    def facts(measured: Measured) -> dict[str, Any]:
        seeds = [options.first_seed + index for index in range(rounds)]
        return {**budget, "seeds": seeds, "samples": samples}

    compare("ladder", [variant(name) for name in budget["rungs"]], options, facts)


def budget() -> dict[str, Any]:
    """The names of the rungs, and what they have in common."""
    rungs = lesson()
    first = rungs.RUNGS[0]
    return {
        "steps": rungs.STEPS,
        "characters_per_step": first.batch_size * first.block_size,
        "learning_rate": rungs.LEARNING_RATE,
        "rungs": [rung.name for rung in rungs.RUNGS],
    }


def climb(name: str, seed: str) -> dict[str, Any]:
    """Train a rung in this process."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jgpt

    rungs = lesson()
    rung = rungs.rung_named(name)
    data = jgpt.DataConfig(data=("shakespeare",))
    dataset = jgpt.load_dataset(data, block_size=rung.block_size)
    model, losses = rungs.train(rung, int(seed), jnp.asarray(dataset.train, int))
    prompt = dataset.validation[: rung.block_size]
    written = rungs.write(model, prompt, CHARACTERS_WRITTEN)
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    return {
        "parameters": sum(leaf.size for leaf in weights),
        "training_loss": float(losses[-500:].mean()),
        "validation_loss": rungs.validation_loss(model, dataset.validation, rung.block_size),
        "sample": dataset.tokenizer.decode(written),
    }


def lesson() -> Any:
    """The module of the lesson, which has the models."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    import rungs

    return rungs


if __name__ == "__main__":
    tyro.cli(main)
