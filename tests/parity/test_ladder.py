"""Identical weights, identical numbers: every rung of every family, and what each would catch."""

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `parity` is not installed")
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tests.parity import torch_gpt
from tests.parity.ladder import (
    ALONE,
    FAMILIES,
    TOLERANCE,
    decays,
    errors,
    ours,
    ours_averaged,
    theirs,
)
from tests.quick import only

MODEL_RUNGS = {"logits", "loss", "gradients", "ten steps", "weights after ten"}
TRAINING_RUNGS = {"AdamW", "ten steps", "weights after ten"}


def rungs_of(dtype: str) -> list[str]:
    """In float32 the weights after ten steps are left out.

    Adam divides a gradient by its size: where it is all rounding, a whole step is.
    """
    rungs = sorted(MODEL_RUNGS | TRAINING_RUNGS)
    return rungs if dtype == "float64" else [rung for rung in rungs if rung != "weights after ten"]


OTHERWISE = {"nanogpt, no norm scales", "nanogpt, grouped heads", "nanogpt, gated"}
"""Of the fields by themselves, those that no larger family has in this form."""
QUICK = {"lecture", "modern, tied", "bigram"}
"""Families that have each field between them."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    only(
        lambda case: case[1] == "float64" and case[0] in QUICK,
        [
            (family, dtype)
            for family in FAMILIES
            for dtype in TOLERANCE
            if family in (QUICK if dtype == "float32" else {*FAMILIES} - {*ALONE} | OTHERWISE)
        ],
    ),
)
def test_every_rung_agrees(family, dtype):
    mine = ours(family, dtype)
    its = theirs(family, dtype)

    assert mine.keys() == its.keys()
    for rung in rungs_of(dtype):
        for name, array in mine[rung].items():
            assert array.dtype == dtype, name
            assert array.shape == its[rung][name].shape, name
        assert errors(mine[rung], its[rung])[1] < TOLERANCE[dtype], rung


def set_everywhere(kind, **attributes):
    def sabotage(port):
        for module in port.modules():
            if isinstance(module, kind):
                vars(module).update(attributes)

    return sabotage


def forget_a_bias(port):
    torch.nn.init.zeros_(port.blocks[1].feed_forward.expansion.bias)


MISTAKES = {
    "epsilon 1e-6": ({"sabotage": set_everywhere(torch.nn.LayerNorm, eps=1e-6)}, MODEL_RUNGS),
    "the other GELU": (
        {"sabotage": set_everywhere(torch_gpt.FeedForward, activation="gelu")},
        MODEL_RUNGS,
    ),
    "no scale": ({"sabotage": set_everywhere(torch_gpt.Attention, scale=1.0)}, MODEL_RUNGS),
    "a future leak": ({"sabotage": set_everywhere(torch_gpt.Attention, causal=False)}, MODEL_RUNGS),
    "heads and head_dim swapped": (
        {"sabotage": set_everywhere(torch_gpt.Attention, num_heads=7, num_kv_heads=7)},
        MODEL_RUNGS,
    ),
    "a missing bias": ({"sabotage": forget_a_bias}, MODEL_RUNGS | TRAINING_RUNGS),
    "decay on norms": (
        {"decays": lambda name, leaf: decays(name, leaf) or "norm" in name},
        TRAINING_RUNGS,
    ),
    "no decay of embeddings": (
        {"decays": lambda name, leaf: "embedding" not in name},
        TRAINING_RUNGS,
    ),
    "no clipping": ({"clip": 1e9}, TRAINING_RUNGS),
}


@pytest.mark.parametrize(("broken", "seen"), MISTAKES.values(), ids=MISTAKES)
def test_the_ladder_sees_a_mistake(broken, seen):
    assert blind_rungs("gpt2", "float64", **broken) == set(rungs_of("float64")) - seen


def blind_rungs(family, dtype, **broken):
    """Where a broken port still agrees."""
    mine = ours(family, dtype)
    its = theirs(family, dtype, **broken)
    return {rung for rung in rungs_of(dtype) if errors(mine[rung], its[rung])[1] < TOLERANCE[dtype]}


def in_other_groups(port):
    """Every other query head shares a key, which is not ours."""
    for module in port.modules():
        if isinstance(module, torch_gpt.Attention):
            times = module.num_heads // module.num_kv_heads
            vars(module)["for_each_query_head"] = lambda x, n=times: x.repeat(1, n, 1, 1)


def forget_a_shortcut(port):
    torch.nn.init.zeros_(port.shortcut[:1])


def activate_the_other(port):
    """The expansion instead of the gate."""
    for module in port.modules():
        if isinstance(module, torch_gpt.FeedForward):
            activate = torch_gpt.ACTIVATIONS[module.activation]
            gate = module.gate
            assert gate is not None
            vars(module)["forward"] = lambda x, its=module, activate=activate, gate=gate: (
                its.projection(activate(its.expansion(x)) * gate(x))
            )


def scale_other_features(port):
    for module in port.modules():
        if isinstance(module, torch_gpt.Attention):
            placed = module.placed
            vars(module)["placed"] = lambda x, norm, placed=placed: placed(x, norm.flip(0))


QWEN3 = {
    "SiLU": set_everywhere(torch_gpt.FeedForward, activation="gelu"),
    "gated": activate_the_other,
    "another rotary base": set_everywhere(torch_gpt.Attention, base=10_000.0),
    "another head size": set_everywhere(torch_gpt.Attention, scale=1 / math.sqrt(7)),
    "scaled queries and keys": scale_other_features,
}
"""The fields of Llama and Qwen3, and a mistake in each."""


MODERN = {
    "rotary": set_everywhere(torch_gpt.Attention, base=1_000.0),
    "RMS norms": set_everywhere(torch.nn.RMSNorm, eps=1e-6),
    "normed queries and keys": set_everywhere(torch_gpt.Attention, epsilon=1e-5),
    "another scale": set_everywhere(torch_gpt.Attention, scale=0.5),
    "grouped heads": in_other_groups,
    "window": set_everywhere(torch_gpt.Attention, window=4),
    "n-grams": set_everywhere(torch_gpt.NGramEmbedding, multiplier=0x9E3779B3),
    "shortcut": forget_a_shortcut,
    "softcap": set_everywhere(torch_gpt.GPT, softcap=None),
    "squared ReLU": set_everywhere(torch_gpt.FeedForward, activation="relu"),
}


@pytest.mark.parametrize(
    ("family", "sabotage"),
    [
        *(pytest.param("modern", each, id=name) for name, each in MODERN.items()),
        *(
            pytest.param("qwen3", each, id=name, marks=pytest.mark.slow)
            for name, each in QWEN3.items()
        ),
    ],
)
def test_the_ladder_sees_a_mistake_in_each_modern_field(family, sabotage):
    rungs = set(rungs_of("float64"))
    seen = rungs if sabotage is forget_a_shortcut else MODEL_RUNGS
    assert blind_rungs(family, "float64", sabotage=sabotage) == rungs - seen


def test_an_unmapped_or_missing_leaf_is_an_error():
    arrays = {"a.weight": np.ones(2)}
    with pytest.raises(AssertionError):
        errors(arrays, {**arrays, "a.bias": np.ones(2)})


def corrected(average, weights, count):
    """An exponential average that doesn't begin at the first weights."""
    return average + 0.2 / (1 - 0.8 ** (count + 1)) * (weights - average)


@pytest.mark.parametrize(
    ("mean", "agrees"),
    [(corrected, True), (get_ema_avg_fn(0.8), False)],
    ids=["corrected for its start", "as PyTorch has it"],
)
def test_averaged_weights_are_those_of_pytorch_s_averaged_model(mean, agrees):
    averaged = []

    def follow(port):
        if not averaged:
            averaged.append(AveragedModel(port, avg_fn=mean))
        averaged[0].update_parameters(port)

    theirs("gpt2", "float64", after_step=follow)
    its = {name: leaf.detach().numpy() for name, leaf in averaged[0].module.named_parameters()}
    error = errors(ours_averaged("gpt2", "float64", 0.8), its)[1]

    assert (error < TOLERANCE["float64"]) == agrees
