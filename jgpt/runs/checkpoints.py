"""Checkpoints: `checkpoints/STEP` is Orbax's, with `checkpoints/STEP.sha256.json` beside it.

A folder with the name of a step is complete: Orbax gives it this name when all files are written.
"""

import contextlib
import json
import os
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.files import sha256_of, sync_below, sync_directory, write_file
from jgpt.machine import process_index
from jgpt.runs.directory import steps_in

Which = Literal["best", "last"] | int
"""A checkpoint by validation loss, by age, or by step."""
OF_A_VARIABLE = jax.tree_util.GetAttrKey("value")
"""The last part of a path in an `nnx.State`. A parameter that is called so has another key."""
WAITED_FOR = 256 << 20
"""The size of a state on a CPU, in bytes, from which waiting for a save beats a second state."""


class Checkpoints:
    """Saves the states of a run in a background thread, and deletes old ones."""

    def __init__(self, folder: Path, keep_last: int, keep_best: int, keep_every: int | None):
        self._folder = folder.resolve()  # Orbax accepts only absolute paths
        self._kept = keep_last, keep_best, keep_every
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.seconds = 0.0
        """The seconds that the last save took."""

    def save(self, step: int, state: dict[str, Any], validation_loss: float | None) -> None:
        """Begin to save a state; a large one on a CPU is waited for. All processes save.

        Raises OSError if this or the last save failed.
        """
        from orbax.checkpoint import v1 as ocp

        self.wait()
        began = time.monotonic()
        # Orbax refuses a part without arrays, such as the state of plain SGD.
        parts = {name: _by_path(tree) for name, tree in state.items() if jax.tree.leaves(tree)}
        facts: dict[str, Any] = {"validation_loss": validation_loss}
        try:
            with _orbax_context():
                response = ocp.save_checkpointables_async(
                    str(self._folder / str(step)), parts, custom_metadata=facts
                )
        except Exception as error:  # Orbax raises many kinds
            raise self._failed(step, error) from error
        self._pending = self._thread.submit(self._finish, step, response, began)
        if _bytes_on_cpu(state) >= WAITED_FOR:
            self.wait()

    def _finish(self, step: int, response: Any, began: float) -> None:
        """Wait for Orbax, write the sums, and only then delete old checkpoints."""
        folder = self._folder / str(step)
        try:
            response.result()
            if process_index() == 0:
                sync_below(folder)
                sync_directory(folder)
                sums = {}
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        sums[path.relative_to(folder).as_posix()] = sha256_of(path)
                write_file(_sums_of(folder), json.dumps(sums, indent=1))
                self.delete_old()
        except Exception as error:
            if process_index() == 0:
                with contextlib.suppress(OSError):
                    if not _sums_of(folder).exists() and folder.exists():
                        folder.rename(self._folder / f"deleted-{step}")
                    clean(self._folder)  # a full disk has this space again
            raise self._failed(step, error) from error
        finally:
            self.seconds = time.monotonic() - began

    def wait(self) -> None:
        """Wait for a pending save. Raises OSError if it failed."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def has_failed(self) -> bool:
        """Return whether the last save has failed already; `wait` raises its error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def close(self) -> None:
        """Wait for a pending save, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def delete_old(self) -> None:
        """Delete all checkpoints but the best, the last and every Nth."""
        last, best, every = self._kept
        steps = steps_in(self._folder)
        kept = set(steps[-last:]) | set(by_loss(self._folder)[:best])
        for step in steps:
            if step not in kept and (every is None or step % every):
                # Renamed first, so that a folder with the name of a step is never partial.
                folder = self._folder / str(step)
                folder.rename(self._folder / f"deleted-{step}")
        sync_directory(self._folder)
        clean(self._folder)

    def _failed(self, step: int, error: BaseException) -> OSError:
        last = "there is no other yet"
        if steps := steps_in(self._folder):
            last = f"the last good checkpoint is step {steps[-1]}"
        return OSError(
            f"the checkpoint of step {step} could not be written to {self._folder} "
            f"({_reason(error)}); {last}: free some space and use `resume=True`"
        )


def clean(folder: Path) -> None:
    """Remove what a kill, a failed save or a deletion left."""
    for pattern in ("deleted-*", "*.orbax-checkpoint-tmp*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.sha256.json*"):
        step = path.name.partition(".")[0]
        if path.name.endswith(".partial") or not (folder / step).exists():
            path.unlink(missing_ok=True)


def loss_of(folder: Path, step: int) -> float | None:
    """Return the validation loss of a checkpoint, or None for a state that wasn't evaluated."""
    path = folder / str(step) / "_CHECKPOINT_METADATA"  # without Orbax, whose import takes a second
    try:
        return json.loads(path.read_text())["custom_metadata"]["validation_loss"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is missing or damaged") from error


def by_loss(folder: Path) -> list[int]:
    """Return the evaluated steps, lowest validation loss first; among equal ones, the earlier."""
    evaluated = []
    for step in steps_in(folder):
        with contextlib.suppress(ValueError):  # a damaged one is kept as the last ones are
            loss = loss_of(folder, step)
            if loss is not None:
                evaluated.append((loss, step))
    return [step for _, step in sorted(evaluated)]


def choose(folder: Path, which: Which) -> int:
    """Return the step of the best checkpoint, the last one, or the one of a step.

    The best one is the last while none is evaluated. Raises FileNotFoundError if there are no
    checkpoints, and ValueError for a step without one.
    """
    steps = steps_in(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no checkpoint: the run never saved one")
    if which == "last":
        return steps[-1]
    if which == "best":
        best, *_ = [*by_loss(folder), steps[-1]]
        return best
    if which not in steps:
        known = ", ".join(map(str, steps))
        raise ValueError(f"{folder} has no checkpoint {which}: it has {known}")
    return which


def load_checkpoint(folder: Path, which: Which, like: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Verify a checkpoint and read its parts that `like` has; return its step, too.

    `like` has the shapes, dtypes and shardings of the arrays; without shardings they come onto the
    default device. If a training deletes the checkpoint meanwhile, the next one is read. Raises
    ValueError if it is damaged or of another model.
    """
    while True:
        steps = steps_in(folder)
        step = choose(folder, which)
        try:
            return step, _load(folder.resolve() / str(step), like)
        except (ValueError, OSError):
            if set(steps) <= set(steps_in(folder)):
                raise


def _load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    if process_index() == 0:
        _verify(path)
    wanted = {}
    for name, tree in like.items():
        if jax.tree.leaves(tree):
            wanted[name] = _on_default_device(_by_path(tree))
    try:
        metadata = ocp.checkpointables_metadata(str(path)).metadata
        for name, leaves in wanted.items():
            _require_dtypes(name, metadata[name], leaves)
        with _orbax_context():
            loaded = ocp.load_checkpointables(str(path), wanted)
    except Exception as error:  # Orbax raises many kinds
        raise ValueError(
            f"checkpoint {path} can't be read: it is damaged, or of another model or optimizer "
            f"({_reason(error)})"
        ) from error
    state = {}
    for name, tree in like.items():
        leaves = [loaded[name][path_of_leaf] for path_of_leaf in _by_path(tree)]
        state[name] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return state


def _verify(path: Path) -> None:
    """Raise ValueError naming the first file that is missing or damaged, and what to do."""
    sums = _sums_of(path)
    if not sums.is_file():
        return  # killed right after Orbax had named the complete folder
    advice = "the run has no other checkpoint"
    if others := [step for step in steps_in(path.parent) if str(step) != path.name]:
        advice = f"delete {path} to use checkpoint {others[-1]}"
    try:
        digests = json.loads(sums.read_text()).items()
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{sums} is damaged; {advice}") from error
    for name, digest in digests:
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; {advice}")
        if sha256_of(file) != digest:
            raise ValueError(f"{file} is damaged: its SHA-256 does not match; {advice}")


def _sums_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sha256.json")


@contextlib.contextmanager
def _orbax_context() -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = False  # plain Zarr: a folder for each array
    # Otherwise a save that fails at once leaves threads that wait for a folder for minutes.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        yield


def _require_dtypes(part: str, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError for arrays of another dtype, which Orbax would cast without a word."""
    for name, leaf in wanted.items():
        dtype = leaf.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            dtype = np.dtype("uint32")  # a typed key is saved as its numbers
        if name in saved and saved[name].dtype != dtype:
            raise ValueError(f"{part}.{name} is {saved[name].dtype}, not {dtype}")


def _by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, as Orbax saves them.

    Orbax itself would return lists in place of tuples. An `nnx.State` has the paths of the dict of
    its values.
    """
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if path and path[-1] == OF_A_VARIABLE:
            path = path[:-1]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves[name or "array"] = leaf  # a mere array has no path
    return leaves


def _on_default_device(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return abstract arrays that all have a sharding, without which nothing is restored."""
    default = jax.device_put(0).sharding

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None) or default
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, leaves)


def _bytes_on_cpu(state: Any) -> int:
    """Return the bytes of a state that are in the memory of a CPU.

    There Orbax writes from the state's own memory, so that the next step can't reuse it and makes
    another state: a Llama of 125M took 5.5 GiB instead of 4.
    """
    total = 0
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and {d.platform for d in leaf.devices()} == {"cpu"}:
            total += leaf.size * leaf.dtype.itemsize
    return total


def _reason(error: BaseException) -> str:
    """Return the first cause in a line; TensorStore's messages are pages long."""
    while error.__cause__ is not None:
        error = error.__cause__
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    lines = str(error).splitlines() or [repr(error)]
    return lines[0][:200]
