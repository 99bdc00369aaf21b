"""Texts that are mixed by weights."""

import numpy as np
import pytest

from jgpt import DataConfig
from jgpt.data.batches import batches, mixed_starts
from jgpt.data.dataset import load_dataset
from jgpt.data.mixture import Share
from jgpt.data.prepared import prepare_tokens

SHARES = (Share("a", 50, 3.0), Share("b", 31, 1.0))
LONGER = "abc" * 40
SHORTER = "xyz" * 20


@pytest.fixture
def texts(tmp_path) -> tuple[str, str]:
    longer = tmp_path / "a.txt"
    shorter = tmp_path / "b.txt"
    longer.write_text(LONGER)
    shorter.write_text(SHORTER)
    return str(longer), str(shorter)


def drawn(tokens, seed, first_step, num_steps, batch_size):
    """Windows of 7 tokens and the next one of each, as an array of NumPy."""
    windows = batches(tokens, seed, first_step, num_steps, batch_size, 7, shares=SHARES)
    return np.asarray(windows)


def test_windows_are_drawn_by_weights_and_stay_inside_a_text():
    tokens = np.repeat(np.array([0, 1], np.uint8), [50, 31])

    windows = drawn(tokens, seed=5, first_step=0, num_steps=40, batch_size=25)
    starts = np.asarray(mixed_starts(5, 0, 40, SHARES, 25, 7))

    # none has tokens of both
    np.testing.assert_array_equal(windows.min(axis=-1), windows.max(axis=-1))
    # 1000 windows, each of the second text with probability 1/4: the deviation is 0.0137
    assert windows[..., 0].mean() == pytest.approx(0.25, abs=0.05)
    assert starts.min() == 0
    assert starts.max() == 50 + 31 - 8


def test_a_step_has_the_same_windows_however_steps_are_grouped():
    tokens = np.arange(81, dtype=np.uint8)

    all_steps = drawn(tokens, seed=5, first_step=0, num_steps=6, batch_size=4)
    last_steps = drawn(tokens, seed=5, first_step=4, num_steps=2, batch_size=4)
    other_seed = drawn(tokens, seed=6, first_step=4, num_steps=2, batch_size=4)

    np.testing.assert_array_equal(all_steps[4:], last_steps)
    assert not np.array_equal(other_seed, last_steps)


def test_a_mixture_has_the_splits_of_each_text_and_one_vocabulary(texts):
    a, b = texts
    config = DataConfig((f"{a}=3", f"{b}=.5"), validation_fraction=0.2, test_fraction=0.1)

    dataset = load_dataset(config, 5)

    train = dataset.tokenizer.decode(dataset.train)
    validation = dataset.tokenizer.decode(dataset.validation)
    test = dataset.tokenizer.decode(dataset.test)
    assert train == LONGER[:84] + SHORTER[:42]
    assert validation == LONGER[84:108] + SHORTER[42:54]
    assert test == LONGER[108:] + SHORTER[54:]
    assert dataset.shares == (Share(a, 84, 3.0), Share(b, 42, 0.5))


def test_prepared_folders_are_mixed(tmp_path):
    folders = []
    for number, notes in enumerate(([1, 2, 3] * 30, [4, 5, 7] * 20)):
        np.save(tmp_path / f"{number}.npy", notes)
        prepare_tokens(tmp_path / f"{number}.npy", tmp_path / str(number))
        folders.append(f"{tmp_path / str(number)}={number + 1}")

    dataset = load_dataset(DataConfig(tuple(folders)), 5)

    assert dataset.tokenizer.vocab_size == 8
    assert dataset.train.tolist() == [1, 2, 3] * 27 + [4, 5, 7] * 18


def test_other_weights_are_another_text(texts):
    a, b = texts
    config = DataConfig((f"{a}=3", f"{b}=1"))
    other_weights = DataConfig((f"{a}=2", f"{b}=1"))
    digest = load_dataset(config, 5).digest

    load_dataset(config, 5, digest=digest)

    with pytest.raises(ValueError, match="has other tokens than the run was trained on"):
        load_dataset(other_weights, 5, digest=digest)


@pytest.mark.parametrize(
    ("written", "weight"), [("5.", 5.0), (".25", 0.25), ("1e-3", 0.001), ("2.5E+1", 25.0)]
)
def test_a_weight_is_written_like_any_number(texts, written, weight):
    a, b = texts

    dataset = load_dataset(DataConfig((f"{a}={written}", f"{b}=1")), 5)

    assert [share.weight for share in dataset.shares] == [weight, 1.0]


def test_a_file_may_have_a_name_like_a_weight(tmp_path):
    path = tmp_path / "a=1"
    path.write_text("ab" * 40)

    dataset = load_dataset(DataConfig((str(path),)), 5)

    assert dataset.shares == ()


@pytest.mark.parametrize(
    ("weights", "block_size", "message"),
    [
        (("=1", ""), 5, "must have a weight for each text, as in a.txt=0.7 b.txt=0.3"),
        (("=1", "=0"), 5, r"'0' is no weight of .*b\.txt: give a positive number"),
        (("=1", "=-1"), 5, r"'-1' is no weight of .*b\.txt: give a positive number, as in .*=0\.3"),
        (("=1", "="), 5, r"'' is no weight of .*b\.txt"),
        (("=1", "=nan"), 5, r"'nan' is no weight of .*b\.txt"),
        (("=1", "=1"), 54, r"the training split of .*b\.txt has 54 tokens, too few for one block"),
    ],
)
def test_a_wrong_mixture_is_one_line(texts, weights, block_size, message):
    a, b = texts
    data = (a + weights[0], b + weights[1])

    with pytest.raises(ValueError, match=message):
        load_dataset(DataConfig(data), block_size)
