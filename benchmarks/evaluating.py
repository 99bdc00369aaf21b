"""Evaluate a trained run on its test split, or with int8 weights."""

import json
from pathlib import Path
from typing import Any

import tyro

WINDOWS = (64, 256, 512)


def test(run: Path) -> None:
    """Print the loss on the test split at the best checkpoint, in windows that don't overlap."""
    from jgpt.runs.directory import RunDirectory
    from jgpt.runs.loop import evaluate

    block_size = RunDirectory.open(run).config().model.block_size
    losses = {
        f"test_loss_in_windows_of_{size}": evaluate(run, split="test", window=size).loss
        for size in WINDOWS
        if size <= block_size
    }
    print(json.dumps(losses))


def int8(run: Path, batch_size: int = 16) -> None:
    """Print the exact validation loss with and without int8 weights, and the share of the targets
    whose most likely token stays the same."""
    import numpy as np

    import jgpt
    from jgpt.data.batches import evaluation_windows
    from jgpt.data.dataset import load_dataset

    model, tokenizer, config = jgpt.load(run)
    size = config.model.block_size
    tokens = load_dataset(config.dataset, size, tokenizer=tokenizer).validation
    windows, counted = evaluation_windows(tokens, size, batch_size)
    figures, likeliest = dict[str, float](), []
    for name, its in (("loss", model), ("int8", jgpt.with_int8_weights(model))):
        losses, tops = evaluated(its, windows)
        figures[name] = float(losses[counted].mean(dtype=np.float64))
        likeliest.append(tops[counted])
    figures["agrees"] = float((likeliest[0] == likeliest[1]).mean())
    print(json.dumps(figures))


def evaluated(model: Any, windows: Any) -> tuple[Any, Any]:
    """The loss and the most likely token at each position."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    graph, weights = nnx.split(model)

    @jax.jit
    def of(weights: Any, windows: Any) -> tuple[Any, Any]:
        logits = nnx.merge(graph, weights)(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses, logits.argmax(-1)

    parts = [of(weights, jnp.asarray(batch)) for batch in windows]
    losses, likeliest = (np.stack(part) for part in zip(*parts, strict=True))
    return losses, likeliest


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"test": test, "int8": int8})
