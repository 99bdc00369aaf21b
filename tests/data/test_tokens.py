"""Tokens that other programs wrote become a folder, and arrays become a dataset."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from jgpt import CharTokenizer, DataConfig, Dataset
from jgpt.data.characters import NumberTokenizer
from jgpt.data.dataset import load_text
from jgpt.data.prepared import open_prepared, prepare_tokens
from tests.commands import refused, worked

NOTES = np.array([60, 62, 64, 65, 67, 69, 71, 72] * 9)
LETTERS = CharTokenizer("".join(map(chr, range(60))))


def digest(tokens) -> str:
    return hashlib.sha256(np.asarray(tokens).astype("<u4").tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">i2"])
def test_a_npy_file_says_its_dtype(tmp_path, dtype):
    np.save(tmp_path / "notes.npy", NOTES.astype(dtype))

    assert prepare_tokens(tmp_path / "notes.npy", tmp_path / "notes") == 72
    prepared = open_prepared(tmp_path / "notes")
    dataset = Dataset.open(tmp_path / "notes", validation_fraction=0.25)

    assert prepared.tokens.tolist() == NOTES.tolist()
    assert isinstance(prepared.tokens, np.memmap)
    assert prepared.tokenizer.to_json() == NumberTokenizer(73).to_json()
    assert prepared.digest == dataset.digest == digest(NOTES)
    assert dataset.train.tolist() == NOTES[:54].tolist()
    assert dataset.train.dtype == np.uint8


@pytest.fixture
def nanogpt(tmp_path) -> Path:
    """What nanoGPT's prepare.py writes, and the tokenizer."""
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    np.arange(40, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(40, 60, dtype=np.uint16).tofile(folder / "val.bin")
    (folder / "tokenizer.json").write_text(LETTERS.to_json())
    return folder


def test_nanogpt_s_folder_is_linked_and_keeps_its_splits(nanogpt, tmp_path):
    said = worked("prepare", nanogpt, "--out", tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out", validation_fraction=0.5)
    config = DataConfig((str(tmp_path / "out"),))

    assert said.startswith(f"60 tokens in {tmp_path / 'out'}; next: jgpt train --data ")
    assert (tmp_path / "out" / "tokens.bin").samefile(nanogpt / "train.bin")
    assert isinstance(dataset.train, np.memmap)
    assert dataset.train.tolist() == list(range(40))
    assert dataset.validation.tolist() == list(range(40, 60))
    assert len(dataset.test) == 0
    assert dataset.digest == digest(range(60))
    # all of another text is evaluated, which is here what is no training text
    assert load_text(config, LETTERS).tolist() == list(range(40, 60))


def test_llm_c_s_header_says_the_dtype_and_the_number_of_tokens(tmp_path):
    for magic, version, dtype in ((20240520, 1, np.uint16), (20240801, 7, np.uint32)):
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, 60
        path = tmp_path / f"{magic}.bin"
        path.write_bytes(header.tobytes() + np.arange(60, dtype=dtype).tobytes())

        prepare_tokens(path, tmp_path / str(magic), LETTERS)

        assert open_prepared(tmp_path / str(magic)).tokens.tolist() == list(range(60))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: (it / "val.bin").write_bytes(b"\0" * 41), "has 41 bytes, which are no uint16"),
        (
            lambda it: np.arange(40, dtype=np.uint32).tofile(it / "val.bin"),
            "val.bin seems to have wider tokens than uint16, because every other one is 0: save ",
        ),
        (
            lambda it: np.full(9, 60, np.uint16).tofile(it / "train.bin"),
            "train.bin contains token 60, outside its tokenizer's vocabulary of 60: give the",
        ),
        (
            lambda it: (it / "tokenizer.json").unlink(),
            "has tokens without a tokenizer: put its tokenizer.json there, or give --tokenizer ",
        ),
        (
            lambda it: (it / "tokenizer.json").rename(it / "meta.pkl"),
            "meta.pkl is not read, since unpickling can run code: prepare the text itself",
        ),
    ],
)
def test_tokens_that_no_model_could_read_are_one_line(nanogpt, tmp_path, damage, message):
    damage(nanogpt)

    assert message in refused("prepare", nanogpt, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_array_that_is_no_row_of_tokens_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", NOTES[None])

    message = r"a.npy must be one row of whole numbers, not int64\[1, 72\]"
    with pytest.raises(ValueError, match=message):
        prepare_tokens(tmp_path / "a.npy", tmp_path / "out")


def test_a_run_takes_numbers_of_its_vocabulary_and_no_others(tmp_path):
    np.save(tmp_path / "a.npy", NOTES)
    worked("prepare", tmp_path / "a.npy", "--tokenizer", "numbers", "--out", tmp_path / "notes")
    config = DataConfig((str(tmp_path / "notes"),))

    assert load_text(config, NumberTokenizer(128)).tolist() == NOTES.tolist()
    with pytest.raises(ValueError, match="notes was prepared with another tokenizer"):
        load_text(config, NumberTokenizer(65))
    line = refused("prepare", tmp_path / "a.npy", "--out", tmp_path / "out")
    assert line.endswith("or --tokenizer numbers for tokens without a text")


def test_a_dataset_from_tokens_is_split_like_a_text():
    dataset = Dataset.from_tokens(NOTES.tolist(), validation_fraction=0.25, test_fraction=0.125)

    assert dataset.train.tolist() == NOTES[:45].tolist()
    assert dataset.validation.tolist() == NOTES[45:63].tolist()
    assert dataset.test.tolist() == NOTES[63:].tolist()
    assert dataset.tokenizer.vocab_size == 73


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([[1], [2, 3]], {}, "inhomogeneous"),
        ([1, -1], {}, "contains token -1, outside .* of 2"),
        ([1, 5], {"vocab_size": 5}, "contains token 5, outside .* of 5: give the tokenizer that"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        Dataset.from_tokens(tokens, **options)


def test_a_dataset_may_have_splits_of_its_own():
    dataset = Dataset.from_tokens(NOTES, validation=NOTES[:9], test=NOTES[:7], vocab_size=128)
    other = Dataset.from_tokens(NOTES, validation=NOTES[:9], test=NOTES[1:8], vocab_size=128)

    assert dataset.train.tolist() == NOTES.tolist()
    assert dataset.validation.tolist() == NOTES[:9].tolist()
    assert dataset.test.tolist() == NOTES[:7].tolist()
    assert dataset.tokenizer.vocab_size == 128
    assert dataset.digest != other.digest
