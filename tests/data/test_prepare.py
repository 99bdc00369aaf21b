"""Preparing goes on after a kill, in parallel, and writes what one encoding of the text gives."""

import builtins
import errno
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jgpt import DataConfig, files
from jgpt.data import prepared as prepared_module
from jgpt.data.dataset import load_dataset
from jgpt.data.prepared import prepare
from tests.commands import files_of_at_most, refused, worked
from tests.data.files import SLOW_AFTER
from tests.disk import Disk

CODE = f"""{SLOW_AFTER}
config = DataConfig((sys.argv[2],), sys.argv[3], 300)
prepared.prepare(config, Path(sys.argv[4]))
"""


@pytest.fixture
def text(tmp_path):
    """400 kB of lines."""
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice([*"etaoinshr"], size)) for size in (1, 2, 3, 4, 7) * 9]
    lines = [" ".join(generator.choice(words, 9)) + "\n" for _ in range(9000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path / "text.txt"


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of the texts that are encoded."""
    lengths = []
    encode_each = prepared_module.encode_each

    def counted(*its):
        for length, data in encode_each(*its):
            lengths.append(length)
            yield length, data

    monkeypatch.setattr(prepared_module, "encode_each", counted)
    return lengths


def test_a_killed_process_is_continued(text, tmp_path, monkeypatch, encoded):
    out = tmp_path / "out"
    config = DataConfig((str(text),), tokenizer="bpe", bpe_vocab_size=300)
    process = subprocess.Popen([sys.executable, "-c", CODE, "40", text, "bpe", out])
    done_files: list[Path] = []
    deadline = time.monotonic() + 120
    try:
        while not done_files:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
            found = tmp_path.glob("out.*.partial/done.json")
            # of more than the first chunks
            done_files = [path for path in found if json.loads(path.read_text())[0] > 100_000]
        with pytest.raises(BlockingIOError, match="out is in use by another process"):
            prepare(config, out)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    (done_file,) = done_files
    partial = done_file.parent
    with (partial / "tokens.bin").open("ab") as file:  # written, but not known to be
        file.write(b"abc")
    (partial / "done.json.0123abcd.partial").write_text("[1")  # killed while it replaced the file
    said = []
    fractions = []

    with monkeypatch.context() as patched:
        # it was trained
        patched.setattr(prepared_module.BPETokenizer, "train", None)
        count = prepare(config, out, warn=said.append, progress=fractions.append)

    assert 9 < sum(encoded) < len(text.read_text()) - 100_000
    (message,) = said
    assert message.startswith("continuing after the ")
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    direct = load_dataset(config, 8)
    mapped = load_dataset(DataConfig((str(out),)), 8)
    assert mapped.digest == direct.digest
    assert mapped.tokenizer.to_json() == direct.tokenizer.to_json()
    assert count == len(direct.train) + len(direct.validation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]
    names = ["dataset.json", "tokenizer.json", "tokens.bin"]
    assert sorted(path.name for path in out.iterdir()) == names


def test_an_interruption_keeps_what_was_done_and_an_error_nothing(text, tmp_path, monkeypatch):
    config = DataConfig((str(text),), "byte")
    said = []
    chunks = prepared_module.text_chunks
    monkeypatch.setattr(prepared_module, "SECONDS_BETWEEN_SAVES", 0.0)

    def ends_with(error):
        def some(files, size, **how):
            for number, chunk in enumerate(chunks(files, 5000, **how)):
                if number == 40:
                    raise error
                yield chunk

        return some

    for error, left in ((ValueError, 0), (KeyboardInterrupt, 1)):
        monkeypatch.setattr(prepared_module, "text_chunks", ends_with(error))
        with pytest.raises(error):
            prepare(config, tmp_path / "out")
        assert len(list(tmp_path.glob("out*.partial"))) == left
    monkeypatch.setattr(prepared_module, "text_chunks", chunks)
    other = DataConfig((str(text),), "byte", data_field="body")
    assert prepare(other, tmp_path / "other", warn=said.append) == text.stat().st_size
    text.write_text(text.read_text() + "more\n")  # another text starts anew
    assert prepare(config, tmp_path / "out", warn=said.append) == text.stat().st_size
    assert said == []
    # what there was of the text before the change is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "text.txt"]


def test_a_text_of_one_line_is_prepared_in_parts(tmp_path, encoded):
    words = " ".join(["one", "fish", "two", "fishes"] * 50_000)
    (tmp_path / "line.txt").write_text(words)
    config = DataConfig((str(tmp_path / "line.txt"),), "bpe", 270)
    prepare(config, tmp_path / "out")
    assert len(encoded) == 4
    assert max(encoded) < 300_000
    mapped = load_dataset(DataConfig((str(tmp_path / "out"),)), 8)
    assert mapped.digest == load_dataset(config, 8).digest


WORDS = "one fish two fish red fish blue fish "
"""A text of 37 bytes, none of which is 0."""


@pytest.fixture
def words(tmp_path) -> DataConfig:
    """The config of a short text that is prepared in chunks of at most 9 bytes."""
    (tmp_path / "words.txt").write_text(WORDS)
    return DataConfig((str(tmp_path / "words.txt"),), "byte")


@pytest.fixture
def in_small_chunks(monkeypatch):
    monkeypatch.setattr(prepared_module, "PIECE", 9)
    monkeypatch.setattr(prepared_module, "SECONDS_BETWEEN_SAVES", -1.0)


def tokens_in(folder: Path) -> bytes:
    """The bytes that a folder's tokens stand for."""
    index = json.loads((folder / "dataset.json").read_text())
    return bytes(np.fromfile(folder / "tokens.bin", index["dtype"]).astype(np.uint8))


@pytest.mark.parametrize("zeros", [False, True], ids=["a shorter file", "zeros"])
def test_whenever_it_crashes_preparing_goes_on_with_the_tokens_that_are_on_disk(
    tmp_path, words, in_small_chunks, monkeypatch, zeros
):
    """A power cut leaves a file's old length, or its new one with zeros."""
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", tmp_path / "views", zeros=zeros)
    with monkeypatch.context() as patch:
        patch.setattr(prepared_module, "os", disk)
        patch.setattr(files, "os", disk)
        patch.setattr(files, "shutil", disk)
        prepare(words, disk.root / "out")
    assert len(disk.views) > 20

    continued = set()
    for view in disk.views:
        out = view / "out"
        if out.exists():
            assert tokens_in(out) == WORDS.encode()
            continue
        counts_on_disk = []
        # the file of tokens has a name that is on disk from the first save on
        for tokens in view.glob("out.*.partial/tokens.bin"):
            record = tokens.with_name("done.json")
            if record.exists():
                _, count = json.loads(record.read_text())
                counts_on_disk.append(count)
        said: list[str] = []

        total = prepare(words, out, warn=said.append)

        assert total == 37
        assert tokens_in(out) == WORDS.encode()
        assert [path.name for path in view.iterdir()] == ["out"]
        # what was done is not done again
        counts = [int(re.findall(r"\d+", line)[0]) for line in said]
        assert counts == counts_on_disk
        continued.update(counts)
    assert continued >= {8, 17, 26}


def test_an_error_at_any_call_leaves_nothing_and_the_next_try_works(
    tmp_path, words, in_small_chunks, monkeypatch
):
    calls = 0
    fails_at = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*arguments, **options)

        return call

    out = tmp_path / "folder" / "out"
    failures = 0
    for fails_at in itertools.count(1):
        calls = 0
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "write", "chmod"):
                patch.setattr(files.os, name, counted(getattr(os, name)))
            patch.setattr(files.Path, "mkdir", counted(Path.mkdir))
            patch.setattr(files.Path, "open", counted(Path.open))
            patch.setattr(builtins, "open", counted(open))
            try:
                prepare(words, out)
            except OSError:
                failures += 1
                if not out.exists():  # it is there if only its name may not be on disk
                    assert not out.parent.exists() or not list(out.parent.iterdir())
                    continue
        if calls < fails_at:
            break
        # or only the process's number in the lock was not written
        assert tokens_in(out) == WORDS.encode()
        for path in (*out.iterdir(), out):
            path.rmdir() if path.is_dir() else path.unlink()

    assert failures > 15
    assert tokens_in(out) == WORDS.encode()


def test_a_pipe_is_prepared(tmp_path):
    """As in `zcat text.gz | jgpt prepare - --out DIR`."""
    text = "one two three\n" * 99
    said = worked("prepare", "-", "--out", tmp_path / "out", stdin=text.encode())
    prepared = prepared_module.open_prepared(tmp_path / "out")

    assert said.startswith("1,386 tokens in ")
    assert prepared.tokenizer.decode(prepared.tokens) == text
    names = ["dataset.json", "tokenizer.json", "tokens.bin"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_process_that_is_killed_while_its_folder_s_name_is_synced_leaves_no_lock(
    tmp_path, words, monkeypatch
):
    out = tmp_path / "out"
    locks = []

    def look(folder):
        if out.exists():
            locks.append(list(tmp_path.glob("*.lock")))

    monkeypatch.setattr(files, "sync_directory", look)
    prepare(words, out)
    assert locks == [[]]


def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "text.txt").write_text("word " * 100_000)
    out = tmp_path / "out"
    with files_of_at_most(100_000):
        line = refused("prepare", tmp_path / "text.txt", "--tokenizer", "byte", "--out", out)

    assert line == f"jgpt: {out} can't be written: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
