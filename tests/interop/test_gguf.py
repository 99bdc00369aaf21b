"""llama.cpp continues a text from a GGUF file as jgpt continues it."""
# ruff: noqa: RUF001

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as tk

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
    sizes = {"vocab_size": tokenizer.vocab_size, "dropout": 0.0, "dtype": "float32"}
    # the head's bias fits into the last norm's if there are at least as many features
    if name == "lecture":
        sizes["embed_dim"] = 68
    return loud(abstract_model(dataclasses.replace(config, **sizes)), size=0.2)


def llama(**changes) -> jgpt.ModelConfig:
    return config_of("qwen3", **{"qk_norm": False, "qk_norm_scale": False, **changes})


def greedy(model: jgpt.GPT, tokenizer, prompt: str, new: int) -> str:
    tokens = jnp.asarray(tokenizer.encode(prompt))[None]
    drawn = jgpt.generate(model, tokens, new, key=jax.random.key(0), temperature=0.0)
    return tokenizer.decode(drawn[0, tokens.shape[1] :])


def in_llamacpp(*asked: dict) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.llamacpp"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_llamacpp
def test_llamacpp_continues_a_text_with_our_own_tokens(tmp_path, monkeypatch):
    """Each architecture and each way to split a text, in float32, up to the end of the block."""
    split = {"llama": byte_pairs(LLAMA3), "qwen3": byte_pairs(LLAMA3.replace("{1,3}", ""))}
    size = split["llama"].vocab_size
    sizes = {"vocab_size": size, "block_size": 64}
    models = {
        **{name: (preset_model(name, CHARACTERS), CHARACTERS) for name in ("lecture", "modern")},
        "letters": (preset_model("nanogpt-cpu", LETTERS), LETTERS),
        "bytes": (preset_model("nanogpt-cpu", jgpt.ByteTokenizer()), jgpt.ByteTokenizer()),
        "gpt2": (preset_model("tiny", byte_pairs()), byte_pairs()),
    }
    for name, config in (("llama", llama(**sizes)), ("qwen3", config_of("qwen3", **sizes))):
        models[name] = loud(abstract_model(config), size=0.3), split[name]
    tied = dataclasses.replace(models["modern"][0].config, tie_embeddings=True)
    models["tied"] = loud(abstract_model(tied), size=0.2), CHARACTERS

    asked = []
    expected = []
    for name, (model, tokenizer) in models.items():
        file = tmp_path / f"{name}.gguf"
        save_gguf(model, file, tokenizer=tokenizer, weights="f32")
        prompt = (
            "HE 12 "
            if isinstance(tokenizer, jgpt.CharTokenizer)
            else "hear 12 'tis "[: model.block_size - 3]
        )
        tokens = len(tokenizer.encode(prompt))
        new = min(100, model.block_size - tokens)
        asked.append({"file": str(file), "prompt": prompt, "new": new})
        expected.append({"tokens": tokens, "text": greedy(model, tokenizer, prompt, new)})
    # what is unknown is left out, also where its first byte is known, as of € and £
    letters = next(each for each in asked if "letters.gguf" in each["file"])
    asked.append(letters | {"prompt": "H€£xE’ 日本…", "new": letters["new"] - 1})
    model, tokenizer = models["letters"]
    text = greedy(model, tokenizer, "HE’ 日本…", letters["new"] - 1)
    models["unknown letters"] = models["letters"]
    expected.append({"tokens": 7, "text": text})
    # the control: with heads in another order, Llama's text is another one
    monkeypatch.setattr("jgpt.interop.gguf._neighbours", lambda weights, heads: weights)
    model, tokenizer = models["llama"]
    save_gguf(model, tmp_path / "wrong.gguf", tokenizer=tokenizer, weights="f32")
    as_llama = next(each for each in asked if "llama.gguf" in each["file"])
    *answers, wrong = in_llamacpp(*asked, as_llama | {"file": str(tmp_path / "wrong.gguf")})
    for name, found, wanted in zip(models, answers, expected, strict=True):
        assert found == wanted, name
    assert wrong["text"] not in [each["text"] for each in answers]


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
