"""nanoGPT's checkpoints, read with `torch.load(weights_only=True)`."""

import functools
import re
import warnings
from pathlib import Path
from typing import Any

from jgpt.files import prefix_errors, require_fetched
from jgpt.interop.formats import NANOGPT, read_config
from jgpt.interop.names import Entry, plain_names, read_tensors
from jgpt.nn.transformer import GPT


def load_nanogpt(file: str | Path) -> GPT:
    """Load the model of a nanoGPT `ckpt.pt`; no code in the file is run.

    Raises ModuleNotFoundError without PyTorch, and OSError or ValueError for any other file.
    """
    file = Path(file)
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError("nanoGPT's checkpoints need PyTorch: pip install torch") from None
    with file.open("rb") as opened, prefix_errors(file):
        require_fetched(file)
        try:
            # the error below has the same content in one line
            with warnings.catch_warnings(action="ignore"):
                checkpoint = torch.load(opened, map_location="cpu", weights_only=True)
            arguments = dict(checkpoint["model_args"])
            entries = _entries(checkpoint["model"])
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"not a nanoGPT checkpoint ({_reason(error)})") from None

        return read_tensors(read_config(arguments, NANOGPT), NANOGPT, entries)


def _reason(error: Exception) -> str:
    """Return why a file can't be read, without PyTorch's advice on running code from it."""
    unsafe = re.search(r"GLOBAL ([\w.]+)", str(error))
    if unsafe is not None:  # such as a loss of NumPy's, which forks save
        return f"it has {unsafe[1]}, which is code: save `model` and `model_args` alone"
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line[:200]}"


def _entries(tensors: dict[str, Any]) -> dict[str, Entry]:
    """Return the tensors of a checkpoint by their plain names."""
    entries = {}
    for short, name in plain_names(tensors).items():
        tensor = tensors[name]
        entries[short] = Entry(tensor.shape, functools.partial(_read, tensor))
    return entries


def _read(tensor: Any) -> Any:
    return tensor.float().numpy()
