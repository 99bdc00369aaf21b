"""Batches as a function of (seed, step), from tokens on the device or memory-mapped."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.rules import shard_by_name, shardings, spec_of
from jgpt.shapes.contract import typed

Tokens = Integer[Array, " tokens"] | Integer[np.ndarray, " tokens"]
RESIDENT_BYTES = 1 << 30
"""Splits up to this size are kept on the device; larger ones stay where they are."""


@typed
def resident(tokens: Integer[np.ndarray, " tokens"]) -> Tokens:
    """Tokens as an array on the device if they are small enough, else as they are.

    They keep their type, of one or two bytes for most vocabularies; windows of them are int32.
    """
    if tokens.nbytes > RESIDENT_BYTES:
        return tokens
    # of what begins with a page, as memory-mapped tokens do, a CPU takes no copy
    return jax.device_put(np.asarray(tokens))


@typed
def batches(
    tokens: Tokens,
    seed: int,
    first_step: int,
    steps: int,
    batch_size: int,
    block_size: int,
    count: int | None = None,
) -> Int[Array, "{steps} {batch_size} {block_size}+1"]:
    """Return the windows of steps `first_step` to `first_step + steps`: a pure function of (seed,
    step).

    A window is a block of inputs and one more token, the last target. From memory-mapped tokens, a
    process reads only the windows of its own devices, and with `count` only those of the first
    `count` steps; the others are zeros then.
    """
    starts = window_starts(seed, first_step, steps, len(tokens), batch_size, block_size)
    if isinstance(tokens, jax.Array):
        return _gather(tokens, starts, block_size)

    first_tokens = np.asarray(starts)  # steps batch
    shape = (steps, batch_size, block_size + 1)

    def read(part: Any) -> np.ndarray:
        """Return the windows of a part of the array, as JAX asks for that of each device."""
        part_of_steps, part_of_batch, _ = part
        part_starts = first_tokens[part_of_steps, part_of_batch]
        # One program takes `steps` windows however many are used. Reading the others from disk
        # would cost far more than their zeros.
        windows = np.zeros((*part_starts.shape, block_size + 1), np.int32)
        used_starts = part_starts[:count]
        windows[:count] = tokens[used_starts[..., None] + np.arange(block_size + 1)]
        return windows

    if current_mesh().empty:  # uncommitted, as computed arrays are: no second compilation
        everything = slice(None)
        return jnp.asarray(read((everything, everything, everything)))
    sharding = shardings(spec_of((None, "batch", None), shape, current_mesh()))
    return jax.make_array_from_callback(shape, sharding, read)


@typed
def batch(
    tokens: Tokens,
    seed: int,
    step: int,
    batch_size: int,
    block_size: int,
) -> tuple[Int[Array, "{batch_size} {block_size}"], Int[Array, "{batch_size} {block_size}"]]:
    """Return a step's inputs and targets, the inputs shifted by one token."""
    window = batches(tokens, seed, step, 1, batch_size, block_size)[0]
    return window[:, :-1], window[:, 1:]


@typed
def window_starts(
    seed: int, first_step: int, steps: int, tokens: int, batch_size: int, block_size: int
) -> Integer[Array, "{steps} {batch_size}"]:
    """Return the offsets of windows in a text of `tokens` tokens.

    Raises ValueError for a text that is shorter than a window, or too long for offsets of 32 bits.
    """
    positions = tokens - block_size
    # a window is drawn as an offset of 32 bits: without jax_enable_x64 there are no wider ones
    if not 0 < positions < 1 << 32:
        raise ValueError(
            f"{tokens} tokens are too few or too many for windows of {block_size + 1}: at least "
            "one window and fewer than 2**32 tokens are needed"
        )
    return _window_starts(np.uint32(seed), first_step, np.uint32(positions), steps, batch_size)


@functools.partial(jax.jit, static_argnums=(3, 4))
@typed
def _window_starts(
    seed: Integer[Array, ""],
    first_step: Integer[Array, ""],
    positions: Integer[Array, ""],
    steps: int,
    batch_size: int,
) -> Integer[Array, "{steps} {batch_size}"]:
    # by the step and not by the steps before it: any step can be replayed, and a run resumed
    def starts_of_step(step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.randint(key, (batch_size,), 0, positions, jnp.uint32)

    return jax.vmap(starts_of_step)(first_step + jnp.arange(steps))


@functools.partial(jax.jit, static_argnums=2)
@typed
def _gather(
    tokens: Integer[Array, " tokens"], starts: Integer[Array, "steps batch"], block_size: int
) -> Int[Array, "steps batch {block_size}+1"]:
    windows = tokens[starts[..., None] + jnp.arange(block_size + 1)]
    return shard_by_name(windows.astype(jnp.int32), None, "batch", None)


@typed
def evaluation_windows(
    tokens: Integer[np.ndarray, " tokens"], block_size: int, batch_size: int
) -> tuple[
    Int[np.ndarray, "{-(-(len(tokens)-1)//block_size//batch_size)} {batch_size} {block_size}+1"],
    Bool[np.ndarray, "{-(-(len(tokens)-1)//block_size//batch_size)} {batch_size} {block_size}"],
]:
    """Non-overlapping windows that cover a split, and a mask that counts each target once.

    The last batch is padded.
    """
    targets = len(tokens) - 1  # every token but the first
    count = -(-targets // block_size // batch_size)  # rounded up, twice
    numbers = np.arange(count * batch_size).reshape(count, batch_size)
    return windows_by_number(tokens, numbers, block_size)


@typed
def windows_by_number(
    tokens: Integer[np.ndarray, " tokens"],
    numbers: Int[np.ndarray, "batches batch"],
    block_size: int,
) -> tuple[
    Int[np.ndarray, "batches batch {block_size}+1"],
    Bool[np.ndarray, "batches batch {block_size}"],
]:
    """Some of the non-overlapping windows that cover a split, and a mask of their targets.

    A window past the end of the split is padding. From memory-mapped tokens only these are read.
    """
    last = len(tokens) - 1
    positions = numbers[..., None] * block_size + np.arange(block_size + 1)
    # past the end the last token is repeated, and the mask leaves it out
    windows = np.asarray(tokens)[np.minimum(positions, last)].astype(np.int32)
    is_counted = positions[..., 1:] <= last
    return windows, is_counted
