"""A batch is a function of the tokens, the seed and the step; an evaluation sees all once."""

import dataclasses
import hashlib
import json
import os
import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer, DataConfig
from jgpt.data import batches as batches_module
from jgpt.data import dataset as dataset_module
from jgpt.data.batches import batch, batches, evaluation_windows, resident
from jgpt.data.dataset import KnownText, count_characters, load_dataset, prepare
from jgpt.parallel.mesh import make_mesh

COUNTING = np.arange(1013, dtype=np.int32)
"""Each token is its own position, so that a window shows where it was cut."""


@pytest.mark.parametrize("tokens", [COUNTING, resident(COUNTING)], ids=["mapped", "resident"])
def test_windows_lie_within_the_text_and_targets_follow_inputs(tokens):
    windows = np.asarray(batches(tokens, 3, 11, 5, 4, 7))
    assert windows.shape == (5, 4, 8)
    assert (windows == windows[..., :1] + np.arange(8)).all()
    assert windows.min() >= 0
    assert windows.max() <= 1012
    inputs, targets = batch(tokens, 3, 11, 4, 7)
    assert np.array_equal(inputs, windows[0, :, :-1])
    assert np.array_equal(targets, inputs + 1)


def test_every_place_is_drawn_and_no_other():
    ten = COUNTING[:10]  # windows of 8 start at 0, 1 or 2
    starts = np.asarray(batches(ten, 0, 0, 50, 4, 7))[..., 0]

    assert set(starts.flat) == {0, 1, 2}
    assert np.bincount(starts.ravel()).min() > 40  # of 200, each about a third


@given(seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**31 - 99), split=st.integers(1, 4))
def test_batches_do_not_depend_on_how_steps_are_grouped(seed, step, split):
    whole = batches(COUNTING, seed, step, 5, 3, 7)
    first = batches(COUNTING, seed, step, split, 3, 7)
    second = batches(COUNTING, seed, step + split, 5 - split, 3, 7)

    assert np.array_equal(whole, np.concatenate([first, second]))


def test_seed_and_step_decide_the_batch():
    drawn = {
        np.asarray(batches(COUNTING, seed, step, 1, 4, 7)).tobytes()
        for seed in (0, 1, 2**31, 2**32 - 1)
        for step in (0, 1, 2, 1000)
    }
    assert len(drawn) == 16


def test_tokens_in_a_file_give_the_same_batches_and_each_device_its_own_windows(tmp_path):
    COUNTING.astype(np.uint16).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.uint16, mode="r")
    expected = batches(resident(mapped), 1, 2, 3, 8, 5)
    found = batches(mapped, 1, 2, 3, 8, 5)
    assert expected.dtype == found.dtype == np.int32
    assert np.array_equal(found, expected)
    with jax.set_mesh(make_mesh("data=4,fsdp=2")):
        found = batches(mapped, 1, 2, 3, 8, 5)
    assert {shard.data.shape for shard in found.addressable_shards} == {(3, 1, 6)}
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32])
def test_tokens_that_exceed_the_device_stay_where_they_are(monkeypatch, dtype):
    """The limit is of bytes, and the tokens on the device keep their type: a window is int32."""
    tokens = (COUNTING % 251).astype(dtype)
    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", tokens.nbytes - 1)
    assert resident(tokens) is tokens
    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", tokens.nbytes)
    on_device = resident(tokens)
    assert isinstance(on_device, jax.Array)
    assert on_device.nbytes == tokens.nbytes
    assert np.array_equal(on_device, tokens)
    windows = batches(on_device, 3, 11, 5, 4, 7)
    assert windows.dtype == np.int32
    assert np.array_equal(windows, batches(tokens, 3, 11, 5, 4, 7))


def test_windows_reach_past_two_billion_tokens(tmp_path):
    length = 2**31 + 2**30
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2 * length)  # which takes no room on the disk
    tokens = np.memmap(tmp_path / "sparse", np.uint16, mode="r")
    assert not np.asarray(batches(tokens, 0, 0, 2, 3, 5)).any()
    starts = batches_module._window_starts(np.uint32(0), 0, np.uint32(length - 5), 50, 4)
    assert 2**31 < np.asarray(starts).max() < length - 5


@pytest.mark.parametrize("block_size", [10, 11])
def test_a_text_without_a_window_is_refused(block_size):
    with pytest.raises(
        ValueError, match=f"10 tokens are too few or too many for windows of {block_size + 1}: "
    ):
        batches(COUNTING[:10], 0, 0, 1, 2, block_size)


@given(st.integers(2, 90), st.integers(1, 13), st.integers(1, 5))
def test_an_evaluation_covers_each_target_exactly_once(length, block_size, batch_size):
    tokens = 1000 + np.arange(length)
    windows, counts = evaluation_windows(tokens, block_size, batch_size)
    assert windows.shape[1:] == (batch_size, block_size + 1)
    assert windows.dtype == np.int32
    inputs = windows[..., :-1][counts]
    targets = windows[..., 1:][counts]
    assert targets.tolist() == list(range(1001, 1000 + length))
    assert np.array_equal(inputs + 1, targets)
    assert len(windows) == -(-(length - 1) // (batch_size * block_size))  # no batch for nothing
    # a target sees all of its window before it
    assert (windows[..., :1] + np.arange(block_size + 1) == windows)[..., 1:][counts].all()


def write(folder, text, name="input.txt"):
    (folder / name).write_text(text, newline="")
    return DataConfig(data=(str(folder / name),))


def test_tiny_shakespeare_splits_as_in_the_lecture(data_directory):
    dataset = load_dataset(DataConfig(data=("shakespeare",)), 8)
    assert (len(dataset.train), len(dataset.validation)) == (1_003_854, 111_540)
    assert dataset.tokenizer.decode(dataset.train[:13]) == "First Citizen"
    halves = DataConfig(data=("shakespeare",), validation_fraction=0.05, test_fraction=0.05)
    cut = load_dataset(halves, 8)
    assert (len(cut.validation), len(cut.test)) == (55_770, 55_770)
    assert np.array_equal(cut.train, dataset.train)
    assert np.array_equal([*cut.validation, *cut.test], dataset.validation)
    assert cut.tokenizer.to_json() == dataset.tokenizer.to_json()


@pytest.mark.parametrize("length", [1000, 1001, 99_999])
@pytest.mark.parametrize("held_out", [(0.07, 0.0), (0.01, 0.06), (0.05, 0.02)])
def test_what_is_held_out_for_the_test_is_not_trained_on(tmp_path, length, held_out):
    """0.01 + 0.06 is less than 0.07 as floats, which would train on another token."""
    (tmp_path / "text").write_text("abcdefghij" * (length // 10) + "k" * (length % 10))
    config = DataConfig((str(tmp_path / "text"),), True, "byte", 300, None, *held_out)
    dataset = load_dataset(config, 2)
    assert len(dataset.train) == int(length * (1 - 0.07))
    assert len(dataset.test) == length - int(length * (1 - held_out[1]))
    joined = np.concatenate([dataset.train, dataset.validation, dataset.test])
    assert dataset.tokenizer.decode(joined) == (tmp_path / "text").read_text()


def test_the_characters_that_begin_in_tokens_are_counted(monkeypatch):
    text = "naïve café 🙂" * 9
    pairs = BPETokenizer.train([text], 266)
    for tokenizer in (CharTokenizer.from_text(text), ByteTokenizer(), pairs):
        tokens = tokenizer.encode(text)
        for size in (1 << 20, 5):  # parts that are decoded at once, which may end in a character
            monkeypatch.setattr(dataset_module, "DECODED_AT_ONCE", size)
            assert count_characters(tokens, tokenizer) == len(text) == 108

    assert len(pairs.encode(text)) < 108 - 9
    assert count_characters(ByteTokenizer().encode("🙂é")[1:], ByteTokenizer()) == 1


def test_a_given_tokenizer_is_used_and_may_not_fit(tmp_path):
    config = write(tmp_path, "abcabcabca" * 3)
    dataset = load_dataset(config, 1, tokenizer=CharTokenizer("abcd"))

    assert dataset.tokenizer.vocab_size == 4
    with pytest.raises(ValueError, match="unknown character 'c' at position 2"):
        load_dataset(config, 1, tokenizer=CharTokenizer("ab"))


@pytest.mark.parametrize(
    ("length", "block_size", "split"), [(50, 45, "training"), (50, 5, "validation")]
)
def test_a_split_shorter_than_a_block_is_refused(tmp_path, length, block_size, split):
    with pytest.raises(ValueError, match=f"the {split} split has {block_size} tokens, too few"):
        load_dataset(write(tmp_path, "ab" * (length // 2)), block_size)
    load_dataset(write(tmp_path, "ab" * (length // 2)), 4)


@pytest.fixture
def prepared(tmp_path):
    """A prepared text of 300 characters, in few of them."""
    config = write(tmp_path, "one two three\n" * 21 + "four..")
    assert prepare(config, tmp_path / "prepared") == 300
    return tmp_path / "prepared"


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_chunks_prepare_to_the_same_tokens(tmp_path, monkeypatch, tokenizer):
    text = "Wer reitet so spät?\nEs ist der Vater, 🙂\n\n  mit Kind.\n" * 9
    write(tmp_path, text)
    config = DataConfig(
        data=(str(tmp_path / "input.txt"),), tokenizer=tokenizer, bpe_vocab_size=280
    )
    direct = load_dataset(config, 8)
    chunks = dataset_module.text_chunks
    read = []

    def text_chunks(sources, **options):
        for chunk in chunks(sources, 17, **options):
            read.append(chunk)
            yield chunk

    monkeypatch.setattr(dataset_module, "text_chunks", text_chunks)
    out = tmp_path / "out"
    total = prepare(config, out)
    mapped = load_dataset(DataConfig(data=(str(out),)), 8)
    assert (type(mapped.train), mapped.train.dtype) == (np.memmap, np.uint16)
    for name in ("train", "validation"):
        assert np.array_equal(getattr(mapped, name), getattr(direct, name))
    assert mapped.tokenizer.to_json() == direct.tokenizer.to_json()
    assert mapped.text.tokens_digest == direct.text.tokens_digest
    assert len(read) > 9
    assert "".join(read).endswith(text)
    assert total == len(direct.train) + len(direct.validation)
    names = ["dataset.json", "tokenizer.json", "tokens.bin"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "dataset.json").read_text().endswith("}\n")


@pytest.mark.parametrize("universal", [True, False])
def test_prepared_text_has_the_newlines_that_were_asked_for(tmp_path, universal):
    said = []
    text = "\ufeffone\r\ntwo\r\n" * 9
    config = dataclasses.replace(write(tmp_path, text), universal_newlines=universal)
    direct = load_dataset(config, 2, warn=said.append)
    prepare(config, tmp_path / "out", warn=said.append)
    mapped = load_dataset(DataConfig(data=(str(tmp_path / "out"),)), 2)
    assert mapped.text.tokens_digest == direct.text.tokens_digest
    characters = direct.tokenizer.decode(range(direct.tokenizer.vocab_size))
    # the first mark is the file's, the others are characters
    assert characters == ("\nenotw\ufeff" if universal else "\n\renotw\ufeff")
    assert len(said) == (2 if universal else 0)  # not again when the tokenizer is made


def test_a_vocabulary_too_large_for_uint16_gets_uint32(tmp_path):
    characters = "".join(map(chr, range(0x10000, 0x10000 + 65_537)))
    prepare(write(tmp_path, characters), tmp_path / "large")
    prepare(write(tmp_path, characters[1:]), tmp_path / "fits")
    for name, dtype in (("large", "uint32"), ("fits", "uint16")):
        assert json.loads((tmp_path / name / "dataset.json").read_text())["dtype"] == dtype
        dataset = load_dataset(DataConfig(data=(str(tmp_path / name),)), 8)
        assert dataset.train.dtype == dtype
        assert dataset.validation[-1] == dataset.tokenizer.vocab_size - 1


def holding(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def index(**changes):
    values = {"dtype": "uint16", "tokens": 300} | changes
    return holding("dataset.json", json.dumps(values).encode())


def make_pipe(folder):
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (holding("dataset.json", b"{"), "dataset.json is damaged"),
        (holding("dataset.json", b"[]"), "dataset.json is damaged"),
        (holding("dataset.json", b"\xff"), "dataset.json is damaged"),
        (index(dtype="float32"), "dataset.json is damaged"),
        (index(dtype=["uint16"]), "dataset.json is damaged"),
        (index(tokens=float("inf")), "dataset.json is damaged"),
        (index(tokens="many"), "dataset.json is damaged"),
        (index(tokens=299), "has 600 bytes, not the 299 uint16 tokens"),
        (index(dtype="uint32"), "has 600 bytes, not the 300 uint32 tokens"),
        (holding("tokens.bin", bytes(599)), "has 599 bytes, not the 300 uint16 tokens"),
        (holding("tokens.bin", b""), "has 0 bytes, not the 300 uint16 tokens"),
        (holding("tokens.bin", bytes(598) + b"\x0c\0"), "token 12, outside .* vocabulary of 12"),
        (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin"),
        (holding("tokenizer.json", b"{}"), "not a tokenizer"),
        (holding("tokenizer.json", b"\xff"), "tokenizer.json: 'utf-8'"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (make_pipe, "tokenizer.json is missing"),
        # a sparse file costs nothing to make
        (lambda it: os.truncate(it / "dataset.json", 1 << 40), r"dataset\.json.* 1,099,511,"),
        (lambda it: os.truncate(it / "tokenizer.json", 1 << 40), r"tokenizer\.json.* 1,099,511,"),
    ],
)
def test_damaged_prepared_data_is_refused(prepared, damage, message):
    damage(prepared)
    with pytest.raises((ValueError, OSError), match=message):
        load_dataset(DataConfig(data=(str(prepared),)), 8)


def test_the_shortest_prepared_text_has_two_tokens(tmp_path):
    for text, is_enough in (("ab", True), ("a", False)):
        prepare(write(tmp_path, text), tmp_path / text)
        config = DataConfig(data=(str(tmp_path / text),))
        with pytest.raises(
            ValueError, match="training split has 1" if is_enough else "prepare it again"
        ):
            load_dataset(config, 8)


@pytest.mark.parametrize(
    ("characters", "split", "tokens"), [(9, "training", 8), (100, "validation", 10)]
)
def test_a_split_has_a_block_and_its_targets(tmp_path, characters, split, tokens):
    """A tenth of the text is the validation split."""
    config = write(tmp_path, "a" * characters)
    message = (
        f"the {split} split has {tokens} tokens, too few for one block of 16 and its targets: use "
        "more text or a smaller block_size"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_dataset(config, 16)


def test_a_digest_is_of_all_tokens():
    """More of them than are hashed at once."""
    tokens = (np.arange((1 << 24) + 3) % 60_000).astype(np.uint16)
    expected = hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
    assert dataset_module._digest(tokens).hexdigest() == expected


def test_prepared_data_goes_with_nothing_else(prepared):
    with pytest.raises(ValueError, match="can't be mixed with other data"):
        load_dataset(DataConfig(data=(str(prepared), "pydocs")), 8)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        load_dataset(DataConfig(data=(str(prepared),)), 8, tokenizer=ByteTokenizer())


def test_of_two_that_prepare_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    """Each writes for itself: the tokens and the tokenizer that are there belong together."""
    slow = write(tmp_path, "slow", "s")
    fast = write(tmp_path, "fast!", "f")
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()  # nobody's, perhaps the user's
    chunks = dataset_module.text_chunks

    def meanwhile(sources, **options):
        monkeypatch.setattr(dataset_module, "text_chunks", chunks)
        assert prepare(fast, out) == 5
        return chunks(sources, **options)

    monkeypatch.setattr(dataset_module, "text_chunks", meanwhile)
    with pytest.raises(FileExistsError, match="out already exists: choose another directory"):
        prepare(slow, out)
    tokens, tokenizer = dataset_module._open_prepared(out)
    assert tokenizer.decode(np.asarray(tokens)) == "fast!"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "out", "out.partial", "s"]


def test_what_can_be_read_once_is_not_prepared(tmp_path):
    """A pipe, such as `<(zcat text.gz)`: the tokenizer is made in a first pass."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe can be read only once: save its text"):
        prepare(DataConfig(data=(str(tmp_path / "pipe"),)), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_only_a_run_s_text_can_have_moved(tmp_path):
    config = DataConfig(data=(str(tmp_path / "nowhere.txt"),))
    with pytest.raises(FileNotFoundError) as missing:
        load_dataset(config, 7)
    assert "nowhere.txt" in str(missing.value)
    assert "has moved" not in str(missing.value)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt.*; if the run's text has moved"):
        load_dataset(config, 7, known=KnownText("0" * 64, None, {}))
