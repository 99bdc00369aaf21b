"""The weights that a run starts from: those of a model, of another run, or of a folder."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jgpt.config import TOKENIZER_FIELDS, DataConfig, TrainConfig
from jgpt.data.byte_pairs import BPETokenizer
from jgpt.data.characters import ByteTokenizer, CharTokenizer, OwnTokenizer
from jgpt.data.dataset import Dataset
from jgpt.data.encode import Tokenizer, is_same_vocabulary
from jgpt.interop.hub import find_model
from jgpt.interop.text_files import read_folder_tokenizer
from jgpt.nn.models import LanguageModel, abstract_model, named_parameters
from jgpt.runs.directory import RunDirectory
from jgpt.runs.load import load, load_pretrained
from jgpt.training.optimizer import is_trainable
from jgpt.words import did_you_mean

_KINDS = {
    "char": CharTokenizer,
    "byte": ByteTokenizer,
    "bpe": BPETokenizer,
    "gpt2": BPETokenizer,
}


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


def read_initial(
    initial: LanguageModel | str | Path | None, config: TrainConfig, dataset: Dataset | None = None
) -> Initial | None:
    """Read the weights to start from: of a model, a run, or a Hugging Face folder.

    A run's tokenizer may be an object of the user's own, which is that of the `dataset`.
    """
    if initial is None:
        return None
    tokenizer = None
    model: Any = initial
    source = type(initial).__name__
    if isinstance(initial, (str, Path)):
        source = str(initial)
        saved_data = DataConfig()
        if RunDirectory.is_run(Path(initial)):
            run = RunDirectory.open(initial)
            saved = run.config()
            saved_data = saved.dataset
            model_code = None
            if saved.model.make is not None:
                model_code = config.model.make
            own = None
            if dataset is not None and isinstance(run.tokenizer(), OwnTokenizer):
                own = dataset.tokenizer
            model, tokenizer, _ = load(initial, model=model_code, tokenizer=own)
        else:
            model, tokenizer, _ = load_pretrained(initial, block_size=config.model.block_size)
        named = named_fields(config.dataset, saved_data)
        require_named_tokenizer(f"`initial={source!r}`", tokenizer, named)
    # On the host, since restored arrays are committed to a device, and a mesh has others.
    arrays = {}
    for name, variable in named_parameters(model).items():
        arrays[name] = np.asarray(variable.get_value())
    return Initial(source, arrays, tokenizer)


def named_fields(config: DataConfig, saved: DataConfig) -> dict[str, Any]:
    """Return the fields with which a config names a tokenizer, in addition to a `saved` one.

    A default may not have been written by anyone, and a run's own fields name its own tokenizer.
    """
    defaults = DataConfig()
    named = {}
    for name in TOKENIZER_FIELDS:
        value = getattr(config, name)
        if value not in (getattr(defaults, name), getattr(saved, name)):
            named[name] = value
    return named


def require_named_tokenizer(owner: str, tokenizer: Tokenizer, named: Mapping[str, Any]) -> None:
    """Raise ValueError for fields that name another tokenizer than that of the owner's weights.

    With another one, the embedding of a token would be that of another text.
    """
    for name, value in named.items():
        if not _is_named(tokenizer, name, value):
            raise ValueError(
                f"{owner} has a tokenizer, which the run takes: leave out `{name}={value!r}`"
            )


def _is_named(tokenizer: Tokenizer, name: str, value: Any) -> bool:
    """Return whether a field and its value fit a tokenizer."""
    if name == "tokenizer":
        return isinstance(tokenizer, _KINDS[value])
    if name == "tokenizer_files":
        return BPETokenizer.from_gpt2(value).has_same_tokens(tokenizer)
    return tokenizer.vocab_size == value


def tokenizer_of(source: str) -> Tokenizer:
    """Return the tokenizer of a run or a Hugging Face folder, without reading its weights."""
    if RunDirectory.is_run(Path(source)):
        return RunDirectory.open(source).tokenizer()
    return read_folder_tokenizer(find_model(source))


def require_same_tokenizer(owner: str, tokenizer: Tokenizer, dataset: Dataset) -> None:
    """Raise ValueError for a dataset that another tokenizer made than that of the owner's
    weights."""
    if not is_same_vocabulary(tokenizer, dataset.tokenizer):
        raise ValueError(
            f"the dataset has another tokenizer than {owner}: make it with that one, as in "
            "Dataset.from_tokens(tokens, tokenizer=tokenizer)"
        )


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
