"""The seeds of a preset are compared with runs of that preset on that text, and with no others."""

import dataclasses
import json

import pytest

from jgpt import CharTokenizer, TrainConfig, preset
from jgpt.config import from_json
from jgpt.runs.bands import BANDS, Band, band_of
from jgpt.runs.directory import RunDirectory
from jgpt.runs.resume import fields_of
from jgpt.user_code import with_code

MEASURED = json.loads(BANDS.read_text())["presets"]
TINY = MEASURED["tiny"]


def run_of(folder, config: TrainConfig, digest: str) -> RunDirectory:
    model = dataclasses.replace(config.model, vocab_size=65)
    config = dataclasses.replace(config, model=model)
    run = RunDirectory.create(folder / "run", config, CharTokenizer("ab"))
    run.append_provenance({"step": 0, "corpus_sha256": digest})
    return run


def tiny(**changes) -> TrainConfig:
    data = dataclasses.replace(preset("tiny").dataset, data=("input.txt",))
    return dataclasses.replace(preset("tiny"), **{"dataset": data, **changes})


BETAS = dataclasses.replace(preset("tiny").optimizer, beta1=0.8)


@pytest.mark.parametrize(
    ("config", "digest", "is_compared"),
    [
        (tiny(seed=7, out="elsewhere", name="mine"), TINY["tokens_sha256"], True),
        (tiny(eval_interval=7), TINY["tokens_sha256"], True),
        (tiny(eval_tokens=None), TINY["tokens_sha256"], True),
        (tiny(eval_tokens=2000), TINY["tokens_sha256"], False),
        (tiny(steps=201), TINY["tokens_sha256"], False),
        (tiny(batch_size=9), TINY["tokens_sha256"], False),
        (tiny(optimizer=BETAS), TINY["tokens_sha256"], False),
        (tiny(), "0" * 64, False),
        (with_code(tiny(), model=lambda config, rngs: None), TINY["tokens_sha256"], False),
    ],
)
def test_another_seed_on_the_same_text_is_compared_and_any_other_run_is_not(
    config, digest, is_compared, tmp_path
):
    band = band_of(run_of(tmp_path, config, digest))
    found = band and (band.name, list(band.best))
    assert found == (("tiny", TINY["best"]) if is_compared else None)


def test_what_has_no_record_of_its_text_is_not_compared(tmp_path):
    assert band_of(RunDirectory(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (1.4976, "within"),
        (1.50849, "within"),
        (1.4974, "0.001 below"),
        (1.5086, "0.001 above"),
        (2.0, "0.492 above"),
    ],
)
def test_a_loss_is_placed(loss, place):
    band = Band("modern", TrainConfig(), "", (1.502, 1.508, 1.4981), {})
    assert band.place(loss) == f"{place} the 3 seeds of modern, 1.498 to 1.508"


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_is_the_preset_as_it_is(name):
    """If not: python benchmarks/bands.py. Evaluations may have been more frequent, but also then of
    all targets, which `auto` is on this text."""
    measured = json.loads(json.dumps(MEASURED[name]))
    expected = json.loads(json.dumps(dict(fields_of(preset(name)))))
    # read as a run's config is: a field that is newer than the measurement has its default
    read = from_json(TrainConfig, json.dumps(measured["config"]))
    config = json.loads(json.dumps(dict(fields_of(read))))
    may_differ = {"model.vocab_size", "seed", "out", "dataset.data", "eval_interval"}
    assert (config.pop("eval_tokens"), expected["eval_tokens"]) == (None, "auto")
    assert expected["eval_interval"] % config["eval_interval"] == 0
    assert {key: config[key] for key in config if key not in may_differ} == {
        key: expected[key] for key in expected if key not in may_differ | {"eval_tokens"}
    }
    best, curves = measured["best"], measured["curves"]
    assert len(best) == 5
    assert curves["validation_loss"]["step"][-1] == config["steps"]
    assert curves["loss"]["step"][0] == 1
    assert min(curves["validation_loss"]["low"]) == min(best)
    for curve in curves.values():
        rows = zip(*(curve[key] for key in ("low", "median", "high")), strict=True)
        assert all(low <= median <= high for low, median, high in rows)
