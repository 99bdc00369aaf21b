"""Pictures: what they draw is what the model computes."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from jgpt import CharTokenizer, ModelConfig, MultiHeadAttention, TrainConfig, preset
from jgpt.nn.attention import merge_heads, split_heads
from jgpt.nn.models import abstract_model
from jgpt.runs.directory import RunDirectory
from jgpt.runs.plots import plot_attention, plot_losses, plot_runs
from tests.models import TRANSFORMERS, config_of, loud, random_gpt, tokens_of

CONFIGS = {
    **{family: config_of(family) for family in TRANSFORMERS},
    "window": config_of("nanogpt", attention_window=2),
    "default preset": dataclasses.replace(
        preset("modern-cpu").model, vocab_size=17, block_size=11, attention_window=3, ngram_rows=13
    ),
}


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, which are not written."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.append(self))
    return figures


def lines_of(axes):
    """The points of each line, and whether they are marked."""
    return [
        (line.get_xdata().tolist(), list(line.get_ydata()), line.get_marker() == "o")
        for line in axes.get_lines()
    ]


METRICS = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": 3.0, "seconds": 10.0, "validation_loss": 3.5},
    {"step": 3, "loss": 2.0},
    {"step": 4, "loss": 1.0, "seconds": 40.0, "validation_loss": 2.5},
]


def run_with(path, metrics, **changes) -> RunDirectory:
    config = TrainConfig(model=ModelConfig(block_size=7), **changes)
    run = RunDirectory.create(path, config, CharTokenizer("ab"))
    run.append_metrics(metrics)
    return run


def test_the_losses_are_drawn_against_steps(figures, tmp_path):
    plot_losses(METRICS, tmp_path / "loss.png")
    (axes,) = figures[0].axes
    labels = [line.get_label() for line in axes.get_lines()]
    assert ["training" in label for label in labels] == [True, False]
    assert ["validation" in label for label in labels] == [False, True]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()] == [
        ([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]),
        ([2, 4], [3.5, 2.5]),
    ]
    assert "step" in axes.get_xlabel()
    assert "loss" in axes.get_ylabel()


def test_runs_are_drawn_against_steps_tokens_and_seconds(figures, tmp_path):
    """35 and 14 tokens a step; seconds between the times that were taken are interpolated."""
    runs = [
        run_with(tmp_path / "five", METRICS, batch_size=5),
        run_with(tmp_path / "two", METRICS[:2], batch_size=2),
    ]
    plot_runs(runs, tmp_path / "runs.png")
    panels = figures[0].axes
    losses, evaluated = [4.0, 3.0, 2.0, 1.0], [3.5, 2.5]
    expected = {
        "steps": ([1, 2, 3, 4], [2, 4], [1, 2], [2]),
        "tokens": ([35, 70, 105, 140], [70, 140], [14, 28], [28]),
        "seconds": ([5.0, 10.0, 25.0, 40.0], [10.0, 40.0], [5.0, 10.0], [10.0]),
    }
    assert [axes.get_xlabel() for axes in panels] == [*expected]
    for axes, places in zip(panels, expected.values(), strict=True):
        assert lines_of(axes) == [
            (places[0], losses, False),
            (places[1], evaluated, True),
            (places[2], losses[:2], False),
            (places[3], evaluated[:1], True),
        ]
        colours = [line.get_color() for line in axes.get_lines()]
        assert colours == ["C0", "C0", "C1", "C1"]
    assert [text.get_text() for text in panels[2].get_legend().get_texts()] == ["five", "two"]
    assert "loss" in panels[0].get_ylabel()


def test_the_attention_of_a_text_s_end_is_drawn(figures, tmp_path):
    """A row per query from the top, a column per key, of the last block of the text."""
    tokenizer = CharTokenizer("\n $abcdefghi")  # 12 characters, and a block of seven
    model = random_gpt("nanogpt", vocab_size=12, block_size=7)
    plot_attention(model, tokenizer, "a c\neg$i bd", tmp_path / "attention.png")
    maps = np.asarray(model.attention_weights(jnp.asarray(tokenizer.encode("eg$i bd"))[None]))
    layers, heads = maps.shape[0], maps.shape[2]
    assert maps.shape == (layers, 1, heads, 7, 7)
    drawn = [axes for axes in figures[0].axes if axes.get_images()][: layers * heads]
    assert layers > 1
    assert heads > 1
    for axes, (layer, head) in zip(drawn, np.ndindex(layers, heads), strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), maps[layer, 0, head])
        assert np.triu(image.get_array(), 1).max() == 0  # nothing reads what comes later
        assert image.get_clim() == (0, 1)
        assert re.findall(r"\d+", axes.get_title()) == [str(layer), str(head)]
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            assert [label.get_text() for label in labels] == ["e", "g", r"\$", "i", "␣", "b", "d"]
        bottom, top = axes.get_ylim()
        assert bottom > top  # the first query on top
    assert figures[0].get_supxlabel() in ("read", "key")
    assert figures[0].get_supylabel() in ("reads", "query")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_drawn_weights_are_those_of_the_forward_pass(config, monkeypatch):
    """Each layer's weighted values, projected, are what its attention gave in the forward pass."""
    model, tokens = loud(abstract_model(config), size=0.5), tokens_of(1)
    given, computed = [], []
    call = MultiHeadAttention.__call__

    def spy(self, x, context=None, **options):
        given.append(x)
        computed.append(call(self, x, context, **options))
        return computed[-1]

    monkeypatch.setattr(MultiHeadAttention, "__call__", spy)
    model(tokens)
    monkeypatch.undo()
    maps = model.attention_weights(tokens)
    assert maps.shape == (len(model.blocks), 2, config.num_heads, 11, 11)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-6)
    for block, x, expected, weights in zip(model.blocks, given, computed, maps, strict=True):
        attention = block.attention
        value = split_heads(attention.value(x), attention.num_kv_heads)
        value = jnp.repeat(value, attention.num_heads // attention.num_kv_heads, axis=1)
        found = attention.projection(merge_heads(weights @ value))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * abs(expected).max())
