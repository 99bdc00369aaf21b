"""Shapes proven for every size; what a proof must not pass over."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import Array, Float

import jgpt
from jgpt.config import ModelConfig
from jgpt.generation.sampling import Sampling, next_token
from jgpt.nn.attention import apply_rotary, merge_heads, split_heads
from jgpt.nn.int8 import with_int8_weights
from jgpt.nn.kernels import attend_windowed
from jgpt.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from jgpt.nn.loss import cross_entropy_from, token_losses, token_losses_from
from jgpt.nn.models import abstract_model
from jgpt.parallel.mesh import use_mesh
from jgpt.presets import PRESETS, preset
from jgpt.shapes.proofs import Case, Proof, prove
from jgpt.training.state import abstract_state
from jgpt.training.step import make_eval_step, make_train_steps
from tests.quick import only

CONFIG = ModelConfig(vocab_size=17, embed_dim=12, num_heads=3, num_layers=2, block_size=9)
BTE, HEADS = "float32[b t e]", "float32[b h t d]"


def zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def model_of(config: ModelConfig) -> Any:
    """The model of a config, whose values are made within the trace."""
    graph, weights = nnx.split(abstract_model(config))
    return nnx.merge(graph, zeros(weights))


def forward(config: ModelConfig, tokens: Array) -> Array:
    return model_of(config)(tokens)


def sized_gpt(tokens: Array, sizes: Array) -> Array:
    """A GPT whose sizes are those of an array, which a config would reject if they are symbolic."""
    vocab_size, embed_dim, block_size = sizes.shape
    with mock.patch.object(ModelConfig, "__post_init__"):
        config = dataclasses.replace(
            CONFIG, vocab_size=vocab_size, embed_dim=embed_dim, block_size=block_size
        )
        # Not by `abstract_model`, which looks for the config in a cache, by the hash of its sizes.
        graph, weights = nnx.split(nnx.eval_shape(lambda: jgpt.GPT(config, rngs=nnx.Rngs(0))))
        return nnx.merge(graph, zeros(weights))(tokens)


def head(x: Array) -> Array:
    return x @ jnp.ones((16, 65))


def lossy(x: Array, targets: Array) -> Array:
    return cross_entropy_from(x, targets, head, 1000)


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "causal_mask": (lambda x: jgpt.causal_mask(x.shape[0]), "float32[t]"),
    "attention_weights": (jgpt.attention_weights, HEADS, "float32[b h k d]"),
    "attend": (jgpt.attend, HEADS, "float32[b h k d]", "float32[b h k v]"),
    "apply_rotary": (apply_rotary, "float32[b t 2*d]", "int32[t]"),
    "merge_heads": (merge_heads, HEADS),
    "split_heads": (lambda x: split_heads(x, 4), BTE),
    "windows of 5": (
        lambda x: attend_windowed(x, x, x, jgpt.causal_mask(x.shape[1]), 5),
        "float32[b t 8]",
    ),
    "Linear": (
        lambda x, y: Linear(x.shape[-1], y.shape[0], rngs=nnx.Rngs(0))(x),
        BTE,
        "float32[f]",
    ),
    "Embedding": (
        lambda i, y: Embedding(*y.shape, rngs=nnx.Rngs(0))(i),
        "int32[b t]",
        "float32[v e]",
    ),
    "RMSNorm": (lambda x: RMSNorm(x.shape[-1])(x), BTE),
    "LayerNorm": (lambda x: LayerNorm(x.shape[-1])(x), BTE),
    "Head": (lambda x: jgpt.Head(x.shape[-1], 8, rngs=nnx.Rngs(0))(x), BTE),
    "Head, a context": (
        lambda x, y: jgpt.Head(x.shape[-1], 8, rngs=nnx.Rngs(0))(x, y),
        BTE,
        "float32[b k e]",
    ),
    "MultiHeadAttention": (jgpt.MultiHeadAttention(CONFIG, rngs=nnx.Rngs(0)), "float32[b t 12]"),
    "MultiHeadAttention, a context": (
        jgpt.MultiHeadAttention(CONFIG, rngs=nnx.Rngs(0)),
        "float32[b t 12]",
        "float32[b k 12]",
    ),
    "FeedForward": (jgpt.FeedForward(CONFIG, rngs=nnx.Rngs(0)), "float32[b t 12]"),
    "Block": (jgpt.Block(CONFIG, rngs=nnx.Rngs(0)), "float32[b t 12]"),
    "BigramLM": (
        lambda x, y: jgpt.BigramLM(y.shape[0], rngs=nnx.Rngs(0))(x),
        "int32[b t]",
        "float32[v]",
    ),
    "token_losses": (token_losses, "float32[b t v]", "int32[b t]"),
    "cross_entropy": (jgpt.cross_entropy, "float32[b t v]", "int32[b t]"),
    "losses in chunks": (
        lambda x, y: token_losses_from(x, y, head, 1000),
        "float32[b t 16]",
        "int32[b t]",
    ),
    "losses in chunks, gradient": (jax.grad(lossy), "float32[b t 16]", "int32[b t]"),
    "next_token": (
        lambda logits: next_token(logits, jax.random.key(0), Sampling(1.0, 5, 0.9, 0.1)),
        "float32[b 65]",
    ),
    "GPT of any vocabulary, width and block": (sized_gpt, "int32[b t]", "float32[v 3*d n]"),
    "int8 weights": (lambda x: with_int8_weights(model_of(CONFIG))(x), "int32[b t]"),
}


def decoded(tokens: Array, room: Array) -> Array:
    model = model_of(preset("modern").model)
    cache = model.empty_cache(tokens.shape[0], room.shape[0])
    return model(tokens, cache=cache)


def trained(config: jgpt.TrainConfig, windows: Array) -> Any:
    state = zeros(abstract_state(config))
    train = make_train_steps(config)
    return train(state, windows, jax.random.key(0), jnp.int32(1), jnp.int32(0))


def proof_of(function: Any, *arrays: str) -> Any:
    """The proof of a function for arrays, which is not made yet."""
    return functools.partial(prove, function, *arrays)


DEEP = {}
for name in PRESETS:
    of_preset = functools.partial(forward, preset(name).model)
    DEEP[f"{name}, any batch and length"] = proof_of(of_preset, "int32[b t]")
TRAINED = {}
for name in ("tiny", "lecture", "nanogpt-cpu", "modern", "modern-cpu", "bigram"):
    of_preset = functools.partial(trained, preset(name))
    TRAINED[f"{name}, train steps"] = proof_of(of_preset, "int32[n b t+1]")
PROVEN = {
    **{name: proof_of(*function_and_arrays) for name, function_and_arrays in PROGRAMS.items()},
    **DEEP,
    "modern, a token, any cache": proof_of(decoded, "int32[b 1]", "float32[c]"),
    "modern, a prompt of any length": proof_of(decoded, "int32[b t]", "float32[32]"),
    **TRAINED,
}
"""The table in benchmarks/proofs.md."""
SLOW = {*TRAINED, "GPT of any vocabulary, width and block"}
RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "proofs.json"


def only_case(proof: Proof) -> Case:
    (case,) = proof.cases
    return case


def cases_with(proof: Proof, verdict: str) -> list[Case]:
    return [case for case in proof.cases if case.verdict == verdict]


def counts(proof: Proof) -> dict[str, int]:
    return {verdict: len(cases_with(proof, verdict)) for verdict in ("proven", "rejected", "open")}


def recorded(name: str) -> dict[str, int]:
    found = json.loads(RECORD.read_text())["programs"][name]
    del found["arrays"]
    return found


LIKE_OTHERS = {"nanogpt-char", "gpt2-medium", "gpt2-large", "gpt2-xl"}
"""Presets that differ from another in numbers alone, once they have two layers."""
WITH_TWO_LAYERS = sorted(set(PRESETS) - LIKE_OTHERS)
DECODED = ("modern, a token, any cache", "modern, a prompt of any length")
WHOLE = [*PROGRAMS, *DECODED, "modern-cpu, train steps"]
"""All layers of a preset are for the record alone: two of them have all that differs."""


def test_random_weights_of_any_width_are_proven():
    def doubled(x: Array) -> Array:
        width = x.shape[-1]
        return nnx.Linear(width, 2 * width, rngs=nnx.Rngs(0))(x)

    proof = prove(doubled, "float32[b t e]")

    assert str(proof).splitlines()[0] == "proven    all sizes"


@pytest.mark.parametrize("name", only(lambda name: name not in SLOW, WHOLE))
def test_is_proven_for_every_size(name):
    make_proof = PROVEN[name]

    proof = make_proof()

    assert proof, str(proof)
    assert counts(proof) == recorded(name)


@pytest.mark.parametrize("name", only(["bigram", "modern-cpu"], WITH_TWO_LAYERS))
def test_two_layers_of_a_preset_are_proven_for_any_batch_and_length(name):
    config = preset(name).model
    config = dataclasses.replace(config, num_layers=min(config.num_layers, 2))

    proof = prove(functools.partial(forward, config), "int32[b t]")

    assert proof, str(proof)
    assert counts(proof) == recorded(f"{name}, any batch and length")
    if config.architecture == "gpt":  # a bigram has no longest context
        (rejected,) = cases_with(proof, "rejected")
        assert rejected.where[0] == f"t >= {config.block_size + 1}"
        assert "more than `block_size=" in rejected.detail


def test_evaluation_is_proven_for_any_batches():
    weights = nnx.to_pure_dict(nnx.state(abstract_model(CONFIG), nnx.Param))

    def evaluate(windows, counts):
        return make_eval_step(CONFIG)(zeros(weights), windows, counts)

    proof = prove(evaluate, "int32[n b 10]", "bool[n b 9]")

    assert proof, str(proof)


@pytest.mark.parametrize(
    ("mesh", "array", "cases"), [("data=4,fsdp=2", "int32[8*b t]", 1), ("fsdp=8", "int32[b t]", 4)]
)
def test_a_mesh_is_proven_for_batches_that_it_divides_and_others(mesh, array, cases):
    function = functools.partial(forward, CONFIG)

    with use_mesh(mesh):
        proof = prove(function, array)

    assert proof, str(proof)
    assert counts(proof) == {"proven": cases, "rejected": 1, "open": 0}


# --- what a proof must find ----------------------------------------------------------------------


@jgpt.typed
def wrong_at_7(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    return x[:, :6] if x.shape[1] == 7 else x


@jgpt.typed
def wrong_from_41(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    return x[:40] if x.shape[0] > 40 else x


@jgpt.typed
def wrong_in_fours(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    if x.shape[1] % 4:
        return x
    return x[:, ::2]


@jgpt.typed
def wrong_unless_one(x: Float[Array, "batch time"]) -> Float[Array, "batch"]:
    return x[:, 0] if x.shape[1] != 1 else x


@jgpt.typed
def wrong_below_4(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
    if x.shape[1] - 4:
        return x if x.shape[1] > 4 else x[:, :-1]
    return x


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (wrong_below_4, "t <= 3"),
        (wrong_at_7, "t == 7"),
        (wrong_from_41, "b >= 41"),
        (wrong_in_fours, "mod(t, 4) == 0"),
        (wrong_unless_one, "t == 1"),
    ],
)
def test_a_mistake_at_some_sizes_is_found(function, where):
    """JAX answers an open `t == 7` with False, and an open `if t % 4` with True."""
    function(jnp.ones((3, 5)))  # at these sizes it is right

    proof = prove(function, "float32[b t]")

    assert not proof
    (violated,) = cases_with(proof, "violated")
    assert violated.where == (where,)
    assert "returned a wrong result" in violated.detail
    assert cases_with(proof, "proven")
    assert f"violated  {where}: " in str(proof)


def halved(x):
    return x.reshape(2, x.shape[0] // 2)


@jax.jit
def reshaped_to_four(x):
    fives = x.reshape(3, -1, 5)
    return fives[0].reshape(4)


def test_a_reshape_to_another_number_of_entries_is_found():
    """JAX doesn't check it while sizes are symbolic."""
    even, odd = prove(halved, "float32[b]").cases

    assert even.verdict == "proven"
    assert even.where == ("b == 2*floordiv(b, 2)",)
    assert odd.verdict == "violated"
    assert odd.detail == "a reshape of b entries to 2*floordiv(b, 2)"
    of_fives = only_case(prove(reshaped_to_four, "float32[3*b 5]"))
    assert of_fives.detail == "a reshape of 5*b entries to 4"


def wrongly_reshaped(x):
    return x.reshape(x.shape[0] + 1)


def hidden_sum(x):
    return wrongly_reshaped(x).sum()


def on_shards(x):
    sums = jax.shard_map(
        lambda x: hidden_sum(x)[None],
        mesh=jax.make_mesh((8,), ("data",)),
        in_specs=jax.P(),
        out_specs=jax.P("data"),
    )
    return sums(x)


HIDDEN = {
    "a branch": lambda x: jax.lax.cond(True, hidden_sum, jnp.sum, x),
    "a switch": lambda x: jax.lax.switch(0, [jnp.sum, jnp.mean, hidden_sum], x),
    "a scan": lambda x: jax.lax.scan(lambda c, _: (c + hidden_sum(x), 0), 0.0, jnp.arange(3)),
    "a nested jit": jax.jit(lambda x: jax.jit(jax.jit(hidden_sum))(x)),
    "a gradient": jax.grad(hidden_sum),
    "shards": lambda x: on_shards(x),
}


@pytest.mark.parametrize("place", HIDDEN)
def test_a_reshape_is_found_wherever_it_is(place):
    proof = prove(HIDDEN[place], "float32[b]")

    case = only_case(proof)
    assert case.verdict == "violated"
    assert "a reshape of b" in case.detail


@jgpt.typed
def merged_wrongly(x: Float[Array, "batch heads time d"]) -> Float[Array, "batch time heads*d"]:
    return x.reshape(x.shape[0], x.shape[1], -1)


def as_many_arrays_as_rows(x):
    return [jnp.ones(n) for n in range(x.shape[0])]


def always_refused(x):
    raise ValueError(f"{x.shape[0]} rows")


@jgpt.typed
def wrong_einsum_from_5(x: Float[Array, "batch features"]) -> Float[Array, "batch"]:
    if x.shape[0] > 4:
        return jnp.einsum("bf,f->b", x, jnp.ones(7))
    return x.sum(axis=1)


def asserted(x):
    assert x.shape[0] <= 8, f"{x.shape[0]} rows are more than 8"
    return x


def test_other_verdicts():
    of_result = only_case(prove(merged_wrongly, HEADS))
    of_argument = only_case(prove(jgpt.attention_weights, HEADS, "float32[b h k e]"))
    of_loop = only_case(prove(as_many_arrays_as_rows, "float32[b]"))
    refused = prove(always_refused, "float32[b]")
    of_assertion = prove(asserted, "float32[b]")
    of_library = prove(wrong_einsum_from_5, "float32[b 8]")

    assert of_result.verdict == "violated"
    assert of_result.where == ()
    assert "wrong argument `key`" in of_argument.detail
    assert of_loop.verdict == "open"
    assert "test_proofs.py:" in of_loop.detail
    assert only_case(refused).verdict == "rejected"
    assert not refused
    assert of_assertion
    assert [case.verdict for case in of_assertion.cases] == ["proven", "rejected"]
    # What a library raises is no refusal of the program's.
    assert [case.verdict for case in of_library.cases] == ["proven", "open"]


@pytest.mark.parametrize(
    "decided",
    [
        lambda size: int(1 + size**0.5),
        lambda size: 1 if size**0.5 > 3 else 2,
        lambda size: 1 if size / 2 > 1 else 2,
    ],
)
def test_what_a_quotient_or_a_power_of_a_size_decides_is_open(decided):
    proof = prove(lambda x: x[: decided(x.shape[0])], "float32[b]")

    case = only_case(proof)
    assert case.verdict == "open"
    assert "of a size decides" in case.detail


if __name__ == "__main__":  # python -m tests.test_proofs writes the record
    sys.path.insert(0, str(RECORD.parents[1]))
    runner = importlib.import_module("runner")
    machine = runner.provenance() | {"command": "python -m tests.test_proofs"}
    programs = {}
    for name, proving in PROVEN.items():
        programs[name] = {"arrays": ", ".join(proving.args[1:]), **counts(proving())}
    print(runner.write("proofs", {"programs": programs}, machine))


def test_an_equality_that_jax_can_t_use_is_an_open_case():
    def wrong_where_equal(x: Array, y: Array) -> Array:
        total = x.sum()
        if sum(x.shape) == y.shape[0]:
            total = total + jnp.ones(2) + jnp.ones(3)
        return total

    proof = prove(wrong_where_equal, "float32[a b]", "float32[c]")

    verdicts = {case.where[0]: case.verdict for case in proof.cases}
    assert verdicts == {
        "b + a == c": "open",
        "b + a >= c + 1": "proven",
        "b + a <= c - 1": "proven",
    }
    assert proof.cases[0].detail == "JAX can't use the constraint b + a == c"
