"""Evaluate a trained run in other ways than `jgpt eval`."""

from runner import Figures

WINDOWS = (64, 256, 512)


def tested(run: str) -> Figures:
    """The loss on the test split at the best checkpoint, in windows that don't overlap."""
    from jgpt.runs.directory import RunDirectory
    from jgpt.runs.evaluate import evaluate

    block_size = RunDirectory.open(run).config().model.block_size
    return {
        f"test_loss_in_windows_of_{size}": evaluate(run, split="test", window=size).loss
        for size in WINDOWS
        if size <= block_size
    }


def int8(run: str) -> Figures:
    """The exact validation loss with and without int8 weights, and the share of the targets whose
    most likely token stays the same."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jgpt
    from jgpt.data.batches import evaluation_windows
    from jgpt.data.dataset import load_dataset
    from jgpt.nn.int8 import with_int8_weights

    model, tokenizer, config = jgpt.load(run)
    size = config.model.block_size
    tokens = load_dataset(config.dataset, size, tokenizer=tokenizer).validation
    windows, counted = evaluation_windows(tokens, size, 16)

    @nnx.jit
    def at(model, batch):
        logits = model(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses, logits.argmax(-1)

    def of_targets(model) -> tuple:
        """The loss and the most likely token at each target."""
        parts = jax.device_get([at(model, jnp.asarray(batch)) for batch in windows])
        return tuple(np.stack(part)[counted] for part in zip(*parts, strict=True))

    (losses, tops), (int8_losses, int8_tops) = map(of_targets, (model, with_int8_weights(model)))
    return {
        "loss": float(losses.mean(dtype=np.float64)),
        "int8": float(int8_losses.mean(dtype=np.float64)),
        "agrees": float((tops == int8_tops).mean()),
    }
