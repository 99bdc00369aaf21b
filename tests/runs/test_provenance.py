"""A run knows the text that it was trained on, and says which one it was."""

import dataclasses
import hashlib
import shutil

import jax
import pytest

from jgpt import DataConfig, ModelConfig, TrainConfig, fit, hardware
from jgpt.data import corpus
from jgpt.data.batches import windows_by_number
from jgpt.fitting.evaluate import evaluate
from jgpt.fitting.fit import plan as plan_of_run
from jgpt.runs.directory import RunDirectory
from jgpt.training import evaluation, memory
from jgpt.training.memory import TrainingMemory
from tests.runs.harness import BIGRAM, Heard, with_changes


def use_corpus(patched, text: str, python: str) -> None:
    """The Python reference, as another version of Python has it."""
    patched.setattr(corpus, "python_reference", lambda: text)
    patched.setattr(corpus.platform, "python_version", lambda: python)


@pytest.fixture(scope="module")
def begun(small_run, poem, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("python") / "run")
    data = DataConfig(data=("pydocs",))
    config = with_changes(small_run, **BIGRAM, dataset=data, out=out, steps=4)
    with pytest.MonkeyPatch.context() as patched:
        use_corpus(patched, poem.read_text(), "3.11.7")
        fit(config)
    return config


@pytest.fixture
def of_python_3_11(begun, poem, tmp_path, monkeypatch):
    """A run on the text of Python 3.11, in a copy."""
    use_corpus(monkeypatch, poem.read_text(), "3.11.7")
    return dataclasses.replace(begun, out=str(shutil.copytree(begun.out, tmp_path / "run")))


def test_provenance_names_the_text_and_the_corpus_version(of_python_3_11, poem):
    (line,) = RunDirectory.open(of_python_3_11.out).provenance()
    assert line["corpora"] == {"pydocs": "Python 3.11.7"}
    assert line["text_sha256"] == hashlib.sha256(poem.read_bytes()).hexdigest()
    assert line["corpus_tokens"] == len(poem.read_text())  # of characters, both splits
    assert (line["step"], line["seed"]) == (0, of_python_3_11.seed)
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["corpus_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_python_s_corpus_is_named_before_it_is_encoded(
    of_python_3_11, poem, monkeypatch, goes_on
):
    """It has characters that the run's tokenizer does not know."""
    use_corpus(monkeypatch, "$" + poem.read_text(), "3.13.0")
    longer = dataclasses.replace(of_python_3_11, steps=8)
    changed = r"pydocs was that of Python 3\.11\.7, here it is that of Python 3\.13\.0"

    with pytest.raises(ValueError, match=changed) as error:
        fit(longer, resume=True) if goes_on else evaluate(of_python_3_11.out)
    assert "restore the text or use that Python, or train a new run" in str(error.value)


def test_a_changed_text_of_the_same_python_is_to_be_restored(of_python_3_11, monkeypatch):
    use_corpus(monkeypatch, "another text", "3.11.7")
    with pytest.raises(ValueError, match="restore the text, or train a new run"):
        evaluate(of_python_3_11.out)


def test_the_same_text_from_another_python_is_the_same(of_python_3_11, poem, monkeypatch):
    use_corpus(monkeypatch, poem.read_text(), "3.13.0")
    assert evaluate(of_python_3_11.out).loss > 0


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
