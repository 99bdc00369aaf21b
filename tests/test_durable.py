"""A file or directory is there as a whole or not at all, and nobody else's is deleted."""

import errno
import os
import stat
import threading

import pytest

from jgpt import durable
from jgpt.durable import append, new_directory, own_file, write_file


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def test_a_new_directory_appears_when_it_is_full_and_takes_no_one_s_place(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with new_directory(tmp_path / "deep" / "out") as partial:
        (partial / "file").write_text("text")
        assert not (tmp_path / "deep" / "out").exists()
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as partial:
        (partial / "other").touch()
    with pytest.raises(FileNotFoundError), new_directory(tmp_path / "failed") as partial:
        (partial / "deep" / "half").touch()
    directories = ["deep", "deep/out", "deep/out/file", "empty", "empty/other"]
    assert names(tmp_path) == [*directories, "out.partial", "out.partial/thesis.txt"]
    mode = stat.S_IMODE((tmp_path / "deep").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "deep" / "out").stat().st_mode) == mode  # not only for us
    for taken in ("deep", "empty/other"):
        with pytest.raises(FileExistsError, match=f"{taken} already exists: choose another"):
            new_directory(tmp_path / taken).__enter__()


def test_of_two_that_make_one_directory_the_first_wins_and_the_other_hears_of_it(tmp_path):
    out, entered, finished = tmp_path / "out", threading.Event(), threading.Event()

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
    path, other = tmp_path / "metrics", tmp_path / "other"
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
