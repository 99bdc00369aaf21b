"""The weights that a run starts from: those of a model, of another run, or of a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.characters import OwnTokenizer
from jgpt.data.dataset import Dataset
from jgpt.data.encode import Tokenizer
from jgpt.nn.models import LanguageModel, abstract_model, named_parameters
from jgpt.runs.checkpoints import choose, load_checkpoint
from jgpt.runs.directory import RunDirectory, run_and_step
from jgpt.runs.load import load, load_pretrained
from jgpt.training.loss_scale import first_loss_scale
from jgpt.training.optimizer import is_trainable
from jgpt.training.state import State, placed_state
from jgpt.words import did_you_mean


@dataclass(frozen=True)
class Initial:
    """The weights to start from, and where they are from."""

    source: str
    arrays: dict[str, Any]
    """The arrays by the paths of their parameters."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the weights, if they are of a run or a folder."""
    run: RunDirectory | None = None
    step: int = 0
    """The run and the step of its checkpoint, if they are of one."""


def read_initial(
    initial: LanguageModel | str | Path, config: TrainConfig, dataset: Dataset | None = None
) -> Initial:
    """Read the weights to start from: of a model, a RUN or RUN@STEP, or a Hugging Face folder.

    A run's tokenizer may be an object of the user's own, which is that of the `dataset`.
    """
    if not isinstance(initial, (str, Path)):
        return Initial(type(initial).__name__, _arrays_of(initial))
    source = str(initial)
    run = None
    which: Any = 0
    path, step = run_and_step(initial)
    if RunDirectory.exists(path):
        run = RunDirectory.open(path)
        model_code = None
        if run.config().model.make is not None:
            model_code = config.model.make
        own = None
        if dataset is not None and isinstance(run.tokenizer(), OwnTokenizer):
            own = dataset.tokenizer
        which = choose(run.checkpoints, "best" if step is None else step)
        model, tokenizer, _ = load(path, which=which, model=model_code, tokenizer=own)
        source = f"{path}@{which}"
    else:
        model, tokenizer, _ = load_pretrained(source, block_size=config.model.block_size)
    return Initial(source, _arrays_of(model), tokenizer, run, which)


def _arrays_of(model: LanguageModel) -> dict[str, Any]:
    """Return a model's arrays on the host: restored ones are committed to a device, and a mesh has
    others."""
    arrays = {}
    for name, variable in named_parameters(model).items():
        arrays[name] = np.asarray(variable.get_value())
    return arrays


def with_moments(initial: Initial | None, config: TrainConfig) -> tuple[int, Callable[[], State]]:
    """Return the step of a run's checkpoint, and what loads its weights and moments.

    They are loaded onto the mesh that is set, which raises ValueError for those of another
    optimizer.
    """
    if initial is None or initial.run is None:
        raise ValueError("`with_optimizer=True` needs `initial=RUN@STEP`, whose moments it takes")
    folder = initial.run.checkpoints
    step = initial.step

    def load_state() -> State:
        wanted = placed_state(config)
        # A run on another machine has none, or one for other gradients.
        loss_scale = wanted.pop("loss_scale", None)
        _, state = load_checkpoint(folder, step, wanted)
        if loss_scale is not None:
            state["loss_scale"] = first_loss_scale()
        return state

    return step, load_state


def require_trainable(config: TrainConfig) -> None:
    """Raise ValueError for a pattern of `trainable` that fits no parameter, or stacked blocks."""
    if not config.optimizer.trainable:
        return
    if config.model.scan_layers:
        raise ValueError(
            f"`trainable={config.optimizer.trainable!r}` needs `scan_layers=False`: a scan "
            "stacks the parameters of all blocks"
        )
    names = list(named_parameters(abstract_model(config.model)))
    for pattern in config.optimizer.trainable:
        if not any(is_trainable(name, (pattern,)) for name in names):
            raise ValueError(
                f"`trainable={(pattern,)!r}` fits no parameter{did_you_mean(pattern, names)}: "
                f"they are such as {names[0]}"
            )


def require_fitting(initial: Initial, config: TrainConfig) -> None:
    """Raise ValueError if weights are of another architecture than the config's model.

    They may lack parameters that `trainable` names, as those of LoRA, which begin as usual.
    """
    expected = named_parameters(abstract_model(config.model))
    trainable = config.optimizer.trainable
    for name in {**expected, **initial.arrays}:
        shape = None
        if name in expected:
            shape = expected[name].shape
        found = None
        if name in initial.arrays:
            found = initial.arrays[name].shape
        # Without `trainable`, all parameters are trained, and none of them may be absent.
        if found is None and trainable and is_trainable(name, trainable):
            continue
        remedy = ""
        if found is None and trainable:
            remedy = (
                f"; `trainable={trainable!r}` does not name it, and a frozen parameter must be in "
                "the initial weights by its name, which a module that wraps another one changes"
            )
        if name == "position_embedding.embedding":
            remedy = "; with `positions='rotary'` a block has any length"
        if shape != found:
            raise ValueError(
                f"`initial={initial.source!r}` is of another architecture: {name} is "
                f"{found or 'absent'} in it, and {shape or 'absent'} in the model of the "
                f"config{remedy}"
            )
