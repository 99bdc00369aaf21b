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
    """The batches of the user's function, whose value depends on its arguments alone.

    The function is called in Python, not in a compiled program, so it may use NumPy. Each call is
    checked, because a compiled step reads a wrong token as NaN, without an error.
    """

    def __init__(
        self, function: Callable[..., Batch], dataset: Dataset, config: TrainConfig
    ) -> None:
        self._function = function
        self._dataset = dataset
        self._config = config
        self._first_fields: tuple[bool, bool] | None = None
        """Whether the first batch has weights, and whether it has documents."""
        # A curriculum needs the sizes of a batch, or the number of steps.
        self._options: dict[str, Any] = {}
        if "config" in inspect.signature(function).parameters:
            self._options["config"] = config

    def of_steps(self, first_step: int, steps: int, count: int) -> Batch:
        """Return the batches of `count` steps, followed by empty ones up to `steps`.

        They are one Batch, whose arrays have the steps as their first axis.
        """
        batches = []
        for step in range(first_step, first_step + count):
            batches.append(self.of_step(step))
        # One program takes `steps` batches, however many are used.
        empty = jax.tree.map(np.zeros_like, batches[0])
        batches.extend([empty] * (steps - count))

        def stack(*arrays_of_steps: Any) -> Any:
            # On the host, so that each process moves only the part of its own devices.
            stacked = np.stack(arrays_of_steps)
            return _placed(stacked)

        return jax.tree.map(stack, *batches)

    def of_step(self, step: int) -> Batch:
        """Return the batch of one step, on the host. Raises ValueError for a wrong one."""
        batch = self._function(self._dataset, self._config.seed, step, **self._options)
        if not isinstance(batch, Batch):
            raise self._wrong(step, f"must be a jgpt.Batch, not {describe_value(batch)}")
        rows = self._config.batch_size
        block_size = self._config.model.block_size
        of_tokens = (rows, block_size + 1)
        of_targets = (rows, block_size)
        self._require_shape(step, "tokens", batch.tokens, of_tokens)
        self._require_same_fields(step, batch)
        host = jax.tree.map(np.asarray, batch)
        self._require_tokens(step, host.tokens)
        if host.weights is not None:
            self._require_shape(step, "weights", batch.weights, of_targets)
            self._require_weights(step, host.weights)
        if host.documents is not None:
            self._require_shape(step, "documents", batch.documents, of_tokens)
        return host

    def require_pure(self, step: int) -> None:
        """Raise ValueError if the function gives another batch when it is called again."""
        arrays = jax.tree.leaves(self.of_step(step))
        arrays_made_again = jax.tree.leaves(self.of_step(step))
        for array, made_again in zip(arrays, arrays_made_again, strict=True):
            if not np.array_equal(array, made_again):
                raise self._wrong(
                    step,
                    "differs when it is made again: batches= must be a pure function of (dataset, "
                    "seed, step), as with np.random.default_rng((seed, step))",
                )

    def abstract(self, step: int) -> Any:
        """Return the shapes of the batches of a call, from that of one step."""

        def of_call(array: Any) -> Any:
            shape = (self._config.steps_per_call, *array.shape)
            return jax.ShapeDtypeStruct(shape, array.dtype)

        return jax.tree.map(of_call, self.of_step(step))

    def _require_shape(self, step: int, name: str, array: Any, expected: tuple[int, ...]) -> None:
        if array.shape != expected:
            raise self._wrong(
                step,
                f"has {name} of shape {list(array.shape)}, not {list(expected)}, for "
                f"batch_size={self._config.batch_size} and "
                f"block_size={self._config.model.block_size}",
            )

    def _require_tokens(self, step: int, tokens: Any) -> None:
        vocab_size = self._dataset.tokenizer.vocab_size
        for extreme in (int(tokens.min()), int(tokens.max())):
            if not 0 <= extreme < vocab_size:
                raise self._wrong(
                    step, f"contains token {extreme}, outside the vocabulary of {vocab_size}"
                )

    def _require_weights(self, step: int, weights: Any) -> None:
        if not np.isfinite(weights).all() or weights.min() < 0:
            raise self._wrong(step, "has a weight that is negative or not finite")
        # The loss is a weighted mean, which divides by this sum.
        if weights.sum(dtype=np.float64) == 0:
            raise self._wrong(step, "has weights that sum to zero: some target must count")

    def _require_same_fields(self, step: int, batch: Batch) -> None:
        """Raise ValueError if a batch has weights or documents and another one does not."""
        fields = (batch.weights is not None, batch.documents is not None)
        if self._first_fields is None:
            self._first_fields = fields
        # One program takes all batches, and it is compiled for these fields.
        if fields != self._first_fields:
            raise self._wrong(step, "must have weights and documents at each step, or at none")

    def _wrong(self, step: int, message: str) -> ValueError:
        return ValueError(f"the batch of step {step} {message}")


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
