"""A run knows the text that it was trained on, and says which one it was."""

import dataclasses
import hashlib

import pytest

from jgpt import DataConfig, fit
from jgpt.data import corpus
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import evaluate


@pytest.fixture
def of_python_3_11(small_run, poem, tmp_path, monkeypatch):
    """A run on the Python reference, as another version of Python has it."""
    text = poem.read_text()
    monkeypatch.setattr(corpus, "python_reference", lambda: text)
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "3.11.7")
    config = dataclasses.replace(
        small_run,
        dataset=DataConfig(data=("pydocs",)),
        out=str(tmp_path / "run"),
        steps=4,
        sample_tokens=0,
    )
    fit(config)
    return config


def test_provenance_names_the_text_and_the_corpus_version(of_python_3_11, poem):
    (line,) = RunDirectory.open(of_python_3_11.out).provenance()
    assert line["corpora"] == {"pydocs": "Python 3.11.7"}
    assert line["text_sha256"] == hashlib.sha256(poem.read_bytes()).hexdigest()
    assert line["corpus_tokens"] == len(poem.read_text())  # of characters, both splits


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_python_s_corpus_is_named_before_it_is_encoded(
    of_python_3_11, poem, monkeypatch, goes_on
):
    """It has characters that the run's tokenizer does not know."""
    text = "$" + poem.read_text()
    monkeypatch.setattr(corpus, "python_reference", lambda: text)
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "3.13.0")
    longer = dataclasses.replace(of_python_3_11, steps=8)
    changed = r"pydocs was that of Python 3\.11\.7, here it is that of Python 3\.13\.0"
    with pytest.raises(ValueError, match=changed) as error:
        fit(longer, resume=True) if goes_on else evaluate(of_python_3_11.out)
    assert "restore the text or use that Python, or train a new run" in str(error.value)


def test_a_changed_text_of_the_same_python_is_to_be_restored(of_python_3_11, monkeypatch):
    monkeypatch.setattr(corpus, "python_reference", lambda: "another text")
    with pytest.raises(ValueError, match="restore the text, or train a new run"):
        evaluate(of_python_3_11.out)


def test_the_same_text_from_another_python_is_the_same(of_python_3_11, monkeypatch):
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "3.13.0")
    assert evaluate(of_python_3_11.out).loss > 0


def test_a_run_from_before_the_text_was_recorded_compares_its_tokens(of_python_3_11, monkeypatch):
    run = RunDirectory.open(of_python_3_11.out)
    path = run.path / "provenance.jsonl"
    path.write_text(path.read_text().replace("text_sha256", "unknown"))
    assert evaluate(run.path).loss > 0
    text = corpus.python_reference()[::-1]
    monkeypatch.setattr(corpus, "python_reference", lambda: text)
    with pytest.raises(ValueError, match="SHA-256 of its tokens"):
        evaluate(run.path)
