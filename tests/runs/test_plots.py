"""Pictures: what they draw is what the model computes."""

import dataclasses
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from jgpt import CharTokenizer, ModelConfig, MultiHeadAttention, TrainConfig, preset
from jgpt.nn.attention import merge_heads, split_heads
from jgpt.nn.models import abstract_model
from jgpt.pictures import plots
from jgpt.pictures.plots import attention_image, drawable, losses_image, runs_image
from jgpt.runs.directory import RunDirectory
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
    """Each line's points, and what it is drawn with: a line, dots or circles."""
    styles = {("-", "full"): "line", ("None", "full"): "dots", ("None", "none"): "circles"}
    return [
        (
            list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True)),
            styles[line.get_linestyle(), line.get_fillstyle()],
        )
        for line in axes.get_lines()
    ]


METRICS = [
    {"step": 0, "validation_estimate": 5.0},
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": 3.0, "seconds": 10.0, "validation_loss": 3.5},
    {"step": 3, "loss": 2.0},
    {"step": 4, "loss": 1.0, "seconds": 40.0, "validation_loss": 2.5},
]
LOSSES = [4.0, 3.0, 2.0, 1.0]


def run_with(path, metrics, **changes) -> RunDirectory:
    config = TrainConfig(model=ModelConfig(block_size=7), **changes)
    run = RunDirectory.create(path, config, CharTokenizer("ab"))
    run.append("metrics.jsonl", metrics)
    return run


def test_the_losses_are_drawn_against_steps(figures):
    losses_image(METRICS, "a run", "png")
    (axes,) = figures[0].axes
    training = list(zip([1, 2, 3, 4], LOSSES, strict=True))
    assert lines_of(axes) == [
        (training, "line"),
        ([(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.5)], "line"),
        ([(2, 3.5), (4, 2.5)], "dots"),
        ([(0, 5.0)], "circles"),
    ]
    assert axes.get_title() == "a run"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss in nats per token")
    (legend,) = figures[0].legends  # not over the data: of the figure, outside its axes
    assert [text.get_text() for text in legend.get_texts()] == [
        *("training, each step", "training, mean of 3 steps"),
        *("validation", "validation, estimated on a part"),
    ]
    assert not axes.get_legend()


def test_training_losses_are_smoothed_over_a_fiftieth_of_the_steps(figures):
    losses = [float(step % 7) for step in range(1, 251)]
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    losses_image(metrics, "run", "png")
    (axes,) = figures[0].axes
    (_, (smooth, _), *_) = lines_of(axes)
    assert figures[0].legends[0].get_texts()[1].get_text() == "training, mean of 5 steps"
    expected = [
        losses[0],
        np.mean(losses[:3]),
        *(np.mean(losses[i - 2 : i + 3]) for i in range(2, 248)),
        np.mean(losses[-4:]),
        np.mean(losses[-3:]),
    ]
    np.testing.assert_allclose([loss for _, loss in smooth], expected, rtol=1e-12)


def test_runs_are_drawn_against_steps_tokens_and_seconds(figures, tmp_path):
    """35 and 14 tokens a step; seconds between the times that were taken are interpolated."""
    runs = [
        run_with(tmp_path / "five", METRICS, batch_size=5),
        run_with(tmp_path / "two", METRICS[:3], batch_size=2),
    ]
    runs_image(runs, "png")
    panels = figures[0].axes
    assert figures[0].get_size_inches().tolist() == [15, 5.5]
    expected = {
        "steps": ([1, 2, 3, 4], [2, 4], [1, 2], [2]),
        "tokens": ([35, 70, 105, 140], [70, 140], [14, 28], [28]),
        "seconds": ([5.0, 10.0, 25.0, 40.0], [10.0, 40.0], [5.0, 10.0], [10.0]),
    }
    assert [axes.get_xlabel() for axes in panels] == [*expected]
    for axes, (five, its_checkpoints, two, the_other) in zip(
        panels, expected.values(), strict=True
    ):
        drawn = [
            (five, LOSSES, "line"),
            (five, [4.0, 3.0, 2.0, 1.5], "line"),
            (its_checkpoints, [3.5, 2.5], "dots"),
            ([0], [5.0], "circles"),
            (two, LOSSES[:2], "line"),
            (two, [4.0, 3.5], "line"),
            (the_other, [3.5], "dots"),
            ([0], [5.0], "circles"),
        ]
        assert lines_of(axes) == [
            (list(zip(places, losses, strict=True)), style) for places, losses, style in drawn
        ]
        colours = [line.get_color() for line in axes.get_lines()]
        assert colours == ["C0"] * 4 + ["C1"] * 4
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["five", "two"]
    assert "mean of 2% of the steps" in legend.get_title().get_text()
    assert "loss" in panels[0].get_ylabel()


def test_a_directory_s_name_is_no_formula(tmp_path):
    run = run_with(tmp_path / r"$\run$", METRICS)
    runs_image([run], "png")
    assert losses_image(METRICS, run.path.name, "png").startswith(b"\x89PNG")


def test_large_numbers_on_axes_can_be_read(figures, tmp_path):
    metrics = [{"step": 1, "loss": 4.0}, {"step": 20_000, "loss": 3.0, "seconds": 2500.0}]
    runs_image([run_with(tmp_path / "run", metrics, batch_size=5)], "png")
    ticks = []
    for axes in figures[0].axes:
        axes.set_xticks([0, 1500, 1_500_000])
        ticks.append([label.get_text() for label in axes.get_xticklabels()])

    assert ticks == [
        ["0", "1,500", "1,500,000"],
        ["0", "1.5k", "1.5M"],
        ["0", "1,500", "1,500,000"],
    ]


def test_the_attention_of_a_text_s_end_is_drawn(figures):
    """A row per query from the top, a column per key, of the last block of the text."""
    tokenizer = CharTokenizer("\n $abcdefghi")  # 12 characters, and a block of seven
    model = random_gpt("nanogpt", vocab_size=12, block_size=7)
    attention_image(model, tokenizer, "a c\neg$i bd", "png")
    maps = np.asarray(model.attention_weights(jnp.asarray(tokenizer.encode("eg$i bd"))[None]))
    layers = maps.shape[0]
    heads = maps.shape[2]
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
        named = axes.get_subplotspec()
        assert axes.get_xlabel() == ("key position" if named.is_last_row() else "")
        assert axes.get_ylabel() == ("query position" if named.is_first_col() else "")
    assert figures[0].axes[-1].get_ylabel() == "attention weight"


@pytest.mark.parametrize(
    ("layers", "heads", "time", "named", "inches", "points"),
    [
        (2, 3, 7, 7, (3 * 2.2 + 1, 2 * 2.2 + 0.5), (8, 7 + 2.2)),
        (2, 3, 13, 13, (3 * 2.2 + 1, 2 * 2.2 + 0.5), (61.2 * 2.2 / 17, 7 + 2.2)),
        (2, 3, 300, 75, (40 + 1, 40 * 2 / 3 + 0.5), (8, 7 + 40 / 3)),
        (1, 1, 300, 150, (40 + 1, 40 + 0.5), (8, 24)),
    ],
)
def test_the_size_of_an_attention_picture_is_bounded(
    figures, layers, heads, time, named, inches, points
):
    """In inches, and the points of the titles and of the tokens, named where there is room."""
    changes = {"num_layers": layers, "num_heads": heads, "vocab_size": 2, "block_size": time}
    model = random_gpt("nanogpt", **changes)
    attention_image(model, CharTokenizer("ab"), "ab" * 150, "png")
    assert figures[0].get_size_inches().tolist() == pytest.approx(inches)
    axes = figures[0].axes[0]
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        found = [label.get_fontsize() for label in labels]
        assert found == pytest.approx([points[0]] * named)
    assert axes.get_images()[0].get_array().shape == (time, time)
    titles = axes.title, axes.yaxis.label, figures[0].axes[-1].yaxis.label
    assert [title.get_fontsize() for title in titles] == pytest.approx([points[1]] * 3)


@pytest.mark.parametrize("name", ["gpt2", "window", "default preset"])
def test_the_drawn_weights_are_those_of_the_forward_pass(name, monkeypatch):
    config = CONFIGS[name]
    """Each layer's weighted values, projected, are what its attention gave in the forward pass."""
    model = loud(abstract_model(config), size=0.5)
    tokens = tokens_of(1)
    given = []
    computed = []
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


def test_characters_that_no_font_has_are_written_as_code_points():
    """matplotlib would draw a box, and warn, which is an error in tests."""
    text = "你好\U0001f642a\n"
    tokenizer = CharTokenizer.from_text(text)
    model = random_gpt("nanogpt", vocab_size=tokenizer.vocab_size, block_size=len(text))
    assert attention_image(model, tokenizer, text, "svg").startswith(b"<?xml")
    assert losses_image(METRICS, "runs/你好", "svg").startswith(b"<?xml")
    texts, families = drawable(["a\U000f1234b", "你"], "monospace")
    assert texts[0] == "aU+F1234b"  # of private use: in no font
    assert families[0] == "monospace"


def test_a_character_is_drawn_with_an_installed_font_that_has_it(monkeypatch):
    fonts = [mock.Mock(fname="latin.ttf"), mock.Mock(fname="cjk.ttf"), mock.Mock(fname="rest.ttf")]
    for font in fonts:
        font.name = font.fname.removesuffix(".ttf")
    has = {"latin.ttf": "ab", "cjk.ttf": "你好", "rest.ttf": "ab你é"}
    monkeypatch.setattr(plots, "_characters_of", lambda file: set(has.get(file, "ab")))
    monkeypatch.setattr(plots.font_manager.fontManager, "ttflist", fonts)

    assert drawable(["a好", "b"], "monospace") == (["a好", "b"], ["monospace", "cjk"])
    assert drawable(["aé您"], "monospace") == (["aéU+60A8"], ["monospace", "rest"])
    assert drawable(["ab"], "monospace") == (["ab"], ["monospace"])
