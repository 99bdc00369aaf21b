"""The validation loss of trained runs with and without int8 weights.

    python benchmarks/int8.py RUN [RUN ...]

The loss is exact: each token of the validation split is a target once. `agrees` is the share of
targets whose most likely token stays the same.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import runner
import tyro
from flax import nnx

import jgpt
from jgpt.data.batches import evaluation_windows
from jgpt.data.dataset import load_dataset

BATCH = 16


def main(runs: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> None:
    """Measure trained runs, which are directories."""
    results: dict[str, Any] = {"runs": {}}
    print("| run | loss | in int8 | change | likeliest token agrees |")
    print("|---|---|---|---|---|")
    for directory in runs:
        model, tokenizer, config = jgpt.load(directory)
        size = config.model.block_size
        tokens = load_dataset(config.dataset, size, tokenizer=tokenizer).validation
        windows, counts = evaluation_windows(tokens, size, BATCH)
        before, likeliest = evaluated(model, windows, counts)
        after, theirs = evaluated(jgpt.with_int8_weights(model), windows, counts)
        agrees = float((likeliest == theirs)[counts].mean())
        results["runs"][directory.name] = {"loss": before, "int8": after, "agrees": agrees}
        change = after - before
        print(f"| {directory.name} | {before:.4f} | {after:.4f} | {change:+.4f} | {agrees:.1%} |")
    print(runner.write("int8", results))


def evaluated(model: Any, windows: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss over the counted targets, and the most likely token at each position."""
    graph, weights = nnx.split(model)

    @jax.jit
    def of(weights, windows):
        logits = nnx.merge(graph, weights)(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses, logits.argmax(-1)

    parts = [of(weights, jnp.asarray(batch)) for batch in windows]
    losses, likeliest = (np.stack(part) for part in zip(*parts, strict=True))
    return float(losses[counts].mean(dtype=np.float64)), likeliest


if __name__ == "__main__":
    tyro.cli(main)
