"""A batch is a function of the tokens, the seed and the step; an evaluation sees all once."""

import hashlib
import math
import re
import tracemalloc

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgpt import BPETokenizer, ByteTokenizer, CharTokenizer, DataConfig
from jgpt.data import batches as batches_module
from jgpt.data import encode
from jgpt.data.batches import batch, batches, evaluation_windows, resident, windows_by_number
from jgpt.data.dataset import load_dataset
from jgpt.data.encode import count_characters
from jgpt.data.prepared import digest_of, prepare
from jgpt.parallel.mesh import make_mesh
from tests.data.files import write

COUNTING = np.arange(1013, dtype=np.int32)
"""Each token is its own position, so that a window shows where it was cut."""


@pytest.mark.parametrize("tokens", [COUNTING, resident(COUNTING)], ids=["mapped", "resident"])
def test_windows_lie_within_the_text_and_targets_follow_inputs(tokens):
    seed = 3
    step = 11

    windows = np.asarray(batches(tokens, seed, step, steps=5, batch_size=4, block_size=7))
    inputs, targets = batch(tokens, seed, step, batch_size=4, block_size=7)

    # a window is a block and one token more, its last target
    assert windows.shape == (5, 4, 8)
    first = windows[..., :1]
    assert (windows == first + np.arange(8)).all()
    assert windows.min() >= 0
    assert windows.max() <= 1012
    assert np.array_equal(inputs, windows[0, :, :-1])
    assert np.array_equal(targets, inputs + 1)


@given(seed=st.integers(0, 2**32 - 1), step=st.integers(0, 2**31 - 99), split=st.integers(1, 4))
def test_batches_do_not_depend_on_how_steps_are_grouped(seed, step, split):
    whole = batches(COUNTING, seed, step, 5, 3, 7)
    first = batches(COUNTING, seed, step, split, 3, 7)
    second = batches(COUNTING, seed, step + split, 5 - split, 3, 7)

    assert np.array_equal(whole, np.concatenate([first, second]))


def test_tokens_in_a_file_give_the_same_batches_and_each_device_its_own_windows(tmp_path):
    COUNTING.astype(np.uint16).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.uint16, mode="r")
    expected = batches(resident(mapped), 1, 2, 3, 8, 5)

    found = batches(mapped, 1, 2, 3, 8, 5)
    with jax.set_mesh(make_mesh("data=4,fsdp=2")):
        sharded = batches(mapped, 1, 2, 3, 8, 5)

    assert expected.dtype == found.dtype == np.int32
    assert np.array_equal(found, expected)
    # each of eight devices has one row of a batch of eight
    assert {shard.data.shape for shard in sharded.addressable_shards} == {(3, 1, 6)}
    assert np.array_equal(sharded, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32])
def test_tokens_that_exceed_the_device_stay_where_they_are(monkeypatch, dtype):
    """The limit is of bytes, and the tokens on the device keep their type: a window is int32."""
    tokens = (COUNTING % 251).astype(dtype)  # each fits into a byte

    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", tokens.nbytes - 1)
    too_many = resident(tokens)
    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", tokens.nbytes)
    on_device = resident(tokens)
    windows = batches(on_device, 3, 11, 5, 4, 7)

    assert too_many is tokens
    assert isinstance(on_device, jax.Array)
    assert on_device.nbytes == tokens.nbytes
    assert np.array_equal(on_device, tokens)
    assert windows.dtype == np.int32
    assert np.array_equal(windows, batches(tokens, 3, 11, 5, 4, 7))


@given(st.integers(2, 90), st.integers(1, 13), st.integers(1, 5))
def test_an_evaluation_covers_each_target_exactly_once(length, block_size, batch_size):
    tokens = 1000 + np.arange(length)  # none is zero, as the padding is
    num_targets = length - 1
    targets_in_batch = batch_size * block_size

    windows, counts = evaluation_windows(tokens, block_size, batch_size)

    assert windows.shape[1:] == (batch_size, block_size + 1)
    assert windows.dtype == np.int32
    assert len(windows) == math.ceil(num_targets / targets_in_batch)  # no batch for nothing
    inputs = windows[..., :-1][counts]
    targets = windows[..., 1:][counts]
    assert targets.tolist() == list(range(1001, 1000 + length))
    np.testing.assert_array_equal(inputs + 1, targets)
    # a target sees all of its window before it
    first = windows[..., :1]
    in_order = windows == first + np.arange(block_size + 1)
    assert in_order[..., 1:][counts].all()


def test_tiny_shakespeare_splits_as_in_the_lecture(data_directory):
    halves = DataConfig(data=("shakespeare",), validation_fraction=0.05, test_fraction=0.05)

    dataset = load_dataset(DataConfig(data=("shakespeare",)), 8)
    cut = load_dataset(halves, 8)

    # nine tenths of its 1,115,394 characters, rounded down, are trained on
    assert len(dataset.train) == 1_003_854
    assert len(dataset.validation) == 111_540
    assert dataset.tokenizer.decode(dataset.train[:13]) == "First Citizen"
    assert len(cut.validation) == 55_770
    assert len(cut.test) == 55_770
    assert np.array_equal(cut.train, dataset.train)
    held_out = np.concatenate([cut.validation, cut.test])
    assert np.array_equal(held_out, dataset.validation)
    assert cut.tokenizer.to_json() == dataset.tokenizer.to_json()


@pytest.mark.parametrize("length", [1000, 1001, 99_999])
@pytest.mark.parametrize("held_out", [(0.07, 0.0), (0.01, 0.06), (0.05, 0.02)])
def test_what_is_held_out_for_the_test_is_not_trained_on(tmp_path, length, held_out):
    """0.01 + 0.06 is less than 0.07 as floats, which would train on another token."""
    text = "abcdefghij" * (length // 10) + "k" * (length % 10)
    validation_fraction, test_fraction = held_out
    config = DataConfig(
        (write(tmp_path, "a.txt", text),),
        tokenizer="byte",
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
    )

    dataset = load_dataset(config, 2)

    assert len(dataset.train) == int(length * (1 - 0.07))
    assert len(dataset.test) == length - int(length * (1 - test_fraction))
    joined = np.concatenate([dataset.train, dataset.validation, dataset.test])
    assert dataset.tokenizer.decode(joined) == text


def test_the_characters_that_begin_in_tokens_are_counted(monkeypatch):
    text = "naïve café 🙂" * 9
    pairs = BPETokenizer.train([text], 266)
    for tokenizer in (CharTokenizer.from_text(text), ByteTokenizer(), pairs):
        tokens = tokenizer.encode(text)
        for size in (1 << 20, 5):  # parts that are decoded at once, which may end in a character
            monkeypatch.setattr(encode, "DECODED_AT_ONCE", size)
            assert count_characters(tokens, tokenizer) == len(text) == 108

    assert len(pairs.encode(text)) < 108 - 9  # a token of pairs may be several characters
    # a special token is one character, as a newline between documents is
    with_end = pairs.encode("one<|endoftext|>two<|endoftext|>")
    assert count_characters(with_end, pairs) == len("one two ")
    # the first of the bytes of a character is what counts, and here it is cut off
    without_first_byte = ByteTokenizer().encode("🙂é")[1:]
    assert count_characters(without_first_byte, ByteTokenizer()) == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokens.bin", bytes(299), "has 299 bytes, not the 300 uint8 tokens"),
        ("tokens.bin", None, "is damaged .*tokens.bin.*: prepare it again"),
        ("dataset.json", b"{}", "is damaged .KeyError: 'dtype'.: prepare it again"),
        ("tokenizer.json", None, "there is no tokenizer .*tokenizer.json"),
    ],
)
def test_damaged_prepared_data_is_rejected(tmp_path, name, data, message):
    path = write(tmp_path, "a.txt", "one two three\n" * 21 + "four..")
    prepare(DataConfig((path,)), tmp_path / "prepared")
    file = tmp_path / "prepared" / name
    file.unlink()
    if data is not None:
        file.write_bytes(data)

    with pytest.raises((ValueError, OSError), match=message):
        load_dataset(DataConfig(data=(str(file.parent),)), 8)


@pytest.mark.parametrize(
    ("characters", "split", "tokens"), [(9, "training", 8), (100, "validation", 10)]
)
def test_a_split_has_a_block_and_its_targets(tmp_path, characters, split, tokens):
    """A tenth of the text is the validation split."""
    config = DataConfig((write(tmp_path, "a.txt", "a" * characters),))
    message = (
        f"the {split} split has {tokens} tokens, too few for one block of 16 and its targets: use "
        "more text or a smaller `block_size`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_dataset(config, 16)


def test_every_place_is_drawn_and_no_other():
    ten = COUNTING[:10]  # windows of 8 start at 0, 1 or 2

    windows = np.asarray(batches(ten, 0, 0, steps=50, batch_size=4, block_size=7))

    starts, counts = np.unique(windows[..., 0], return_counts=True)
    assert starts.tolist() == [0, 1, 2]
    assert counts.min() > 40  # of 200, each about a third


def test_a_digest_is_of_all_tokens():
    """More of them than are hashed at once."""
    tokens = (np.arange((1 << 20) + 3) % 60_000).astype(np.uint16)
    little_endian = tokens.astype("<u4").tobytes()  # so that the digest is the same for any type
    expected = hashlib.sha256(little_endian).hexdigest()

    digest = digest_of(tokens)

    assert digest == expected


def test_seed_and_step_decide_the_batch():
    drawn = set()
    for seed in (0, 1, 2**31, 2**32 - 1):  # up to the largest that a config allows
        for step in (0, 1, 2, 1000):
            windows = np.asarray(batches(COUNTING, seed, step, 1, 4, 7))
            drawn.add(windows.tobytes())

    assert len(drawn) == 16


def test_of_tokens_in_a_file_no_more_windows_are_read_than_are_used():
    tokens = np.arange(1, 50, dtype=np.uint16)

    read = np.asarray(batches(tokens, 3, 5, steps=3, batch_size=2, block_size=4, count=2))

    np.testing.assert_array_equal(read[:2], batches(tokens, 3, 5, 2, 2, 4))
    assert (read[2] == 0).all()


def test_an_evaluation_converts_the_windows_that_it_reads_alone():
    tokens = np.zeros(20_000_000, np.uint8)

    tracemalloc.start()
    windows_by_number(tokens, np.array([[3, 5]]), 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1_000_000
