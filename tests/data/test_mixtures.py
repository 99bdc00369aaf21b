"""Texts that are mixed by weights."""

import numpy as np
import pytest

from jgpt import DataConfig
from jgpt.data.batches import batches, mixed_starts
from jgpt.data.dataset import load_dataset
from jgpt.data.mixture import Share

SHARES = (Share("a", 50, 3.0), Share("b", 31, 1.0))


@pytest.fixture
def texts(tmp_path) -> tuple[str, str]:
    (tmp_path / "a.txt").write_text("abc" * 40)
    (tmp_path / "b.txt").write_text("xyz" * 20)
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def test_windows_are_drawn_by_weights_and_stay_inside_a_text():
    tokens = np.concatenate([np.zeros(50, np.uint8), np.ones(31, np.uint8)])
    windows = np.asarray(batches(tokens, 5, 0, 40, 25, 7, shares=SHARES))

    assert (windows.min(axis=-1) == windows.max(axis=-1)).all()  # none has both
    # 1000 windows, each of the second text with probability 1/4: the deviation is 0.0137
    assert windows[..., 0].mean() == pytest.approx(0.25, abs=0.05)
    starts = np.asarray(mixed_starts(5, 0, 40, SHARES, 25, 7))
    assert (starts.min(), starts.max()) == (0, 50 + 31 - 8)


def test_a_step_has_the_same_windows_however_steps_are_grouped():
    tokens = np.arange(81, dtype=np.uint8)
    whole = np.asarray(batches(tokens, 5, 0, 6, 4, 7, shares=SHARES))
    later = np.asarray(batches(tokens, 5, 4, 2, 4, 7, shares=SHARES))
    other_seed = np.asarray(batches(tokens, 6, 4, 2, 4, 7, shares=SHARES))

    assert (whole[4:] == later).all()
    assert (other_seed != later).any()


def test_a_mixture_has_the_splits_of_each_text_and_one_vocabulary(texts):
    a, b = texts
    config = DataConfig((f"{a}=3", f"{b}=.5"), validation_fraction=0.2, test_fraction=0.1)

    dataset = load_dataset(config, 5)

    decode = dataset.tokenizer.decode
    assert decode(dataset.train) == ("abc" * 40)[:84] + ("xyz" * 20)[:42]
    assert decode(dataset.validation) == ("abc" * 40)[84:108] + ("xyz" * 20)[42:54]
    assert decode(dataset.test) == ("abc" * 40)[108:] + ("xyz" * 20)[54:]
    assert dataset.shares == (Share(a, 84, 3.0), Share(b, 42, 0.5))


def test_other_weights_are_another_text(texts):
    a, b = texts
    known = load_dataset(DataConfig((f"{a}=3", f"{b}=1")), 5).text

    load_dataset(DataConfig((f"{a}=3", f"{b}=1")), 5, known=known)
    with pytest.raises(ValueError, match="the text has changed since the run was trained"):
        load_dataset(DataConfig((f"{a}=2", f"{b}=1")), 5, known=known)


def test_a_file_may_have_a_name_like_a_weight(tmp_path):
    (tmp_path / "a=1").write_text("ab" * 40)

    dataset = load_dataset(DataConfig((str(tmp_path / "a=1"),)), 5)

    assert dataset.shares == ()


@pytest.mark.parametrize(
    ("weights", "block_size", "message"),
    [
        (("=1", ""), 5, "must have a weight for each text, as in a.txt=0.7 b.txt=0.3"),
        (("=1", "=0"), 5, r"b\.txt has the weight 0: leave it out"),
        (("=1", "=1"), 54, r"the training split of .*b\.txt has 54 tokens, too few for one block"),
    ],
)
def test_a_wrong_mixture_is_one_line(texts, weights, block_size, message):
    a, b = texts
    data = (a + weights[0], b + weights[1])

    with pytest.raises(ValueError, match=message):
        load_dataset(DataConfig(data), block_size)
