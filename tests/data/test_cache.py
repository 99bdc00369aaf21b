"""A text is tokenized once, into the user's cache, in little memory."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jgpt import BPETokenizer, CharTokenizer, DataConfig
from jgpt.data import prepared as prepared_module
from jgpt.data.dataset import load_dataset
from jgpt.data.prepared import digest_of
from tests.data.files import SLOW_AFTER, write

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# a folder of scripts, which pyright doesn't know
from texts import code_like  # type: ignore[import-not-found]

TOKENIZERS = {
    "char": {"tokenizer": "char"},
    "byte": {"tokenizer": "byte"},
    "bpe": {"tokenizer": "bpe", "bpe_vocab_size": 300},
}


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(code_like(60_000)))
    return path


def folders(cache: Path) -> list[Path]:
    return sorted((cache / "prepared").glob("*"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_is_tokenized_once_for_new_runs_and_those_that_are_resumed(
    text, user_cache, monkeypatch, kind
):
    config = DataConfig((str(text),), **TOKENIZERS[kind])
    fractions = []
    first = load_dataset(config, 8, progress=fractions.append)
    assert isinstance(first.train, np.memmap)
    (folder,) = folders(user_cache)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    tokens = np.concatenate([first.train, first.validation])
    assert first.tokenizer.decode(tokens) == text.read_text()
    assert first.digest == digest_of(tokens)
    assert first.train.dtype == (np.uint16 if kind == "bpe" else np.uint8)

    monkeypatch.setattr(prepared_module, "encode_each", None)
    for tokenizer in (None, first.tokenizer):
        again = load_dataset(config, 8, tokenizer=tokenizer, digest=first.digest)
        assert np.array_equal(again.validation, first.validation)
    assert folders(user_cache) == [folder]


def test_what_happens_to_a_text_that_is_edited_touched_moved_or_linked(text, user_cache):
    first = load_dataset(DataConfig((str(text),)), 8).digest

    os.utime(text, ns=(1, 1))  # touched: tokenized again, to the same tokens
    assert load_dataset(DataConfig((str(text),)), 8, digest=first).digest == first
    assert len(folders(user_cache)) == 2

    moved = text.with_name("moved.txt")
    text.rename(moved)  # moved: the same text in another place
    assert load_dataset(DataConfig((str(moved),)), 8, digest=first).digest == first
    with pytest.raises(FileNotFoundError, match="neither a file nor a corpus"):
        load_dataset(DataConfig((str(text),)), 8, digest=first)
    assert len(folders(user_cache)) == 3

    text.symlink_to(moved)  # replaced by a link: the file that it leads to
    assert load_dataset(DataConfig((str(text),)), 8, digest=first).digest == first
    assert len(folders(user_cache)) == 3

    moved.write_text(moved.read_text() + "\n")  # edited: another text
    assert load_dataset(DataConfig((str(text),)), 8).digest != first
    with pytest.raises(ValueError, match=r"has other tokens than the run was trained on .*: give"):
        load_dataset(DataConfig((str(text),)), 8, digest=first)


def test_another_tokenizer_has_its_own_tokens(text, user_cache):
    configs = [DataConfig((str(text),), **options) for options in TOKENIZERS.values()]
    configs.append(DataConfig((str(text),), tokenizer="bpe", bpe_vocab_size=301))
    assert len({load_dataset(config, 8).digest for config in configs}) == 4
    assert len(folders(user_cache)) == 4
    # a run's own tokenizer, of another text
    foreign = CharTokenizer.from_text(text.read_text() + "§")
    for _ in range(2):
        mapped = load_dataset(configs[0], 8, tokenizer=foreign)
        assert mapped.tokenizer.to_json() == foreign.to_json()
    assert len(folders(user_cache)) == 5


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_stop_is_possible_while_a_text_is_learned_from_and_encoded(
    text, user_cache, monkeypatch, kind
):
    monkeypatch.setattr(prepared_module, "PIECE", 4000)
    config = DataConfig((str(text),), **TOKENIZERS[kind])
    fractions = []
    whole = load_dataset(config, 8, progress=fractions.append)
    assert len(set(fractions)) > 4
    shutil.rmtree(user_cache / "prepared")
    for last in (0, len(fractions) // 2, len(fractions) - 2):
        heard = []

        def stop(fraction, heard=heard, last=last):
            heard.append(fraction)
            if len(heard) > last:
                raise Stopped

        with pytest.raises(Stopped):
            load_dataset(config, 8, progress=stop)
        assert heard == fractions[: last + 1]
        assert folders(user_cache) == []
    assert load_dataset(config, 8).digest == whole.digest


def test_tokens_that_no_run_has_opened_for_a_month_are_deleted_unless_they_are_locked(
    text, user_cache
):
    load_dataset(DataConfig((str(text),)), 8)
    (unused,) = folders(user_cache)
    cache = user_cache / "prepared"
    left = cache / "0123.text.jgpt.partial"
    in_use = cache / "4567.text.jgpt.partial"
    month = time.time() - prepared_module.SECONDS_UNUSED
    for path in (left, in_use):
        path.mkdir()
    for path in (unused, left, in_use):
        os.utime(path, (month - 60, month - 60))
    load_dataset(DataConfig((str(text),)), 8)  # opened again
    with prepared_module.locked(cache / "4567.jgpt.lock", in_use):
        load_dataset(DataConfig((str(text),), tokenizer="byte"), 8)
    assert unused.exists()
    assert in_use.exists()
    assert not left.exists()
    os.utime(unused, (month - 60, month - 60))
    load_dataset(DataConfig((str(text),), tokenizer="bpe", bpe_vocab_size=300), 8)
    assert not unused.exists()
    assert not in_use.exists()
    assert not list(cache.glob("*.lock"))


CODE = f"""{SLOW_AFTER}
import platformdirs
platformdirs.user_cache_dir = lambda *_: sys.argv[3]
dataset.load_dataset(DataConfig((sys.argv[2],), tokenizer="byte"), 8)
"""


@pytest.mark.slow
def test_a_second_process_waits_and_goes_on_after_the_first_was_killed(text, user_cache):
    command = [sys.executable, "-c", CODE, "7", str(text), str(user_cache)]
    said = []

    def done():
        files = list((user_cache / "prepared").glob("*.partial/done.json"))
        return files and int(files[0].read_text()[1:].split(",")[0]) > 15_000

    def warn(line):
        said.append(line)
        first.kill()

    with subprocess.Popen(command) as first:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        digest = load_dataset(DataConfig((str(text),), tokenizer="byte"), 8, warn=warn).digest
    waiting, continuing = said
    assert waiting == "another process is tokenizing this text: waiting for it"
    assert continuing.startswith("continuing after the ")
    assert int(continuing.split()[3].replace(",", "")) > 15_000
    assert digest == digest_of(np.frombuffer(text.read_bytes(), np.uint8))
    assert len(folders(user_cache)) == 1


# --- parts of a text -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [17, 1 << 14])
def test_byte_pairs_are_learned_from_short_parts(tmp_path, monkeypatch, size):
    """The library reads 256 parts ahead: of a megabyte each, they would take gigabytes."""
    text = "".join(code_like(60_000)) + "a" * 150 + "<|endoftext|>\n\n  b <|endoftext|>c"
    whole = BPETokenizer.train([text], 320)
    train = BPETokenizer.train
    learned = []

    def record_parts(texts, vocab_size):
        learned.extend(texts)
        return train(learned, vocab_size)

    monkeypatch.setattr(BPETokenizer, "train", record_parts)
    monkeypatch.setattr(prepared_module, "DOCUMENT", size)
    path = write(tmp_path, "a.txt", text)
    config = DataConfig((path,), tokenizer="bpe", bpe_vocab_size=320)
    trained = load_dataset(config, 8).tokenizer
    assert "".join(learned) == text
    longest_word = 150 + len("<|endoftext|>")
    assert max(len(part) for part in learned) < max(2 * size, 4 * longest_word)
    assert trained.to_json() == whole.to_json()


# in a process of its own, since memory that tests have used and freed would be used again
MEASURE = """
import sys
from jgpt import DataConfig
from jgpt.data.dataset import load_dataset
def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024
most = 0
def look(fraction):
    global most
    most = max(most, anonymous())
for path in sys.argv[2:]:
    config = DataConfig((path,), tokenizer=sys.argv[1], bpe_vocab_size=300)
    load_dataset(config, 8, progress=look)
    print(most)
"""


@pytest.mark.parametrize("kind", ["char", pytest.param("bpe", marks=pytest.mark.slow)])
def test_a_longer_text_takes_no_more_memory(tmp_path, kind):
    """Beside its tokens, which are pages of a file: the system takes them back at any time."""
    block = "".join(code_like(1_000_000))
    paths = []
    for times in (4, 16):
        path = tmp_path / f"{times}.txt"
        path.write_text(block * times)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, *paths],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    short, long = map(int, done.stdout.split())

    assert long < short + 8_000_000


def test_without_a_cache_that_can_be_written_the_tokens_end_with_the_process(text, tmp_path):
    """As in a container whose home is read-only."""
    place = tmp_path / "file"
    place.write_text("")
    code = f"""
import platformdirs
platformdirs.user_cache_dir = lambda *_: {str(place / "cache")!r}
from jgpt import DataConfig
from jgpt.data.dataset import load_dataset
dataset = load_dataset(DataConfig(({str(text)!r},)), 8)
print(len(dataset.train), dataset.train.filename)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, file = done.stdout.split()

    assert int(count) > 50_000
    assert not Path(file).parents[1].exists()


def test_a_text_that_changes_while_it_is_read_is_an_error(text, user_cache):
    def change(fraction):
        if fraction == 0.5:
            text.write_text("def " * 30_000)

    with pytest.raises(ValueError, match=r"text\.txt changed while it was read: start again"):
        load_dataset(DataConfig((str(text),)), 8, progress=change)
    assert folders(user_cache) == []
