"""Durable writes: a file with its final name is complete on disk; foreign files are never
deleted."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LARGEST_TEXT = 1 << 28
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of what Git leaves in place of a large file, where Git LFS is not installed."""
# Never through a link, never blocked by a pipe, and without newline conversion on Windows.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_PRIVATE = 0o700
_WRITABLE_BY_OTHERS = 0o022


@contextlib.contextmanager
def new_directory(path: Path, content: str | None = None) -> Iterator[Path]:
    """Yield an empty directory beside `path` to fill; it is renamed to `path` at the end.

    After an error it is deleted. With `content`, a word for the data, it is the directory that a
    killed or interrupted process with the same word left, if there is one. Directories of killed
    processes with other content are deleted.
    Raises FileExistsError if `path` exists and is not an empty directory, BlockingIOError if
    another process fills it, and OSError for a directory to continue that is not this user's.
    """
    taken = FileExistsError(f"{path} already exists: choose another directory")
    is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if os.path.lexists(path) and not is_empty:
        raise taken
    make_directory(path.parent)
    _delete_abandoned(path, content)
    if content:
        partial = path.with_name(f"{path.name}.{content}.partial")
    else:
        partial = _partial(path)
    lock = partial.with_suffix(".lock")
    is_to_continue = False
    is_foreign = False
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, path))
        except LocksUnsupported:
            lock.unlink(missing_ok=True)
            if content is not None:
                raise
            # Nobody else knows a random name; its lock only shows later that this process has
            # ended.
        try:
            _make_private(partial)
            if content is not None:
                # the directory that is kept must survive a power cut, too
                sync_directory(path.parent)
            made = os.lstat(partial)
            yield partial
            # This order is what makes it durable: files, then the directory, then its name. After a
            # power cut either there is no name, or a name with all data.
            sync_below(partial)
            if not os.path.samestat(made, os.lstat(partial)):
                raise OSError(f"{partial} was replaced while it was written")
            _open_to_others(partial)
            sync_directory(partial)
            os.replace(partial, path)
            sync_directory(path.parent)
        except KeyboardInterrupt:
            is_to_continue = content is not None
            raise
        except ForeignDirectory:
            is_foreign = True
            raise
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                raise taken from None
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _unwritten(path, error) from error
            raise
        finally:
            if not is_to_continue and not is_foreign:
                shutil.rmtree(partial, ignore_errors=True)
            if not is_to_continue:  # the lock of a kept directory shows later that it is jgpt's
                with contextlib.suppress(OSError):  # Windows keeps open files
                    lock.unlink(missing_ok=True)


class ForeignDirectory(OSError):
    """A directory that another user made, or a link."""


class LocksUnsupported(OSError):
    """The file system has no locks."""


def _make_private(partial: Path) -> None:
    """Make a directory that only this user may write to, or use the existing one.

    The name can be computed, so in a folder such as /tmp others can put a link or a directory in
    its place, and data would be written through their links.
    """
    try:
        partial.mkdir(mode=_PRIVATE)
        return
    except FileExistsError:
        pass
    if not _is_own_directory(partial):
        raise ForeignDirectory(
            f"{partial} is a link, or another user's: move it away, or choose another directory"
        )
    others_may_write = os.lstat(partial).st_mode & _WRITABLE_BY_OTHERS
    if others_may_write and not _mode_of_new(partial, _PRIVATE) & _WRITABLE_BY_OTHERS:
        # Anyone may have put links or tokens there, so it is deleted. On file systems without
        # modes, every directory looks like that, and the existing one is continued.
        shutil.rmtree(partial)
        partial.mkdir(mode=_PRIVATE)
    for unfinished in partial.glob("*.partial"):  # remains of a killed process
        unfinished.unlink()


def _open_to_others(directory: Path) -> None:
    """Give a private directory the mode that the user's new directories have."""
    usual = _mode_of_new(directory, 0o777)
    if stat.S_IMODE(os.lstat(directory).st_mode) != usual:
        os.chmod(directory, usual)


def _mode_of_new(path: Path, mode: int) -> int:
    """Return the mode of a new directory beside `path`, which depends on umask and folder."""
    probe = _partial(path)
    probe.mkdir(mode=mode)
    try:
        return stat.S_IMODE(os.lstat(probe).st_mode)
    finally:
        probe.rmdir()


def _delete_abandoned(path: Path, content: str | None) -> None:
    """Delete directories of killed processes beside `path`, other than one for `content`.

    A directory is jgpt's if its lock lies beside it, and abandoned if nobody holds that lock.
    """
    pattern = re.compile(re.escape(path.name) + r"\.([0-9a-f]{8})\.lock")
    for lock in list(path.parent.iterdir()):
        found = pattern.fullmatch(lock.name)
        if found is None or found[1] == content or not _is_own(lock):
            continue
        # If a living process holds it, or the file system has no locks, it stays.
        with contextlib.suppress(OSError, ValueError), locked(lock, path):
            partial = lock.with_suffix(".partial")
            if _is_own_directory(partial):
                shutil.rmtree(partial, ignore_errors=True)
            lock.unlink()


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and _is_own(path)


def _is_own(path: Path) -> bool:
    """Return whether this user owns a file, directory or link. On Windows this is always True."""
    return not hasattr(os, "geteuid") or os.lstat(path).st_uid == os.geteuid()


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file, or replace it: a crash leaves the old one or the new one."""
    if isinstance(data, str):
        data = data.encode()
    named_path = path  # for messages, with the user's path
    path = path.resolve()  # a link stays, and its target is replaced
    if path.exists() and not path.is_file():  # a pipe or a device is written to, and not replaced
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
        raise _unwritten(named_path, error) from error
    finally:
        with contextlib.suppress(OSError):  # on a read-only file system, of a file that isn't there
            partial.unlink(missing_ok=True)


def read_file(path: Path) -> str:
    """Read a small text file, such as a config. Raises ValueError for a large one, and for a
    pointer of Git LFS."""
    require_fetched(path)
    size = path.stat().st_size
    if size > _LARGEST_TEXT:  # such as a device or a forged file, which would fill the memory
        raise ValueError(f"it has {size:,} bytes")
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
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        values = json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"not an object, but {type(values).__name__}")
    return values


@contextlib.contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Prefix the messages of ValueErrors with the path of the file."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Append to a file either all of the data or none."""
    with own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        size = os.fstat(descriptor).st_size
        try:
            while data:  # a nearly full disk accepts only a part
                written = os.write(descriptor, data)
                data = data[written:]
            if durable:
                os.fsync(descriptor)
                sync_directory(path.parent)
        except OSError as error:
            # otherwise a truncated line would be damage at the next start
            os.truncate(descriptor, size)
            raise _unwritten(path, error) from error


@contextlib.contextmanager
def own_file(path: Path, flags: int) -> Iterator[int]:
    """Open a file. Raises ValueError for links, also hard links, and for anything but a regular
    file."""
    foreign = ValueError(f"{path} is a link or not a file: delete it, or replace it by a copy")
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        # ENXIO: a pipe without a reader
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise foreign from None
        raise
    try:
        # The status of the open file; its name may now belong to another one.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise foreign
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Lock:
    """The lock of a directory, which this process holds in an open file."""

    file: Path
    path: Path
    """The locked directory."""
    descriptor: int

    def require_in_place(self) -> None:
        """Raise OSError if the locked directory was moved or replaced.

        A lock belongs to the open file rather than its name, so another process can hold the lock
        of the directory that has the name now.
        """
        if not self.is_in_place():
            raise MovedDirectory(
                f"{self.path} was moved or replaced while this process wrote to it, and nothing "
                "more is written there: what was saved is in the directory that was moved"
            )

    def is_in_place(self) -> bool:
        """Return whether the file with the lock still has its name."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.file))
        except (FileNotFoundError, NotADirectoryError):
            return False


class MovedDirectory(OSError):
    """Raised when a locked directory was moved or replaced."""


@contextlib.contextmanager
def locked(lock: Path, path: Path) -> Iterator[Lock]:
    """Hold the lock of a path in a file, at most as long as this process lives.

    Raises BlockingIOError if another process holds it, and LocksUnsupported if the file system has
    no locks.
    """
    while True:
        with own_file(lock, os.O_RDWR | os.O_CREAT) as descriptor:
            _take_lock(descriptor, path)
            taken_lock = Lock(lock, path, descriptor)
            if not taken_lock.is_in_place():
                continue  # the process that held it has just deleted it
            with contextlib.suppress(OSError):  # on a full disk the lock works without a number
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            yield taken_lock
            return


def _take_lock(descriptor: int, path: Path) -> None:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):  # EDEADLK: Windows
            raise LocksUnsupported(
                f"{path} can't be locked against other processes ({error.strerror}): choose a "
                "directory on another file system"
            ) from None
        holder = "another process"
        number = os.read(descriptor, 20).decode("ascii", "replace").strip()
        if number:  # the holder may not have written it yet
            holder = f"process {number}"
        raise BlockingIOError(
            f"{path} is in use by {holder}: wait for it, or choose another directory"
        ) from None


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
            with path.open("r+b") as file:  # Windows syncs only files that are open for writing
                os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that the names of its entries are durable."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems sync only files, and there is no alternative.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def printable(text: str) -> str:
    """Return a path with bytes that are not UTF-8 as \\x.., since a terminal can't show them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _partial(path: Path) -> Path:
    """Return a name beside a path that nobody else computes; a rename within one folder is
    atomic."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def _unwritten(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} can't be written: {error.strerror or error}")
