"""Preparing goes on after a kill, in parallel, and writes what one encoding of the text gives."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jgpt import DataConfig
from jgpt.data import dataset as dataset_module
from jgpt.data.dataset import load_dataset, prepare

CODE = """
import sys, time
from pathlib import Path
from jgpt import DataConfig
from jgpt.data import dataset, tokenizers
dataset.SECONDS_BETWEEN_SAVES = 0.0
chunks = dataset.text_chunks
def slowly(sources, **how):
    for number, chunk in enumerate(chunks(sources, 5000, **how)):
        if number > 40 and "warn" in how:
            time.sleep(600)
        yield chunk
dataset.text_chunks = slowly
config = DataConfig((sys.argv[1],), True, sys.argv[2], 300)
dataset.prepare(config, Path(sys.argv[3]))
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
    lengths, encode_each = [], dataset_module.encode_each

    def counted(*its):
        for length, data in encode_each(*its):
            lengths.append(length)
            yield length, data

    monkeypatch.setattr(dataset_module, "encode_each", counted)
    return lengths


def start(text, tokenizer, out):
    """A process that prepares 40 chunks and then waits."""
    return subprocess.Popen([sys.executable, "-c", CODE, text, tokenizer, out])


def wait_for(found, process):
    deadline = time.monotonic() + 120
    while not found():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def done_files(out):
    """Of more than the first chunks."""
    found = list(out.parent.glob(f"{out.name}.*.partial/done.json"))
    return [path for path in found if int(path.read_text().strip("[]").split(",")[0]) > 100_000]


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_process_is_continued(text, tmp_path, monkeypatch, encoded):
    out, config, said = tmp_path / "out", DataConfig((str(text),), True, "bpe", 300), []
    process = start(text, "bpe", out)
    try:
        wait_for(lambda: done_files(out), process)
        with pytest.raises(BlockingIOError, match=f"out is in use by process {process.pid}"):
            prepare(config, out)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (partial,) = (path.parent for path in done_files(out))
    with (partial / "tokens.bin").open("ab") as file:  # written, but not known to be
        file.write(b"abc")
    (partial / "done.json.0123abcd.partial").write_text("[1")  # killed while it replaced the file
    monkeypatch.setattr(dataset_module.tokenizers.BPETokenizer, "train", None)  # it was trained
    fractions = []
    count = prepare(config, out, warn=said.append, progress=fractions.append)
    assert 9 < sum(encoded) < len(text.read_text()) - 100_000
    assert len(said) == 1
    assert said[0].startswith("continuing after the ")
    monkeypatch.undo()
    direct = load_dataset(config, 8)
    mapped = load_dataset(DataConfig((str(out),)), 8)
    assert mapped.text.tokens_digest == direct.text.tokens_digest
    assert mapped.tokenizer.to_json() == direct.tokenizer.to_json()
    assert count == len(direct.train) + len(direct.validation)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]
    names = ["dataset.json", "tokenizer.json", "tokens.bin"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


def test_an_interruption_keeps_what_was_done_and_an_error_nothing(text, tmp_path, monkeypatch):
    config, said = DataConfig((str(text),), True, "byte"), []
    chunks = dataset_module.text_chunks
    monkeypatch.setattr(dataset_module, "SECONDS_BETWEEN_SAVES", 0.0)

    def ends_with(error):
        def some(sources, **how):
            for number, chunk in enumerate(chunks(sources, 5000, **how)):
                if number == 40:
                    raise error
                yield chunk

        return some

    for error, left in ((ValueError, 0), (KeyboardInterrupt, 1)):
        monkeypatch.setattr(dataset_module, "text_chunks", ends_with(error))
        with pytest.raises(error):
            prepare(config, tmp_path / "out")
        assert len(list(tmp_path.glob("out*"))) == left
    monkeypatch.setattr(dataset_module, "text_chunks", chunks)
    other = DataConfig((str(text),), False, "byte")
    assert prepare(other, tmp_path / "other", warn=said.append) == text.stat().st_size
    text.write_text(text.read_text() + "more\n")  # another text starts anew
    assert prepare(config, tmp_path / "out", warn=said.append) == text.stat().st_size
    assert said == []


def test_a_text_of_one_line_is_prepared_in_parts(tmp_path, encoded):
    words = " ".join(["one", "fish", "two", "fishes"] * 200_000)
    (tmp_path / "line.txt").write_text(words)
    config = DataConfig((str(tmp_path / "line.txt"),), True, "bpe", 270)
    prepare(config, tmp_path / "out")
    assert len(encoded) == 4
    assert max(encoded) < 1_100_000
    mapped = load_dataset(DataConfig((str(tmp_path / "out"),)), 8)
    assert mapped.text.tokens_digest == load_dataset(config, 8).text.tokens_digest
