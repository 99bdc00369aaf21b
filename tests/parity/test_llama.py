"""Directories of Llama and Qwen3 against transformers: what it saves we load, and back."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

import jgpt
from jgpt.interop.formats import LLAMA
from jgpt.interop.names import write_tensors
from tests.models import config_of, random_gpt, weights_of
from tests.parity.test_gpt2 import assert_same_logits, tokens_for, transformers
from tests.quick import only

SMALL = {
    "vocab_size": 17,
    "max_position_embeddings": 11,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
QWEN3 = {"head_dim": 10, **BASE}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SMALL, **BASE}),
    "llama, tied": ("Llama", {**SMALL, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama, no groups": ("Llama", {**SMALL, "num_key_value_heads": 6, "num_hidden_layers": 1}),
    "llama, wide heads": ("Llama", {**SMALL, "head_dim": 14, "vocab_size": 1009}),
    "llama, GELU": ("Llama", {**SMALL, "hidden_act": "gelu"}),
    "qwen3": ("Qwen3", {**SMALL, **QWEN3}),
    "qwen3, tied": ("Qwen3", {**SMALL, **QWEN3, "tie_word_embeddings": True}),
}


def random_model(name: str, seed: int = 0, **options: Any) -> Any:
    """A model of transformers, every parameter of which is random and matters."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**fields, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    random = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        mean = 1.0 if "norm" in path else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3, generator=random)
    return model


def with_positions(model: Any) -> Any:
    """As the tests of GPT-2 ask for the size of a context."""
    model.config.n_positions = model.config.max_position_embeddings
    return model


@pytest.fixture
def directory(tmp_path):
    random_model("qwen3").save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def change(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("name", only(["llama", "qwen3, tied"], MODELS))
def test_import_and_export(name, tmp_path):
    reference = with_positions(random_model(name))
    reference.save_pretrained(tmp_path / "theirs")
    model = jgpt.load_hf(tmp_path / "theirs")
    assert_same_logits(model, reference)

    jgpt.save_hf(model, tmp_path / "ours")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    again, notes = loaded
    assert type(again) is type(reference)
    assert not any(notes.values()), notes
    for (path, theirs), (_, ours) in zip(
        reference.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(theirs, ours), path
    assert_same_logits(model, with_positions(again.eval()))
    assert jgpt.load_hf(tmp_path / "ours").config == model.config


@pytest.mark.parametrize("name", only(["qwen3, tied"], ["llama", "qwen3, tied"]))
def test_gradients_and_greedy_tokens(name, tmp_path):
    reference = with_positions(random_model(name))
    reference.save_pretrained(tmp_path)
    model = jgpt.load_hf(tmp_path)
    tokens = tokens_for(reference, 11)
    labels = torch.tensor(tokens)
    loss = reference(labels, labels=labels).loss
    loss.backward()
    graph, weights = nnx.graphdef(model), weights_of(model)

    def loss_of(weights):
        logits = nnx.merge(graph, weights)(jnp.asarray(tokens))
        return jgpt.cross_entropy(logits[:, :-1], jnp.asarray(tokens[:, 1:]))

    mine, gradients = jax.jit(jax.value_and_grad(loss_of))(weights)
    assert float(mine) == pytest.approx(loss.item(), rel=1e-5)
    found = write_tensors(nnx.merge(graph, gradients), LLAMA)
    wanted = {path: leaf.grad.numpy() for path, leaf in reference.named_parameters()}
    assert found.keys() == wanted.keys()
    for path, its in wanted.items():
        np.testing.assert_allclose(found[path], its, atol=1e-5 * np.abs(its).max(), err_msg=path)
        assert np.abs(its).max() > 1e-4, path

    prompt = tokens[:1, :3]
    continued = jgpt.generate(model, jnp.asarray(prompt), 8, key=jax.random.key(0), temperature=0.0)
    its = reference.generate(
        torch.tensor(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert continued.tolist() == its.tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    ],
    ids=str,
)
def test_the_comparison_sees_what_jgpt_would_get_wrong(wrong, tmp_path):
    reference = with_positions(random_model("llama, no groups"))
    reference.save_pretrained(tmp_path)
    change(tmp_path, **wrong)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_same_logits(jgpt.load_hf(tmp_path), reference)


def test_shards_bfloat16_and_a_stored_tied_head(tmp_path):
    random_model("qwen3, tied").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="5KB")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    reference = with_positions(read(tmp_path, dtype=torch.float32).eval())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = jgpt.load_hf(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    assert_same_logits(model, reference)
    for file in tmp_path.glob("model*"):
        file.unlink()
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(tensors, file)
    assert_same_logits(jgpt.load_hf(tmp_path), reference)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        jgpt.load_hf(tmp_path)


def test_a_base_where_older_configs_have_it(directory):
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    assert_same_logits(jgpt.load_hf(directory), with_positions(random_model("qwen3")))


def test_a_shorter_context_is_the_same_function(directory):
    model, shorter = jgpt.load_hf(directory), jgpt.load_hf(directory, block_size=5)
    assert (model.block_size, shorter.block_size) == (11, 5)
    tokens = jnp.arange(10).reshape(2, 5)
    np.testing.assert_array_equal(shorter(tokens), model(tokens))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "mistral"}, "model_type='mistral' is not supported, only 'gpt2', 'llama'"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
        ({"hidden_act": "gelu_fast"}, "hidden_act='gelu_fast' is not supported, only gelu_new"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported, only 0.0"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported, only 1e-06"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
            r"rope_parameters=\{.*'yarn'.*\} is not supported, only \{'rope_type': 'default'\}",
        ),
        ({"rope_parameters": "llama3"}, "rope_parameters='llama3' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling=\{.* is not supp"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types=\['full_attention', 'sliding_attention'\] is not supported",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"hidden_size": 26}, r"embed_tokens\.weight has shape \[17, 24\], not \[17, 26\]"),
        ({"head_dim": 9}, "positions='rotary' needs an even head size"),
        ({"num_hidden_layers": 3}, "the config has 3 layers, the weights 2"),
        ({"intermediate_size": None}, r"gate_proj\.weight has shape \[29, 24\], not \[96, 24\]"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "rope_parameters=None is not supported"),
        ({"rope_theta": -1.0, "rope_parameters": {}}, r"rope_parameters=\{\} is not supported"),
    ],
)
def test_what_jgpt_lacks_is_refused_by_the_field_s_name(fields, complaint, directory):
    change(directory, **fields)
    with pytest.raises(ValueError, match=complaint) as caught:
        jgpt.load_hf(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_qwen3_s_norms_are_not_llama_s(directory):
    change(directory, model_type="llama")
    with pytest.raises(ValueError, match=r"unexpected tensors \(4\): layers.0.self_attn.k_norm"):
        jgpt.load_hf(directory)
    with pytest.raises(ValueError, match="model_type='llama' is not supported, only 'gpt2'"):
        jgpt.load_gpt2(directory)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"norm": "layer"}, "Qwen3's format doesn't support norm='layer', only norm='rms'"),
        ({"gated": False}, "support gated=False, only gated=True"),
        ({"qk_norm_scale": False}, "support qk_norm_scale=False"),
        ({"norm_epsilon": 1e-5}, "support norm_epsilon=1e-05, only norm_epsilon=1e-06"),
        ({"qkv_bias": True}, "support qkv_bias=True, only qkv_bias=False"),
        ({"use_bias": True}, "support use_bias=True"),
        ({"attention_window": 3}, "support attention_window=3"),
        ({"logit_softcap": 15.0}, "support logit_softcap=15.0"),
        ({"attention_scale": 0.7}, "support attention_scale=0.7"),
        (
            {"qk_norm": False, "qk_norm_scale": False, "norm_scale": False},
            "Llama's format doesn't support norm_scale=False",
        ),
    ],
)
def test_what_the_format_cannot_say_is_refused(fields, complaint, tmp_path):
    model = random_gpt("qwen3", **fields)
    with pytest.raises(ValueError, match=complaint):
        jgpt.save_hf(model, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_model_of_ours_is_transformers_(tmp_path):
    """Trained here, with what is only of training, and with sizes that defaults give."""
    for changes in (
        {"num_kv_heads": None, "head_dim": None, "hidden_dim": None, "attention_scale": 0.5},
        {"qk_norm": False, "qk_norm_scale": False, "zero_init": True, "dropout": 0.1},
    ):
        model = random_gpt("qwen3", **changes)
        kind = "qwen3" if model.config.qk_norm else "llama"
        jgpt.save_hf(model, tmp_path / kind)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        assert theirs.config.model_type == kind
        assert_same_logits(model, with_positions(theirs.eval()))
    scaled = dataclasses.replace(config_of("qwen3"), attention_scale=10**-0.5)
    jgpt.save_hf(jgpt.GPT(scaled, rngs=nnx.Rngs(0)), tmp_path / "scaled")


def test_its_tokenizer_goes_in_and_out(tmp_path):
    text = "It was 1984. <|im_start|>Once upon a time<|im_end|>\n" * 9
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=290, special_tokens=special, show_progress=False)
    )
    tokenizer = jgpt.BPETokenizer(backend)
    model = random_gpt("qwen3", vocab_size=tokenizer.vocab_size)
    jgpt.save_hf(model, tmp_path / "hf", tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.encode(text) == tokenizer.encode(text).tolist()
    assert theirs.decode(theirs.encode(text)) == text == tokenizer.decode(tokenizer.encode(text))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.end_of_text == 0
