"""A run knows the text that it was trained on, and says which one it was."""

import jax

from jgpt.data.dataset import load_dataset
from jgpt.runs.directory import RunDirectory


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
