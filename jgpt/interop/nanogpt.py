"""nanoGPT's checkpoints, read with `torch.load(weights_only=True)`."""

import functools
import pickletools
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from jgpt.durable import prefix_errors
from jgpt.interop.formats import NANOGPT, read_config
from jgpt.interop.names import Entry, plain_names, read_tensors
from jgpt.nn.transformer import GPT

_MOST_PICKLES = 8
"""The most pickles in a file. Before PyTorch 1.6, files were several pickles, followed by the bytes
of tensors."""


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
        _require_stored(opened)
        try:
            # the error below has the same content in one line
            with warnings.catch_warnings(action="ignore"):
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
    named = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("_orig_mod.")  # torch.compile adds this prefix
        if short in named:
            raise ValueError(f"_orig_mod.{short} and {short} are two names of one tensor")
        named[short] = tensor
    entries = {}
    for short, name in plain_names(named).items():
        tensor = named[name]
        entries[short] = Entry(tensor.shape, functools.partial(_read, short, tensor))
    return entries


def _require_stored(file: BinaryIO) -> None:
    """Raise ValueError for a file of kilobytes that claims all memory.

    PyTorch reads compressed archives, but never writes them. It also makes a `bytearray` of any
    size, which no checkpoint contains.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{entry.filename} is compressed, which PyTorch never does")
                if entry.filename.endswith(".pkl"):
                    with archive.open(entry) as pickled:
                        _require_no_bytearray(pickled)
    else:
        file.seek(0)
        _require_no_bytearray(file)
    file.seek(0)


def _require_no_bytearray(file: IO[bytes]) -> None:
    """Raise ValueError if a pickled file makes a `bytearray`. Its operations aren't run."""
    for argument in _strings_of_pickles(file):
        # A name may be in one string with its module, as in "builtins bytearray".
        if argument.split(" ")[-1] == "bytearray":
            raise ValueError("it makes a bytearray, which no nanoGPT checkpoint has")


def _strings_of_pickles(file: IO[bytes]) -> Iterator[str]:
    """Yield the strings in the pickles at the beginning of a file, and the names that they
    import."""
    for _ in range(_MOST_PICKLES):
        try:
            for _, argument, _ in pickletools.genops(file):
                if isinstance(argument, str):
                    yield argument
        except (ValueError, EOFError):
            return  # the rest is not a pickle


def _read(name: str, tensor: Any) -> Any:
    # Strides may claim far more values than are stored, which a copy would allocate.
    needed = tensor.numel() * tensor.element_size()
    if str(tensor.layout) == "torch.strided" and tensor.untyped_storage().nbytes() < needed:
        raise ValueError(f"{name} claims {needed:,} bytes, which the file doesn't have")
    try:
        return tensor.float().numpy()
    except (RuntimeError, TypeError) as error:  # a quantised or sparse tensor
        raise ValueError(f"{name} can't be read: {str(error).splitlines()[0]}") from None
