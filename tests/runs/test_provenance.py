"""A run knows the text that it was trained on, and says which one it was."""

import dataclasses
from pathlib import Path

import jax
import pytest

from jgpt import DataConfig, ModelConfig, TrainConfig, fit, hardware
from jgpt.data import sources
from jgpt.data.batches import windows_by_number
from jgpt.data.dataset import load_dataset
from jgpt.fitting.evaluate import evaluate
from jgpt.fitting.fit import plan as plan_of_run
from jgpt.runs.directory import RunDirectory
from jgpt.training import evaluation, memory
from jgpt.training.memory import TrainingMemory
from tests.runs.harness import BIGRAM, Heard, with_changes


def use_corpus(patched, text: str, module: Path) -> None:
    """The Python reference, as another version of Python has it."""
    module.write_text(text)
    patched.setattr(sources, "python_reference", lambda: text)
    patched.setattr(sources, "reference_file", lambda: module)


def test_provenance_names_the_tokens(trained, poem):
    (line,) = RunDirectory.open(trained.directory).provenance()
    assert line["tokens_sha256"] == load_dataset(trained.config.dataset, 7).digest
    assert line["tokens"] == len(poem.read_text())  # of characters, both splits
    assert (line["step"], line["seed"]) == (0, trained.config.seed)
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["tokens_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]


def test_another_python_s_corpus_is_another_text(small_run, poem, tmp_path, monkeypatch):
    use_corpus(monkeypatch, poem.read_text(), tmp_path / "3.11.py")
    data = DataConfig(data=("pydocs",))
    out = str(tmp_path / "run")
    config = with_changes(small_run, **BIGRAM, dataset=data, out=out, steps=4)
    fit(config)
    assert evaluate(out).loss > 0

    use_corpus(monkeypatch, poem.read_text() * 2, tmp_path / "3.13.py")
    another = (
        r"has other tokens than the run was trained on .*; pydocs is another text in each vers"
    )
    with pytest.raises(ValueError, match=another):
        evaluate(out)
    with pytest.raises(ValueError, match=another):
        fit(dataclasses.replace(config, steps=8), resume=True)


def micro_batches_in(run: RunDirectory) -> list[int]:
    return [line["micro_batches"] for line in run.provenance()]


def test_micro_batches_that_a_device_s_memory_decides_are_recorded(poem, tmp_path, monkeypatch):
    """Of 12 rows a device holds 6 at once, and the one that goes on 3: evaluations are as large."""
    out = tmp_path / "run"
    evaluated = []

    def memory_of_rows(config):
        return TrainingMemory(0, config.batch_size // config.micro_batches)

    def note_rows(tokens, numbers, block_size):
        evaluated.append(numbers.shape[1])
        return windows_by_number(tokens, numbers, block_size)

    monkeypatch.setattr(memory, "training_memory", memory_of_rows)
    monkeypatch.setattr(hardware, "host_memory", lambda: 2 * 6)
    monkeypatch.setattr(evaluation, "windows_by_number", note_rows)
    config = TrainConfig(
        model=ModelConfig(architecture="bigram", block_size=7, dropout=0.1),
        dataset=DataConfig(data=(str(poem),)),
        out=str(out),
        steps=2,
        batch_size=12,
        micro_batches="auto",
        sample_tokens=0,
    )

    fit(config)

    run = RunDirectory.open(out)
    assert run.config().micro_batches == "auto"
    assert micro_batches_in(run) == [2]

    monkeypatch.setattr(hardware, "host_memory", lambda: 2 * 3)
    progress = Heard()
    fit(dataclasses.replace(config, steps=3), resume=True, progress=progress)

    assert micro_batches_in(run) == [2, 4]
    about_micro_batches = [line for line in progress.messages if "micro-batches" in line]
    assert about_micro_batches == [
        "4 micro-batches fit here, 2 were used before: gradients differ in rounding, and dropout "
        "in its random numbers"
    ]

    evaluate(out)
    (run.path / "provenance.jsonl").unlink()  # then one row at a time, which fits anywhere
    evaluate(out)

    assert evaluated[::2] == [6, 3, 3, 1]  # they are read for the exact loss and the estimate
    planned = plan_of_run(dataclasses.replace(config, steps=4), resume=True)
    assert planned.config.micro_batches == 4
