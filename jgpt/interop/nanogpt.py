"""nanoGPT's checkpoints, read with `torch.load(weights_only=True)`."""

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jgpt.files import prefix_errors, require_fetched
from jgpt.interop.formats import NANOGPT, read_config
from jgpt.interop.names import Entry, plain_names, read_tensors
from jgpt.nn.transformer import GPT


class _NumberType:
    """The dtype of a NumPy number in a file."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code
        self.byte_order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.byte_order, *_ = state


def _number(dtype: _NumberType, data: bytes) -> int | float:
    """Return a NumPy number of a file."""
    return np.frombuffer(data, dtype.byte_order + dtype.code).item()


# Ours in place of NumPy's: its dtypes are shared by all arrays of the process, and a pickle sets
# their state.
_NUMBERS: list[Any] = [
    (_NumberType, "numpy.dtype"),
    (_number, "numpy._core.multiarray.scalar"),
    (_number, "numpy.core.multiarray.scalar"),  # before NumPy 2
]
"""What PyTorch may call in addition, by the names in a file: forks save a loss of NumPy's."""


def load_nanogpt(file: str | Path) -> GPT:
    """Load the model of a nanoGPT `ckpt.pt`; no code in the file is run.

    Raises ModuleNotFoundError without PyTorch, and OSError or ValueError for any other file.
    """
    file = Path(file)
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.serialization import safe_globals  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nanoGPT's checkpoints need PyTorch: pip install torch") from None
    with file.open("rb") as opened, prefix_errors(file):
        require_fetched(file)
        try:
            # the error below has the same content in one line
            with warnings.catch_warnings(action="ignore"), safe_globals(_NUMBERS):
                checkpoint = torch.load(opened, map_location="cpu", weights_only=True)
            arguments = dict(checkpoint["model_args"])
            entries = _entries(checkpoint["model"])
        except Exception as error:  # a damaged file can raise anything
            # One sentence of PyTorch's message, without its advice on running code from the file.
            first_line, *_ = str(error).splitlines() or [""]
            first_sentence, _, _ = first_line.partition(". ")
            reason = first_sentence[:200]
            raise ValueError(
                f"not a nanoGPT checkpoint ({type(error).__name__}: {reason})"
            ) from None

        return read_tensors(read_config(arguments, NANOGPT), NANOGPT, entries)


def _entries(tensors: dict[str, Any]) -> dict[str, Entry]:
    """Return the tensors of a checkpoint by their plain names."""
    entries = {}
    for short, name in plain_names(tensors).items():
        tensor = tensors[name]
        entries[short] = Entry(tensor.shape, functools.partial(_read, tensor))
    return entries


def _read(tensor: Any) -> Any:
    return tensor.float().numpy()
