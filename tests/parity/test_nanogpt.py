"""nanoGPT's checkpoints: GPT-2's names, linear layers' layout, and biases or none."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `parity` is not installed")
pytest.importorskip("transformers", reason="the extra `parity` is not installed")
import torch
import transformers

from jgpt.interop.nanogpt import load_nanogpt

SIZES = {"vocab_size": 17, "block_size": 11, "n_layer": 2, "n_head": 3, "n_embd": 21}


def random_gpt2(vocab_size, block_size, n_layer, n_head, n_embd, bias) -> Any:
    """What nanoGPT computes: transformers' GPT-2 with the exact GELU; without `bias`, zeros."""
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=block_size,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.4, generator=random)
        if name.endswith("bias") and not bias:
            torch.nn.init.zeros_(parameter)
    return model


def write(path, *, bias=False, prefix="", sizes=SIZES, tensors=None, **more):
    """Write a checkpoint, with other tensors or parts; return what it was made of."""
    model = random_gpt2(**sizes, bias=bias)
    state = {
        # kernels are those of linear layers
        prefix + name: tensor.T.contiguous() if ".c_" in name and "weight" in name else tensor
        for name, tensor in model.state_dict().items()
        if bias or not name.endswith("bias")
    }
    checkpoint = {
        "model": state | (tensors or {}),
        "model_args": {**sizes, "bias": bias, "dropout": 0.1},
        "optimizer": {"state": {}, "param_groups": []},
        "iter_num": 60,
        "best_val_loss": torch.tensor(3.3),
        "config": {"out_dir": "out"},
        **more,
    }
    torch.save(checkpoint, path)
    return model


def logits(model):
    tokens = np.random.default_rng(1).integers(17, size=(2, 11))
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()
    return np.asarray(model(jnp.asarray(tokens)))


@pytest.mark.parametrize(
    ("bias", "prefix", "stored"),
    [
        (False, "", {}),
        (True, "_orig_mod.", {}),
        (False, "module._orig_mod.", {}),
        (True, "", {"transformer.h.0.attn.bias": torch.ones(1, 1, 11, 11).tril()}),
    ],
    ids=["without biases", "compiled", "compiled and in parallel", "masks"],
)
def test_the_same_logits(bias, prefix, stored, tmp_path):
    reference = write(tmp_path / "ckpt.pt", bias=bias, prefix=prefix, tensors=stored)
    model = load_nanogpt(tmp_path / "ckpt.pt")
    assert (model.config.dropout, model.config.use_bias) == (0.1, bias)
    its = logits(reference)
    np.testing.assert_allclose(logits(model), its, rtol=1e-5, atol=1e-5 * np.abs(its).max())


def test_a_number_of_numpy_beside_the_weights_is_named(tmp_path):
    """As forks save it. PyTorch reads none without code."""
    write(tmp_path / "ckpt.pt", best_val_loss=np.float64(3.25))

    with pytest.raises(ValueError, match=r"it has numpy\S*\.scalar, which is code: save `model`"):
        load_nanogpt(tmp_path / "ckpt.pt")


class Malice:
    def __reduce__(self):
        return (print, ("code has run",))


def test_code_in_a_checkpoint_does_not_run(tmp_path, capsys):
    write(tmp_path / "ckpt.pt", config=Malice())
    with pytest.raises(ValueError, match=r"ckpt\.pt: not a nanoGPT checkpoint"):
        load_nanogpt(tmp_path / "ckpt.pt")
    assert "code has run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"model_args": {}}, "it has no vocab_size, block_size, n_layer, n_head, n_embd"),
        ({"model_args": {**SIZES, "bias": True}}, r"missing tensors \(13\): h.0.attn.c_attn.bi"),
    ],
)
def test_other_files_are_rejected(more, complaint, tmp_path):
    write(tmp_path / "ckpt.pt", **more)
    with pytest.raises(ValueError, match=complaint):
        load_nanogpt(tmp_path / "ckpt.pt")
