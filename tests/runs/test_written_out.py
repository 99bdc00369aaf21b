"""The training that `jgpt new --training` writes, which is that of `fit`, bitwise."""

import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.nn.models import weights_of
from jgpt.runs.directory import RunDirectory
from tests.commands import jgpt as command

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


def module_of(path):
    spec: Any = importlib.util.spec_from_file_location("train", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module


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
        return module_of(path)

    return write


def weights_in(path):
    weights = weights_of(jgpt.load(path, which="last").model)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(weights)}


def losses_in(path):
    return [line["loss"] for line in RunDirectory.open(path).metrics()]


def require_equal(path, other):
    assert losses_in(path) == losses_in(other)
    expected = weights_in(other)
    found = weights_in(path)
    assert len(found) == len(expected) > 10
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, expected[name])


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

    module.main(str(poem))
    run = jgpt.fit(config, progress=None)

    require_equal(module.OUT, run.path)
    # its last tenth in windows that follow each other
    tokens = run.tokenizer.encode(poem.read_text())
    held_out = tokens[int(len(tokens) * 0.9) :]
    starts = range(0, len(held_out) - 11, 11)
    windows = jnp.stack([jnp.asarray(held_out[start : start + 12]) for start in starts])
    model, _, saved = jgpt.load(module.OUT, which="last")
    same_place = {"name": saved.name, "out": saved.out, "sample_tokens": saved.sample_tokens}
    assert saved == dataclasses.replace(run.config, **same_place)
    mean = jgpt.cross_entropy(model(windows[:, :-1]), windows[:, 1:])
    assert f"validation {mean:.3f}\nsaved" in capsys.readouterr().out
    assert jgpt.evaluate(module.OUT).tokens == len(held_out) - 1  # the same text, by its digest
    other = dataclasses.replace(config, seed=3, out=str(tmp_path / "other"))
    assert losses_in(jgpt.fit(other, progress=None).path)[-1] != losses_in(run.path)[-1]


@pytest.mark.slow
def test_the_default_training_equals_fit_bitwise(training, tmp_path):
    """The first steps of the default config, whose schedule goes on to step 2000."""
    module = training(
        {"while step < STEPS": "while step < 4", "step % EVAL_INTERVAL == 0": "step == 4"}
    )
    optimizer = jgpt.OptimizerConfig(schedule_steps=2000)
    config = jgpt.TrainConfig(optimizer=optimizer, steps=4, out=str(tmp_path / "fitted"))

    module.main()
    run = jgpt.fit(config, progress=None)

    require_equal(module.OUT, run.path)


@pytest.mark.slow
def test_the_written_training_takes_the_written_model(training, tmp_path, poem, capsys):
    shutil.copy(TEMPLATE.with_name("new_gpt.py.txt"), tmp_path / "my_gpt.py")
    ours = "from jgpt import GPT, ModelConfig"
    module = training(
        {
            **SMALL,
            f"\n{ours}": "\nfrom my_gpt import GPT, Config as ModelConfig",
            "= 7": "= 60",
            "= 3": "= 30",
        }
    )
    module.main(str(poem))
    sys.modules.pop("my_gpt")

    losses = losses_in(module.OUT)
    assert losses[-1] < losses[0] - 0.3
    named = capsys.readouterr().out.rpartition("next: jgpt ")[2].split()
    sampled = command(*named, cwd=tmp_path)
    assert sampled.code == 0, sampled.stderr


def start(folder, *options):
    return subprocess.Popen(
        [sys.executable, "train.py", "poem.txt", *options],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_written_training_that_is_killed_and_stopped_goes_on_bit_for_bit(
    training, tmp_path, poem
):
    module = training({**SMALL, "= 7": "= 400", "= 3": "= 40"})
    shutil.copy(poem, tmp_path / "poem.txt")
    module.main("poem.txt")
    straight = Path(module.OUT).rename(tmp_path / "straight")

    for steps, number in ((25, signal.SIGKILL), (90, signal.SIGINT), (200, signal.SIGKILL)):
        process = start(tmp_path, "--resume")
        while len(lines_of(module.OUT)) < steps:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        _, error = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 1
            said = r"^stopped at step \d+; next: the same command with --resume"
            assert re.search(said, error, re.M)
            assert RunDirectory.open(module.OUT).checkpoint_steps()[-1] == len(lines_of(module.OUT))
    resumed = start(tmp_path, "--resume")
    _, error = resumed.communicate()
    assert resumed.returncode == 0, error

    require_equal(module.OUT, straight)


def lines_of(path):
    file = Path(path) / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


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
