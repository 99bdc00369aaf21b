"""The training that `jgpt new --training` writes, which is that of `fit`, bitwise."""

import dataclasses
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.nn.models import weights_of
from jgpt.runs.checkpoints import Checkpoints
from jgpt.runs.directory import RunDirectory
from tests.commands import jgpt as command
from tests.commands import refused

TEMPLATE = Path(jgpt.__file__).parent / "cli/commands/new_training.py.txt"
SMALL = {
    "STEPS = 2000": "STEPS = 7",
    "BATCH_SIZE = 12": "BATCH_SIZE = 5",
    "EVAL_INTERVAL = 250": "EVAL_INTERVAL = 3",
    "WARMUP_STEPS = 100": "WARMUP_STEPS = 2",
    '"block_size": 64': '"block_size": 11',
    '"num_layers": 4': '"num_layers": 2',
    '"num_heads": 4': '"num_heads": 3',
    '"embed_dim": 128': '"embed_dim": 24',
}
"""Edits of the file, as a user makes them."""


@pytest.fixture
def training(tmp_path, monkeypatch):
    """Write the file with edits, and return it as a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(edits):
        text = TEMPLATE.read_text()
        for old, new in edits.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "train.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("train", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return write


def last_weights(run):
    """The weights of a run's last step, by path."""
    directory = RunDirectory.open(run.directory)
    with Checkpoints(directory, run.config, read_only=True) as checkpoints:
        weights = checkpoints.restore(run.config).weights
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(weights)}


def require_equal(module, run, losses, weights):
    np.testing.assert_array_equal(np.array(losses), run.metrics["loss"][-len(losses) :])
    expected = last_weights(run)
    found = jax.tree.leaves_with_path(weights_of(jgpt.load(module.OUT).model))
    assert len(found) == len(expected) > 10
    for path, leaf in found:
        np.testing.assert_array_equal(leaf, expected[jax.tree_util.keystr(path)])


@pytest.mark.slow
def test_the_written_training_equals_fit_bitwise(training, tmp_path, poem, capsys):
    module = training(SMALL)
    config = jgpt.TrainConfig(
        model=jgpt.ModelConfig(block_size=11, num_layers=2, num_heads=3, embed_dim=24),
        optimizer=jgpt.OptimizerConfig(warmup_steps=2),
        dataset=jgpt.DataConfig((str(poem),)),
        steps=7,
        batch_size=5,
        eval_interval=3,
        sample_tokens=0,
        out=str(tmp_path / "fitted"),
    )

    losses, weights = module.main(str(poem))
    run = jgpt.fit(config, progress=None)

    require_equal(module, run, losses, weights)
    # its last tenth in windows that follow each other
    tokens = run.tokenizer.encode(poem.read_text())
    held_out = tokens[int(len(tokens) * 0.9) :]
    starts = range(0, len(held_out) - 11, 11)
    windows = jnp.stack([jnp.asarray(held_out[start : start + 12]) for start in starts])
    model, _, saved = jgpt.load(module.OUT)
    same_place = {"name": saved.name, "out": saved.out, "sample_tokens": saved.sample_tokens}
    assert saved == dataclasses.replace(run.config, **same_place)
    mean = jgpt.cross_entropy(model(windows[:, :-1]), windows[:, 1:])
    assert f"validation {mean:.3f}\nsaved" in capsys.readouterr().out
    other = dataclasses.replace(config, seed=3, out=str(tmp_path / "other"))
    assert jgpt.fit(other, progress=None).metrics["loss"][-1] != losses[-1]


@pytest.mark.slow
def test_the_default_training_equals_fit_bitwise(training, tmp_path):
    """The first steps of the default config, whose schedule goes on to step 2000."""
    module = training({"range(STEPS)": "range(4)", "EVAL_INTERVAL == 0": "4 == 0"})
    optimizer = jgpt.OptimizerConfig(schedule_steps=2000)
    config = jgpt.TrainConfig(optimizer=optimizer, steps=4, out=str(tmp_path / "fitted"))

    losses, weights = module.main()
    run = jgpt.fit(config, progress=None)

    require_equal(module, run, losses, weights)


@pytest.mark.slow
def test_the_written_training_takes_the_written_model(training, tmp_path, poem, capsys):
    shutil.copy(TEMPLATE.with_name("new_gpt.py.txt"), tmp_path / "my_gpt.py")
    ours = "from jgpt import GPT, ModelConfig"
    module = training(
        {**SMALL, f"\n{ours}": "\nfrom my_gpt import GPT, Config as ModelConfig", "= 7": "= 60"}
    )
    losses, _ = module.main(str(poem))
    sys.modules.pop("my_gpt")

    assert losses[-1] < losses[0] - 0.3
    assert "validation" in capsys.readouterr().out
    sampled = command("sample", module.OUT, "--model", "my_gpt.py:GPT", cwd=tmp_path)
    assert sampled.code == 0, sampled.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read as UTF-8 text: "),
        (b"caf\xe9", "can't be read as UTF-8 text: "),
        (b"", "is empty: give a text"),
        (b"abc", "is too short: its last tenth has no 12 characters"),
    ],
)
def test_a_text_that_can_t_be_trained_on_ends_the_training_in_a_line(
    training, tmp_path, content, message
):
    module = training(SMALL)
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(SystemExit, match=rf"^{re.escape(str(file))} {message}"):
        module.main(str(file))

    assert not Path(module.OUT).exists()


@pytest.mark.slow
def test_the_command_writes_a_training_that_runs(tmp_path, poem):
    done = command("new", "--training", "train.py", cwd=tmp_path)
    assert done.code == 0
    assert done.stdout == "wrote train.py; next: python train.py\n"
    assert (tmp_path / "train.py").read_bytes() == TEMPLATE.read_bytes()
    line = refused("new", "train.py", "--training", cwd=tmp_path)
    assert "train.py already exists: choose another name" in line
