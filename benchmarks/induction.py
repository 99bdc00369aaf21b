"""Train the default preset, and look for induction heads in it: the record of lesson 21.

    python benchmarks/induction.py

Texts are repeated: 40 characters, three times. They are random characters, or a passage of the
validation text of tiny Shakespeare.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import runner
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int

import jgpt

PERIOD = 40
COPIES = 3
TEXTS = 64


def main(seed: int = 1337) -> None:
    """Train, measure, and write the record `induction`.

    Args:
        seed: That of the training.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        options = ("--data", "shakespeare", "--sample-tokens", 0, "--seed", seed, "--out", run)
        train = runner.jgpt("train", *options)
        subprocess.run(train, check=True)
        model, tokenizer, config = jgpt.load(run)
        dataset = jgpt.load_dataset(config.dataset, config.model.block_size, tokenizer=tokenizer)
    random_characters = random_texts(model.vocab_size)
    shakespeare = passages(dataset.validation)
    found = {
        "preset": config.name,
        "period": PERIOD,
        "copies": COPIES,
        "texts": TEXTS,
        "random characters": measured(model, random_characters),
        "Shakespeare": measured(model, shakespeare),
    }
    print(found)
    print(runner.write("induction", found))


def random_texts(vocab_size: int) -> Int[Array, "{TEXTS} time"]:
    """Random characters, no two of them equal in a copy."""

    def shuffled(key: Array) -> Array:
        return jax.random.permutation(key, vocab_size)

    keys = jax.random.split(jax.random.key(0), TEXTS)
    characters = jax.vmap(shuffled)(keys)
    return repeated(characters[:, :PERIOD])


def passages(text: Int[np.ndarray, " length"]) -> Int[Array, "{TEXTS} time"]:
    """Passages from all of a text."""
    starts = np.linspace(0, len(text) - PERIOD, TEXTS).astype(int)
    positions = starts[:, None] + np.arange(PERIOD)  # batch PERIOD
    passages = jnp.asarray(text[positions], int)
    return repeated(passages)


def repeated(texts: Int[Array, "{TEXTS} {PERIOD}"]) -> Int[Array, "{TEXTS} time"]:
    return jnp.tile(texts, (1, COPIES))


def measured(model: jgpt.GPT, tokens: Int[Array, "batch time"]) -> dict[str, Any]:
    """Losses of the first copy and of those after it, and scores of each head."""
    first, later = losses_of(model, tokens)
    weights = np.asarray(model.attention_weights(tokens))  # layers batch heads query key
    previous = on_diagonal(weights, 1, first_query=1)
    # An induction head attends to what followed the query's character in the copy before, which is
    # PERIOD - 1 back. In the first copy there is none.
    prefix = on_diagonal(weights, PERIOD - 1, first_query=PERIOD)
    rises = np.zeros_like(prefix)  # layers heads
    for layer, head in np.ndindex(*rises.shape):
        without_head = head_off(model, layer, head)
        _, later_without_head = losses_of(without_head, tokens)
        rises[layer, head] = later_without_head - later
    return {
        "loss of the first copy": first,
        "loss of the later copies": later,
        "previous-token scores": np.round(previous, 4).tolist(),
        "prefix-matching scores": np.round(prefix, 4).tolist(),
        "rise of the later copies' loss without a head": np.round(rises, 4).tolist(),
    }


def losses_of(model: Any, tokens: Int[Array, "batch time"]) -> tuple[float, float]:
    """The loss of the characters of the first copy, and of those that were seen before."""
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    logits = model(inputs)  # batch time-1 vocab
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_probability, targets[..., None], axis=-1)  # batch time-1 1
    loss = -picked[..., 0]  # batch time-1
    # The first character of the second copy can't be foreseen: nothing says that a copy ends.
    in_first = loss[:, : PERIOD - 1]
    in_later = loss[:, PERIOD:]
    return float(in_first.mean()), float(in_later.mean())


def on_diagonal(
    weights: Float[np.ndarray, "layers batch heads query key"], back: int, first_query: int
) -> Float[np.ndarray, "layers heads"]:
    """The mean weight so many keys back, over the queries from the first on."""
    queries = np.arange(first_query, weights.shape[3])
    keys = queries - back
    picked = weights[..., queries, keys]  # layers batch heads query
    return picked.mean(axis=(1, 3))


def head_off(model: jgpt.GPT, layer: int, head: int) -> nnx.Module:
    """The model without a head."""

    def off(heads: Float[Array, "batch heads time head_dim"]) -> Array:
        return heads.at[:, head].set(0.0)

    return jgpt.edit(model, {f"blocks.{layer}.attention.attend_windowed": off})


if __name__ == "__main__":
    tyro.cli(main)
