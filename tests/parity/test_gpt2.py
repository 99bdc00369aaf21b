"""GPT-2 directories against transformers: what it saves we load, what we save it loads."""

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
from jgpt.interop.huggingface import save_gpt2
from tests.models import SIZES, randomised, weights_of
from tests.quick import only

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL = {"vocab_size": 17, "n_positions": 11, "n_embd": 21, "n_layer": 2, "n_head": 3}
MODELS = {
    "small": SMALL,
    "one head": {**SMALL, "n_head": 1, "n_layer": 1, "n_inner": 29},
    "many heads": {**SMALL, "n_embd": 24, "n_head": 8, "activation_function": "gelu"},
    "odd vocabulary": {**SMALL, "vocab_size": 1009, "n_positions": 37},
    "untied, relu": {**SMALL, "tie_word_embeddings": False, "activation_function": "relu"},
    "squared relu": {**SMALL, "activation_function": "relu2"},
    "epsilon": {**SMALL, "layer_norm_epsilon": 1e-3, "n_layer": 3, "n_positions": 7},
}


def random_gpt2(seed=0, **options) -> Any:
    """A model of transformers, every parameter of which is random and matters."""
    config = transformers.GPT2Config(**options, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.4, generator=random)
    return model


def tokens_for(model, time, seed=1):
    return np.random.default_rng(seed).integers(model.config.vocab_size, size=(2, time))


def assert_same_logits(model, reference, tolerance=1e-5):
    tokens = tokens_for(reference, reference.config.n_positions)
    mine = np.asarray(model(jnp.asarray(tokens)))
    with torch.no_grad():
        its = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(mine, its, rtol=tolerance, atol=tolerance * np.abs(its).max())
    return mine


@pytest.mark.parametrize("name", only(["small", "untied, relu"], MODELS))
def test_import_and_export(name, tmp_path):
    reference = random_gpt2(**MODELS[name])
    reference.save_pretrained(tmp_path / "theirs")
    model = jgpt.load_gpt2(tmp_path / "theirs")
    logits = assert_same_logits(model, reference)

    tokens = tokens_for(reference, reference.config.n_positions)
    mine = jgpt.cross_entropy(jnp.asarray(logits[:, :-1]), jnp.asarray(tokens[:, 1:]))
    labels = torch.tensor(tokens)
    assert float(mine) == pytest.approx(reference(labels, labels=labels).loss.item(), rel=1e-5)

    prompt = tokens[:1, :3]
    more = reference.config.n_positions - 3
    continued = jgpt.generate(
        model, jnp.asarray(prompt), more, key=jax.random.key(0), temperature=0.0
    )
    its = reference.generate(
        torch.tensor(prompt), max_new_tokens=more, do_sample=False, pad_token_id=0
    )
    assert continued.tolist() == its.tolist()

    jgpt.save_gpt2(model, tmp_path / "ours")
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    again, notes = loaded
    assert not any(notes.values()), notes
    again.eval()
    for (parameter, theirs), (_, ours) in zip(
        reference.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(theirs, ours), parameter
    assert again.config.to_dict().keys() == reference.config.to_dict().keys()
    assert_same_logits(model, again)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_precisions_are_read_into_float32(dtype, tmp_path):
    reference = random_gpt2(**SMALL).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path)
    model = jgpt.load_gpt2(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    assert_same_logits(model, reference.float())


def test_shards_are_joined(tmp_path):
    reference = random_gpt2(**SMALL)
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(jgpt.load_gpt2(tmp_path), reference)


def test_names_without_prefix_stored_masks_and_a_stored_tied_head(tmp_path):
    reference = random_gpt2(**SMALL)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file)
    assert_same_logits(jgpt.load_gpt2(tmp_path), reference)

    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from wte\.weight"):
        jgpt.load_gpt2(tmp_path)


def test_the_comparison_sees_what_jgpt_would_get_wrong(tmp_path):
    reference = random_gpt2(**SMALL)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"layer_norm_epsilon": 1e-6},
        {"activation_function": "gelu"},
        {"n_head": 7},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(AssertionError):
            assert_same_logits(jgpt.load_gpt2(tmp_path), reference)


def test_a_model_without_biases_is_the_same_function_with_zeros(tmp_path):
    config = jgpt.ModelConfig(**SIZES)
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    nnx.update(model, randomised(weights_of(model)))
    save_gpt2(model, tmp_path / "gpt2", zero_biases=True)
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "gpt2", output_loading_info=True
    )
    again, notes = loaded
    assert not any(notes.values()), notes
    assert_same_logits(model, again)
