"""Under every transform of JAX a good call passes, and a bad one fails by the contract."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, TypeCheckError

import jgpt
from jgpt.shapes.contract import typed

BATCH, TIME, EMBED, LAYERS = 3, 7, 10, 2
GOOD = jax.ShapeDtypeStruct((BATCH, TIME, EMBED), jnp.float32)
BAD = jax.ShapeDtypeStruct((BATCH, TIME, EMBED + 1), jnp.float32)
BLOCK = jgpt.Block(jgpt.ModelConfig(embed_dim=EMBED, num_heads=2), rngs=nnx.Rngs(0))
GRAPH, WEIGHTS = nnx.split(BLOCK)


def loss(x: Array) -> Array:
    return BLOCK(x).sum()


def scan_over_layers(x: Array) -> Array:
    """One block's code, the layers' weights stacked: the contract sees one layer at a time."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAYERS), WEIGHTS)

    def body(carry, weights):
        return nnx.merge(GRAPH, weights)(carry), None

    return jax.lax.scan(body, x, stacked)[0]


def sharded(x: Array) -> Array:
    """Each device's own shape is what the contract sees inside `shard_map`."""
    mesh = jax.sharding.AbstractMesh((BATCH,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = PartitionSpec("data")

    @typed
    def whole(x: Float[Array, "batch time features"]) -> Float[Array, "batch time features"]:
        return jax.shard_map(BLOCK, mesh=mesh, in_specs=data, out_specs=data)(x)

    return whole(x)


def over_examples(x: Array) -> Array:
    return jax.vmap(lambda example: BLOCK(example[None])[0])(x)


def under_nnx_jit(x: Any) -> Array:
    block = nnx.merge(GRAPH, WEIGHTS)  # it is updated in place: one of its own
    return nnx.jit(jgpt.Block.__call__)(block, jnp.ones(x.shape, x.dtype))


def exported_for_any_batch(x: Any) -> Any:
    (batch,) = jax.export.symbolic_shape("batch")
    any_batch = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    program = jax.export.export(jax.jit(BLOCK))(any_batch)
    assert program.out_avals[0].shape == any_batch.shape
    return program


def traced(function: Callable[[Array], Any]) -> Callable[[Any], Any]:
    return functools.partial(jax.eval_shape, function)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda x: jax.jit(BLOCK).trace(x),
    "nnx.jit": under_nnx_jit,
    "grad, rematerialised": traced(jax.grad(jax.checkpoint(loss))),  # type: ignore[arg-type]
    "vmap": traced(over_examples),
    "scan over layers": traced(scan_over_layers),
    "shard_map": traced(sharded),
    "export for any batch": exported_for_any_batch,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_good_passes_and_bad_fails(transform: Callable[[Any], Any]):
    transform(GOOD)
    with pytest.raises(
        TypeCheckError, match=r"^jgpt.nn.transformer.Block.__call__\(\) got a wrong argument `x`"
    ):
        transform(BAD)


def test_a_compiled_function_checks_each_new_shape():
    compiled = jax.jit(jgpt.causal_mask, static_argnums=0)
    attend = jax.jit(jgpt.attend)
    for time in (3, 4):
        x = jnp.ones((2, time, 5))
        assert attend(x, x, x, compiled(time)).shape == x.shape
        with pytest.raises(TypeCheckError, match="got a wrong argument `mask`"):
            attend(x, x, x, compiled(5))


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("b, t", {"vocab_size": 1030}),  # of more than 1,024 the logits may be padded
        ("time, batch", {"scan_layers": True, "ngram_sizes": (2, 3)}),  # named the wrong way round
        pytest.param(
            "query, key",
            {"positions": "rotary", "norm": "rms", "num_kv_heads": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_is_exported_for_any_batch_and_length(names, options):
    """`causal_mask(time: int)` and others are given a symbolic size for an integer."""
    vocab_size = options.pop("vocab_size", 17)
    config = jgpt.ModelConfig(
        vocab_size=vocab_size, block_size=13, num_layers=2, num_heads=2, embed_dim=12, **options
    )
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    length = names.split(", ")[1]
    sizes = jax.export.symbolic_shape(names, constraints=[f"{length} <= 13"])
    call = jax.jit(lambda tokens: model(tokens))
    exported = jax.export.export(call)(jax.ShapeDtypeStruct(sizes, jnp.int32))
    assert str(exported.out_avals[0].shape) == f"({names}, {vocab_size})"
    for shape in ((2, 5), (3, 11)):
        tokens = np.random.default_rng(0).integers(vocab_size, size=shape).astype(np.int32)
        np.testing.assert_allclose(exported.call(tokens), call(tokens), rtol=1e-5, atol=1e-6)
