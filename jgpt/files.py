"""Durable writes: a file or directory with its final name is complete on disk."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of what Git leaves in place of a large file, where Git LFS is not installed."""


@contextlib.contextmanager
def new_directory(path: Path, content: str | None = None) -> Iterator[Path]:
    """Yield a directory beside `path` to fill; it is renamed to `path` at the end.

    After an error it is deleted. With `content`, a word for the data, a process that is interrupted
    or killed leaves it, and the next one with the same word goes on with it. Raises FileExistsError
    if `path` exists and is not an empty directory, and BlockingIOError if another process fills it.
    """
    _require_free(path)
    make_directory(path.parent)
    partial = path.with_name(f"{path.name}.{content or 'new'}.jgpt.partial")
    lock = path.with_name(f"{path.name}.jgpt.lock")
    with locked(lock, path):
        is_to_continue = False
        try:
            _require_free(path)  # another process may have filled it before it gave up the lock
            # of processes that were killed: whoever fills one has the lock
            for abandoned in path.parent.glob(f"{path.name}.*.jgpt.partial"):
                if abandoned != partial or content is None:
                    shutil.rmtree(abandoned)
            partial.mkdir(exist_ok=True)
            for unfinished in partial.glob("*.partial"):
                unfinished.unlink()
            sync_directory(path.parent)
            yield partial
            # This order is what makes it durable: files, then the directory, then its name. After a
            # power cut either there is no name, or a name with all data.
            sync_below(partial)
            sync_directory(partial)
            os.replace(partial, path)
        except KeyboardInterrupt:
            is_to_continue = content is not None
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _unwritten(path, error) from error
            raise
        finally:
            if not is_to_continue:
                shutil.rmtree(partial, ignore_errors=True)
            lock.unlink(missing_ok=True)
        # Without the lock: a process that is killed in this slow call would leave it.
        sync_directory(path.parent)


def _require_free(path: Path) -> None:
    is_empty = path.is_dir() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty:
        raise FileExistsError(f"{path} already exists: choose another directory")


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file, or replace it: a crash leaves the old one or the new one."""
    if isinstance(data, str):
        data = data.encode()
    named_path = path  # for messages, with the user's path
    path = path.resolve()  # a link stays, and its target is replaced
    if path.exists() and not path.is_file():  # a pipe or a device is written to, and not replaced
        path.write_bytes(data)
        return
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as error:
        raise _unwritten(named_path, error) from error
    finally:
        with contextlib.suppress(OSError):  # on a read-only file system, of a file that isn't there
            partial.unlink(missing_ok=True)


def read_file(path: Path) -> str:
    """Read a small text file, such as a config. Raises ValueError for a pointer of Git LFS."""
    require_fetched(path)
    return path.read_text(encoding="utf-8-sig")  # an editor may have added a byte-order mark


def require_fetched(path: Path) -> None:
    """Raise ValueError for a pointer of Git LFS in place of a file."""
    with path.open("rb") as file:
        beginning = file.read(len(_GIT_LFS))
    if beginning == _GIT_LFS:
        raise ValueError(
            "it is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder, or "
            "download the file"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    return json.loads(read_file(path))


def parse_file(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    """Parse a text file of a run. Raises ValueError naming it if it is damaged."""
    try:
        return parse(read_file(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or of another program: {error}") from error


@contextlib.contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Prefix the messages of ValueErrors with the path of the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Append to a file either all of the data or none."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:  # a nearly full disk accepts only a part
                written = os.write(file.fileno(), data)
                data = data[written:]
            if durable:
                os.fsync(file.fileno())
                sync_directory(path.parent)
        except OSError as error:
            # otherwise a truncated line would be damage at the next start
            os.truncate(path, size)
            raise _unwritten(path, error) from error


@contextlib.contextmanager
def locked(file: Path, path: Path) -> Iterator[None]:
    """Hold the lock of a path in a file, at most as long as this process lives.

    Raises BlockingIOError if another process holds it.
    """
    import filelock  # takes as long as all else that `jgpt --help` imports

    lock = filelock.FileLock(file)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise BlockingIOError(
            f"{path} is in use by another process: wait for it, or choose another directory"
        ) from None
    try:
        yield
    finally:
        lock.release()


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in reversed(missing):  # the outermost first
        sync_directory(directory.parent)


def sync_below(directory: Path) -> None:
    """Sync all files and directories below a directory to disk."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that the names of its entries are durable."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no such thing
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # a mounted drive, such as that of a hosted notebook, may sync only files
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _unwritten(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} can't be written: {error.strerror or error}")
