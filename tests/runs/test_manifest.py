"""The manifest vouches for every byte of a checkpoint."""

import hashlib

import numpy as np
import pytest

from jgpt.runs.manifest import MANIFEST, Manifest, files_below, sha256_of, verify

MIB = 1 << 20
DATA = np.random.default_rng(0).bytes(2 * MIB + 3)


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "5"
    (directory / "weights").mkdir(parents=True)
    (directory / "weights" / "large").write_bytes(DATA)
    files = {name: (path.stat().st_size, sha256_of(path)) for name, path in files_below(directory)}
    Manifest(5, None, {}, "", files).write(directory)
    return directory


@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, len(DATA)])
def test_a_checksum_is_of_the_whole_file(tmp_path, size):
    (tmp_path / "file").write_bytes(DATA[:size])
    assert sha256_of(tmp_path / "file") == hashlib.sha256(DATA[:size]).hexdigest()


@pytest.mark.parametrize("place", [0, MIB - 1, MIB, len(DATA) - 1])
def test_a_flipped_bit_is_found_wherever_it_is(checkpoint, place):
    verify(checkpoint)
    damaged = bytearray(DATA)
    damaged[place] ^= 1
    (checkpoint / "weights" / "large").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"weights/large is damaged"):
        verify(checkpoint)


def test_a_manifest_is_read_as_it_was_written(checkpoint):
    text = (checkpoint / MANIFEST).read_text()
    assert (text[:2], text[-2:]) == ("{\n", "}\n")
    assert Manifest.read(checkpoint) == Manifest(
        step=5,
        validation_loss=None,
        model={},
        tokenizer="",
        files={"weights/large": (len(DATA), hashlib.sha256(DATA).hexdigest())},
    )
