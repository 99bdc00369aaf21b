"""Checkpoints: saved asynchronously with checksums, and verified when they are loaded."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jgpt.config import TrainConfig
from jgpt.durable import (
    MovedDirectory,
    make_directory,
    sync_below,
    sync_directory,
)
from jgpt.fields import as_dict
from jgpt.hardware import process_count, process_index
from jgpt.nn.models import (
    Weights,
    abstract_model,
    weights_of,
)
from jgpt.parallel.mesh import current_mesh
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.parallel.rules import abstract_arrays, shardings, weight_specs, without_trailing_none
from jgpt.runs.directory import CHECKPOINTS, TOKENIZER, RunDirectory
from jgpt.runs.manifest import MANIFEST, Manifest, files_below, sha256_of, verify
from jgpt.runs.provenance import comparable_after
from jgpt.shapes.contract import typed
from jgpt.training.state import TrainState, abstract_state, stack_state, state_specs, unstack_state

Which = Literal["best", "last"] | int
"""A checkpoint by validation loss, by age, or by step."""

WAITED_FOR = 256 << 20
"""The size of a state on a CPU, in bytes, from which waiting for a save beats a second state."""


def _is_alone(tree: Any) -> bool:
    """Return whether a tree is one array or empty, which Orbax does not save."""
    return jax.tree_util.all_leaves([tree]) or not tree


def _as_saved(tree: Any) -> Any:
    """Return a tree as Orbax saves it. An optimizer's state may be a mere count, or nothing."""
    if _is_alone(tree):
        return {"state": tree}
    return tree


def _as_given(saved: Any, tree: Any) -> Any:
    """Return the inverse of `_as_saved`, for a tree of the structure of `tree`."""
    if _is_alone(tree):
        return saved["state"]
    return saved


class Checkpoints:
    """A run's checkpoints, in `checkpoints/STEP`. Use it as a context manager.

    Orbax writes to a temporary directory, which is renamed when the checkpoint and its manifest are
    on disk. A directory with the name of a step is therefore complete, or was damaged later.
    """

    def __init__(
        self, run: RunDirectory, config: TrainConfig | None = None, *, read_only: bool = False
    ) -> None:
        """Open the checkpoints of `run`; `config` is the saved one by default.

        To resume, a run is read with the new config.
        """
        self._path = (run.path / CHECKPOINTS).resolve()  # Orbax accepts only absolute paths
        if config is None:
            config = run.config()
        self._config = config
        self.run = run
        self._orbax: Any = None
        # One thread, so that a save, the loss that is added to it and the next save keep their
        # order.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Drops the log messages of Orbax alone, since its failures raise errors as well.
        self._quiet = lambda record: "orbax" not in Path(record.pathname).parts
        self._saving: Future[None] | None = None
        self._save_began: float | None = None
        self._save_ended: float | None = None
        self._writes = not read_only and process_index() == 0
        if self._writes:
            make_directory(self._path)
            run.delete_checkpoints(())  # the remains of a killed process

    def __enter__(self) -> Self:
        logging.getLogger("absl").addFilter(self._quiet)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            # After an error, other processes may not come here, or may have ended.
            has_failed = kind is not None
            if not has_failed or process_count() == 1:
                self.wait()
        finally:
            self._background.shutdown()
            if self._orbax is not None:
                # This repeats the error of a save, without naming the save as `wait` does.
                with contextlib.suppress(Exception):
                    self._orbax.close()
            if self._writes and self.run.is_in_place():
                self.run.delete_checkpoints(())  # the remains of a failed save
            logging.getLogger("absl").removeFilter(self._quiet)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        return self.run.checkpoint_steps()

    def save(
        self,
        state: TrainState,
        validation_loss: float | None,
        *,
        unevaluated: dict[str, Any] | None = None,
    ) -> None:
        """Save a state, a small one asynchronously. Raises OSError if this or the last save failed.

        A step that already has a checkpoint is not saved again. With `unevaluated`, the step's line
        of metrics, the state is evaluated next, and `evaluated` or `discard` must follow.
        """
        self.wait()
        step = int(state.step)
        if step in self.steps():
            return
        with raise_in_all_processes():
            self.run.require_in_place()  # or the checkpoint would go into another run
        self._save_began = time.monotonic()
        self._save_ended = None
        # Each block's arrays apart, so that runs with and without a scan load the same checkpoints.
        state = unstack_state(state)
        # Under another name until it is complete, so that a killed process leaves no checkpoint.
        partial = self._path / f"saving-{step}"
        self._begin_writing(partial, step, state)
        self._saving = self._background.submit(
            self._finish, partial, step, validation_loss, unevaluated
        )
        if _is_large_on_cpu(state):
            self.wait()

    def _begin_writing(self, directory: Path, step: int, state: TrainState) -> None:
        """Have Orbax write a state's arrays; it returns before the files are written."""
        ocp = self._open_orbax()
        # Two parts, so that sampling reads only the weights, a third of AdamW's state.
        parts = ocp.args.Composite(
            weights=ocp.args.StandardSave(state.weights),
            optimizer=ocp.args.StandardSave(_as_saved(state.optimizer)),
        )
        with self._naming_failure(step):
            self._orbax.save(directory, args=parts)

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Add the loss to a step's checkpoint and delete old checkpoints, asynchronously."""
        saving = self._saving
        self._saving = self._background.submit(self._add_loss, saving, step, validation_loss)

    def discard(self, step: int) -> None:
        """Delete the checkpoint of a state whose loss is not finite."""
        self.wait()
        with raise_in_all_processes():
            if self._writes and step in self.steps():
                self.run.delete_checkpoints([step])

    def unevaluated(self, step: int) -> dict[str, Any] | None:
        """Return the metrics of a step whose evaluation has not ended, or None if it has."""
        if step not in self.steps():
            return None
        return self._read(Manifest.read, step).unevaluated

    def seconds(self) -> float:
        """Return the seconds that the last save took, or takes so far; 0 before the first save."""
        if self._save_began is None:
            return 0.0
        ended = self._save_ended
        if ended is None:  # the background thread is still writing
            ended = time.monotonic()
        return ended - self._save_began

    def wait(self) -> None:
        """Wait for a pending save. Raises OSError if it failed."""
        if self._saving is not None:
            saving = self._saving
            self._saving = None
            with raise_in_all_processes():
                saving.result()

    def have_failed(self) -> bool:
        """Return whether the last save has failed already; `wait` raises its error."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def step(self, which: Which) -> int:
        """Return the step of the best checkpoint, the last one, or the one of a step.

        Raises FileNotFoundError if there are no checkpoints, and ValueError for a step without one,
        for another word, or if damage hides which one is best.
        """
        if which not in ("best", "last") and type(which) is not int:
            raise ValueError(f"`which={which!r}` must be best, last or a step")
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"{self._path} has no checkpoint: the run never saved one")
        if isinstance(which, int):
            if which not in steps:
                known = ", ".join(str(step) for step in steps)
                raise ValueError(f"{self._path} has no checkpoint {which}: it has {known}")
            return which
        if which == "best":
            by_loss = self._by_loss()
            if by_loss:
                return by_loss[0]
        return steps[-1]  # also the best one while none is evaluated

    def best(self) -> Manifest:
        """Return the manifest of the best checkpoint."""
        return Manifest.read(self._folder(self.step("best")))

    def restore(self, config: TrainConfig, which: Which = "last") -> TrainState:
        """Restore a verified state. Raises ValueError if it is damaged or of another model."""
        step, arrays = self._restore(config, which, _expected_state)
        # Committed to devices like the other arrays; otherwise the steps would be compiled twice.
        arrays["step"] = jax.device_put(np.int32(step), shardings(PartitionSpec()))
        return stack_state(config, TrainState(**arrays))

    @typed
    def restore_weights(self, config: TrainConfig, which: Which) -> Weights:
        """Restore only the verified weights. Raises ValueError if they are damaged."""
        _, arrays = self._restore(config, which, _expected_weights)
        return arrays["weights"]

    def _restore(
        self, config: TrainConfig, which: Which, expected: Callable[[TrainConfig], dict[str, Any]]
    ) -> tuple[int, dict[str, Any]]:
        """Verify a checkpoint and read the parts whose arrays `expected` describes.

        If training deletes it meanwhile, the next one is read. A checkpoint has separate arrays for
        each block, even where the steps scan over stacked blocks.
        """
        model = dataclasses.replace(config.model, scan_layers=False)
        unstacked = dataclasses.replace(config, model=model)
        while True:
            steps_before = self.steps()
            try:
                step = self.step(which)
                self._verify(step)  # before a state is made, which may be huge
                return step, self._read_arrays(step, expected(unstacked))
            except (ValueError, OSError):
                # If all checkpoints are still there, this is damage.
                if set(steps_before) <= set(self.steps()):
                    raise

    def _by_loss(self) -> list[int]:
        """Return the evaluated steps, lowest validation loss first.

        Losses over other targets than the last ones can't be compared with them. Their steps count
        only if there are no others.
        """
        first_comparable = comparable_after(self.run.provenance()) + 1
        evaluated = []
        comparable = []
        for step in self.steps():
            loss = self._read(Manifest.read, step).validation_loss
            if loss is None:
                continue
            evaluated.append((loss, step))
            if step >= first_comparable:
                comparable.append((loss, step))
        # Among equal losses, the earlier step comes first.
        return [step for _, step in sorted(comparable or evaluated)]

    def _verify(self, step: int) -> None:
        """Raise ValueError for a checkpoint that is damaged, or not of this model and tokenizer."""
        with raise_in_all_processes():
            read = Manifest.read
            # one process reads every byte, and all others raise its error, too
            if process_index() == 0:
                read = verify
            manifest = self._read(read, step)
        differences = []
        if manifest.tokenizer != sha256_of(self.run.path / TOKENIZER):
            differences.append("another tokenizer than the run's")
        # Tuples become lists, as in the manifest.
        fields = json.loads(json.dumps(as_dict(self._config.model)))
        for name, saved in manifest.model.items():
            # Code is recorded by its name and digest, which `changed_code` compares.
            if name != "make" and fields.get(name) != saved:
                differences.append(f"`{name}={saved!r}` and not {fields.get(name)!r}")
        if differences:
            raise ValueError(
                f"checkpoint {self._folder(step)} was saved with {', '.join(differences)}: it "
                "belongs to another run"
            )

    def _read(self, read: Callable[[Path], Manifest], step: int) -> Manifest:
        """Read or verify a checkpoint; if it is damaged, the error names another one that is
        intact."""
        try:
            return read(self._folder(step))
        except ValueError as error:
            advice = "the run has no other intact checkpoint"
            intact = self._newest_intact(except_step=step)
            if intact is not None:
                advice = f"checkpoint {intact} is intact: delete {self._folder(step)} to use it"
            raise ValueError(f"{error}; {advice}") from None

    def _newest_intact(self, *, except_step: int) -> int | None:
        """Return the newest step, except `except_step`, whose checkpoint is intact, or None."""
        for step in reversed(self.steps()):
            if step == except_step:
                continue
            with contextlib.suppress(ValueError):
                verify(self._folder(step))
                return step
        return None

    def _read_arrays(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        directory = self._folder(step)
        ocp = self._open_orbax()
        parts = {}
        for part, arrays in wanted.items():
            parts[part] = ocp.args.StandardRestore(_as_saved(arrays))
        try:
            restored = self._orbax.restore(directory, args=ocp.args.Composite(**parts))
            return {part: _as_given(restored[part], wanted[part]) for part in wanted}
        except Exception as error:  # Orbax raises many kinds
            raise ValueError(
                f"checkpoint {directory} can't be read: it is damaged, or of a model other than "
                f"the config's ({_reason(error)})"
            ) from error

    def _open_orbax(self) -> Any:
        """Import Orbax and make a checkpointer on first use, since they take 30 MiB."""
        import orbax.checkpoint as ocp

        if self._orbax is None:
            # Plain Zarr: one directory for each array, which can be inspected and checksummed.
            handler = ocp.CompositeCheckpointHandler(
                weights=ocp.StandardCheckpointHandler(use_ocdbt=False),
                optimizer=ocp.StandardCheckpointHandler(use_ocdbt=False),
            )
            self._orbax = ocp.AsyncCheckpointer(handler)
        return ocp

    def _finish(
        self,
        partial: Path,
        step: int,
        validation_loss: float | None,
        unevaluated: dict[str, Any] | None,
    ) -> None:
        """Finish a save in the background: wait for Orbax, write the manifest, rename, delete old
        ones."""
        try:
            with self._naming_failure(step):
                self._orbax.wait_until_finished()  # in all processes
                if process_index() != 0:
                    return
                # This order ensures that a directory with the name of a step is complete: all files
                # are on disk, then the manifest that lists them, and last the name.
                sync_below(partial)  # Orbax syncs arrays, but not its metadata
                files = {}
                for name, path in files_below(partial):
                    files[name] = sha256_of(path)
                manifest = Manifest(
                    step=step,
                    validation_loss=validation_loss,
                    model=as_dict(self._config.model),
                    tokenizer=sha256_of(self.run.path / TOKENIZER),
                    files=files,
                    unevaluated=unevaluated,
                )
                manifest.write(partial)
                self.run.require_in_place()
                os.replace(partial, self._folder(step))
                sync_directory(self._path)
        except Exception:
            if process_index() == 0:
                self.run.delete_checkpoints(())
            raise
        finally:
            self._save_ended = time.monotonic()
        # An unevaluated state deletes nothing yet: if its loss is not finite, the last good
        # checkpoint is still needed.
        if unevaluated is None:
            self._delete_old()

    def _add_loss(self, saving: Future[None] | None, step: int, validation_loss: float) -> None:
        """Replace the manifest by one with the loss, in the background after the save."""
        if saving is not None:
            saving.result()
        if not self._writes:
            return
        with self._naming_failure(step):
            self.run.require_in_place()
            folder = self._folder(step)
            manifest = dataclasses.replace(
                Manifest.read(folder), validation_loss=validation_loss, unevaluated=None
            )
            # Outside of the checkpoint's folder, where a crash would leave an extra file.
            beside = self._path / f"saving-{step}-manifest"
            make_directory(beside)
            manifest.write(beside)
            self.run.require_in_place()
            os.replace(beside / MANIFEST, folder / MANIFEST)
            beside.rmdir()
            sync_directory(folder)
        self._delete_old()

    @contextlib.contextmanager
    def _naming_failure(self, step: int) -> Iterator[None]:
        """Raise OSError naming the last good checkpoint if a step's can't be written."""
        try:
            yield
        except MovedDirectory:
            raise
        except Exception as error:  # Orbax raises many kinds
            last = "there is no other yet"
            steps = self.steps()
            if steps:
                last = f"the last good checkpoint is step {steps[-1]}"
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self._path} "
                f"({_reason(error)}); {last}: free some space and use `resume=True`"
            ) from error

    def _delete_old(self) -> None:
        """Delete all checkpoints but the best, the last and every Nth."""
        steps = self.steps()
        config = self._config
        try:
            by_loss = self._by_loss()
        except ValueError:
            return  # keep all if one is damaged
        kept = set(by_loss[: config.keep_best])
        kept.update(steps[-config.keep_last :])
        if config.keep_every is not None:
            for step in steps:
                if step % config.keep_every == 0:
                    kept.add(step)
        self.run.delete_checkpoints(step for step in steps if step not in kept)

    def _folder(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self._path / str(step)


def _expected_state(config: TrainConfig) -> dict[str, Any]:
    """Return the shapes, dtypes and shardings of both parts of a checkpoint."""
    state = abstract_arrays(abstract_state(config), state_specs(config))
    return {"weights": state.weights, "optimizer": state.optimizer}


def _expected_weights(config: TrainConfig) -> dict[str, Any]:
    """Return those of the weights alone, without tracing an optimizer, which may be custom code."""
    model = abstract_model(config.model)
    specs = jax.tree.map(without_trailing_none, weight_specs(model, current_mesh()))
    return {"weights": abstract_arrays(weights_of(model), specs)}


def _is_large_on_cpu(state: TrainState) -> bool:
    """Return whether training must wait until a state is written, to save the memory of a second
    one.

    On a CPU Orbax writes from the state's own memory, so that the next step can't reuse it and
    makes another state: a Llama of 125M took 5.5 GiB instead of 4. On other platforms Orbax writes
    from a copy in the host's memory.
    """
    leaves = jax.tree.leaves(state)
    platforms = {device.platform for device in leaves[0].devices()}
    if platforms != {"cpu"}:
        return False
    return sum(leaf.nbytes for leaf in leaves) >= WAITED_FOR


def _reason(error: Exception) -> str:
    """Shorten an error's message; TensorStore's are pages long and cite its source."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    lines = str(error).splitlines()
    if not lines:
        lines = [repr(error)]
    return lines[0][:200]
