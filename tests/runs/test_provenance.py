"""A run knows the text that it was trained on, and says which one it was."""

import dataclasses
from pathlib import Path

import jax
import pytest

from jgpt import DataConfig, evaluate, fit
from jgpt.data import sources
from jgpt.data.dataset import load_dataset
from jgpt.runs.directory import RunDirectory
from tests.runs.harness import BIGRAM, with_changes


def use_corpus(patched, text: str, module: Path) -> None:
    """The Python reference, as another version of Python has it."""
    module.write_text(text)
    patched.setattr(sources, "python_reference", lambda: text)
    patched.setattr(sources, "REFERENCE", module)


def test_provenance_names_the_tokens(trained, poem):
    (line,) = RunDirectory.open(trained.path).provenance()
    assert line["tokens_sha256"] == load_dataset(trained.config.dataset, 7).digest
    assert line["tokens"] == len(poem.read_text())  # of characters, both splits
    assert (line["step"], line["seed"]) == (0, trained.config.seed)
    assert line["versions"]["jax"] == jax.__version__
    assert line["devices"] == ["cpu"] * jax.device_count()
    assert len(line["tokens_sha256"]) == len(line["tokenizer_sha256"]) == 64
    assert line["command"]
    assert (line["mesh"], line["micro_batches"], line["attention_kernel"]) == (None, 1, "xla")


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
