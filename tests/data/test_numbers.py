"""Tokens without a text: numbers, from files that say their dtype and from Python."""

import json

import numpy as np
import pytest

from jgpt import DataConfig, Dataset
from jgpt.data.dataset import load_dataset, load_text
from jgpt.data.tokenizers import NumberTokenizer, UnencodableText, tokenizer_from_json

NOTES = np.array([60, 62, 64, 65, 67, 69, 71, 72] * 9)


def loaded(path, **options) -> Dataset:
    config = DataConfig((str(path),), tokenizer="numbers", **options)
    return load_dataset(config, 5)


def test_numbers_are_their_own_text():
    tokenizer = NumberTokenizer(128)

    assert tokenizer.encode(" 60 127\n0 ").tolist() == [60, 127, 0]
    assert tokenizer.decode(np.array([60, 127, 0])) == "60 127 0"
    assert tokenizer_from_json(tokenizer.to_json()).to_json() == tokenizer.to_json()
    assert tokenizer.to_hf().encode("60 127").ids == [60, 127]


@pytest.mark.parametrize("word", ["128", "-1", "1.5", "x", "1_0", "٣", "9" * 99])
def test_a_word_that_is_no_token_is_named(word):
    with pytest.raises(UnencodableText, match=r"^word 2 of the text, .* numbers from 0 to 127$"):
        NumberTokenizer(128).encode(f"5 {word}")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">i2"])
def test_a_npy_file_says_its_dtype(tmp_path, dtype):
    np.save(tmp_path / "a.npy", NOTES.astype(dtype))

    dataset = loaded(tmp_path / "a.npy")

    assert np.concatenate([dataset.train, dataset.validation]).tolist() == NOTES.tolist()
    assert dataset.tokenizer.to_json() == json.dumps({"type": "numbers", "vocab_size": 73})
    # others would be cut to 32 bits on a device
    assert dataset.train.dtype.name in ("uint8", "uint16", "uint32", "int32")
    assert dataset.text == loaded(tmp_path / "a.npy", numbers_vocab_size=128).text


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_a_bin_file_is_read_as_the_dtype_that_is_named(tmp_path, dtype):
    NOTES.astype(dtype).tofile(tmp_path / "a.bin")

    dataset = loaded(tmp_path / "a.bin", token_dtype=dtype, numbers_vocab_size=128)

    assert np.concatenate([dataset.train, dataset.validation]).tolist() == NOTES.tolist()
    assert dataset.tokenizer.vocab_size == 128


def test_a_named_dtype_is_that_of_tokens_with_a_tokenizer_too(tmp_path):
    """Every other uint16 is 0, which is an error only where the dtype is a guess."""
    tokens = np.array([7, 0] * 20, np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    named = DataConfig((str(tmp_path / "a.bin"),), tokenizer="byte", token_dtype="uint16")
    guessed = DataConfig((str(tmp_path / "a.bin"),), tokenizer="byte")

    assert load_dataset(named, 3).train.tolist() == tokens[:36].tolist()
    with pytest.raises(ValueError, match=r"seems to have uint32 tokens.* `token_dtype='uint32'`$"):
        load_dataset(guessed, 3)


def test_numbers_of_64_bits_are_not_taken_for_32(tmp_path):
    NOTES.astype(np.int64).tofile(tmp_path / "a.bin")
    guessed = DataConfig((str(tmp_path / "a.bin"),), tokenizer="byte")

    with pytest.raises(ValueError, match=r"seems to have int64 tokens.* `token_dtype='int64'`$"):
        load_dataset(guessed, 3)


def test_a_mixture_of_numbers_has_the_vocabulary_of_all(tmp_path):
    np.save(tmp_path / "a.npy", NOTES)
    np.save(tmp_path / "b.npy", NOTES + 5)
    (tmp_path / "c.txt").write_text("3 90 4 " * 9)
    sources = (f"{tmp_path}/a.npy=0.5", f"{tmp_path}/b.npy=0.25", f"{tmp_path}/c.txt=1")

    dataset = load_dataset(DataConfig(sources, tokenizer="numbers"), 5)

    assert dataset.tokenizer.vocab_size == 91
    assert dataset.train[:64].tolist() == NOTES[:64].tolist()
    assert dataset.train[64:128].tolist() == (NOTES + 5)[:64].tolist()


def test_a_text_of_numbers_is_tokens(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(map(str, NOTES)))

    dataset = loaded(tmp_path / "a.txt")

    assert dataset.train.tolist() == NOTES[:64].tolist()
    assert dataset.tokenizer.vocab_size == 73


@pytest.mark.parametrize(
    ("name", "array", "options", "message"),
    [
        ("a.bin", NOTES.astype("u2"), {}, r"a.bin doesn't say the dtype .* `token_dtype='uint16'`"),
        ("a.npy", NOTES / 2, {}, r"a.npy must be one row of whole numbers, not float64\[72\]"),
        ("a.npy", NOTES.reshape(8, 9), {}, r"one row of whole numbers, not int64\[8, 9\]"),
        ("a.npy", NOTES[:0], {}, "the training split has 0 tokens"),
        ("a.npy", -NOTES, {}, "a.npy contains token -72, outside its tokenizer's vocabulary"),
        (
            "a.npy",
            NOTES,
            {"numbers_vocab_size": 72},
            "token 72, outside .* of 72: give .*size=73`$",
        ),
        ("a.npy", np.array(["a"], object), {}, "Python objects"),
        ("a.npy", NOTES + 2**24, {}, "16777289` must be a whole number from 1 to 16,777,216"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, array, options, message):
    if name == "a.npy":
        np.save(tmp_path / name, array)
    else:
        array.tofile(tmp_path / name)

    with pytest.raises(ValueError, match=message) as error:
        loaded(tmp_path / name, **options)

    assert "\n" not in str(error.value)


def test_numbers_outside_of_the_vocabulary_of_a_run_need_another_run(tmp_path):
    np.save(tmp_path / "a.npy", NOTES)
    config = DataConfig((str(tmp_path / "a.npy"),), tokenizer="numbers")

    with pytest.raises(
        ValueError, match=r"token 72, .* of 65: train a run whose vocabulary has it"
    ):
        load_text(config, NumberTokenizer(65))


def test_tokens_without_a_tokenizer_may_be_numbers(tmp_path):
    np.save(tmp_path / "a.npy", NOTES)

    with pytest.raises(ValueError, match="`tokenizer='numbers'` for tokens without a text"):
        load_dataset(DataConfig((str(tmp_path / "a.npy"),)), 5)


def test_a_dataset_from_tokens_is_split_like_a_text():
    dataset = Dataset.from_tokens(NOTES.tolist(), validation_fraction=0.25, test_fraction=0.125)

    assert dataset.train.tolist() == NOTES[:45].tolist()
    assert dataset.validation.tolist() == NOTES[45:63].tolist()
    assert dataset.test.tolist() == NOTES[63:].tolist()
    assert dataset.tokenizer.vocab_size == 73


def test_a_dataset_may_have_splits_of_its_own():
    dataset = Dataset.from_tokens(NOTES, validation=NOTES[:9], test=NOTES[:7], vocab_size=128)
    other = Dataset.from_tokens(NOTES, validation=NOTES[:9], test=NOTES[1:8], vocab_size=128)

    assert dataset.train.tolist() == NOTES.tolist()
    assert dataset.validation.tolist() == NOTES[:9].tolist()
    assert dataset.test.tolist() == NOTES[:7].tolist()
    assert dataset.tokenizer.vocab_size == 128
    assert dataset.text != other.text


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([0.5, 1], {}, r"tokens must be one row of whole numbers, not float64\[2\]"),
        ([[1], [2, 3]], {}, "inhomogeneous"),
        ([1, -1], {}, "contains token -1, outside .* of 2: a token is never negative"),
        ([1, 5], {"vocab_size": 5}, "contains token 5, outside .* of 5: give a larger vocab_size"),
        (
            [1, 9],
            {"tokenizer": NumberTokenizer(9)},
            "outside .* of 9: give the tokenizer that made",
        ),
        ([1, 5], {"tokenizer": "bpe"}, "must have encode, decode and a vocab_size"),
        ([1, 5], {"vocab_size": 5.5}, "`vocab_size=5.5` must be a whole number from 1 to"),
        (
            np.array([2**64 - 1], np.uint64),
            {},
            "`vocab_size=18446744073709551616` must be a whole number from 1 to",
        ),
        ([1, 5], {"test": [1]}, "give validation with test"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        Dataset.from_tokens(tokens, **options)


def test_a_vocabulary_size_may_be_of_numpy():
    """As `tokens.max() + 1` is, which JSON can't hold."""
    tokens = np.array([1, 70_000], np.uint64)

    dataset = Dataset.from_tokens(tokens, vocab_size=tokens.max() + np.uint64(1))

    assert dataset.tokenizer.to_json() == json.dumps({"type": "numbers", "vocab_size": 70_001})
    # no file is misread here, so a large number among few tokens is no sign of a mistake
    assert Dataset.from_tokens(tokens).tokenizer.vocab_size == 70_001
