"""Batches from the user's own function of (dataset, seed, step), checked and put on the devices."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.batch import Batch
from jgpt.data.dataset import Dataset
from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import shardings, spec_of
from jgpt.shapes.describe import describe_value
from jgpt.user_code import require_code


class OwnBatches:
    """The batches of the user's function, which is called in Python and may use NumPy."""

    def __init__(
        self, function: Callable[..., Batch], dataset: Dataset, config: TrainConfig
    ) -> None:
        self._function = function
        self._dataset = dataset
        self._config = config
        # A curriculum needs the sizes of a batch, or the number of steps.
        self._options: dict[str, Any] = {}
        if "config" in inspect.signature(function).parameters:
            self._options["config"] = config

    def of_steps(self, first_step: int, steps: int, count: int) -> Batch:
        """Return the batches of `count` steps, followed by empty ones up to `steps`.

        They are one Batch, whose arrays have the steps as their first axis.
        """
        batches = [self.of_step(step) for step in range(first_step, first_step + count)]
        # One program takes `steps` batches, however many are used.
        empty = jax.tree.map(np.zeros_like, batches[0])
        batches.extend([empty] * (steps - count))
        # Stacked on the host, so that each process moves only the part of its own devices.
        return jax.tree.map(lambda *arrays: _placed(np.stack(arrays)), *batches)

    def of_step(self, step: int) -> Batch:
        """Return the batch of one step, on the host. Raises ValueError for a wrong one."""
        batch = self._function(self._dataset, self._config.seed, step, **self._options)
        if not isinstance(batch, Batch):
            raise ValueError(
                f"the batch of step {step} must be a jgpt.Batch, not {describe_value(batch)}"
            )
        expected = (self._config.batch_size, self._config.model.block_size + 1)
        if batch.tokens.shape != expected:
            raise ValueError(
                f"the batch of step {step} has tokens of shape {list(batch.tokens.shape)}, not "
                f"{list(expected)}, for batch_size={expected[0]} and block_size={expected[1] - 1}"
            )
        host = jax.tree.map(np.asarray, batch)
        # A compiled step reads a wrong token as NaN, without an error.
        vocab_size = self._dataset.tokenizer.vocab_size
        for extreme in (int(host.tokens.min()), int(host.tokens.max())):
            if not 0 <= extreme < vocab_size:
                raise ValueError(
                    f"the batch of step {step} contains token {extreme}, outside the vocabulary of "
                    f"{vocab_size}"
                )
        return host

    def abstract(self, step: int) -> Any:
        """Return the shapes of the batches of a call, from that of one step."""

        def of_call(array: Any) -> Any:
            shape = (self._config.steps_per_call, *array.shape)
            return jax.ShapeDtypeStruct(shape, array.dtype)

        return jax.tree.map(of_call, self.of_step(step))


def own_batches(config: TrainConfig, dataset: Dataset) -> OwnBatches | None:
    """Return the batches of a config's own function, or None if it has none."""
    if config.batches is None:
        return None
    return OwnBatches(require_code(config.batches, "batches"), dataset, config)


def _placed(array: Any) -> Any:
    """Put an array of steps, rows and positions on the devices; a mesh shards its rows."""
    mesh = current_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    spec = spec_of((None, "batch", None), array.shape, mesh)
    sharding = shardings(spec)
    # JAX asks for the parts of this process's devices alone.
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])
