"""Directories of GPT-2, Llama and Qwen3 against transformers: what it saves we load, and back."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `parity` is not installed")
pytest.importorskip("transformers", reason="the extra `parity` is not installed")
import tokenizers
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

import jgpt
from jgpt.interop.formats import HF_FORMATS
from jgpt.interop.names import write_tensors
from jgpt.nn.models import named_parameters
from tests.interop.test_huggingface import change
from tests.models import random_gpt, weights_of
from tests.parity.ladder import TOLERANCE, errors
from tests.quick import only

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

NO_SPECIAL = {"vocab_size": 17, "bos_token_id": None, "eos_token_id": None}
GPT2 = {**NO_SPECIAL, "n_positions": 11, "n_embd": 21, "n_layer": 2, "n_head": 3}
LLAMA = {
    **NO_SPECIAL,
    "max_position_embeddings": 11,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
QWEN3 = {**LLAMA, **BASE, "head_dim": 10}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, relu": (
        "GPT2",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "llama": ("Llama", {**LLAMA, **BASE}),
    "llama, no groups": ("Llama", {**LLAMA, "num_key_value_heads": 6, "num_hidden_layers": 1}),
    "llama, wide heads": ("Llama", {**LLAMA, "head_dim": 14, "vocab_size": 1009}),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3, tied": ("Qwen3", {**QWEN3, "tie_word_embeddings": True}),
}
QUICK = ("gpt2", "gpt2, untied, relu", "llama", "qwen3, tied")


def random_model(name: str, seed: int = 0) -> Any:
    """A model of transformers, every parameter of which is random and matters."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    random = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        mean = 0.1 if kind == "GPT2" else float("norm" in path)
        torch.nn.init.normal_(parameter, mean, 0.4 if kind == "GPT2" else 0.3, generator=random)
    return model


def tokens_for(model, seed=1):
    shape = (2, model.config.max_position_embeddings)
    return np.random.default_rng(seed).integers(model.config.vocab_size, size=shape)


def assert_same_logits(model, reference, tolerance=1e-5):
    tokens = tokens_for(reference)
    mine = np.asarray(model(jnp.asarray(tokens)))
    with torch.no_grad():
        its = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(mine, its, rtol=tolerance, atol=tolerance * np.abs(its).max())


def read_back(directory) -> Any:
    """The model as transformers reads it, without any remark."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    model, notes = model
    assert not any(notes.values()), notes
    return model.eval()


@pytest.mark.parametrize("name", only(["qwen3, tied"], (*QUICK, "llama, wide heads")))
def test_import_and_export(name, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path / "theirs")
    model = jgpt.load_hf(tmp_path / "theirs")
    assert_same_logits(model, reference)

    jgpt.save_hf(model, tmp_path / "ours")
    again = read_back(tmp_path / "ours")
    assert type(again) is type(reference)
    fields = {*again.config.to_dict()} - {"n_ctx"}  # which GPT-2's config knows no more
    assert fields == {*reference.config.to_dict()}
    for (path, theirs), (_, ours) in zip(
        reference.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(theirs, ours), path
    assert_same_logits(model, again)
    hidden_dim = model.config.hidden_dim or 4 * model.config.embed_dim
    expected = dataclasses.replace(model.config, hidden_dim=hidden_dim)
    assert jgpt.load_hf(tmp_path / "ours").config == expected


def compared(reference: Any, model: Any) -> dict[str, tuple[Any, Any]]:
    """Logits, loss and gradients, ours and theirs, by the names of theirs."""
    tokens = tokens_for(reference)
    labels = torch.tensor(tokens)
    targets = jnp.asarray(tokens[:, 1:])
    graph = nnx.graphdef(model)

    def loss_of(weights):
        logits = nnx.merge(graph, weights)(jnp.asarray(tokens))
        return jgpt.cross_entropy(logits[:, :-1], targets), logits

    differentiate = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, logits), gradients = differentiate(weights_of(model))
    theirs = reference(labels, labels=labels)
    theirs.loss.backward()

    hf_format = HF_FORMATS[reference.config.model_type]
    entries = write_tensors(nnx.merge(graph, gradients), hf_format)
    found = {name: entry.read() for name, entry in entries.items()}
    wanted = {path: leaf.grad.numpy() for path, leaf in reference.named_parameters()}
    return {
        "logits": ({"": np.asarray(logits)}, {"": theirs.logits.detach().numpy()}),
        "loss": ({"": np.asarray(loss)}, {"": theirs.loss.detach().numpy()}),
        "gradients": (found, wanted),
    }


@pytest.mark.parametrize("name", only(["qwen3, tied"], QUICK))
def test_gradients_and_greedy_tokens(name, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path)
    model = jgpt.load_hf(tmp_path)
    pairs = compared(reference, model)
    for rung, (mine, its) in pairs.items():
        assert errors(mine, its)[1] < TOLERANCE["float32"], rung
    for path, gradient in pairs["gradients"][1].items():
        assert np.abs(gradient).max() > 1e-4, path

    tokens = tokens_for(reference)
    prompt = tokens[:1, :3]
    continued = jgpt.generate(model, jnp.asarray(prompt), 8, key=jax.random.key(0), temperature=0.0)
    its = reference.generate(
        torch.tensor(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert continued.tolist() == its.tolist()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", {"layer_norm_epsilon": 1e-6}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"n_head": 7}),
        ("llama, no groups", {"rms_norm_eps": 1e-2}),
        ("llama, no groups", {"hidden_act": "gelu"}),
        ("llama, no groups", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
        ("llama, no groups", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}),
    ],
    ids=str,
)
def test_the_comparison_sees_what_jgpt_would_get_wrong(name, wrong, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path)
    change(tmp_path / "config.json", **wrong)

    with pytest.raises(AssertionError, match="Not equal"):
        assert_same_logits(jgpt.load_hf(tmp_path), reference)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float16"), ("qwen3, tied", "bfloat16")])
def test_shards_of_other_precisions_are_read_into_float32(name, dtype, tmp_path):
    reference = random_model(name).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = jgpt.load_hf(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    assert_same_logits(model, read(tmp_path, dtype=torch.float32).eval())


PLAIN = {"rope_type": "default"}
TWO_BASES = {
    "rope_parameters": {**PLAIN, "rope_theta": 100.0},
    "rope_scaling": {**PLAIN, "rope_theta": 300.0},
}
OTHER_SPELLINGS = [
    # what a config says, and what says nearly the same and computes something else
    ("llama", TWO_BASES, {"rope_scaling": None}),
    ("llama", {"rope_parameters": {"rope_theta": 500.0}}, {"rope_parameters": {"rope_theta": 5.0}}),
    ("llama", {"rope_parameters": None, "rope_theta": 500.0}, {"rope_theta": 5.0}),
    ("llama", {"attention_dropout": 0.25}, None),
    ("qwen3, tied", {"layer_types": None}, None),
    ("qwen3, tied", {"rms_norm_eps": 1e-2}, {"rms_norm_eps": 1e-6}),
    ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.25}, None),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {"activation_function": "gelu"}),
    ("gpt2", {"n_ctx": 5, "temperature": 0.3, "use_cache": False}, None),
]


@pytest.mark.parametrize(
    ("name", "fields", "other"), only(OTHER_SPELLINGS[::3].__contains__, OTHER_SPELLINGS), ids=str
)
def test_a_config_in_other_words_computes_the_same(name, fields, other, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path / "theirs")
    change(tmp_path / "theirs" / "config.json", **fields)
    theirs = read_back(tmp_path / "theirs")
    model = jgpt.load_hf(tmp_path / "theirs")
    assert_same_logits(model, theirs)
    source = json.loads((tmp_path / "theirs" / "config.json").read_text())
    jgpt.save_hf(model, tmp_path / "ours", like=tmp_path / "theirs")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: written[name] for name in fields if name != "n_ctx"} == {
        name: source[name] for name in fields if name != "n_ctx"
    }
    assert_same_logits(jgpt.load_hf(tmp_path / "ours"), read_back(tmp_path / "ours"))
    if other is not None:
        change(tmp_path / "theirs" / "config.json", **other)
        with pytest.raises(AssertionError, match="Not equal"):
            assert_same_logits(model, read_back(tmp_path / "theirs"))


@pytest.mark.parametrize("name", ["gpt2", "qwen3, tied"])
def test_a_tied_table_that_is_stored_as_the_head_alone(name, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (table,) = [path for path in tensors if path.endswith(("wte.weight", "embed_tokens.weight"))]
    tensors["lm_head.weight"] = tensors.pop(table)
    save_file(tensors, file)
    model = jgpt.load_hf(tmp_path)
    assert_same_logits(model, read_back(tmp_path))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)

    with pytest.raises(AssertionError, match="Not equal"):
        assert_same_logits(model, read_back(tmp_path))


MASKS = {
    "h.0.attn.bias": torch.ones(1, 1, 11, 11, dtype=torch.bool).tril(),
    "h.1.attn.masked_bias": torch.tensor(-1e4),
}
PACES = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}


@pytest.mark.parametrize(
    ("name", "table", "buffers"),
    [("gpt2", "wte.weight", MASKS), ("qwen3, tied", "embed_tokens.weight", PACES)],
    ids=["gpt2", "qwen3"],
)
@pytest.mark.parametrize("prefixed", [True, False])
def test_stored_buffers_and_a_stored_tied_head(name, table, buffers, prefixed, tmp_path):
    reference = random_model(name)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefix = next(iter(tensors)).partition(".")[0] + "."
    tensors |= {prefix + path: tensor for path, tensor in buffers.items()}
    tensors["lm_head.weight"] = tensors[prefix + table].clone()
    if not prefixed:
        tensors = {path.removeprefix(prefix): tensor for path, tensor in tensors.items()}
    save_file(tensors, file)
    assert_same_logits(jgpt.load_hf(tmp_path), reference)


DEFAULT_PRESET = {
    "activation": "relu_squared",
    "gated": False,
    "qk_norm_scale": False,
    "norm_epsilon": 1e-2,  # beside 1e-6 of QK-norm
    "tie_embeddings": False,
}


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    only(
        lambda case: case[1] != "qwen3",
        [
            ("nanogpt", "gpt2", {"norm_scale": False}),  # without biases: a function with zeros
            ("gpt2", "gpt2", {"num_kv_heads": 3, "head_dim": 7, "attention_scale": 7**-0.5}),
            ("qwen3", "apertus", DEFAULT_PRESET),
            ("qwen3", "qwen3", {"norm_epsilon": 1e-2, "norm_scale": False}),
            ("qwen3", "qwen3", {"num_kv_heads": None, "head_dim": None, "hidden_dim": None}),
            ("qwen3", "qwen3", {"attention_scale": 10**-0.5}),
            ("qwen3", "llama", {"qk_norm": False, "qk_norm_scale": False, "zero_init": True}),
            ("qwen3", "qwen3", {"dropout": 0.1}),
        ],
    ),
    ids=str,
)
def test_a_model_of_ours_is_transformers_(family, kind, changes, tmp_path):
    """Trained here, with what is only of training, and with sizes that defaults give."""
    model = random_gpt(family, **changes)
    jgpt.save_hf(model, tmp_path / kind)
    theirs = read_back(tmp_path / kind)
    assert theirs.config.model_type == kind
    assert_same_logits(model, theirs)
    again = jgpt.load_hf(tmp_path / kind)
    assert_same_logits(again, theirs)


def test_the_bias_of_the_lectures_head_goes_out_in_the_last_norm(tmp_path):
    """The logits differ by a number for all tokens, on which no probability depends."""
    model = random_gpt("lecture")
    jgpt.save_hf(model, tmp_path / "gpt2")
    theirs = read_back(tmp_path / "gpt2")
    tokens = tokens_for(theirs)
    ours = jax.nn.log_softmax(model(jnp.asarray(tokens)))
    logits = theirs(torch.tensor(tokens)).logits
    found = torch.log_softmax(logits, dim=-1).detach().numpy()
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-4)
    # without the bias they are far away
    bias = named_parameters(model)["head.bias"]
    bias.set_value(jnp.zeros_like(bias.get_value()))
    without = jax.nn.log_softmax(model(jnp.asarray(tokens)))
    assert np.abs(found - without).max() > 0.1


ODD = "naïve — “日本語” 😀\n\t\u0301 \u00a0 ﬁ Ⅷ\u200b  don't ÿ , . <|endoftext|>"


def byte_pairs_with_more():
    """Byte-pairs of GPT-2's kind, with added tokens and a normaliser."""
    backend = jgpt.BPETokenizer.train([ODD * 9], 280).to_hf()
    backend.add_special_tokens(["<|user|>"])
    backend.add_tokens([tokenizers.AddedToken("ROMEO:", normalized=False)])
    backend.normalizer = tokenizers.normalizers.NFC()
    return jgpt.BPETokenizer(backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        jgpt.CharTokenizer.from_text(ODD),
        jgpt.ByteTokenizer(),
        jgpt.BPETokenizer.train([ODD * 9], 280),
        byte_pairs_with_more(),
    ],
    ids=["characters", "bytes", "byte-pairs", "added tokens"],
)
def test_our_tokenizers_in_transformers(tokenizer, tmp_path):
    model = random_gpt("gpt2", vocab_size=tokenizer.vocab_size)
    jgpt.save_hf(model, tmp_path / "hf", tokenizer=tokenizer)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = ODD
    if isinstance(tokenizer, jgpt.BPETokenizer):
        text += "<|user|>ROMEO: cafe\u0301"
    tokens = theirs(text)["input_ids"]

    assert tokens == tokenizer.encode(text).tolist()
    assert theirs.decode(tokens) == tokenizer.decode(tokens)
    assert len(theirs) == tokenizer.vocab_size == model.vocab_size
    for token in theirs.all_special_ids:
        assert token < model.vocab_size
