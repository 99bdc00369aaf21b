"""A tokenized text, split into training, validation and test."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from jgpt.config import DataConfig
from jgpt.data.characters import NumberTokenizer, OwnTokenizer, UnencodableText
from jgpt.data.encode import Tokenizer, is_same_vocabulary
from jgpt.data.prepared import (
    Prepared,
    digest_of,
    extremes,
    folder_of,
    open_prepared,
    require_in_vocabulary,
    token_dtype,
    whole_numbers,
)
from jgpt.data.sources import Warn
from jgpt.shapes.contract import host_record, typed
from jgpt.words import counted

GIVEN = "dataset="
"""The source that a run records for a dataset that was made in Python."""


@host_record
@dataclass(frozen=True)
class Dataset:
    """A tokenized text, split by position into training, validation and test."""

    train: Integer[np.ndarray, " tokens"]
    validation: Integer[np.ndarray, " held_out"]
    test: Integer[np.ndarray, " unseen"]
    """The test split, empty by default."""
    tokenizer: Tokenizer
    digest: str
    """SHA-256 of all tokens, with which a resumed run finds the same text again."""

    @classmethod
    def open(
        cls, folder: str | Path, *, validation_fraction: float = 0.1, test_fraction: float = 0.0
    ) -> "Dataset":
        """Open the `folder` that `jgpt prepare` wrote; its tokens are mapped into memory.

        `validation_fraction` and `test_fraction` of the tokens, at their end, are held out, unless
        the data came split. Raises ValueError for a folder that is incomplete or damaged.
        """
        fractions = DataConfig(validation_fraction=validation_fraction, test_fraction=test_fraction)
        return _dataset_of(open_prepared(Path(folder)), fractions)

    @classmethod
    def from_tokens(
        cls,
        tokens: Any,
        *,
        validation: Any = None,
        test: Any = None,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.0,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> "Dataset":
        """Make a dataset of tokens that have no text, or that a `tokenizer` made.

        The tokens are an array or a sequence of whole numbers, and so are `validation` and `test`.
        Without a `validation` split, `validation_fraction` and `test_fraction` of the tokens, at
        their end, are held out. The `tokenizer` is any object with `encode`, `decode` and
        `vocab_size`. Without one, the tokens are numbers below `vocab_size`, by default one more
        than the largest one. Raises ValueError for tokens that are not whole numbers, or outside of
        the vocabulary.
        """
        if validation is None and test is not None:
            raise ValueError("give `validation` with `test`, or neither and the fractions")
        if test is None:
            test = ()
        given = {"tokens": tokens}
        if validation is not None:
            given |= {"validation": validation, "test": test}
        arrays = {name: whole_numbers(name, values) for name, values in given.items()}
        if tokenizer is None:
            if vocab_size is None:
                vocab_size = max(extremes(array)[1] for array in arrays.values()) + 1
            tokenizer = NumberTokenizer(vocab_size)
        elif not isinstance(tokenizer, Tokenizer):
            tokenizer = OwnTokenizer.of(tokenizer)
        for name, array in arrays.items():
            require_in_vocabulary(name, array, tokenizer)
        parts = [_narrow(array, tokenizer) for array in arrays.values()]
        digest = digest_of(*parts)
        if validation is None:
            fractions = DataConfig(
                validation_fraction=validation_fraction, test_fraction=test_fraction
            )
            parts = _split(parts[0], fractions)
        training, held_out, unseen = parts
        return cls(training, held_out, unseen, tokenizer, digest)


@typed
def _narrow(
    tokens: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer
) -> Integer[np.ndarray, " tokens"]:
    """Return tokens in a dtype that JAX has and that is native here."""
    if tokens.dtype.isnative and tokens.dtype.name in ("uint8", "uint16", "uint32", "int32"):
        return tokens
    return tokens.astype(token_dtype(tokenizer))


def _dataset_of(prepared: Prepared, fractions: DataConfig) -> Dataset:
    """Split the tokens of a folder, unless they came split."""
    if prepared.validation is None:
        splits = _split(prepared.tokens, fractions)
    else:
        splits = prepared.tokens, prepared.validation, prepared.validation[:0]
    return Dataset(*splits, prepared.tokenizer, prepared.digest)


def _split(tokens: Any, fractions: DataConfig) -> tuple[Any, Any, Any]:
    """Split the tokens into training, validation and test."""
    # The split is by position, since windows of one part overlap: no training step sees validation
    # text.
    train_end = int(len(tokens) * (1 - fractions.held_out_fraction))
    validation_end = int(len(tokens) * (1 - fractions.test_fraction))
    return tokens[:train_end], tokens[train_end:validation_end], tokens[validation_end:]


@typed
def load_dataset(
    config: DataConfig,
    block_size: int,
    *,
    tokenizer: Tokenizer | None = None,
    digest: str | None = None,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Dataset:
    """Open the data of a config, which are tokenized into the user's cache first if they are text.

    The tokenizer is the folder's own, the `tokenizer` of a run, or the one that the config asks
    for. `progress` is called often with the fraction that is tokenized, and may raise an exception
    to stop. Raises ValueError or OSError for text that can't be read or encoded, is too short, or
    has another `digest` than that of a run.
    """
    if GIVEN in config.data:
        raise ValueError(
            "the run was trained on a Dataset in Python: give it again with dataset=, or name "
            "other data with `data`"
        )
    try:
        folder = folder_of(config, tokenizer, warn, progress)
    except FileNotFoundError as error:
        if digest is None:
            raise
        raise FileNotFoundError(
            f"{error}; if the run's text has moved, train it with `resume=True` `data=PLACE`"
        ) from None
    except UnencodableText as error:
        if digest is None:
            raise
        raise _another_text(config, str(error)) from None
    dataset = _dataset_of(open_prepared(folder, tokenizer), config)
    require_usable(dataset, config, block_size, digest)
    return dataset


@typed
def load_text(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    warn: Warn = lambda message: None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Integer[np.ndarray, " tokens"]:
    """Return the tokens of a config's data, without splitting them."""
    prepared = open_prepared(folder_of(config, tokenizer, warn, progress), tokenizer)
    if prepared.validation is None:
        return prepared.tokens
    return prepared.validation  # of data that came split


@typed
def require_usable(
    dataset: Dataset, config: DataConfig, block_size: int, digest: str | None = None
) -> None:
    """Raise ValueError if a dataset is too short, or has another `digest` than that of a run."""
    require_same_text(dataset, config, digest)
    _require_a_block("the training split", dataset.train, block_size)
    _require_a_block("the validation split", dataset.validation, block_size)
    if config.test_fraction > 0 or len(dataset.test) > 0:
        _require_a_block("the test split", dataset.test, block_size)


def require_same_text(dataset: Dataset, config: DataConfig, digest: str | None) -> None:
    """Raise ValueError if a dataset has another `digest` than that of a run."""
    if digest is not None and digest != dataset.digest:
        raise _another_text(config, f"SHA-256 {dataset.digest[:12]}…, not {digest[:12]}…")


def require_same_tokenizer(owner: str, tokenizer: Tokenizer, dataset: Dataset) -> None:
    """Raise ValueError for a dataset that another tokenizer made than that of a run or weights."""
    if not is_same_vocabulary(tokenizer, dataset.tokenizer):
        raise ValueError(
            f"the dataset has another tokenizer than {owner}: make it with that one, as in "
            "Dataset.from_tokens(tokens, tokenizer=tokenizer)"
        )


def _another_text(config: DataConfig, reason: str) -> ValueError:
    if "pydocs" in config.data:
        reason += "; pydocs is another text in each version of Python"
    return ValueError(
        f"`data={config.data!r}` has other tokens than the run was trained on ({reason}): give the "
        "run's text, or train a new run"
    )


def _require_a_block(name: str, split: Any, block_size: int) -> None:
    if len(split) > block_size:  # one more token is the target of the last input
        return
    raise ValueError(
        f"{name} has {counted(len(split), 'token')}, too few for one block of "
        f"{block_size} and its targets: use more text or a smaller `block_size`"
    )
