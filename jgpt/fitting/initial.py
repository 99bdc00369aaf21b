"""The weights that a run starts from: those of a model, of another run, or of a folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jgpt.config import TrainConfig
from jgpt.data.tokenizers import CustomTokenizer, Tokenizer
from jgpt.fields import Code
from jgpt.nn.models import LanguageModel, abstract_model, named_parameters
from jgpt.refusal import Field, Message
from jgpt.runs.directory import RunDirectory
from jgpt.runs.load import load, load_pretrained
from jgpt.training.optimizer import is_trainable
from jgpt.words import did_you_mean


@dataclass(frozen=True)
class Initial:
    """The weights to start from, and where they are from."""

    source: str
    arrays: dict[str, Any]
    """The arrays by the paths of their parameters."""
    tokenizer: Tokenizer | None = None
    """The tokenizer of the weights, if they are of a run or a folder."""

    @property
    def recorded(self) -> dict[str, str]:
        """The record for the provenance: the source, and the SHA-256 of the weights."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.arrays[name]).tobytes())
        return {"source": self.source, "weights_sha256": digest.hexdigest()}


def read_initial(initial: LanguageModel | str | Path | None, config: TrainConfig) -> Initial | None:
    """Read the weights to start from: of a model, a run, or a Hugging Face folder."""
    if initial is None:
        return None
    tokenizer = None
    model: Any = initial
    source = type(initial).__name__
    if isinstance(initial, (str, Path)):
        source = str(initial)
        if RunDirectory.exists(Path(initial)):
            saved = RunDirectory.open(initial).config()
            model_code = None
            if saved.model.make is not None:
                model_code = config.model.make
            tokenizer_code = None
            if saved.dataset.make is not None:
                tokenizer_code = config.dataset.make
            model, tokenizer, _ = load(initial, model=model_code, tokenizer=tokenizer_code)
        else:
            model, tokenizer, _ = load_pretrained(initial, block_size=config.model.block_size)
        _require_one_tokenizer(source, tokenizer, config)
    # On the host, since restored arrays are committed to a device, and a mesh has others.
    arrays = {}
    for name, variable in named_parameters(model).items():
        arrays[name] = np.asarray(variable.get_value())
    return Initial(source, arrays, tokenizer)


def _require_one_tokenizer(source: str, tokenizer: Tokenizer, config: TrainConfig) -> None:
    """Raise ValueError for a custom tokenizer in place of the one that belongs to the weights."""
    if config.dataset.make is not None and not isinstance(tokenizer, CustomTokenizer):
        raise ValueError(
            Message(
                Field("initial", source),
                " has a tokenizer, which the run takes: leave out ",
                Field("tokenizer", Code.of(config.dataset.make).named),
            )
        )


def require_trainable(config: TrainConfig) -> None:
    """Raise ValueError for a pattern of `trainable` that fits no parameter, or stacked blocks."""
    if not config.optimizer.trainable:
        return
    if config.model.scan_layers:
        raise ValueError(
            Message(
                Field("trainable", config.optimizer.trainable),
                " needs ",
                Field("scan_layers", False),
                ": a scan stacks the parameters of all blocks",
            )
        )
    names = list(named_parameters(abstract_model(config.model)))
    for pattern in config.optimizer.trainable:
        if not any(is_trainable(name, (pattern,)) for name in names):
            raise ValueError(
                Message(
                    Field("trainable", (pattern,)),
                    f" fits no parameter{did_you_mean(pattern, names)}: they are such as "
                    f"{names[0]}",
                )
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
        if shape != found:
            raise ValueError(
                Message(
                    Field("initial", initial.source),
                    f" is of another architecture: {name} is {found or 'absent'} in it, and "
                    f"{shape or 'absent'} in the model of the config",
                )
            )
