"""Durable writes: a finished name means a whole file on disk; nothing foreign is deleted."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LARGEST_TEXT = 1 << 28
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def new_directory(path: Path, content: str | None = None) -> Iterator[Path]:
    """Yield an empty directory beside `path` to fill; it is renamed to `path` at the end.

    After an error nothing is left of it. With `content`, a word for what is written, the directory
    is the one that a killed or interrupted process with the same word has left, if there is one.
    Raises FileExistsError if `path` exists and is not an empty directory, and BlockingIOError if
    another process fills it.
    """
    taken = FileExistsError(f"{path} already exists: choose another directory")
    empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(path) and not empty:
        raise taken
    make_directory(path.parent)
    partial = path.with_name(f"{path.name}.{content}.partial") if content else _partial(path)
    lock, keep = partial.with_suffix(".lock"), False
    with locked(lock, path) if content else contextlib.nullcontext():
        try:
            partial.mkdir(exist_ok=content is not None)
            for unfinished in partial.glob("*.partial"):  # that the killed process was writing
                unfinished.unlink()
            yield partial
            sync_below(partial)
            sync_directory(partial)
            os.replace(partial, path)
            sync_directory(path.parent)
        except KeyboardInterrupt:
            keep = content is not None
            raise
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                raise taken from None
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _unwritten(path, error) from error
            raise
        finally:
            if not keep:
                shutil.rmtree(partial, ignore_errors=True)
            with contextlib.suppress(OSError):  # Windows keeps what is open
                lock.unlink(missing_ok=True)


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


def read_file(path: Path) -> str:
    """The text of a small file, as configs are. Raises ValueError for a large one."""
    if (size := path.stat().st_size) > _LARGEST_TEXT:
        raise ValueError(f"it has {size:,} bytes")
    return path.read_text(encoding="utf-8-sig")  # an editor may have added a mark


@contextlib.contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Prefix ValueErrors with the file that they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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


@contextlib.contextmanager
def locked(lock: Path, path: Path) -> Iterator[None]:
    """Hold the lock of a path in a file, at most as long as this process lives.

    Raises BlockingIOError if another process holds it.
    """
    with own_file(lock, os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            raise BlockingIOError(
                f"{path} is in use by process {holder}: wait for it, or choose another directory"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a number
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield


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
