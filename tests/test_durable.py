"""A file or directory is there as a whole or not at all, and nobody else's is deleted."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jgpt import durable
from jgpt.durable import append, locked, new_directory, own_file, sync_directory, write_file


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_appears_when_it_is_full_and_takes_no_one_s_place(tmp_path):
    deep = tmp_path / "deep"
    empty = tmp_path / "empty"
    empty.mkdir()
    users = tmp_path / "out.partial"
    users.mkdir()
    (users / "thesis.txt").write_text("mine")

    with new_directory(deep / "out") as partial:
        (partial / "file").write_text("text")
        assert not (deep / "out").exists()
    with new_directory(empty) as partial:
        (partial / "other").touch()
    with pytest.raises(FileNotFoundError), new_directory(tmp_path / "failed") as partial:
        (partial / "deep" / "half").touch()

    assert names(tmp_path) == [
        "deep",
        "deep/out",
        "deep/out/file",
        "empty",
        "empty/other",
        "out.partial",
        "out.partial/thesis.txt",
    ]
    assert mode_of(deep / "out") == mode_of(deep)  # not only for us


@pytest.mark.parametrize("taken", ["folder", "folder/file"])
def test_a_new_directory_takes_no_full_folder_s_and_no_file_s_place(tmp_path, taken):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    directory = new_directory(tmp_path / taken)

    with pytest.raises(FileExistsError, match=f"{taken} already exists: choose another"):
        directory.__enter__()


def test_of_two_that_make_one_directory_the_first_wins_and_the_other_hears_of_it(tmp_path):
    out = tmp_path / "out"
    entered = threading.Event()
    finished = threading.Event()

    def slower():
        with new_directory(out) as partial:
            (partial / "slow").touch()
            entered.set()
            finished.wait(10)

    def run():
        with pytest.raises(FileExistsError, match="out already exists: choose another directory"):
            slower()
        outcome.append("refused")

    outcome: list[str] = []
    thread = threading.Thread(target=run)
    thread.start()
    entered.wait(10)
    with new_directory(out) as partial:
        (partial / "fast").touch()
    finished.set()
    thread.join()

    assert (names(tmp_path), outcome) == (["out", "out/fast"], ["refused"])


def test_a_file_is_replaced_as_a_whole_through_its_links(tmp_path):
    write_file(tmp_path / "file", "old")
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "said")
    assert (os.read(reader, 9), (tmp_path / "pipe").is_fifo()) == (b"said", True)
    os.close(reader)
    assert names(tmp_path) == ["file", "link", "pipe"]


def test_a_full_disk_names_the_file_and_leaves_it_as_it_was(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    write_file(path, "old\n")
    monkeypatch.setattr(durable.os, "fsync", full)
    said = f"^{path} can't be written: No space left on device$"
    with pytest.raises(OSError, match=said):
        write_file(path, "new")
    with pytest.raises(OSError, match=said):
        append(path, b"more\n", durable=True)
    said = f"^{tmp_path}/out can't be written: No space left on device$"
    with pytest.raises(OSError, match=said), new_directory(tmp_path / "out") as partial:
        os.close(os.open(partial / "half", os.O_CREAT))
    monkeypatch.setattr(durable.os, "write", full)  # also of a lock's number
    monkeypatch.setattr(durable.Path, "mkdir", lambda self, **_: self.suffix and full())
    with pytest.raises(OSError, match=said), new_directory(tmp_path / "out", "text"):
        pass
    assert (names(tmp_path), path.read_text()) == (["file"], "old\n")


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "directory"])
def test_nothing_is_appended_to_what_may_be_another_s(tmp_path, kind):
    path = tmp_path / "metrics"
    other = tmp_path / "other"
    other.write_text("precious")
    match kind:
        case "symbolic link":
            path.symlink_to(other)
        case "hard link":
            path.hardlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(ValueError, match="metrics is a link or not a file: delete it, or replace"):
        append(path, b"line")
    if kind == "pipe":  # one that is read can be opened
        with pytest.raises(ValueError, match="is a link or not a file"):
            own_file(path, os.O_RDWR).__enter__()
    assert other.read_text() == "precious"


HALF_WRITTEN = """
import sys
from pathlib import Path
from jgpt.durable import new_directory
with new_directory(Path(sys.argv[1])) as partial:
    (partial / "half").touch()
    print(partial, flush=True)
    input()
"""


@pytest.fixture
def half_written(tmp_path):
    """A process that fills the directory `out`, as import and export do."""
    command = [sys.executable, "-c", HALF_WRITTEN, tmp_path / "out"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_what_a_killed_process_left_goes_when_the_next_one_begins(half_written, tmp_path):
    (tmp_path / "out.0123abcd.partial").mkdir()  # no lock beside it tells that it is ours
    (tmp_path / "out.0123abcd.partial" / "thesis.txt").write_text("mine")
    (tmp_path / "out.2.0123abcd.lock").touch()  # of out.2
    mine = ["out.0123abcd.partial", "out.0123abcd.partial/thesis.txt", "out.2.0123abcd.lock"]
    with pytest.raises(FileNotFoundError), new_directory(tmp_path / "out") as partial:
        (partial / "deep" / "half").touch()
    assert len(names(tmp_path)) == len(mine) + 3  # that of the living process stays
    half_written.send_signal(signal.SIGKILL)
    half_written.wait()
    with new_directory(tmp_path / "out"):
        assert len(names(tmp_path)) == len(mine) + 2
    assert names(tmp_path) == ["out", *mine]


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_a_link_with_the_name_of_what_a_killed_process_left_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    (tmp_path / "out.0123abcd.lock").touch()
    (tmp_path / "out.0123abcd.partial").symlink_to(precious)
    (tmp_path / "out.4567abcd.lock").symlink_to(precious / "thesis.txt")
    with new_directory(tmp_path / "out"):
        pass

    assert (precious / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "out.0123abcd.partial").is_symlink()
    assert (tmp_path / "out.4567abcd.lock").is_symlink()


def test_a_lock_whose_file_was_deleted_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Who holds it deletes the file at the end, while another process waits with the same one."""
    lock = tmp_path / "lock"
    take = durable._take_lock

    def take_what_is_deleted(descriptor, path):
        take(descriptor, path)
        monkeypatch.setattr(durable, "_take_lock", take)
        lock.unlink()

    monkeypatch.setattr(durable, "_take_lock", take_what_is_deleted)
    with locked(lock, tmp_path) as held:
        assert held.is_in_place()
        with pytest.raises(BlockingIOError, match=f"is in use by process {os.getpid()}: wait"):
            locked(lock, tmp_path).__enter__()


NO_LOCKS = [errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK]


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
@pytest.mark.parametrize("code", NO_LOCKS, ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_said_to_be_one(tmp_path, monkeypatch, code):
    def unsupported(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(durable.fcntl, "flock", unsupported)
    said = rf"^{tmp_path}/out can't be locked against other processes \({os.strerror(code)}\): "
    said += "choose a directory on another file system$"
    with pytest.raises(OSError, match=said):
        locked(tmp_path / "lock", tmp_path / "out").__enter__()
    with pytest.raises(OSError, match=said):  # another process could fill it, too
        new_directory(tmp_path / "out", "0123abcd").__enter__()
    with new_directory(tmp_path / "out") as partial:  # nobody else knows its name
        (partial / "file").touch()
    assert names(tmp_path) == ["lock", "out", "out/file"]


def test_a_lock_that_another_has_just_taken_names_no_process_yet(tmp_path, monkeypatch):
    with locked(tmp_path / "lock", tmp_path):
        (tmp_path / "lock").write_bytes(b"")
        with pytest.raises(BlockingIOError, match="is in use by another process: wait for it"):
            locked(tmp_path / "lock", tmp_path).__enter__()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_where_folders_can_t_be_synced_files_still_are(tmp_path, monkeypatch, code):
    fsync = os.fsync
    synced = []

    def of_files_alone(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        synced.append(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(durable.os, "fsync", of_files_alone)
    if code == errno.EIO:  # the disk is broken
        with pytest.raises(OSError, match=os.strerror(code)):
            sync_directory(tmp_path)
        return
    write_file(tmp_path / "file", "text")
    with new_directory(tmp_path / "deep" / "out", "0123abcd") as partial:
        (partial / "file").touch()

    assert len(synced) == 2
    assert names(tmp_path) == ["deep", "deep/out", "deep/out/file", "file"]


def test_a_file_on_a_read_only_file_system_is_named_as_the_user_did(tmp_path, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x.html.29ae6c32.partial")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)

    with pytest.raises(OSError, match=r"x\.html can't be written: Read-only file system$"):
        write_file(tmp_path / "x.html", "page")
