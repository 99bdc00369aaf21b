"""Pictures: what they draw is what the model computes."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import jgpt
from jgpt import ModelConfig, TrainConfig, preset
from jgpt.fields import to_json
from jgpt.nn.attention import merge_heads, split_heads
from jgpt.nn.models import abstract_model
from jgpt.runs.directory import RunDirectory
from jgpt.runs.plots import metric_image, runs_image
from tests.models import TRANSFORMERS, compiled, config_of, loud, tokens_of
from tests.quick import only

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
    """Each line's places and heights."""
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]


def texts_of(labels):
    return [label.get_text() for label in labels]


METRICS = [
    {"step": 1, "loss": 4.0},
    {"step": 2, "loss": 3.0, "seconds": 10.0, "validation_loss": 3.5},
    {"step": 3, "loss": 2.0},
    {"step": 4, "loss": 1.0, "seconds": 40.0, "validation_loss": 2.5},
]
LOSSES = [4.0, 3.0, 2.0, 1.0]


def run_with(path, metrics, **changes) -> RunDirectory:
    config = TrainConfig(model=ModelConfig(block_size=7), **changes)
    path.mkdir()
    (path / "config.json").write_text(to_json(config))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    return RunDirectory(path)


def test_runs_are_drawn_against_steps_tokens_and_seconds(figures, tmp_path):
    """35 and 14 tokens a step; seconds between the times that were taken are interpolated."""
    runs = [
        run_with(tmp_path / "five", METRICS, batch_size=5),
        run_with(tmp_path / "two", METRICS[:2], batch_size=2),
    ]
    # of each run the places of its steps and of its checkpoints
    five = {
        "steps": ([1, 2, 3, 4], [2, 4]),
        "tokens": ([35, 70, 105, 140], [70, 140]),
        "seconds": ([5.0, 10.0, 25.0, 40.0], [10.0, 40.0]),
    }
    two = {"steps": ([1, 2], [2]), "tokens": ([14, 28], [28]), "seconds": ([5.0, 10.0], [10.0])}

    runs_image(runs, "png")

    (figure,) = figures
    assert [axes.get_xlabel() for axes in figure.axes] == ["steps", "tokens", "seconds"]
    for axes in figure.axes:
        steps_of_five, checkpoints_of_five = five[axes.get_xlabel()]
        steps_of_two, checkpoints_of_two = two[axes.get_xlabel()]
        assert lines_of(axes) == [
            (steps_of_five, LOSSES),
            (steps_of_five, [3.5, 3.0, 2.0, 1.5]),
            (checkpoints_of_five, [3.5, 2.5]),
            (steps_of_two, LOSSES[:2]),
            (steps_of_two, [3.5, 3.5]),
            (checkpoints_of_two, [3.5]),
        ]
        colours = [line.get_color() for line in axes.get_lines()]
        assert colours == ["C0"] * 3 + ["C1"] * 3
    (legend,) = figure.legends
    assert texts_of(legend.get_texts()) == ["five", "two"]


def test_a_group_of_metrics_has_a_line_for_each_part_of_each_run(figures, tmp_path):
    metrics: list[dict] = [{"step": 1, "loss": 3.0}]
    for step in (2, 4):
        norms = {f"norms/blocks.{layer}": float(step * layer) for layer in (0, 2, 10)}
        metrics.append({"step": step, "loss": 2.0, **norms})
    other = [{"step": 3, "loss": 2.0, "norms/embedding": 0.5}]
    runs = [run_with(tmp_path / "parts", metrics), run_with(tmp_path / "other", other)]

    metric_image(runs, "norms", "png")

    (axes,) = figures[0].axes
    drawn = lines_of(axes)[::2]  # beside their means
    assert drawn == [
        ([2, 4], [0.0, 0.0]),
        ([2, 4], [4.0, 8.0]),
        ([2, 4], [20.0, 40.0]),
        ([3], [0.5]),
    ]
    assert (axes.get_ylabel(), axes.get_yscale()) == ("norms", "log")
    labels = ["parts/blocks.0", "parts/blocks.2", "parts/blocks.10", "other/embedding"]
    assert texts_of(figures[0].legends[0].get_texts()) == labels
    with pytest.raises(
        ValueError, match=r"no metric 'norm' \(did you mean 'norms'\?\): it has loss"
    ):
        metric_image(runs[:1], "norm", "png")


@pytest.mark.parametrize("name", only(["default preset"], ["gpt2", "default preset"]))
def test_the_drawn_weights_are_those_of_the_forward_pass(name):
    """Each layer's weighted values, projected, are what its attention gave in the forward pass."""
    config = CONFIGS[name]
    model = loud(abstract_model(config), size=0.5)
    paths = [f"blocks.{layer}.attention" for layer in range(len(model.blocks))]
    inside = jgpt.capture(model, *paths, *(f"{path}_norm" for path in paths))

    def found_and_expected(tokens):
        maps = model.attention_weights(tokens)
        captured = inside(tokens)
        found = []
        for block, path, weights in zip(model.blocks, paths, maps, strict=True):
            attention = block.attention
            values = attention.value(captured[f"{path}_norm"])
            values = split_heads(values, attention.num_kv_heads)
            group = attention.num_heads // attention.num_kv_heads
            values = jnp.repeat(values, group, axis=1)
            found.append(attention.projection(merge_heads(weights @ values)))
        return maps, found, [captured[path] for path in paths]

    maps, found, expected = compiled(found_and_expected, tokens_of(1))

    assert maps.shape == (len(model.blocks), 2, config.num_heads, 11, 11)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-6)
    for found_output, output in zip(found, expected, strict=True):
        tolerance = 1e-6 * abs(output).max()
        np.testing.assert_allclose(found_output, output, rtol=0, atol=tolerance)
