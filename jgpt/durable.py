"""Durable writes: a finished name means a whole file on disk; nothing foreign is deleted."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` to fill; it is renamed to `path` at the end.

    After an error nothing is left of it.
    Raises FileExistsError if `path` exists and is not an empty directory.
    """
    taken = FileExistsError(f"{path} already exists: choose another directory")
    empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(path) and not empty:
        raise taken
    make_directory(path.parent)
    partial = _partial(path)
    partial.mkdir()
    try:
        yield partial
        sync_below(partial)
        sync_directory(partial)
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
            raise taken from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _unwritten(path, error) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file, or replace it: a crash leaves the old one or the new one."""
    data, given, path = data.encode() if isinstance(data, str) else data, path, path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a device has to stay what it is
        path.write_bytes(data)
        return
    partial = _partial(path)
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        raise _unwritten(given, error) from error
    finally:
        partial.unlink(missing_ok=True)


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Append to a file all of the data or none."""
    with own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            if durable:
                os.fsync(descriptor)
                sync_directory(path.parent)
        except OSError as error:
            os.truncate(descriptor, size)
            raise _unwritten(path, error) from error


@contextlib.contextmanager
def own_file(path: Path, flags: int) -> Iterator[int]:
    """Open a file. Raises ValueError for links, hard ones too, and for what is not a file."""
    foreign = ValueError(f"{path} is a link or not a file: delete it, or replace it by a copy")
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # ENXIO: a pipe nobody reads
            raise foreign from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise foreign
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents."""
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        sync_directory(each.parent)


def sync_below(directory: Path) -> None:
    """fsync all files and directories below a directory."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("r+b") as file:  # Windows syncs only what is open for writing
                os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names of its entries are durable."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def _unwritten(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} can't be written: {error.strerror or error}")
