"""Explicit axes: an array's sharding is what its annotation's names say, in the whole step."""

import functools
import textwrap
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, TypeCheckError

import jgpt
from jgpt import TrainConfig, sharding
from jgpt.contracts import check, typed
from jgpt.nn import depth, heads, kernels, layers, loss, models, transformer
from jgpt.nn.attention import split_heads
from jgpt.nn.kernels import attend_windowed, fused_attend
from jgpt.nn.models import abstract_model
from jgpt.nn.products import project
from jgpt.sharding import (
    abstract_arrays,
    dimensions_of,
    make_mesh,
    read,
    replicate,
    shard_by_name,
    shardings,
)
from jgpt.training.step import (
    abstract_state,
    dropout_stream,
    make_eval_step,
    make_train_steps,
    state_specs,
)
from tests.quick import only
from tests.training.test_mesh import ALL, CONFIGS, GROUPED, MESHES, config_of

BATCH = ("data", "fsdp")


def explicit(mesh: str):
    return jax.set_mesh(make_mesh(mesh, explicit=True))


def arguments(config: TrainConfig, batch: Any = BATCH) -> tuple[Any, Any]:
    """A train state and windows, abstract, sharded over the mesh that is set."""
    state = abstract_arrays(abstract_state(config), state_specs(config))
    shape, where = (3, config.batch_size, 11), shardings(P(None, batch, None))
    return state, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)


def trace(config: TrainConfig, mesh: str = ALL, batch: Any = BATCH) -> None:
    with explicit(mesh):
        make_train_steps(config).trace(*arguments(config, batch), dropout_stream(1), 3, 0)


# --- the whole step ------------------------------------------------------------------------------


TRACED = [
    *((name, ALL) for name in CONFIGS),
    ("heads that tensor=8 doesn't divide", "tensor=8"),
    *(
        (name, mesh)
        for name in ("lecture", "modern", "bigram", "accumulated", "scanned")
        for mesh in MESHES[:-1]
    ),
]
QUICK_TRACES = [(name, ALL) for name in ("modern", "accumulated", "lecture in bfloat16")]


@pytest.mark.parametrize(("name", "mesh"), only([*QUICK_TRACES, TRACED[len(CONFIGS)]], TRACED))
def test_the_step_is_sharded_as_the_names_say(name, mesh):
    trace(CONFIGS[name], mesh)


@pytest.mark.parametrize("name", ["lecture", "modern"])
def test_so_is_the_loss_in_chunks_and_the_evaluation(name, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 30)
    config = CONFIGS[name]
    trace(config)
    with explicit(ALL):
        state, windows = arguments(config)
        counts = jax.ShapeDtypeStruct((3, 24, 10), bool, sharding=windows.sharding)
        make_eval_step(config.model).trace(state.weights, windows, counts)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mesh", only([ALL], MESHES))
def test_so_is_the_fused_attention(mesh, monkeypatch):
    fused = functools.partial(fused_attend, implementation="xla")
    monkeypatch.setattr(kernels, "fused_attend", fused)
    model = {"attention_kernel": "cudnn", "embed_dim": 64, "num_kv_heads": 4}
    trace(config_of("nanogpt", "adamw", model={**model, "activation_dtype": "bfloat16"}), mesh)


# --- what the names mean -------------------------------------------------------------------------

SHARDED = {
    "batch": "8@(data,fsdp)",
    "embed_dim": "8@fsdp",
    "hidden_dim": "8@tensor",
    "num_heads": "8@tensor",
    "num_kv_heads": "8@tensor",
    "vocab_size": "8@tensor",
}
HEADS, KV_HEADS = ("num_heads", 8), ("num_kv_heads", 4)
LAYERS: dict[str, tuple[Any, Any]] = {
    "attention.query": ("embed_dim", HEADS),
    "attention.key": ("embed_dim", KV_HEADS),
    "attention.value": ("embed_dim", KV_HEADS),
    "attention.projection": (HEADS, "embed_dim"),
    "feed_forward.expansion": ("embed_dim", "hidden_dim"),
    "feed_forward.gate": ("embed_dim", "hidden_dim"),
    "feed_forward.projection": ("hidden_dim", "embed_dim"),
    "head": ("embed_dim", "vocab_size"),
}
NORMS = ("attention_norm", "feed_forward_norm", "final_norm")
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "token_embedding.embedding": ("vocab_size", "embed_dim"),
    "position_embedding.embedding": (None, "embed_dim"),
    "ngram_embedding.table.embedding": (None, "embed_dim"),
    **{f"{name}.kernel": dimensions for name, dimensions in LAYERS.items()},
    **{f"{name}.bias": (outputs,) for name, (_, outputs) in LAYERS.items()},
    **{f"{name}.{part}": (None,) for name in NORMS for part in ("scale", "bias")},
    "attention.query_norm.scale": (None,),
    "attention.key_norm.scale": (None,),
    "shortcut": (None,),
}
TABLE = {"table.embedding": (None, "embed_dim")}
EVERYTHING = config_of(
    "lecture",
    "adamw",
    model={
        **GROUPED,
        "num_layers": 1,
        "qkv_bias": True,
        "embedding_shortcut": True,
        "gated": True,
        "qk_norm": True,
        "qk_norm_scale": True,
    },
)


def test_each_rule_is_what_the_documentation_says():
    with explicit(ALL):
        found = {
            name: str(jax.typeof(shard_by_name(jnp.zeros((8, 8)), name, None)))[
                len("float32[") : -3
            ]
            for name in sharding.RULES
        }
    assert found == SHARDED


def dimensions(model: Any) -> dict[str, tuple[Any, ...]]:
    """The dimensions' names of a model's parameters by path, the block's without its number."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    paths = {".".join(map(str, path)): dimensions_of(variable) for path, variable in flat}
    return {path.removeprefix("blocks.0."): names for path, names in paths.items()}


def test_each_parameter_says_its_dimensions():
    assert dimensions(abstract_model(EVERYTHING.model)) == PARAMETERS
    assert dimensions(abstract_model(CONFIGS["bigram"].model)) == TABLE


# --- faults are refused, and for the right reason -----------------------------------------------

WITHOUT_BIAS = config_of(  # a bias could hide how the product before it is sharded
    "lecture",
    "adamw",
    model={**GROUPED, "num_layers": 1, "use_bias": False, "head_bias": False},
)
value_and_grad = jax.value_and_grad


def replaced(module: Any, name: str, function: Any):
    return lambda patch: patch.setattr(module, name, function)


def moved(function: Any, *axes: Any):
    """The function, and then its result sharded over other axes."""
    return lambda *args, **_: jax.sharding.reshard(function(*args), P(*axes))


def itself(x, *_):
    return x


def with_gathered_gradients(function):
    def call(*args):
        value, gradients = value_and_grad(function)(*args)
        return value, replicate(gradients)

    return call


def attend_to_gathered(query, key, *rest, **options):
    return attend_windowed(query, shard_by_name(key, "batch", None, None, None), *rest, **options)


def read_tables(parameter, dtype=None):
    return read(parameter) if dtype is None else parameter[...]


UNSPLIT_BATCH = "dimension batch is not sharded, the rules say data and fsdp."
UNSPLIT_HEADS = "dimension {self.num_heads} is not sharded, the rules say tensor."
STEP = "training.step.make_train_steps.<locals>."
WINDOWS = STEP + "steps() got a wrong argument `windows`."
BLOCK = "nn.transformer.Block.__call__() got a wrong argument `x`."
PROJECTED = "nn.heads.MultiHeadAttention._project() returned a wrong result."
FAULTS = {
    "the batch is replicated": (None, WINDOWS, UNSPLIT_BATCH),
    "the axes of the batch are swapped": (
        ("fsdp", "data"),
        WINDOWS,
        "dimension batch is sharded over fsdp and data, the rules say data and fsdp.",
    ),
    "the step gathers the batch": (
        replaced(sharding, "shard_by_name", moved(itself)),
        STEP + "gradients_of() got a wrong argument `window`.",
        UNSPLIT_BATCH,
    ),
    "the residual stream is replicated": (
        replaced(depth, "shard_by_name", moved(itself)),
        BLOCK,
        UNSPLIT_BATCH,
    ),
    "features of the residual stream are sharded": (
        replaced(depth, "shard_by_name", moved(itself, BATCH, None, "tensor")),
        BLOCK,
        "dimension {self.embed_dim} is sharded over tensor, the rules say no axis.",
    ),
    "features of a head are sharded instead": (
        replaced(heads, "split_heads", moved(split_heads, BATCH, None, None, "tensor")),
        PROJECTED,
        "item 0 is float32[24@data+fsdp,8,10,6@tensor]: " + UNSPLIT_HEADS,
    ),
    "repeated key-value heads are replicated": (
        replaced(sharding, "_rule", lambda *_: None),
        "nn.kernels.repeat_heads() returned a wrong result.",
        "dimension {heads} is not sharded, the rules say tensor.",
    ),
    "keys are sharded otherwise than queries": (
        replaced(kernels, "attend_windowed", attend_to_gathered),
        "nn.kernels.attend_windowed() got a wrong argument `key`.",
        "dimension *batch[1] is not sharded, and sharded over tensor before in this call.",
    ),
    "a table is not gathered": (
        replaced(sharding, "_gathered", lambda dimensions, dtype, x: x),
        "nn.layers.look_up() got a wrong argument `table`.",
        "dimension embed_dim is sharded over fsdp, the rules say no axis.",
    ),
    "a weight is not gathered": (
        replaced(layers, "read", read_tables),
        "nn.products.project() got a wrong argument `kernel`.",
        "dimension in_features is sharded over fsdp, and not sharded before in this call.",
    ),
    "hidden features are gathered": (
        replaced(transformer, "activation", lambda name: moved(jax.nn.relu, BATCH)),
        "nn.transformer.FeedForward.__call__() computed a wrong intermediate.",
        "dimension {self.hidden_dim} is not sharded, the rules say tensor.",
    ),
    "logits are gathered": (
        replaced(layers, "project_to_vocabulary", moved(project, BATCH)),
        "nn.transformer.GPT.logits() returned a wrong result.",
        "dimension {self.vocab_size} is not sharded, the rules say tensor.",
    ),
    "gradients are gathered": (
        replaced(jax, "value_and_grad", with_gathered_gradients),
        STEP + "gradients_of() returned a wrong result.",
        "dimension *shape is not sharded, and sharded over fsdp before in this call.",
    ),
}


QUICK = (
    "the batch is replicated",
    "features of a head are sharded instead",
    "a weight is not gathered",
)


@pytest.mark.parametrize("name", only(QUICK, FAULTS))
def test_a_fault_is_refused_with_its_reason(name, monkeypatch):
    fault, subject, reason = FAULTS[name]
    jax.clear_caches()  # or nothing is traced again
    monkeypatch.setattr(models, "_traced", models._traced.__wrapped__)
    if callable(fault):
        fault(monkeypatch)
    with pytest.raises(TypeCheckError) as caught:
        trace(WITHOUT_BIAS, batch=BATCH if callable(fault) else fault)
    first, _, got, last = str(caught.value).splitlines()
    assert first == f"jgpt.{subject}"
    assert got.startswith("Got: ")
    assert last.startswith("Reason: ")
    assert last.endswith(reason)


def test_the_message_has_the_four_lines_of_shapes():
    with explicit("data=4,tensor=2"), pytest.raises(TypeCheckError) as caught:
        jgpt.Head(10, 4, rngs=nnx.Rngs(0))(jnp.ones((8, 3, 10)))
    assert str(caught.value) == textwrap.dedent(
        """\
        jgpt.nn.heads.Head.__call__() got a wrong argument `x`.
        Expected: Float[Array, "batch time {self.embed_dim}"] with batch=8, time=3, \
{self.embed_dim}=10
        Got: float32[8,3,10]
        Reason: dimension batch is not sharded, the rules say data."""
    )


# --- what the contract does with a sharding -----------------------------------------------------


@typed
def merged(x: Float[Array, "batch heads time value_dim"]) -> Float[Array, "batch heads*value_dim"]:
    return jax.sharding.reshard(x[:, :, 0].reshape(len(x), -1), P(BATCH, "tensor"))


@typed
def normalised(x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
    return x / x.sum(axis=-1, keepdims=True)


@typed
def last(x: Float[Array, "... {x.shape[-1]//2}+1"]) -> Float[Array, "_"]:
    return x[0]


@typed
def averaged(tree: PyTree[Float[Array, "batch time"]]) -> Float[Array, " time"]:
    return jnp.add(*jax.tree.leaves(tree)).mean(axis=0)


def array(*shape: int, axes: Any = ()) -> jax.Array:
    return jax.sharding.reshard(jnp.ones(shape), P(*axes))


UNALIKE = "is sharded over tensor, and not sharded before in this call"


@pytest.mark.parametrize(
    ("mesh", "call", "refusal"),
    [
        # a name without rules may be sharded, but alike in a call
        (ALL, lambda: normalised(array(8, 4, 6)), None),
        (ALL, lambda: normalised(array(8, 4, 6, axes=(BATCH, None, "tensor"))), None),
        (ALL, lambda: normalised(array(8, 4, 6, axes=("tensor", BATCH))), None),
        (ALL, lambda: normalised(array(8, 4, 6, axes=(None, None, "fsdp"))), None),
        (
            ALL,
            lambda: project(array(8, 4), array(4, 6, axes=("tensor",)), "float32"),
            f"in_features {UNALIKE}",
        ),
        # a product of names is sharded as the first, and no axis divides three heads
        (ALL, lambda: merged(array(8, 4, 3, 6, axes=(BATCH, "tensor"))), None),
        (ALL, lambda: merged(array(8, 3, 3, 6, axes=(BATCH,))), rf"heads\*value_dim {UNALIKE}"),
        # other expressions are free
        (ALL, lambda: last(array(2, 2, axes=(None, "tensor"))), None),
        # each leaf of a tree is checked
        (ALL, lambda: averaged([array(8, 3, axes=(BATCH,))] * 2), None),
        (
            ALL,
            lambda: averaged([array(8, 3, axes=(BATCH,)), array(8, 3, axes=("data",))]),
            r"its leaf 1 is float32\[8@data,3\]: dimension b",
        ),
        # what axes don't divide is to be replicated
        ("data=8", lambda: averaged([array(7, 3)] * 2), None),
        ("data=8", lambda: averaged([array(8, 3, axes=("data",))] * 2), None),
        ("data=8", lambda: averaged([array(8, 3)] * 2), "batch is not sharded, the rules say data"),
        # an axis of size one shards nothing
        ("tensor=8", lambda: averaged([array(8, 3, axes=("data",)), array(8, 3)]), None),
    ],
)
def test_a_call_is_checked_by_its_names(mesh, call, refusal):
    refused = pytest.raises(TypeCheckError, match=refusal) if refusal else nullcontext()
    with explicit(mesh), refused:
        call()


def test_an_axis_that_is_not_explicit_is_left_to_the_partitioner():
    kinds = (AxisType.Explicit, AxisType.Auto)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), kinds)):
        heads = array(8, 4, 3, 6, axes=("data",))
        assert jgpt.attend(heads, heads, heads).shape == heads.shape
        assert split_heads(array(8, 3, 24, axes=("data",)), 4).shape == heads.shape
        with pytest.raises(TypeCheckError, match="batch is not sharded, the rules say data"):
            split_heads(array(8, 3, 24), 4)


def test_an_intermediate_is_checked_against_what_its_call_has_bound():
    @typed
    def summed(x: Float[Array, "rows features"]) -> Float[Array, " rows"]:
        check(jax.sharding.reshard(x, P(None, "tensor")), Float[Array, "rows features"])
        return x.sum(axis=1)

    with explicit(ALL), pytest.raises(TypeCheckError, match="computed a wrong intermediate"):
        summed(array(4, 6, axes=("fsdp",)))


def test_without_explicit_axes_no_sharding_is_checked():
    wrong = jnp.ones((8, 3))
    averaged([wrong] * 2)
    with jax.set_mesh(make_mesh(ALL)):
        averaged([wrong] * 2)
        jax.jit(averaged)([wrong] * 2)
