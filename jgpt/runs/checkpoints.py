"""Checkpoints: saved asynchronously, checksummed, verified when loaded."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jgpt.config import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.tokenizers import Tokenizer
from jgpt.durable import (
    MovedDirectory,
    make_directory,
    new_directory,
    sync_below,
    sync_directory,
)
from jgpt.fields import Make, as_dict
from jgpt.hardware import Platform, current_platform, process_count, process_index
from jgpt.interop.text_files import TextFiles
from jgpt.nn.bigram import BigramLM
from jgpt.nn.models import (
    LanguageModel,
    Weights,
    abstract_model,
    weight_dimensions,
    weights_of,
)
from jgpt.nn.precision import run_for_platform
from jgpt.nn.transformer import GPT
from jgpt.parallel.processes import raise_in_all_processes
from jgpt.parallel.rules import abstract_arrays, shardings
from jgpt.refusal import Field, Message
from jgpt.runs.directory import CHECKPOINTS, TOKENIZER, RunDirectory, require_storable
from jgpt.runs.manifest import MANIFEST, Manifest, files_below, parse_file, sha256_of, verify
from jgpt.runs.provenance import comparable_after
from jgpt.shapes.contract import typed
from jgpt.training.optimizer import make_optimizer
from jgpt.training.state import TrainState, abstract_state, stack_state, state_specs, unstack_state
from jgpt.user_code import changed_code, with_code

Which = Literal["best", "last"] | int
"""A checkpoint by validation loss, by age, or by step."""

WAITED_FOR = 256 << 20
"""The bytes of a state on a CPU from which on a second one costs more than waiting for a save."""

_STORED_DTYPES = ("bfloat16", "<f2", "<f4", "<f8", "<i4", "<i8", "<u4", "|b1")
_LAYOUT = re.compile(
    r"manifest\.json|((weights|optimizer)/)?(_[A-Za-z_]+|commit_success\.txt)"
    r"|(weights|optimizer)/(array_metadatas/process_\d+|[^/]+/(\.zarray|\d+(\.\d+)*))"
)
"""The files of a checkpoint: Orbax's records, and arrays in plain Zarr."""


class Checkpoints:
    """A run's checkpoints, in `checkpoints/STEP`. Use it as a context manager.

    Orbax writes to a temporary directory; it is renamed when the checkpoint and its manifest are
    on disk. So a directory with the name of a step is complete, or was damaged later.
    """

    def __init__(
        self, run: RunDirectory, config: TrainConfig | None = None, *, read_only: bool = False
    ) -> None:
        """`config` is the saved one by default; to resume, a run is read with the new one."""
        require_storable(run.path)
        self._path = (run.path / CHECKPOINTS).resolve()
        self._config = run.config() if config is None else config
        self.run = run
        self._orbax: Any = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # drops Orbax's log messages, and no others: what fails raises an error as well
        self._quiet = lambda record: "orbax" not in Path(record.pathname).parts
        self._saving: Future[None] | None = None
        self._save_began: float | None = None
        self._save_ended: float | None = None
        self._writes = not read_only and process_index() == 0
        if self._writes:
            make_directory(self._path)
            run.delete_checkpoints(())  # what a killed process was still writing or deleting

    def __enter__(self) -> Self:
        logging.getLogger("absl").addFilter(self._quiet)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None or process_count() == 1:  # the others may not wait, or be no more
                self.wait()
        finally:
            self._background.shutdown()
            if self._orbax is not None:
                # it raises again, without a name, what failed in a save that `wait` has named
                with contextlib.suppress(Exception):
                    self._orbax.close()
            if self._writes and self.run.is_in_place():
                self.run.delete_checkpoints(())  # what a save that failed was still writing
            logging.getLogger("absl").removeFilter(self._quiet)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return self.run.checkpoint_steps()

    def save(
        self,
        state: TrainState,
        validation_loss: float | None,
        *,
        unevaluated: dict[str, Any] | None = None,
    ) -> None:
        """Save a state, a small one asynchronously. Raises OSError if this or the last one failed.

        A step that has a checkpoint already is not saved again. With `unevaluated`, the step's line
        of metrics, the state is evaluated next; `evaluated` or `discard` follows.
        """
        self.wait()
        step = int(state.step)
        if step in self.steps():
            return
        with raise_in_all_processes():
            self.run.require_in_place()  # or the checkpoint would be another run's
        self._save_began = time.monotonic()
        self._save_ended = None
        state = unstack_state(state)
        partial = self._path / f"saving-{step}"
        ocp = self._open_orbax()
        weights, optimizer = map(ocp.args.StandardSave, (state.weights, state.optimizer))
        try:
            self._orbax.save(partial, args=ocp.args.Composite(weights=weights, optimizer=optimizer))
        except Exception as error:
            raise self._failed(step, error) from error
        arrays = {
            "weights": len(jax.tree.leaves(state.weights)),
            "optimizer": len(jax.tree.leaves(state.optimizer)),
        }
        self._saving = self._background.submit(
            self._finish, partial, step, validation_loss, arrays, unevaluated
        )
        if _is_large_on_cpu(state):
            self.wait()

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Add the loss to the checkpoint of a step and delete old ones, asynchronously."""
        saving = self._saving
        self._saving = self._background.submit(self._add_loss, saving, step, validation_loss)

    def discard(self, step: int) -> None:
        """Delete the checkpoint of a state whose loss is not finite."""
        self.wait()
        with raise_in_all_processes():
            if self._writes and step in self.steps():
                self.run.delete_checkpoints([step])

    def unevaluated(self, step: int) -> dict[str, Any] | None:
        """The line of metrics of a step whose evaluation has not ended; None if it has."""
        if step not in self.steps():
            return None
        return self._read(Manifest.read, step).unevaluated

    def seconds(self) -> float:
        """How long the last save took, or takes so far; 0 before the first."""
        if self._save_began is None:
            return 0.0
        ended = time.monotonic() if self._save_ended is None else self._save_ended
        return ended - self._save_began

    def wait(self) -> None:
        """Wait for a pending save. Raises OSError if it failed."""
        if self._saving is not None:
            saving = self._saving
            self._saving = None
            with raise_in_all_processes():
                saving.result()

    def have_failed(self) -> bool:
        """Whether the last save has failed already; `wait` raises the error."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def step(self, which: Which) -> int:
        """Resolve best, last or a step to a step.

        Raises FileNotFoundError if there are no checkpoints, and ValueError for a step without one,
        for anything else or if damage hides which one is best.
        """
        if which not in ("best", "last") and type(which) is not int:
            raise ValueError(Message(Field("which", which), " must be best, last or a step"))
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"{self._path} has no checkpoint: the run never saved one")
        if isinstance(which, int):
            if which not in steps:
                known = ", ".join(map(str, steps))
                raise ValueError(f"{self._path} has no checkpoint {which}: it has {known}")
            return which
        by_loss = self._by_loss() if which == "best" else []
        return by_loss[0] if by_loss else steps[-1]

    def best(self) -> Manifest:
        """The manifest of the best checkpoint."""
        return Manifest.read(self._path / str(self.step("best")))

    def restore(self, config: TrainConfig, which: Which = "last") -> TrainState:
        """Restore a verified state. Raises ValueError if it is damaged or of another model."""
        step, arrays = self._restore(config, which, ("weights", "optimizer"))
        # committed to devices like the other arrays, or steps would be compiled for both
        arrays["step"] = jax.device_put(np.int32(step), shardings(PartitionSpec()))
        return stack_state(config, TrainState(**arrays))

    @typed
    def restore_weights(self, config: TrainConfig, which: Which) -> Weights:
        """Restore verified weights only. Raises ValueError if they are damaged."""
        config = dataclasses.replace(config, optimizer=OptimizerConfig())  # a user's isn't needed
        return self._restore(config, which, ("weights",))[1]["weights"]

    def _restore(
        self, config: TrainConfig, which: Which, parts: tuple[str, ...]
    ) -> tuple[int, dict[str, Any]]:
        """Verify a checkpoint and read parts of it; if training deletes it meanwhile, the next.

        A checkpoint has the arrays of each block, also where steps scan over stacked blocks.
        """
        model = dataclasses.replace(config.model, scan_layers=False)
        unstacked = dataclasses.replace(config, model=model)
        while True:
            before = self.steps()
            try:
                step = self._verified_step(which)  # before a state that may be huge
                state = abstract_arrays(abstract_state(unstacked), state_specs(unstacked))
                return step, self._read_arrays(step, {part: getattr(state, part) for part in parts})
            except (ValueError, OSError):
                if set(before) <= set(self.steps()):
                    raise

    def _by_loss(self) -> list[int]:
        """The steps that were evaluated, by validation loss.

        Losses over other targets than the last ones can't be compared with them. These steps count
        only as long as there are no others.
        """
        losses = {step: self._read(Manifest.read, step).validation_loss for step in self.steps()}
        evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
        first = comparable_after(self.run.provenance())
        comparable = [(loss, step) for loss, step in evaluated if step > first]
        return [step for _, step in sorted(comparable or evaluated)]

    def _verified_step(self, which: Which) -> int:
        step = self.step(which)
        with raise_in_all_processes():
            manifest = self._read(verify if process_index() == 0 else Manifest.read, step)
        # tuples become lists, as in the manifest
        given = json.loads(json.dumps(as_dict(self._config.model)))
        for name, saved in manifest.model.items():
            if name != "make" and name in given and given[name] != saved:
                raise ValueError(
                    Message(
                        f"checkpoint {self._path / str(step)} was saved with ",
                        Field(name, saved),
                        ", the config has ",
                        Field(name, given[name]),
                        "; they belong to different runs",
                    )
                )
        if manifest.tokenizer != sha256_of(self.run.path / TOKENIZER):
            raise ValueError(
                f"checkpoint {self._path / str(step)} was saved with another tokenizer than the "
                "run's; they belong to different runs"
            )
        return step

    def _read(self, read: Callable[[Path], Manifest], step: int) -> Manifest:
        """Read or verify a checkpoint; of a damaged one the error names another that is intact."""
        try:
            return read(self._path / str(step))
        except ValueError as error:
            for other in reversed(self.steps()):
                with contextlib.suppress(ValueError):
                    if other != step and verify(self._path / str(other)):
                        advice = Message(
                            f"checkpoint {other} is intact: use ",
                            Field("which", other),
                            f", or delete {self._path / str(step)} to resume from the others",
                        )
                        break
            else:
                advice = Message("the run has no other intact checkpoint")
            raise ValueError(Message(f"{error}; ", advice)) from None

    def _read_arrays(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        directory = self._path / str(step)
        _require_plausible(directory, max(leaf.size for leaf in jax.tree.leaves(wanted)))
        ocp = self._open_orbax()
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        try:
            restored = self._orbax.restore(directory, args=ocp.args.Composite(**arguments))
            return {name: restored[name] for name in wanted}
        except Exception as error:  # Orbax raises many kinds
            raise ValueError(
                f"checkpoint {directory} can't be read: it is damaged, or of a model other than "
                f"the config's ({_reason(error)})"
            ) from error

    def _open_orbax(self) -> Any:
        """Import Orbax and make a checkpointer when first needed: they take 30 MiB."""
        import orbax.checkpoint as ocp

        if self._orbax is None:
            # plain Zarr: a directory per array, which can be inspected and checksummed
            weights, optimizer = (ocp.StandardCheckpointHandler(use_ocdbt=False) for _ in range(2))
            handler = ocp.CompositeCheckpointHandler(weights=weights, optimizer=optimizer)
            self._orbax = ocp.AsyncCheckpointer(handler)
        return ocp

    def _finish(
        self,
        partial: Path,
        step: int,
        validation_loss: float | None,
        arrays: dict[str, int],
        unevaluated: dict[str, Any] | None,
    ) -> None:
        """In the background: wait for Orbax, write the manifest, rename, delete old checkpoints."""
        try:
            self._orbax.wait_until_finished()  # for all processes
            if process_index() != 0:
                return
            for part, count in arrays.items():
                _require_arrays(partial / part, count)
            sync_below(partial)  # Orbax syncs arrays, but not its metadata
            model = as_dict(self._config.model)
            tokenizer = sha256_of(self.run.path / TOKENIZER)
            found = files_below(partial)
            files = {name: (path.stat().st_size, sha256_of(path)) for name, path in found}
            manifest = Manifest(step, validation_loss, model, tokenizer, files, unevaluated)
            manifest.write(partial)
            self.run.require_in_place()
            os.replace(partial, self._path / str(step))
            sync_directory(self._path)
        except MovedDirectory:
            raise
        except Exception as error:
            if process_index() == 0:
                self.run.delete_checkpoints(())
            raise self._failed(step, error) from error
        finally:
            self._save_ended = time.monotonic()
        if unevaluated is None:  # or a loss that is not finite could cost the last good one
            self._delete_old()

    def _add_loss(self, saving: Future[None] | None, step: int, validation_loss: float) -> None:
        """In the background, after the save: replace the manifest by one with the loss."""
        if saving is not None:
            saving.result()
        if not self._writes:
            return
        try:
            self.run.require_in_place()
            manifest = Manifest.read(self._path / str(step))
            manifest = dataclasses.replace(
                manifest, validation_loss=validation_loss, unevaluated=None
            )
            # not in the checkpoint's folder, where a crash would leave a file too many
            beside = self._path / f"saving-{step}-manifest"
            make_directory(beside)
            manifest.write(beside)
            self.run.require_in_place()
            os.replace(beside / MANIFEST, self._path / str(step) / MANIFEST)
            beside.rmdir()
            sync_directory(self._path / str(step))
        except MovedDirectory:
            raise
        except Exception as error:
            raise self._failed(step, error) from error
        self._delete_old()

    def _failed(self, step: int, error: Exception) -> OSError:
        steps = self.steps()
        last = f"the last good checkpoint is step {steps[-1]}" if steps else "there is no other yet"
        return OSError(
            Message(
                f"the checkpoint of step {step} could not be written to {self._path} "
                f"({_reason(error)}); {last}: free some space and use ",
                Field("resume", True),
            )
        )

    def _delete_old(self) -> None:
        """Delete all but the best, the last and every Nth."""
        steps = self.steps()
        config = self._config
        try:
            kept = {*self._by_loss()[: config.keep_best], *steps[-config.keep_last :]}
        except ValueError:
            return  # with a damaged one, keep all
        if config.keep_every is not None:
            kept |= {step for step in steps if step % config.keep_every == 0}
        self.run.delete_checkpoints(step for step in steps if step not in kept)


@typed
def load(
    run_directory: str | Path,
    *,
    which: Which = "best",
    model: Make | str = None,
    optimizer: Make | str = None,
    platform: Platform | None = None,
) -> tuple[LanguageModel, Tokenizer, TrainConfig]:
    """Load a run's model, tokenizer and config; nothing is written.

    A run of a user's own `model` needs it again, as itself or as FILE.py:NAME, and warns if it has
    changed; an own `optimizer` is needed to train further with the config. `platform`, by default
    the current one, decides the config's `auto`.
    Raises FileNotFoundError if there is no run or no checkpoint, and ValueError if one of their
    files is damaged.
    """
    run = RunDirectory.open(run_directory)
    saved = run.config()
    tokenizer = run.tokenizer()
    config = with_code(saved, model, optimizer)
    for line in changed_code(saved, config):
        warnings.warn(line, stacklevel=2)
    with Checkpoints(run, read_only=True) as checkpoints:
        decided = run_for_platform(config, platform or current_platform())
        weights = checkpoints.restore_weights(decided, which)
    return nnx.merge(nnx.graphdef(abstract_model(decided.model)), weights), tokenizer, config


@typed
def save(
    model: LanguageModel,
    directory: str | Path,
    *,
    tokenizer: Tokenizer,
    config: TrainConfig | ModelConfig,
    text_files: TextFiles | None = None,
) -> Path:
    """Save a model as a run at step 0, atomically: to load, sample, evaluate or train further.

    The class of a user's own model is recorded as the model to give to `load`. `text_files` are
    what a Hugging Face folder says about its text, which an export writes again.
    Raises FileExistsError for a directory that exists, and ValueError for a model that is not of
    the config or the tokenizer.
    """
    path = Path(directory)
    config = TrainConfig(model=config) if isinstance(config, ModelConfig) else config
    config = dataclasses.replace(config, name=path.resolve().name, out=str(path))
    if config.model.make is None and type(model) not in (GPT, BigramLM):
        config = with_code(config, type(model))
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}"
        )
    its = dataclasses.replace(config.model, vocab_size=model.vocab_size)
    config = dataclasses.replace(config, model=its)
    wanted, given = (
        {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(each, nnx.Param))}
        for each in (abstract_model(config.model), model)
    )
    for name in wanted | given:
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"{'.'.join(map(str, name))} is {given.get(name)} in the model and "
                f"{wanted.get(name)} in one of the config"
            )
    with new_directory(path) as partial:
        weights = weights_of(model)
        dimensions = weight_dimensions(config.model)
        optimizer = make_optimizer(config.optimizer, config.steps, dimensions).init(weights)
        run = RunDirectory.create(partial, config, tokenizer, text_files)
        with Checkpoints(run) as checkpoints:
            checkpoints.save(TrainState(weights, optimizer, jnp.int32(0)), None)
    return path


def _require_arrays(directory: Path, count: int) -> None:
    """Raise OSError unless as many arrays are there, each with the files of all its chunks.

    The manifest vouches for the files that it finds. TensorStore can write them elsewhere, without
    an error, where it reads a path in another way than the system does.
    """
    headers = list(directory.glob("*/.zarray"))
    if len(headers) != count:
        raise OSError(f"{len(headers)} of {count} arrays are in {directory}")
    for path in headers:
        header = json.loads(path.read_text())
        grid = zip(header["shape"], header["chunks"], strict=True)
        chunks = math.prod(-(-size // chunk) for size, chunk in grid)
        found = len(list(path.parent.iterdir())) - 1
        if found != chunks:
            raise OSError(f"{path.parent} has {found} of {chunks} files")


def _is_large_on_cpu(state: TrainState) -> bool:
    """Whether training must wait until a state is written, or its memory is needed twice.

    On a CPU Orbax writes from the state's own memory, so that the next step can't reuse it and
    makes another state: a Llama of 125M took 5.5 GiB and not 4. Elsewhere the copy that is written
    lies in the host's memory.
    """
    leaves = jax.tree.leaves(state)
    platforms = {device.platform for device in leaves[0].devices()}
    return platforms == {"cpu"} and sum(leaf.nbytes for leaf in leaves) >= WAITED_FOR


def has_average(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint are an average: it has the trained ones as well."""
    return any((checkpoint / "optimizer").glob("trained.*"))


def _require_plausible(directory: Path, largest: int) -> None:
    """Raise ValueError for files that jgpt doesn't write, and headers that claim too much memory.

    TensorStore allocates what a header says before it reads, and aborts the process if that fails;
    it knows other formats, with other headers. A forged manifest could vouch for either.
    """

    def require_plausible(text: str) -> None:
        header = json.loads(text)
        if header["dtype"] not in _STORED_DTYPES:  # other dtypes have other item sizes
            raise ValueError(f"dtype {header['dtype']!r} is not one that jgpt writes")
        if header["compressor"]["id"] != "zstd" or header["filters"] is not None:
            raise ValueError("its compressor is not zstd alone, which jgpt writes")
        for field in ("shape", "chunks"):
            sizes = header[field]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"{field} is {sizes!r}")
            if math.prod(sizes) > largest:
                raise ValueError(
                    f"{field} {sizes!r} is larger than the model's largest array, or it is of "
                    "another model"
                )

    for name, path in files_below(directory):
        if not _LAYOUT.fullmatch(name):
            raise ValueError(f"{path} is not a file that jgpt writes")
        if path.name == ".zarray":
            parse_file(path, require_plausible)


def _reason(error: Exception) -> str:
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's
        return os.strerror(int(code[1]))
    return (str(error).splitlines() or [repr(error)])[0][:200]
