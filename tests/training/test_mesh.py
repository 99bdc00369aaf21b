"""Train steps on eight devices: the numbers of one device, and the collectives one expects."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jgpt import ModelConfig, OptimizerConfig, TrainConfig, sharding
from jgpt.data.batches import batches
from jgpt.nn import depth, loss, models
from jgpt.sharding import abstract_arrays, make_mesh, use_mesh
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
    "num_layers": 2,
    "num_heads": 8,
    "embed_dim": 48,
    "hidden_dim": 56,
}
ROWS = 24 * 10
MATRICES = Counter({(48, 48): 4 * 2, (48, 56): 2, (56, 48): 2})  # of the blocks
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
        model={"dropout": 0.2, "attention_window": 4, "rematerialise": True},
        batch_size=48,
        micro_batches=2,
    ),
    "scanned": config_of("modern", "muon", model={**GROUPED, "scan_layers": True}),
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


def losses(config: TrainConfig) -> np.ndarray:
    """The losses of the first steps, and the norm of the weights after them."""
    state = init_state(config)
    windows = batches(TOKENS, config.seed, 0, STEPS, config.batch_size, 10)
    key = dropout_stream(config.seed)
    state, metrics = make_train_steps(config)(state, windows, key, STEPS, 0)
    norm = sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(state.weights))
    return np.append(np.asarray(metrics.loss), norm)


@functools.cache
def losses_on_one_device(name: str) -> np.ndarray:
    with jax.enable_x64(True):
        return losses(RUNS[name])


SAME = [  # the first two are quick
    ("lecture", "fsdp=8", ""),
    ("modern", ALL, ""),
    ("modern", "fsdp=8", ""),
    ("qwen3", ALL, ""),
    ("accumulated", ALL, ""),
    ("lecture", "data=8", ""),
    ("lecture", "tensor=8", ""),
    ("lecture", ALL, "loss in chunks"),  # an untied head
    ("modern", ALL, "loss in chunks"),
    ("lecture", "fsdp=8", "explicit axes"),
    ("modern", ALL, "explicit axes"),
    ("accumulated", ALL, "explicit axes"),
]


@pytest.mark.parametrize(("name", "mesh", "how"), only(SAME[:2], SAME))
def test_steps_are_those_of_one_device(name, mesh, how, monkeypatch):
    wanted = losses_on_one_device(name)
    if how == "loss in chunks":
        monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 3 * 4)
    with jax.enable_x64(True), jax.set_mesh(make_mesh(mesh, explicit=how == "explicit axes")):
        found = losses(RUNS[name])
    assert found.dtype == np.float64
    assert np.abs(found[:-1] - wanted[:-1]).max() < 1e-12
    assert abs(found[-1] / wanted[-1] - 1) < 1e-12
    assert np.abs(np.diff(wanted[:-1])).min() > 1e-9  # each step would show a mistake


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
    assert activations == {(24, 10, 48): 1, (ROWS, 48): 2 * (2 + 4) + 1}  # the embedding, the head
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


def check_collectives(of: str, folder) -> None:
    config, expected = EXPECTED[of]
    expected(collectives(config, of.split()[0], folder))


@pytest.mark.parametrize("of", only(["fsdp=8"], EXPECTED))
def test_what_is_communicated(of, tmp_path):
    check_collectives(of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_gathered_once_for_all_chunks_of_a_loss(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 3 * 4)  # a device's 30 rows in three chunks
    shape = (40, 48) if tied else (48, 40)
    config = config_of("nanogpt", "adamw", model={"tie_embeddings": tied, "dtype": "bfloat16"})

    def loops_around_gathers(folder) -> list[int]:
        folder.mkdir()
        collectives(config, "fsdp=8", folder)
        (program,) = folder.glob("*jit_steps*after_spmd-partitioning*.txt")
        gather = re.compile(r"= bf16\[{},{}\]\S* all-gather\(".format(*shape))
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


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize("rows", [24 * 10, 17])
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


def rule(name: str, *axes: str):
    return lambda patch: patch.setitem(sharding.RULES, name, axes)


def kept(policy):
    return lambda patch: patch.setattr(sharding, "_is_kept", policy)


def widely_gathered(patch):
    gather = sharding._gathered
    patch.setattr(
        sharding, "_gathered", lambda dimensions, dtype, x: gather(dimensions, x.dtype, x)
    )


FAULTS = {
    "the batch is replicated": ("fsdp=8", rule("batch", "data")),
    "the batch is not split over data": ("data=8", rule("batch", "fsdp")),
    "weights are split over the wrong axis": ("fsdp=8", rule("embed_dim", "tensor")),
    "weights are replicated": ("fsdp=8", rule("embed_dim")),
    "heads are replicated": ("tensor=8", rule("num_heads")),
    "the MLP is replicated": ("tensor=8", rule("hidden_dim")),
    "the vocabulary is replicated": ("tensor=8", rule("vocab_size")),
    "gathered in float32": ("fsdp=8", widely_gathered),
    "gathered once and kept": ("fsdp=8", kept(lambda *_, **__: True)),
    "gathered once and kept, but for the casts": (
        "fsdp=8",
        kept(lambda operation, *_, **__: operation.name != "convert_element_type"),
    ),
    "not gathered": (
        "fsdp=8",
        lambda patch: patch.setattr(sharding, "_gathered", lambda dimensions, dtype, x: x),
    ),
    "activations are gathered": (
        "data=8",
        lambda patch: patch.setattr(depth, "shard_by_name", lambda x, *_: sharding.replicate(x)),
    ),
    "Muon's products gather": (
        "fsdp=8 with Muon",
        lambda patch: patch.setattr(optimizer, "replicate", lambda tree: tree),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, tmp_path, monkeypatch):
    of, plant = FAULTS[fault]
    plant(monkeypatch)
    jax.clear_caches()
    monkeypatch.setattr(models, "_traced", models._traced.__wrapped__)
    with pytest.raises(AssertionError):
        check_collectives(of, tmp_path)


# --- where the state lies ------------------------------------------------------------------------


def test_no_device_holds_the_whole_state():
    config = config_of("nanogpt", "muon")
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        state, again = init_state(config), init_state(config)  # one is donated
        windows = batches(TOKENS, 1, 0, 2, 24, 10)
        stepped, _ = make_train_steps(config)(state, windows, dropout_stream(1), 2, 0)
    kernel = stepped.weights["blocks"][1]["feed_forward"]["expansion"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor")
    assert kernel.addressable_shards[3].data.shape == (48 // 4, 56 // 2)
    for leaf in jax.tree.leaves((stepped.weights, stepped.optimizer)):
        if leaf.ndim == 2:
            assert leaf.addressable_shards[0].data.size <= leaf.size // 4, leaf.shape
    # as the state that the call took, so that the next one compiles nothing
    same = jax.tree.map(
        lambda one, other: one.sharding.is_equivalent_to(other.sharding, one.ndim), again, stepped
    )
    assert jax.tree.all(same)
