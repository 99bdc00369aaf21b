"""A large text is tokenized once, into the user's cache; a smaller one in little memory."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jgpt import BPETokenizer, CharTokenizer, DataConfig
from jgpt.data import dataset as dataset_module
from jgpt.data.dataset import load_dataset
from tests.data.files import write

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# a folder of scripts, which pyright doesn't know
from texts import code_like, write_code  # type: ignore[import-not-found]

from tests.quick import only

LIMIT = 50_000
TOKENIZERS = {
    "char": {"tokenizer": "char"},
    "byte": {"tokenizer": "byte"},
    "bpe": {"tokenizer": "bpe", "bpe_vocab_size": 300},
}


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Three times as long as what is tokenized in memory."""
    monkeypatch.setattr(dataset_module, "LARGE_TEXT", LIMIT)
    return write(tmp_path, "text.txt", "".join(code_like(3 * LIMIT))[: 3 * LIMIT])


@pytest.fixture
def in_memory(monkeypatch):
    """Load a text as a small one."""

    def load(config, **options):
        with monkeypatch.context() as patch:
            patch.setattr(dataset_module, "LARGE_TEXT", 1 << 26)
            return load_dataset(config, 8, **options)

    return load


def folders(cache):
    return sorted(path for path in (cache / "prepared").glob("*"))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_large_text_gives_the_tokens_of_a_small_one_and_is_tokenized_once(
    text, in_memory, user_cache, monkeypatch, kind
):
    config = DataConfig((text,), **TOKENIZERS[kind])
    said = []
    fractions = []
    small = in_memory(config)
    assert folders(user_cache) == []
    assert type(small.train) is np.ndarray
    large = load_dataset(config, 8, warn=said.append, progress=fractions.append)
    assert isinstance(large.train, np.memmap)
    (folder,) = folders(user_cache)
    assert said == [f"{text}: a text of 0 MB is tokenized once, into {folder}"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert large.text == small.text
    assert large.text.digest is not None
    assert large.tokenizer.to_json() == small.tokenizer.to_json()
    for split in ("train", "validation", "test"):
        assert np.array_equal(getattr(large, split), getattr(small, split))
    # again, and resumed with the run's tokenizer: found
    monkeypatch.setattr(dataset_module, "encode_each", None)
    for tokenizer in (None, small.tokenizer):
        again = load_dataset(config, 8, tokenizer=tokenizer, known=small.text, warn=said.append)
        assert np.array_equal(again.validation, small.validation)
    assert len(said) == 1
    assert folders(user_cache) == [folder]


class Stopped(Exception):
    pass


@pytest.mark.parametrize("size", only(["small"], ["small", "large"]))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_is_possible_while_a_text_is_read_learned_from_and_encoded(
    tmp_path, user_cache, monkeypatch, kind, size
):
    """A small text of 60 MB takes a minute for byte-pairs, in which nothing was heard."""
    if size == "large":
        monkeypatch.setattr(dataset_module, "LARGE_TEXT", 16_000)
    monkeypatch.setattr(dataset_module, "PIECE", 4000)
    path = write(tmp_path, "text.txt", "".join(code_like(20_000)))
    config = DataConfig((path,), **TOKENIZERS[kind])
    fractions = []
    whole = load_dataset(config, 8, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert fractions[-1] == 1
    if size == "small":
        passes = 1 if kind == "byte" else 2
        assert len({fraction for fraction in fractions if fraction > 0}) >= 6 * passes
    shutil.rmtree(user_cache / "prepared", ignore_errors=True)
    for last in (fractions.count(0) // 2, fractions.count(0), len(fractions) - 2):
        heard = []

        def stop(fraction, heard=heard, last=last):
            heard.append(fraction)
            if len(heard) > last:
                raise Stopped

        with pytest.raises(Stopped):
            load_dataset(config, 8, progress=stop)
        assert heard == fractions[: last + 1]
        shutil.rmtree(user_cache / "prepared", ignore_errors=True)
    assert load_dataset(config, 8).text == whole.text


def test_a_stop_is_possible_while_another_process_tokenizes(text, user_cache, monkeypatch):
    def in_use(*_):
        raise BlockingIOError

    def stop(fraction):
        if "waiting" in said:
            raise Stopped

    said = []
    monkeypatch.setattr(dataset_module, "new_directory", in_use)

    with pytest.raises(Stopped):
        load_dataset(
            DataConfig((text,)), 8, warn=lambda line: said.extend(line.split()), progress=stop
        )


def test_a_changed_text_or_another_tokenizer_is_tokenized_anew(text, in_memory, user_cache):
    """Of a text that was changed in place, with the size and time of before."""
    config = DataConfig((text,), tokenizer="bpe", bpe_vocab_size=300)
    first = load_dataset(config, 8)
    before = os.stat(text)
    words = Path(text).read_text()
    Path(text).write_text(words.replace("self", "flse"))
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = load_dataset(config, 8)
    assert second.text == in_memory(config).text
    assert second.text.digest != first.text.digest
    others = [DataConfig((text,), tokenizer="bpe", bpe_vocab_size=301), DataConfig((text,))]
    for other in others:
        assert load_dataset(other, 8).text == in_memory(other).text
    assert len(folders(user_cache)) == 4
    # a run's own tokenizer, of another text
    foreign = CharTokenizer.from_text(words + "§")
    config = DataConfig((text,))
    for _ in range(2):
        mapped = load_dataset(config, 8, tokenizer=foreign)
        assert mapped.tokenizer.to_json() == foreign.to_json()
        assert mapped.text == in_memory(config, tokenizer=foreign).text
    assert len(folders(user_cache)) == 5


def test_tokens_that_no_run_has_used_for_a_month_are_deleted(text, user_cache):
    load_dataset(DataConfig((text,)), 8)
    (unused,) = folders(user_cache)
    left = user_cache / "prepared" / "0123.4567.partial"
    left.mkdir()
    month = time.time() - dataset_module.SECONDS_UNUSED
    for path, age in ((unused, 60), (left, 60)):
        os.utime(path, (month - age, month - age))
    load_dataset(DataConfig((text,)), 8)  # used again
    assert folders(user_cache) == sorted([unused, left])
    load_dataset(DataConfig((text,), tokenizer="byte"), 8)
    assert left not in folders(user_cache)
    assert unused in folders(user_cache)
    os.utime(unused, (month - 60, month - 60))
    load_dataset(DataConfig((text,), tokenizer="bpe", bpe_vocab_size=300), 8)
    assert unused not in folders(user_cache)


def test_a_full_disk_is_named_with_the_folder_and_leaves_nothing(text, user_cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dataset_module, "encode_each", full)
    message = r"prepared/\w+ can't be written: No space left on device"

    with pytest.raises(OSError, match=message):
        load_dataset(DataConfig((text,)), 8)
    assert folders(user_cache) == []


def test_a_text_that_changes_while_it_is_read_is_an_error(text, user_cache, monkeypatch):
    read_once = dataset_module._read_once

    def changing(*arguments):
        found = read_once(*arguments)
        Path(text).write_text("other words " * LIMIT)
        return found

    monkeypatch.setattr(dataset_module, "_read_once", changing)

    with pytest.raises(ValueError, match=r"text\.txt changed while it was read: start again"):
        load_dataset(DataConfig((text,)), 8)
    assert folders(user_cache) == []


CODE = """
import sys, time, platformdirs
platformdirs.user_cache_dir = lambda *_: sys.argv[2]
from jgpt import DataConfig
from jgpt.data import dataset
dataset.LARGE_TEXT = 50_000
dataset.SECONDS_BETWEEN_SAVES = 0.0
chunks = dataset.text_chunks
def slowly(sources, *size, **options):
    for number, chunk in enumerate(chunks(sources, *(size or [5000]), **options)):
        if number > 20 and not size and sys.argv[3] == "hang":
            time.sleep(600)
        yield chunk
dataset.text_chunks = slowly
config = DataConfig((sys.argv[1],), tokenizer="byte")
print(dataset.load_dataset(config, 8, warn=lambda line: print(line, flush=True)).text.digest)
"""


@pytest.mark.slow
def test_a_second_process_waits_and_goes_on_after_the_first_was_killed(text, in_memory, user_cache):
    def start(how):
        command = [sys.executable, "-c", CODE, text, str(user_cache), how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_for(found):
        deadline = time.monotonic() + 120
        while not found():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def done():
        files = list((user_cache / "prepared").glob("*.partial/done.json"))
        return files and int(files[0].read_text()[1:].split(",")[0]) > 20 * 4000

    first = start("hang")
    try:
        wait_for(done)
        second = start("on")
        assert second.stdout is not None
        assert "is tokenized once, into" in second.stdout.readline()
        assert second.stdout.readline() == (
            "another process is tokenizing this text: waiting for it\n"
        )
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    said, _ = second.communicate(timeout=120)
    continuing, digest = said.splitlines()
    assert continuing.startswith("continuing after the ")
    assert int(continuing.split()[3].replace(",", "")) > 20 * 4000
    config = DataConfig((text,), tokenizer="byte")
    assert digest == in_memory(config).text.digest
    assert load_dataset(config, 8).text == in_memory(config).text
    assert len(folders(user_cache)) == 1


# --- in memory -----------------------------------------------------------------------------------


def spaced(prepend):
    """A tokenizer that puts a space before each text, as Llama's does."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    steps = [tokenizers.normalizers.Replace(" ", "▁")]
    if prepend:
        steps.insert(0, tokenizers.normalizers.Prepend("▁"))
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    return BPETokenizer(backend)


@pytest.mark.parametrize("prepend", [True, False])
def test_the_parts_of_a_text_have_the_tokens_of_the_whole(tmp_path, monkeypatch, prepend):
    """Also of a tokenizer for which each text begins with a space."""
    tokenizer = spaced(prepend)
    text = "a a aa a " * 99
    path = write(tmp_path, "a.txt", text)
    monkeypatch.setattr(dataset_module, "PIECE", 17)
    dataset = load_dataset(DataConfig((path,)), 1, tokenizer=tokenizer)

    assert [*dataset.train, *dataset.validation] == tokenizer.encode(text).tolist()
    assert tokenizer.encode("a").tolist() == ([2] if prepend else [1])


def test_the_narrowest_type_holds_the_tokens(tmp_path):
    for count, dtype in ((256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")):
        characters = "".join(map(chr, range(0x10000, 0x10000 + count)))
        dataset = load_dataset(DataConfig((write(tmp_path, "a.txt", characters),)), 1)
        assert dataset.train.dtype == dtype
        assert [*dataset.train, *dataset.validation] == list(range(count))


def test_an_unknown_character_is_named_with_its_place_in_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "PIECE", 7)
    path = write(tmp_path, "a.txt", "abc\n" * 9 + "abd\n")
    with pytest.raises(ValueError, match="unknown character 'd' at position 38"):
        load_dataset(DataConfig((path,)), 1, tokenizer=CharTokenizer("\nabc"))


def test_a_pipe_is_read_once_however_long_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "LARGE_TEXT", 100)
    os.mkfifo(tmp_path / "pipe")
    text = "one two three\n" * 999
    writer = subprocess.Popen(["sh", "-c", 'printf %s "$0" > "$1"', text, tmp_path / "pipe"])
    dataset = load_dataset(DataConfig((str(tmp_path / "pipe"),)), 1)
    writer.wait()

    assert dataset.tokenizer.decode(np.concatenate([dataset.train, dataset.validation])) == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_takes_little_memory_for_a_long_text(kind):
    """Characters took 24 bytes for each: code points, indices of eight bytes, and copies."""
    text = "".join(code_like(5_000_000))
    tokenizer = dataset_module._make_tokenizer(
        DataConfig(**TOKENIZERS[kind]), lambda: [text[:100_000]]
    )
    list(dataset_module.encode_each(tokenizer, [text[:1000]], np.dtype(np.uint16)))
    parts = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]

    def encode_all():
        for _, tokens in dataset_module.encode_each(tokenizer, parts, np.dtype(np.uint16)):
            yield len(tokens)

    assert peak_of(lambda: tokenizer.encode(text)) < 8 * len(text)
    assert peak_of(lambda: sum(encode_all())) < 2 * len(text)


@pytest.mark.parametrize("size", [17, 100, 1 << 14])
def test_byte_pairs_are_learned_from_short_parts(monkeypatch, size):
    """The library reads 256 parts ahead: of a megabyte each, they would take gigabytes."""
    text = "".join(code_like(60_000)) + "a" * 150 + "<|endoftext|>\n\n  b <|endoftext|>c"
    whole = BPETokenizer.train([text], 320)
    train = BPETokenizer.train
    learned = []

    def record_parts(texts, vocab_size):
        learned.extend(texts)
        return train(learned, vocab_size)

    monkeypatch.setattr(BPETokenizer, "train", record_parts)
    monkeypatch.setattr(dataset_module, "DOCUMENT", size)
    halves = [text[:40_000], text[40_000:]]
    config = DataConfig(tokenizer="bpe", bpe_vocab_size=320)
    trained = dataset_module._make_tokenizer(config, lambda: halves)
    assert "".join(learned) == text
    longest_word = 150 + len("<|endoftext|>")
    assert max(len(part) for part in learned) < max(2 * size, 2 * longest_word)
    assert trained.to_json() == whole.to_json()


def test_a_long_word_to_learn_from_is_looked_at_about_twice(monkeypatch):
    """As DNA without a newline. With 16 KB more at each look, 8 MB of it took 1.3 s before anything
    was learned, and the time grew with the square of the size."""
    text = "acgt" * 5000
    seen = []

    def look(part):
        seen.append(len(part))
        return 0

    monkeypatch.setattr(dataset_module, "last_split_point", look)
    monkeypatch.setattr(dataset_module, "DOCUMENT", 100)

    assert list(dataset_module._documents([text])) == [text]
    assert len(text) / 2 < sum(seen) < 2 * len(text)


def peak_of(call):
    """The most bytes that Python and NumPy have in use during a call, above those before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_digest_converts_few_tokens_at_once(dtype):
    """Of all of them it would make four bytes each."""
    tokens = np.arange(8_000_000).astype(dtype)
    assert peak_of(lambda: dataset_module._digest(tokens, tokens[:9])) < 9_000_000


# of each process itself: Linux begins ru_maxrss with the memory of what started it, which is above
# a gigabyte in a test's worker, so that nothing seemed to grow
MEASURE = """
import sys
from jgpt import DataConfig
from jgpt.data.batches import resident
from jgpt.data.dataset import load_dataset
from jgpt.hardware import memory_in_use
def load(path):
    config = DataConfig((path,), tokenizer=sys.argv[1], bpe_vocab_size=512)
    return resident(load_dataset(config, 8).train).block_until_ready()
load(sys.argv[2])  # what any text takes
before = memory_in_use()
tokens = load(sys.argv[3])
print(memory_in_use() - before, len(tokens))
"""
MEASURE_TRAINING = """
import sys
import jgpt.cli
from jgpt.hardware import memory_in_use
jgpt.cli.main(sys.argv[1:])
print(memory_in_use(), file=sys.stderr)
"""


def run_python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_in_memory_takes_at_most_three_bytes_for_each(tmp_path, kind):
    """With its tokens on the device, which on a CPU are the same memory.

    Learning byte-pairs takes some 100 MB for the counts of words, of 20 MB of text as of 50 MB: a
    smaller text takes them, too, and is what a larger one is compared with.
    """
    size = 50_000_000
    small = tmp_path / "small.txt"
    large = tmp_path / "large.txt"
    write_code(small, size // 4 if kind == "bpe" else size // 20)
    write_code(large, size, seed=1)
    done = run_python(MEASURE, kind, small, large)
    grown, tokens = map(int, done.stdout.split())

    assert tokens > 0.2 * size
    # the tokens themselves are there: a measure of something else would be less
    assert tokens < grown < 3 * large.stat().st_size


@pytest.mark.slow
def test_training_on_60_megabytes_takes_three_bytes_for_each(tmp_path):
    """As commands, beside training on a small text; the tokens are on the device, too."""
    peaks = {}
    # the first command compiles, which takes more memory than all of the text: it doesn't count
    for name, size in (("first", 1_000_000), ("small", 1_000_000), ("large", 60_000_000)):
        text = tmp_path / f"{name}.txt"
        write_code(text, size)
        options = ["--data", text, "--steps", 2, "--eval-tokens", 10_000]
        out = ["--out", tmp_path / f"run-{name}"]
        done = run_python(MEASURE_TRAINING, "train", "tiny", *options, *out)
        peaks[name] = int(done.stderr.splitlines()[-1])
    grown = peaks["large"] - peaks["small"]

    assert 0 < grown < 3 * 60_000_000
    # it is not a text whose tokens are kept in the cache
    assert (tmp_path / "large.txt").stat().st_size < dataset_module.LARGE_TEXT
