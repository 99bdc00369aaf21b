"""What weights in int8 cost: the validation loss of trained runs with and without them.

    python benchmarks/int8.py RUN [RUN ...]

The loss is exact: each whole block of the validation split, every target once. `agrees` is the
share of positions whose likeliest token stays the same.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import record
import tyro
from flax import nnx

import jgpt
from jgpt.data.dataset import load_dataset

BATCH = 16


@dataclass(frozen=True)
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of trained runs."""


def main(options: Options) -> None:
    results: dict[str, Any] = {"runs": {}}
    print("| run | loss | in int8 | change | likeliest token agrees |")
    print("|---|---|---|---|---|")
    for directory in options.runs:
        model, tokenizer, config = jgpt.load(directory)
        size = config.model.block_size
        tokens = load_dataset(config.dataset, size, tokenizer=tokenizer).validation
        blocks = (len(tokens) - 1) // size
        windows = np.stack([tokens[i * size : (i + 1) * size + 1] for i in range(blocks)])
        before, likeliest = evaluated(model, windows)
        after, theirs = evaluated(jgpt.with_int8_weights(model), windows)
        agrees = float((likeliest == theirs).mean())
        results["runs"][directory.name] = {"loss": before, "int8": after, "agrees": agrees}
        change = after - before
        print(f"| {directory.name} | {before:.4f} | {after:.4f} | {change:+.4f} | {agrees:.1%} |")
    print(record.write("int8", results))


def evaluated(model: Any, windows: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss, and the likeliest token at each position."""
    graph, weights = nnx.split(model)

    @jax.jit
    def of(weights, windows):
        logits = nnx.merge(graph, weights)(windows[:, :-1])
        return jgpt.cross_entropy(logits, windows[:, 1:]), logits.argmax(-1)

    whole = len(windows) // BATCH * BATCH
    parts = [
        of(weights, jnp.asarray(windows[i : i + BATCH], jnp.int32)) for i in range(0, whole, BATCH)
    ]
    losses, likeliest = zip(*parts, strict=True)
    return statistics.mean(map(float, losses)), np.concatenate(likeliest)


if __name__ == "__main__":
    main(tyro.cli(Options))
