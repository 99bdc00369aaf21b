"""llama.cpp continues a text from a GGUF file as jgpt continues it."""
# ruff: noqa: RUF001

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import tokenizers as tk
from flax import nnx

import jgpt
from jgpt.interop.gguf import save_gguf
from jgpt.nn.models import abstract_model
from jgpt.presets import PRESETS
from tests.models import config_of, loud

needs_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="there is no xllamacpp"
)
TEXT = "First Citizen:\nBefore we proceed any further, hear me speak. 12 'tis 3456!\n" * 3
LETTERS = jgpt.CharTokenizer("".join(sorted("\n 12EHRaehrty'°ß‘’“”…—日本")))
CHARACTERS = jgpt.CharTokenizer("".join(map(chr, (10, *range(32, 97)))) + "\x7f")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_pairs(words: str | None = None) -> jgpt.BPETokenizer:
    """Byte-pairs; with a pattern, as in Llama 3 or Qwen3, and with special tokens."""
    trained = jgpt.BPETokenizer.train([TEXT.lower()], 300)
    if words is None:
        return trained
    values = json.loads(trained.to_hf().to_str())
    values["model"]["ignore_merges"] = words == LLAMA3
    backend = tk.Tokenizer.from_str(json.dumps(values))
    backend.pre_tokenizer = tk.pre_tokenizers.Sequence(
        [
            tk.pre_tokenizers.Split(tk.Regex(words), "isolated"),
            tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return jgpt.BPETokenizer(backend, vocab_size=backend.get_vocab_size() + 2)


def preset_model(name: str, tokenizer) -> jgpt.GPT:
    config = PRESETS[name][1].model
    # the head's bias fits into the last norm's if there are at least as many features
    sizes = {"num_layers": 2, "embed_dim": 96, "block_size": 48}
    sizes |= {"vocab_size": tokenizer.vocab_size, "dropout": 0.0, "dtype": "float32"}
    return loud(abstract_model(dataclasses.replace(config, **sizes)), size=0.2)


def llama(**changes) -> jgpt.ModelConfig:
    return config_of("qwen3", qk_norm=False, qk_norm_scale=False, **changes)


def qwen3(**changes) -> jgpt.ModelConfig:
    """With an epsilon of QK-norm of its own, which is written as a factor of queries and keys."""
    return config_of("qwen3", norm_epsilon=1e-3, **changes)


class Case(NamedTuple):
    """A model, and the text that it continues."""

    model: jgpt.GPT
    tokenizer: Any
    prompt: str


def cases() -> dict[str, Case]:
    """Each architecture, and each way to split a text."""
    asked = "HE 12 "
    cases = {
        "lecture": Case(preset_model("lecture", CHARACTERS), CHARACTERS, asked),
        "modern": Case(preset_model("modern", CHARACTERS), CHARACTERS, asked),
        "letters": Case(preset_model("nanogpt-cpu", LETTERS), LETTERS, asked),
        "bytes": Case(
            preset_model("nanogpt-cpu", jgpt.ByteTokenizer()), jgpt.ByteTokenizer(), asked
        ),
        "gpt2": Case(preset_model("tiny", byte_pairs()), byte_pairs(), "hear 12 'tis"),
    }
    tied = dataclasses.replace(cases["modern"].model.config, tie_embeddings=True)
    cases["tied"] = Case(loud(abstract_model(tied), size=0.2), CHARACTERS, asked)
    one_by_one = LLAMA3.replace("{1,3}", "")
    for name, words, config in (("llama", LLAMA3, llama), ("qwen3", one_by_one, qwen3)):
        tokenizer = byte_pairs(words)
        model = abstract_model(config(vocab_size=tokenizer.vocab_size, block_size=64))
        cases[name] = Case(loud(model, size=0.3), tokenizer, "hear 12 'tis")
    return cases


def of_llamacpp(files: dict[str, Path], cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """What llama.cpp answers from each file, up to the end of the block."""
    asked = []
    for name, file in files.items():
        model, tokenizer, prompt = cases[name]
        new = model.block_size - len(_known(tokenizer, prompt))
        asked.append({"file": str(file), "prompt": prompt, "new": new})
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.llamacpp"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(files, json.loads(done.stdout), strict=True))


def _known(tokenizer: Any, text: str) -> Any:
    """The tokens of a text, without the characters that a vocabulary lacks."""
    if isinstance(tokenizer, jgpt.CharTokenizer):
        text = "".join(character for character in text if character in tokenizer.characters)
    return tokenizer.encode(text)


def assert_ours(answer: dict[str, Any], case: Case) -> None:
    """Equal numbers of tokens, log probabilities and greedy texts."""
    model, tokenizer, prompt = case
    tokens = _known(tokenizer, prompt).tolist()
    count = len(tokens)
    assert answer["tokens"] == count

    @jax.jit
    def next_logs(padded, count):
        return jax.nn.log_softmax(model(padded))[0, count - 1]

    def logs_after(tokens):
        padded = np.zeros((1, model.block_size), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(next_logs(padded, len(tokens)))

    logs = logs_after(tokens)
    tolerance = 1e-5
    if model.config.activation in ("gelu", "gelu_tanh"):  # llama.cpp has a table of 16 bits
        tolerance = 2e-3
    for token, found in answer["log_probabilities"]:
        assert found == pytest.approx(float(logs[token]), abs=tolerance)
    while len(tokens) < model.block_size:
        tokens.append(int(logs_after(tokens).argmax()))
    assert answer["text"] == tokenizer.decode(tokens[count:])


@pytest.mark.slow
@needs_llamacpp
def test_llamacpp_continues_a_text_with_our_own_tokens(tmp_path, monkeypatch):
    known = cases()
    files = {name: tmp_path / f"{name}.gguf" for name in known}
    for name, (model, tokenizer, _) in known.items():
        save_gguf(model, files[name], tokenizer=tokenizer)
    # what is unknown is left out, also where its first byte is known, as of € and £
    files["unknown letters"] = files["letters"]
    known["unknown letters"] = known["letters"]._replace(prompt="H€£xE’ 日本…")
    # the controls: heads in another order, and QK-norm with the epsilon of the other norms
    monkeypatch.setattr("jgpt.interop.gguf._neighbours", lambda weights, heads: weights)
    monkeypatch.setattr("jgpt.interop.names._factor_for_epsilon", lambda config: 1.0)
    for name in ("llama", "qwen3"):
        wrong = f"wrong {name}"
        files[wrong] = tmp_path / f"wrong_{name}.gguf"
        known[wrong] = known[name]
        save_gguf(known[name].model, files[wrong], tokenizer=known[name].tokenizer)

    answers = of_llamacpp(files, known)

    assert sum(len(answer["log_probabilities"]) == 5 for answer in answers.values()) >= 5
    for name, answer in answers.items():
        if not name.startswith("wrong"):
            assert_ours(answer, known[name])
            continue
        with pytest.raises(AssertionError):
            assert_ours(answer, known[name])


@pytest.mark.parametrize(
    ("changes", "tokenizer", "word"),
    [
        ({"activation": "silu"}, CHARACTERS, "`activation='silu'`, only gelu_tanh and gelu"),
        ({}, byte_pairs(r"\w+|\s+"), "splits a text into words"),
    ],
    ids=["activation", "words"],
)
def test_what_llamacpp_would_compute_otherwise_is_refused(changes, tokenizer, word, tmp_path):
    model = abstract_model(config_of("nanogpt", vocab_size=tokenizer.vocab_size, **changes))
    with pytest.raises(ValueError, match=word):
        save_gguf(loud(model), tmp_path / "gpt.gguf", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_matrices_in_fewer_bits(tmp_path):
    """Q8_0 for rows of a multiple of 32, else F16; vectors and positions stay in float32."""
    import gguf

    config = config_of("nanogpt", vocab_size=CHARACTERS.vocab_size, num_heads=2, embed_dim=32)
    model = loud(abstract_model(config))
    types = {}
    for weights in ("f16", "q8_0"):
        file = tmp_path / f"{weights}.gguf"
        save_gguf(model, file, tokenizer=CHARACTERS, weights=weights)
        reader = gguf.GGUFReader(file)
        types[weights] = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
        found = gguf.dequantize(tensor.data, tensor.tensor_type)
        kernel = model.blocks[1].feed_forward.expansion.kernel.get_value().T
        np.testing.assert_allclose(found, kernel, rtol=1e-3, atol=0.02 if weights == "q8_0" else 0)
    assert types["f16"]["blk.0.ffn_down.weight"] == "F16"
    assert types["q8_0"]["blk.0.ffn_down.weight"] == "F16"  # rows of 29
    assert types["q8_0"]["token_embd.weight"] == "Q8_0"
    assert {types["q8_0"][name] for name in ("position_embd.weight", "output_norm.bias")} == {"F32"}


@pytest.mark.slow
def test_a_file_is_written_one_tensor_at_a_time(tmp_path):
    """Beside the model: a large one would not fit into memory twice."""
    config = config_of("nanogpt", vocab_size=CHARACTERS.vocab_size, num_layers=6, embed_dim=192)
    model = loud(abstract_model(config))
    size = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
    save_gguf(model, tmp_path / "first", tokenizer=CHARACTERS)  # what compiles once does it here
    tracemalloc.start()

    save_gguf(model, tmp_path / "second", tokenizer=CHARACTERS)

    _, peak = tracemalloc.get_traced_memory()  # of NumPy's arrays; JAX's are the model
    tracemalloc.stop()
    assert peak < size / 2


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    import gguf

    model = loud(abstract_model(config_of("nanogpt", vocab_size=CHARACTERS.vocab_size)))
    file = tmp_path / "gpt.gguf"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
        with pytest.raises(OSError, match="No space left"):
            save_gguf(model, file, tokenizer=CHARACTERS)
    assert not list(tmp_path.iterdir())
    save_gguf(model, file, tokenizer=CHARACTERS)
    with pytest.raises(FileExistsError, match="already exists"):
        save_gguf(model, file, tokenizer=CHARACTERS)
