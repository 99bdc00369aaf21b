"""Train steps on eight devices: the numbers of one device, the collectives that one expects, and
under explicit axes the shardings that annotations name.
"""

import dataclasses
import functools
import re
import textwrap
from collections import Counter
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, TypeCheckError

import jgpt
from jgpt import ModelConfig, OptimizerConfig, TrainConfig, sharding
from jgpt.contracts import check, typed
from jgpt.data.batches import batches
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
    use_mesh,
)
from jgpt.training import optimizer
from jgpt.training.ahead import _without_compilation_cache
from jgpt.training.step import (
    abstract_state,
    dropout_stream,
    init_state,
    make_eval_step,
    make_train_steps,
    state_specs,
)
from tests.models import FAMILIES
from tests.quick import only

SIZES = {
    "vocab_size": 40,
    "block_size": 10,
    "num_layers": 1,
    "num_heads": 8,
    "embed_dim": 48,
    "hidden_dim": 56,
}
ROWS = 24 * 10
MATRICES = Counter({(48, 48): 4, (48, 56): 1, (56, 48): 1})  # of a block
TOKENS = np.arange(997, dtype=np.int32) ** 2 % 37


def config_of(family: str, optimizer: Any, ema_decay: float = 0.0, **changes: Any) -> TrainConfig:
    own = {**FAMILIES[family], **SIZES, **changes.pop("model", {})}
    return TrainConfig(
        model=ModelConfig(**own),
        optimizer=OptimizerConfig(optimizer=optimizer, warmup_steps=3, ema_decay=ema_decay),
        **{"steps": 50, "batch_size": 24, **changes},
    )


# --- the same numbers -------------------------------------------------------------------------

# four key-value heads can't be split over eight devices, nor 21 rows of n-grams
GROUPED = {"num_kv_heads": 4, "ngram_sizes": (2,), "ngram_rows": 21, "ngram_dropout": 0.2}
CONFIGS = {
    "lecture": config_of("lecture", "adamw", 0.8, model={"dropout": 0.1}),
    "lecture in bfloat16": config_of("lecture", "adamw", model={"dtype": "bfloat16"}),
    "nanogpt": config_of("nanogpt", "adamw"),
    "gpt2": config_of("gpt2", "muon", 0.9),
    "modern": config_of("modern", "muon", model={**GROUPED, "attention_window": 4}),
    "qwen3": config_of("qwen3", "adamw", model={"num_kv_heads": 4}),
    "bigram": config_of("bigram", "adamw"),
    "accumulated": config_of(
        "nanogpt",
        "adamw",
        0.9,
        model={"num_layers": 2, "dropout": 0.2, "attention_window": 4, "rematerialise": True},
        batch_size=48,
        micro_batches=2,
    ),
    "scanned": config_of("modern", "muon", model={**GROUPED, "num_layers": 2, "scan_layers": True}),
    "heads that tensor=8 doesn't divide": config_of(
        "modern", "adamw", model={"num_heads": 6, "num_kv_heads": 3}
    ),
    "a vocabulary that no axis divides": config_of("nanogpt", "adamw", model={"vocab_size": 41}),
}


def in_float64(name: str) -> TrainConfig:
    dtypes = dict.fromkeys(("dtype", "param_dtype", "activation_dtype"), "float64")
    config = CONFIGS[name]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **dtypes))


RUNS = {name: in_float64(name) for name in ("lecture", "modern", "qwen3", "accumulated")}
ALL = "data=2,fsdp=2,tensor=2"
MESHES = ("data=8", "fsdp=8", "tensor=8", ALL)


STEPS = 12


def trained(config: TrainConfig) -> tuple[np.ndarray, Any]:
    """The losses of the first steps and the norm of the weights after them; the weights."""
    state = init_state(config)
    places = jax.tree.map(lambda leaf: (leaf.sharding, leaf.ndim), state)
    windows = batches(TOKENS, config.seed, 0, STEPS, config.batch_size, 10)
    key = dropout_stream(config.seed)
    state, metrics = make_train_steps(config)(state, windows, key, STEPS, 0)
    stayed = jax.tree.map(lambda leaf, at: leaf.sharding.is_equivalent_to(*at), state, places)
    assert jax.tree.all(stayed)
    if not sharding.current_mesh().explicit_axes:  # equal, so that the next call compiles nothing
        assert jax.tree.all(jax.tree.map(lambda leaf, at: leaf.sharding == at[0], state, places))
    norm = sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(state.weights))
    return np.append(np.asarray(metrics.loss), norm), state


@functools.cache
def losses_on_one_device(name: str) -> np.ndarray:
    with jax.enable_x64(True):
        return trained(RUNS[name])[0]


SAME = [  # each run, mesh and way with some of the others; the first two are quick
    ("lecture", "fsdp=8", "loss in chunks"),  # an untied head
    ("modern", ALL, ""),
    ("lecture", "data=8", "explicit axes"),
    ("lecture", "tensor=8", ""),
    ("qwen3", "fsdp=8", "explicit axes"),
    ("modern", "tensor=8", "explicit axes"),
    ("accumulated", ALL, "loss in chunks"),
]


@pytest.mark.parametrize(("name", "mesh", "how"), only(SAME[:2], SAME))
def test_steps_are_those_of_one_device(name, mesh, how, monkeypatch):
    wanted = losses_on_one_device(name)
    if how == "loss in chunks":
        monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 3 * 4)
    with jax.enable_x64(True), jax.set_mesh(make_mesh(mesh, explicit=how == "explicit axes")):
        found, state = trained(RUNS[name])
    assert found.dtype == np.float64
    assert np.abs(found[:-1] - wanted[:-1]).max() < 1e-12
    assert abs(found[-1] / wanted[-1] - 1) < 1e-12
    assert np.abs(np.diff(wanted[:-1])).min() > 1e-9  # each step would show a mistake
    if (name, mesh) in [case[:2] for case in SAME[:2]]:  # no device holds the whole state
        matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
        parts = {leaf.size // leaf.addressable_shards[3].data.size for leaf in matrices}
        assert parts == ({8} if mesh == "fsdp=8" else {2, 4})


# --- the communication that one expects --------------------------------------------------------

LINE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")


def collectives(config: TrainConfig, mesh: str, folder) -> Counter:
    """The collectives of the step's program as XLA's partitioner leaves it: kind, dtype, shape."""
    options: dict[str, str | bool] = {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_pass_re": "spmd-partitioning",
    }
    with jax.set_mesh(make_mesh(mesh)):
        state = abstract_arrays(abstract_state(config), state_specs(config))
        windows = jax.ShapeDtypeStruct((3, config.batch_size, 11), jnp.int32)
        lowered = make_train_steps(config).lower(state, windows, dropout_stream(1), 3, 0)
        with _without_compilation_cache():  # a program from the cache would not be dumped
            lowered.compile(compiler_options=options)
    (program,) = folder.glob("*jit_steps*after_spmd-partitioning*.txt")
    found: Counter = Counter()
    for line in program.read_text().splitlines():
        if match := LINE.search(line):
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                sizes = tuple(int(size) for size in shape.split(",") if size)
                found[match[2], dtype, sizes] += 1
    return found


def of_matrices(found: Counter, kind: str, dtype: str) -> Counter:
    """How often each shape of two dimensions is communicated."""
    return Counter(
        {
            shape: count
            for (its, of, shape), count in found.items()
            if (its, of) == (kind, dtype) and len(shape) == 2
        }
    )


def kinds(found: Counter) -> set[str]:
    return {kind for kind, _, _ in found}


UNTIED = config_of("nanogpt", "adamw", model={"tie_embeddings": False, "dtype": "bfloat16"})
MUON = config_of("nanogpt", "muon", model={"tie_embeddings": False})
TABLES = Counter({(40, 48): 1, (10, 48): 1})
HEAD = Counter({(48, 40): 1})


def expected_of_data(found: Counter) -> None:
    """Each gradient is summed once, and nothing else is sent."""
    assert kinds(found) == {"all-reduce"}
    assert of_matrices(found, "all-reduce", "f32") == MATRICES + TABLES + HEAD


def expected_of_fsdp(found: Counter) -> None:
    """Each matrix is gathered for the forward and for the backward pass, in the products' dtype.

    The head, which ends one and begins the other, is gathered once for both.

    Its gradient is summed once. Accelerators' compilers make a reduce-scatter of the sum and the
    slice that follows; the CPU's doesn't.
    """
    assert of_matrices(found, "all-gather", "bf16") == MATRICES + MATRICES + HEAD
    assert of_matrices(found, "all-gather", "f32") == TABLES
    # the token table's gradient is scattered from tokens and activations instead
    assert of_matrices(found, "all-reduce", "f32") == MATRICES + HEAD + Counter({(10, 48): 1})
    activations = {(kind, shape) for kind, of, shape in found if len(shape) > 2 and of != "s32"}
    assert activations == {("all-to-all", (3, 10, 8, 6))}


def expected_of_tensor(found: Counter) -> None:
    """Two sums of activations in a block's forward pass (Shoeybi et al. 2019, section 3).

    And four in its backward pass: the three of queries, keys and values are added up afterwards,
    which accelerators' compilers do before the sum.
    """
    assert kinds(found) <= {"all-reduce"}
    sums = {shape: n for (_, _, shape), n in found.items() if np.prod(shape) >= ROWS}
    activations = {shape: n for shape, n in sums.items() if shape[-1] == 48}
    assert activations == {(24, 10, 48): 1, (ROWS, 48): 2 + 4 + 1}  # the embedding, the head
    # the loss: the largest logit, the sum of exponentials, the target's logit
    assert sum(sums.values()) == sum(activations.values()) + 3


def expected_of_muon(found: Counter) -> None:
    """Muon gathers each matrix and its momentum once more."""
    gathered = of_matrices(found, "all-gather", "f32")
    forward_and_backward = MATRICES + MATRICES
    assert {
        shape: gathered[shape] for shape in MATRICES
    } == forward_and_backward + MATRICES + MATRICES


EXPECTED = {
    "data=8": (UNTIED, expected_of_data),
    "fsdp=8": (UNTIED, expected_of_fsdp),
    "tensor=8": (UNTIED, expected_of_tensor),
    "fsdp=8 with Muon": (MUON, expected_of_muon),
}


@pytest.mark.parametrize("of", only(["fsdp=8"], EXPECTED))
def test_what_is_communicated(of, tmp_path):
    config, expected = EXPECTED[of]
    expected(collectives(config, of.split()[0], tmp_path))


@pytest.mark.slow
def test_the_head_is_gathered_once_for_all_chunks_of_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 3 * 4)  # a device's 30 rows in three chunks

    def loops_around_gathers(folder) -> list[int]:
        folder.mkdir()
        collectives(UNTIED, "fsdp=8", folder)
        (program,) = folder.glob("*jit_steps*after_spmd-partitioning*.txt")
        gather = re.compile(r"= bf16\[48,40\]\S* all-gather\(")
        lines = program.read_text().splitlines()
        return [line.count("while/body") for line in lines if gather.search(line)]

    assert loops_around_gathers(tmp_path / "once") == [1]  # the loop over the steps
    monkeypatch.setattr(sharding, "gather_once", lambda *_: None)
    assert loops_around_gathers(tmp_path / "control") == [2]  # and that over the chunks


@pytest.mark.parametrize(("rows", "gathers"), [(24 * 10, 0), (24 * 10 - 1, 1)])
def test_an_evaluation_in_chunks_gathers_the_head_before_them(rows, gathers, monkeypatch):
    gathered = []
    monkeypatch.setattr(sharding, "gather_once", lambda *head: gathered.append(head))
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * rows)
    config = config_of("nanogpt", "adamw")
    windows, counts = jnp.zeros((2, 24, 11), jnp.int32), jnp.ones((2, 24, 10), bool)
    evaluate = make_eval_step(config.model)
    jax.eval_shape(evaluate, abstract_state(config).weights, windows, counts)
    assert [its.shape for its, _ in gathered] == [(40, 48)] * gathers


@pytest.mark.parametrize(("mesh", "rows"), [("fsdp=8", 17), (ALL, 24 * 10)])
def test_an_evaluation_is_that_of_one_device(mesh, rows, monkeypatch):
    """Also with rematerialised blocks, and in chunks, before which the head is gathered."""
    config = config_of("nanogpt", "adamw", model={"rematerialise": True})
    windows = TOKENS[: 2 * 24 * 11].reshape(2, 24, 11)
    counts = jnp.arange(2 * 24 * 10).reshape(2, 24, 10) % 7 > 1
    expected = make_eval_step(config.model)(init_state(config).weights, windows, counts)
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * rows // 8)
    with use_mesh(mesh):
        found = make_eval_step(config.model)(init_state(config).weights, windows, counts)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- explicit axes: the whole step ---------------------------------------------------------------

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


TRACED = [
    *((name, ALL) for name in CONFIGS),
    ("heads that tensor=8 doesn't divide", "tensor=8"),
    *((name, mesh) for name in ("modern", "accumulated") for mesh in MESHES[:-1]),
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


# --- faults are seen, and for the right reason ----------------------------------------------------

WITHOUT_BIASES = config_of(  # a bias could hide how the product before it is sharded
    "lecture", "adamw", model={**GROUPED, "use_bias": False, "head_bias": False}
)
value_and_grad, gathered_in = jax.value_and_grad, sharding._gathered


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


NOT_GATHERED = replaced(sharding, "_gathered", lambda dimensions, dtype, x: x)
COMMUNICATED = {
    "the MLP is replicated": (
        "tensor=8",
        lambda patch: patch.setitem(sharding.RULES, "hidden_dim", ()),
    ),
    "gathered in float32": (
        "fsdp=8",
        replaced(sharding, "_gathered", lambda names, dtype, x: gathered_in(names, x.dtype, x)),
    ),
    "gathered once and kept": ("fsdp=8", replaced(sharding, "_is_kept", lambda *_, **__: True)),
    "gathered once and kept, but for the casts": (
        "fsdp=8",
        replaced(sharding, "_is_kept", lambda of, *_, **__: of.name != "convert_element_type"),
    ),
    "not gathered": ("fsdp=8", NOT_GATHERED),
    "activations are gathered": (
        "data=8",
        replaced(depth, "shard_by_name", lambda x, *_: replicate(x)),
    ),
    "Muon's products gather": ("fsdp=8 with Muon", replaced(optimizer, "replicate", itself)),
}
"""What the program's collectives show. That a rule is another is seen by the rules' own test."""
UNSPLIT_BATCH = "dimension batch is not sharded, the rules say data and fsdp."
UNSPLIT_HEADS = "dimension {self.num_heads} is not sharded, the rules say tensor."
STEP = "training.step.make_train_steps.<locals>."
WINDOWS = STEP + "steps() got a wrong argument `windows`."
BLOCK = "nn.transformer.Block.__call__() got a wrong argument `x`."
PROJECTED = "nn.heads.MultiHeadAttention._project() returned a wrong result."
REFUSED = {
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
        NOT_GATHERED,
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


@pytest.fixture
def plant(monkeypatch):
    """Plants a fault in what is traced anew."""

    def plant(fault) -> None:
        jax.clear_caches()
        monkeypatch.setattr(models, "_traced", models._traced.__wrapped__)
        fault(monkeypatch)

    return plant


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMUNICATED)
def test_a_fault_is_seen_in_what_is_communicated(name, tmp_path, plant):
    of, fault = COMMUNICATED[name]
    plant(fault)
    with pytest.raises(AssertionError):
        test_what_is_communicated(of, tmp_path)


@pytest.mark.parametrize("name", only(QUICK, REFUSED))
def test_a_fault_is_refused_with_its_reason(name, plant):
    fault, subject, reason = REFUSED[name]
    plant(fault if callable(fault) else itself)
    with pytest.raises(TypeCheckError) as caught:
        trace(WITHOUT_BIASES, batch=BATCH if callable(fault) else fault)
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
