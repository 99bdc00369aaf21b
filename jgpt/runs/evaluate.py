"""The exact loss of a trained run."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax import nnx
from jaxtyping import Integer

from jgpt.data.characters import NumberTokenizer
from jgpt.data.dataset import Dataset, load_dataset, load_text, require_usable
from jgpt.data.encode import count_characters
from jgpt.fields import Make
from jgpt.machine import this_machine
from jgpt.nn.loss import bits_per_character
from jgpt.runs.checkpoints import Which
from jgpt.runs.directory import RunDirectory
from jgpt.runs.load import load
from jgpt.runs.progress import Progress
from jgpt.runs.run import Run
from jgpt.shapes.contract import typed
from jgpt.training.complete import complete
from jgpt.training.evaluation import Evaluator


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    loss: float
    """The mean loss in nats per token, over every held-out target once."""
    perplexity: float
    bits_per_character: float | None
    """None for tokens without a text."""
    tokens: int
    """The number of targets."""
    data: str | None = None
    """The other text, if it is not a split of the run's own."""


@typed
def evaluate(
    run: str | Path | Run,
    *,
    model: Make | str = None,
    tokenizer: Any = None,
    which: Which = "best",
    split: Literal["validation", "test"] = "validation",
    data: str | tuple[str, ...] = (),
    data_field: str | None = None,
    dataset: Dataset | None = None,
    window: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Compute the exact loss of a run's model on a split, or on another text.

    `run` is a run directory or a `Run`. The loss is over the whole split, even if the run's
    `eval_tokens` is smaller. `data` names another text, as in a `DataConfig`: all of it is
    evaluated, with the run's tokenizer, and read as the run's text was. `data_field` is its field
    or column, by default that of the run. A run that was trained on a `dataset` needs it again. A
    run of a custom model or a tokenizer of the user's own needs the `model` or the `tokenizer`
    again. The text is evaluated in windows of `window` tokens, at most `block_size`. Raises
    ValueError for a split that the run does not have, a longer window, or a text that the tokenizer
    can't encode, and the errors of `load`.
    """
    progress = progress or Progress()
    if isinstance(run, Run):
        opened = run
    else:
        opened = load(run, model=model, tokenizer=tokenizer, which=which)
    loaded, used_tokenizer, config = opened
    digest = None
    if opened.path is not None:
        digest = RunDirectory.open(opened.path).recorded("tokens_sha256")
    size = _window_size(window, config.model.block_size)
    data = _other_data(data, split)
    if data:
        other = replace(
            config.dataset, data=data, data_field=data_field or config.dataset.data_field
        )
        tokens = load_text(other, used_tokenizer, warn=progress.warned, progress=progress.tokenized)
    elif dataset is None:
        known = load_dataset(
            config.dataset,
            size,
            tokenizer=used_tokenizer,
            digest=digest,
            warn=progress.warned,
            progress=progress.tokenized,
        )
        tokens = _tokens_of(known, split, opened.path)
    else:
        require_usable(dataset, config.dataset, size, digest)
        tokens = _tokens_of(dataset, split, opened.path)
    # All targets, in windows of this size; the weights stay unchanged.
    config = replace(config, model=replace(config.model, block_size=size), eval_tokens=None)
    weights = nnx.to_pure_dict(nnx.state(loaded))
    # on the mesh that is set, and not on that of the training
    machine = replace(this_machine(), devices=1)
    decided = complete(replace(config, mesh=None), machine)
    evaluator = Evaluator(decided, tokens)
    loss = evaluator.mean(weights, progress.evaluating)
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss of {opened.path} is {loss}: it has diverged")
    # The characters of the targets, not of all tokens: the first token is never predicted.
    targets = tokens[1:]
    bits = None
    if not isinstance(used_tokenizer, NumberTokenizer):
        characters_per_token = count_characters(targets, used_tokenizer) / len(targets)
        bits = bits_per_character(loss, characters_per_token)
    return Evaluation(loss, float(np.exp(loss)), bits, len(targets), " ".join(data) or None)


def _window_size(window: int | None, block_size: int) -> int:
    """Return the number of tokens in a window, by default the model's whole block."""
    if window is None:
        return block_size
    if not 0 < window <= block_size:
        raise ValueError(f"`window={window!r}` must be from 1 to `block_size={block_size!r}`")
    return window


def _other_data(data: str | tuple[str, ...], split: str) -> tuple[str, ...]:
    """Return the sources of another text, if there are any."""
    if isinstance(data, str):
        data = (data,)
    if data and split == "test":
        raise ValueError(f"give `data` or `split={split!r}`, not both")
    return data


@typed
def _tokens_of(dataset: Dataset, split: str, path: Path | None) -> Integer[np.ndarray, " tokens"]:
    """Return a split of the run's own data."""
    if split == "validation":
        return dataset.validation
    if len(dataset.test) == 0:
        raise ValueError(f"{path} has no test split: its `test_fraction` is 0")
    return dataset.test
