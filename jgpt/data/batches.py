"""Batches as a function of (seed, step), from tokens on the device or in a memory-mapped file."""

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
"""The largest size in bytes of a split that is moved to the device."""


@typed
def resident(tokens: Integer[np.ndarray, " tokens"]) -> Tokens:
    """Move tokens to the device if they have at most `RESIDENT_BYTES`, else return them unchanged.

    The tokens keep their dtype, which has one or two bytes for most vocabularies. Windows of them
    are int32.
    """
    if tokens.nbytes > RESIDENT_BYTES:
        return tokens
    # A CPU copies nothing here: memory-mapped tokens begin at a page, so JAX shares their memory.
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
    """Return the windows of steps `first_step` to `first_step + steps`, a pure function of (seed,
    step).

    A window has `block_size` inputs and one more token, the last target. From memory-mapped tokens,
    a process reads only the windows of its own devices. With `count`, it reads only those of the
    first `count` steps, and the other windows are zeros.
    """
    starts = window_starts(seed, first_step, steps, len(tokens), batch_size, block_size)
    if isinstance(tokens, jax.Array):
        return _gather(tokens, starts, block_size)

    first_tokens = np.asarray(starts)  # steps batch
    shape = (steps, batch_size, block_size + 1)

    def read(part: Any) -> np.ndarray:
        """Read the windows for one part of the array; JAX calls this for each device."""
        part_of_steps, part_of_batch, _ = part
        part_starts = first_tokens[part_of_steps, part_of_batch]
        # One program takes `steps` windows however many are used. Reading the others from disk
        # would cost far more than their zeros.
        windows = np.zeros((*part_starts.shape, block_size + 1), np.int32)
        used_starts = part_starts[:count]
        positions = used_starts[..., None] + np.arange(block_size + 1)  # steps batch window
        windows[:count] = tokens[positions]
        return windows

    if current_mesh().empty:  # uncommitted, like computed arrays, so that nothing is compiled twice
        everything = slice(None)
        return jnp.asarray(read((everything, everything, everything)))
    spec = spec_of((None, "batch", None), shape, current_mesh())
    sharding = shardings(spec)
    return jax.make_array_from_callback(shape, sharding, read)


@typed
def batch(
    tokens: Tokens,
    seed: int,
    step: int,
    batch_size: int,
    block_size: int,
) -> tuple[Int[Array, "{batch_size} {block_size}"], Int[Array, "{batch_size} {block_size}"]]:
    """Return the inputs and targets of a step; the targets are the inputs shifted by one token."""
    window = batches(tokens, seed, step, 1, batch_size, block_size)[0]
    return window[:, :-1], window[:, 1:]


@typed
def window_starts(
    seed: int, first_step: int, steps: int, tokens: int, batch_size: int, block_size: int
) -> Integer[Array, "{steps} {batch_size}"]:
    """Return the offsets of random windows in a text of `tokens` tokens.

    Raises ValueError if the text is shorter than a window or too long for 32-bit offsets.
    """
    positions = tokens - block_size
    # Offsets are drawn as 32-bit integers: without jax_enable_x64, JAX has no wider ones.
    if not 0 < positions < 1 << 32:
        raise ValueError(
            f"{tokens} tokens are too few or too many for windows of {block_size + 1}: at least "
            "one window and fewer than 2**32 tokens are needed"
        )
    # As uint32, since `jit` would make an int32 of a Python int, which overflows from 2**31 on.
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
    # The key depends on the step alone, so that any step can be replayed and a run resumed.
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
    """Return non-overlapping windows that cover a split, and a mask that counts each target once.

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
    """Return non-overlapping windows of a split by their numbers, and a mask of their targets.

    A window past the end of the split is padding. Only these windows are read from memory-mapped
    tokens.
    """
    last = len(tokens) - 1
    # A window's last token is the first one of the next window: a target here, an input there.
    positions = numbers[..., None] * block_size + np.arange(block_size + 1)
    # Past the end, the last token is repeated and the mask excludes it.
    inside = np.minimum(positions, last)
    windows = np.asarray(tokens)[inside].astype(np.int32)
    is_counted = positions[..., 1:] <= last
    return windows, is_counted
