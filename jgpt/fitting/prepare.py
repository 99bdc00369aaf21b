"""All checks before a run's directory is written or a step is compiled."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jgpt.config import ModelConfig, TrainConfig
from jgpt.data.dataset import GIVEN, Dataset, load_dataset, require_usable
from jgpt.data.sources import Warn
from jgpt.fitting.initial import (
    Initial,
    named_fields,
    read_initial,
    require_fitting,
    require_named_tokenizer,
    require_same_tokenizer,
    require_trainable,
)
from jgpt.fitting.progress import Progress
from jgpt.fitting.resolve import (
    ResolvedConfig,
    describe_replicated,
    for_machine,
    resolve_micro_batches,
    with_vocabulary_and_dtype,
)
from jgpt.fitting.resume import (
    describe_learning_rate,
    describe_micro_batches,
    fields_of,
    require_same_run,
    resume_evaluations,
)
from jgpt.fitting.stopping import StoppedBeforeTraining
from jgpt.fitting.trackers import require_tracker
from jgpt.hardware import Machine, process_count
from jgpt.nn.models import LanguageModel, abstract_model
from jgpt.runs.provenance import provenance
from jgpt.runs.target import SavedRun, Target
from jgpt.shapes.proofs import prove
from jgpt.training.evaluation import EvaluationPlan, plan_evaluations
from jgpt.training.placement import bytes_of
from jgpt.training.state import abstract_state
from jgpt.user_code import changed_code, code_facts, custom_code, require_code, with_code
from jgpt.words import format_bytes


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start: its config is decided and its text is loaded."""

    config: ResolvedConfig
    dataset: Dataset
    target: Target
    evaluations: EvaluationPlan
    initial: Initial | None = None
    """The weights to start from, if they aren't those of the seed."""

    # Cached, since it is compared between processes and written later.
    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """The line of provenance for this start, without its step."""
        line = provenance(self.config.trained, self.dataset, self.evaluations)
        if self.initial is not None:
            line["initial"] = self.initial.recorded
        return line


def prepare(
    config: TrainConfig,
    target: Target,
    machine: Machine,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    dataset: Dataset | None = None,
    initial: LanguageModel | str | Path | None = None,
) -> PreparedRun:
    """Load the text, decide what the config leaves open, and check all of it. Nothing is written.

    A given `dataset` is trained on in place of the config's text, and the run starts from the
    `initial` weights. Raises ValueError or OSError if the run can't start, and
    StoppedBeforeTraining.
    """
    for name in config.trackers:
        require_tracker(name)
    _require_custom_code(config, target.saved)
    weights = read_initial(initial, config, dataset)
    if isinstance(initial, (str, Path)) and target.saved is None:
        _require_other_run(Path(initial), target.path)
    if dataset is None:
        dataset = _load_text(config, target, progress, should_stop, weights)
    else:
        config = replace(config, dataset=replace(config.dataset, data=(GIVEN,)))
        _require_same_dataset(dataset, config, target.saved)
        if weights is not None and weights.tokenizer is not None:
            require_same_tokenizer(f"`initial={weights.source!r}`", weights.tokenizer, dataset)
    recorded = with_vocabulary_and_dtype(config, dataset.tokenizer.vocab_size, machine.platform)
    require_trainable(recorded)
    if weights is not None:
        require_fitting(weights, recorded)
    if target.saved is not None:
        _require_initial(weights, target.saved)
        _require_resumable(recorded, target.saved, progress.warned)
    evaluations = _choose_evaluations(
        recorded, target.saved, len(dataset.validation), progress.warned
    )
    trained = for_machine(recorded, machine)
    # Both before anything is compiled, which `micro_batches=auto` does.
    _require_room(trained, target.path)
    resolved = resolve_micro_batches(recorded, trained, machine, progress.warned)
    if target.saved is None and recorded.model.make is not None:
        looking_ahead = _describe_sight(resolved.trained.model)
        if looking_ahead is not None:
            progress.warned(looking_ahead)
    replicated = describe_replicated(resolved.trained)
    if replicated is not None:
        progress.warned(replicated)
    if target.saved is not None:
        changed = describe_micro_batches(target.saved.micro_batches, resolved.trained)
        if changed is not None:
            progress.warned(changed)
    return PreparedRun(resolved, dataset, target, evaluations, weights)


LONGEST_PROOF = 1024
"""At this length a proof of a small model takes 3 s of a processor and 430 MiB, at 256 0.7 s."""


def _describe_sight(config: ModelConfig) -> str | None:
    """Return a warning unless it is proven that a model of one's own reads no later token."""
    model = abstract_model(config)
    if not getattr(model, "causal", True):  # it says that it looks ahead on purpose
        return None
    time = min(model.block_size, LONGEST_PROOF)
    try:
        proof = prove(model, "int32[b t]", causal="t", sizes={"t": time, "b": 1})
    # A model that trains is not kept from it by a program that the proof can't read.
    except Exception as error:
        reason = str(error) or type(error).__name__
        return f"whether the model reads later tokens can't be proven: {reason}"
    if proof:
        return None
    # A model that reads later tokens has a low loss, and samples nonsense.
    verdict, *reasons = str(proof).splitlines()
    found = verdict.removeprefix("not proven: ")
    entries = [reason for reason in reasons if "comes in at" in reason]
    return (
        f"the model is not proven causal: {'; '.join([found, *map(str.strip, entries)])} "
        "(one that looks ahead on purpose has `causal = False`)"
    )


def shared_facts(prepared: PreparedRun, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Return the facts that must be equal in all processes of a run, by their names in messages."""
    line = prepared.provenance
    facts: dict[str, Any] = dict(fields_of(prepared.config.trained))
    facts |= code_facts(prepared.config.trained)
    facts["resume"] = resume
    facts["overwrite"] = overwrite
    facts["checkpoints"] = list(prepared.target.checkpoints)
    facts["tokens_sha256"] = line["tokens_sha256"]
    # Another version of JAX may compute other numbers.
    facts |= line["versions"]
    return facts


def _require_custom_code(config: TrainConfig, saved: SavedRun | None) -> None:
    """Raise ValueError if a run with custom code is resumed without it."""
    for part, make in custom_code(config).items():
        if make is None and saved is not None:
            make = custom_code(saved.config)[part]
        if make is not None:
            require_code(make, part)


def _require_other_run(initial: Path, out: Path) -> None:
    """Raise ValueError if a new run would delete the run whose weights it starts from."""
    if out.exists() and initial.exists() and initial.samefile(out):
        raise ValueError(
            f"`overwrite=True` would delete the weights of {initial}, from which the run "
            "starts: give another `out`"
        )


def _require_initial(initial: Initial | None, saved: SavedRun) -> None:
    """Raise ValueError unless a run is resumed from the weights that it started from.

    They may be given again, but a run with a checkpoint doesn't need them.
    """
    recorded: dict[str, Any] = {}
    for line in saved.provenance:
        recorded = line.get("initial", recorded)
    if not saved.checkpoints:
        if recorded and initial is None:
            raise ValueError(
                "the run started from other weights and has no checkpoint yet: give "
                f"`initial={str(recorded.get('source'))!r}`"
            )
        return
    if initial is not None and initial.recorded["weights_sha256"] != recorded.get("weights_sha256"):
        raise ValueError(
            "the run to resume did not start from these weights: leave out "
            f"`initial={initial.source!r}`, or train a new run from them"
        )


def _load_text(
    config: TrainConfig,
    target: Target,
    progress: Progress,
    should_stop: Callable[[], bool],
    weights: Initial | None,
) -> Dataset:
    """Load the text as tokens; a resumed run keeps its tokenizer. Raises StoppedBeforeTraining."""
    tokenizer = None
    known = None
    if target.saved is not None:
        tokenizer = target.saved.tokenizer
        known = target.saved.tokens_digest
    elif weights is not None:
        tokenizer = weights.tokenizer
    stop_is_asked = False

    def tokenized(fraction: float) -> None:
        nonlocal stop_is_asked
        progress.tokenized(fraction)
        # Several processes would have to agree, which they do only between steps.
        if process_count() == 1 and should_stop():
            stop_is_asked = True
            raise KeyboardInterrupt  # the tokens so far are kept

    try:
        return load_dataset(
            config.dataset,
            config.model.block_size,
            tokenizer=tokenizer,
            digest=known,
            warn=progress.warned,
            progress=tokenized,
        )
    except KeyboardInterrupt:
        if stop_is_asked:
            raise StoppedBeforeTraining(target.path) from None
        raise


def _require_same_dataset(dataset: Dataset, config: TrainConfig, saved: SavedRun | None) -> None:
    """Raise ValueError if a dataset is too short, or not the one of the run to resume."""
    known = None
    if saved is not None:
        known = saved.tokens_digest
        require_same_tokenizer(f"`out={str(saved.path)!r}`", saved.tokenizer, dataset)
    require_usable(dataset, config.dataset, config.model.block_size, known)


def _require_resumable(recorded: TrainConfig, saved: SavedRun, warn: Warn) -> None:
    """Raise ValueError if a config doesn't continue a run; warn of the changes that it makes."""
    for line in changed_code(saved.config, recorded):
        warn(line)
    # A run records the name of its code but loads none, so the code of this start replaces it.
    saved_config = with_code(saved.config, **custom_code(recorded))
    text_is_known = saved.tokens_digest is not None
    require_same_run(saved_config, recorded, saved.checkpoints, text_is_known=text_is_known)
    # Of an imported run, other fields of the data may differ.
    named = named_fields(recorded.dataset, saved.config.dataset)
    require_named_tokenizer(f"`out={str(saved.path)!r}`", saved.tokenizer, named)
    changed = describe_learning_rate(saved_config, recorded, saved.checkpoints)
    if changed is not None:
        warn(changed)


def _choose_evaluations(
    recorded: TrainConfig, saved: SavedRun | None, validation_tokens: int, warn: Warn
) -> EvaluationPlan:
    """Plan the evaluations; a resumed run keeps its targets if they may stay."""
    if saved is None or not saved.checkpoints:
        return plan_evaluations(recorded, validation_tokens)
    evaluations, other_targets = resume_evaluations(
        saved=saved.config,
        config=recorded,
        lines=saved.provenance,
        step=saved.checkpoints[-1],
        validation_tokens=validation_tokens,
    )
    if other_targets is not None:
        warn(other_targets)
    return evaluations


def _require_room(config: TrainConfig, out: Path) -> None:
    """Raise OSError if the disk can't hold the checkpoints that are kept and the one being saved.

    A disk that fills up later costs steps, and hours may pass until then.
    """
    # The nearest existing folder, since the directory itself may not exist yet.
    folders = (out, *out.absolute().parents)
    existing = next(folder for folder in folders if folder.exists())
    free = shutil.disk_usage(existing).free
    kept = config.keep_best + config.keep_last
    needed = bytes_of(abstract_state(config)) * (kept + 1)
    if needed > free:
        raise OSError(
            f"{existing} has {format_bytes(free)} free, but the checkpoints need "
            f"{format_bytes(needed)}: free some space, or lower `keep_best` and `keep_last`"
        )
