"""A file or directory is there as a whole or not at all, and nobody else's is deleted."""

import errno
import os
import stat
import subprocess
import sys

import pytest

from jgpt import files
from jgpt.files import append, new_directory, write_file


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
    monkeypatch.setattr(files.os, "fsync", full)
    said = f"^{path} can't be written: No space left on device$"
    with pytest.raises(OSError, match=said):
        write_file(path, "new")
    with pytest.raises(OSError, match=said):
        append(path, b"more\n", durable=True)
    said = f"^{tmp_path}/out can't be written: No space left on device$"
    with pytest.raises(OSError, match=said), new_directory(tmp_path / "out") as partial:
        os.close(os.open(partial / "half", os.O_CREAT))
    monkeypatch.setattr(files.Path, "mkdir", lambda self, **_: self.suffix and full())
    with pytest.raises(OSError, match=said), new_directory(tmp_path / "out", "text"):
        pass
    assert (names(tmp_path), path.read_text()) == (["file"], "old\n")


HALF_WRITTEN = """
import sys
from pathlib import Path
from jgpt.files import new_directory
with new_directory(Path(sys.argv[1])) as partial:
    (partial / "half").touch()
    print(partial, flush=True)
    input()
"""


def test_what_a_killed_process_left_goes_when_the_next_one_begins(tmp_path):
    """As import and export leave it."""
    of_the_user = tmp_path / "out.partial"
    of_the_user.mkdir()
    command = [sys.executable, "-c", HALF_WRITTEN, tmp_path / "out"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(BlockingIOError):
            new_directory(tmp_path / "out").__enter__()
        process.kill()
    with new_directory(tmp_path / "out") as partial:
        assert names(partial) == []
    assert names(tmp_path) == ["out", "out.partial"]


def fill(out, content, error):
    with new_directory(out, content) as partial:
        (partial / f"half of {content}").touch()
        raise error


def test_what_an_interrupted_process_left_is_continued_for_the_same_content_alone(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        fill(out, "one", KeyboardInterrupt)
    with new_directory(out, "one") as partial:
        assert names(partial) == ["half of one"]
    assert names(tmp_path) == ["out", "out/half of one"]

    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "next", "one", KeyboardInterrupt)
    with pytest.raises(ValueError, match="wrong"):
        fill(tmp_path / "next", "two", ValueError("wrong"))
    assert names(tmp_path) == ["out", "out/half of one"]
