"""The changes of the written-out training that the documents show: each is applied and trained."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.runs.directory import RunDirectory
from tests.runs.test_written_out import SMALL, TEMPLATE, module_of

CHANGES = Path(__file__).parents[2] / "docs/changes"
OWN_MODEL = {"masked": "bidirectional", "prefix": "prefix_model"}
"""The changes that need one of the model, too."""
FEW_SAVES = {
    **SMALL,
    "EVAL_INTERVAL = 250": "EVAL_INTERVAL = 20",
    '"num_layers": 4': '"num_layers": 1',
}

pytestmark = pytest.mark.slow


@pytest.fixture
def changed(tmp_path, monkeypatch, poem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(poem, "poem.txt")

    def apply(name, edits=()):
        shutil.copy(TEMPLATE, "train.py")
        shutil.copy(TEMPLATE.with_name("new_gpt.py.txt"), "my_gpt.py")
        for change in filter(None, (name, OWN_MODEL.get(name))):
            subprocess.run(["git", "apply", CHANGES / f"{change}.diff"], check=True)
        text = Path("train.py").read_text()
        for old, new in {**FEW_SAVES, **dict(edits)}.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path("train.py").write_text(text)
        sys.modules.pop("my_gpt", None)  # of another test
        return module_of("train.py")

    return apply


def lines_of(module):
    return RunDirectory.open(module.OUT).metrics()


def test_every_change_is_tried_here():
    tried = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tried |= {*OWN_MODEL, *OWN_MODEL.values()}
    assert {path.stem for path in CHANGES.glob("*.diff")} <= tried


def test_mixture(changed):
    Path("second.txt").write_text("0123456789" * 40)
    module = changed("mixture", {"SHARE = 0.3": "SHARE = 0.5"})
    module.main("poem.txt")

    tokenizer = jgpt.load(module.OUT).tokenizer
    first = tokenizer.encode(Path("poem.txt").read_text())
    border = int(len(first) * 0.9)
    tokens = np.concatenate([first[:border], tokenizer.encode("0123456789" * 40)])
    digits = set(tokenizer.encode("0123456789").tolist())
    kinds = []
    for step in range(20):
        windows = module.draw_windows(
            jnp.asarray(tokens), jax.random.key(0), jnp.asarray(step), 11, border
        )
        kinds += [len(digits & set(window)) > 0 for window in windows.tolist()]
        assert all(
            len(set(window) - digits) in (0, len(set(window))) for window in windows.tolist()
        )
    assert 0.3 < np.mean(kinds) < 0.7
    assert len(lines_of(module)) == 7


def test_weights(changed):
    module = changed("weights", {"FULL_CONTEXT = 16": "FULL_CONTEXT = 1"})
    module.main("poem.txt")
    all_alike = [line["loss"] for line in lines_of(module)]
    shutil.rmtree(module.OUT)
    module = changed("weights")
    module.main("poem.txt")
    weighted = [line["loss"] for line in lines_of(module)]
    shutil.rmtree(module.OUT)
    module = changed(None)
    module.main("poem.txt")

    np.testing.assert_allclose(all_alike, [line["loss"] for line in lines_of(module)], rtol=1e-5)
    assert abs(weighted[-1] - all_alike[-1]) > 1e-4


def test_statistics(changed):
    module = changed("statistics")
    module.main("poem.txt")
    *_, last = lines_of(module)
    assert last["gradient_norm"] > 0.1
    assert 0 < last["update_norm"] < last["gradient_norm"]


def test_layer_norms(changed):
    module = changed("layer_norms")
    module.main("poem.txt")
    norms = {name: value for name, value in lines_of(module)[-1].items() if "/" in name}
    assert norms["gradients/blocks.0.attention.query.kernel"] > 0
    assert len(norms) == len(
        jax.tree.leaves(jgpt.init_state(jgpt.load(module.OUT).config)["model"])
    )


def test_batch_ramp(changed):
    module = changed("batch_ramp", {"{0: 3, 100: 6, 500: BATCH_SIZE}": "{0: 2, 3: 4}"})
    sizes = []
    inner = module.train_step

    def counted(graph, batch_size, *rest):
        sizes.append(batch_size)
        return inner(graph, batch_size, *rest)

    module.train_step = counted
    module.main("poem.txt")
    assert sizes == [2, 2, 2, 4, 4, 4, 4]


def test_noise_scale(changed):
    module = changed("noise_scale", {"BATCH_SIZE = 5": "BATCH_SIZE = 4"})
    module.main("poem.txt")
    lines = lines_of(module)
    assert sum(line["noise"] for line in lines) > 0
    assert sum(line["signal"] for line in lines) > 0


@pytest.mark.parametrize("name", sorted(OWN_MODEL))
def test_an_objective_of_another_kind_with_its_own_evaluation(changed, name):
    module = changed(name, {"= 7": "= 60", "= 20": "= 4", '"num_layers": 1': '"num_layers": 2'})
    module.main("poem.txt")
    lines = lines_of(module)
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert losses[-1] < losses[0]


def test_batch_norm(changed):
    module = changed("batch_norm")
    state = module.main("poem.txt")
    means = state["model"]["batch_norm"]["mean"].get_value()
    assert np.abs(means).max() > 1e-4  # it has followed the activations

    run = jgpt.load(module.OUT, which="last", model=f"{Path('train.py').resolve()}:GPT")
    model: Any = run.model
    np.testing.assert_array_equal(model.batch_norm.mean.get_value(), means)
    *_, last = lines_of(module)
    assert abs(jgpt.evaluate(run).loss - last["validation_loss"]) < 0.01
    assert len(run.generate(max_new_tokens=4)) == 4


def test_mean_teacher(changed):
    module = changed("mean_teacher", {'"embed_dim": 24': '"embed_dim": 24, "dropout": 0.1'})
    state = module.main("poem.txt")
    loaded: Any = jgpt.load(module.OUT, which="last").model
    average = state["average"]["token_embedding"]["embedding"].get_value()
    student = state["model"]["token_embedding"]["embedding"].get_value()
    np.testing.assert_array_equal(loaded.token_embedding.embedding.get_value(), average)
    assert np.abs(average - student).max() > 1e-5


def test_pairs(changed):
    module = changed(None, {"= 7": "= 30"})
    module.main("poem.txt")
    Path(module.OUT).rename("runs/base")
    pairs = [{"prompt": "a", "chosen": "bab", "rejected": "aaa"}] * 3
    text = Path("poem.txt").read_text()
    letters = sorted(set(text) - {"\n"})[:3]
    table = str.maketrans("ab", "".join(letters[:2]))
    lines = [json.dumps({k: v.translate(table) for k, v in pair.items()}) for pair in pairs]
    Path("pairs.jsonl").write_text("\n".join(lines))
    module = changed("pairs")
    module.main("poem.txt")

    losses = [line["loss"] for line in lines_of(module)]
    assert math.isclose(losses[0], math.log(2), rel_tol=1e-5)  # the model is the reference
    assert losses[-1] < losses[0]


def test_tuned(changed):
    pytest.importorskip("optuna")
    module = changed("tuned", {"TRIALS = 20": "TRIALS = 2"})
    study = module.main("poem.txt")
    assert len(study.trials) == 2
    assert len(RunDirectory.open(f"{module.OUT}-0").metrics()) == 7
    assert study.best_value > 0
