"""Train steps on eight devices: the numbers of one device, and the collectives that one expects."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt import ModelConfig, OptimizerConfig, TrainConfig
from jgpt.data.batches import batches
from jgpt.nn import depth, loss, models, transformer
from jgpt.parallel import gather, rules
from jgpt.parallel.mesh import abstract_mesh, make_mesh, use_mesh
from jgpt.parallel.rules import abstract_arrays, axes_of, replicate
from jgpt.training import optimizer
from jgpt.training.ahead import _without_compilation_cache
from jgpt.training.state import abstract_state, dropout_stream, init_state, state_specs
from jgpt.training.step import make_eval_step, make_train_steps
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
    "nanogpt": config_of("nanogpt", "adamw"),
    "modern": config_of("modern", "muon", model={**GROUPED, "attention_window": 4}),
    "qwen3": config_of("qwen3", "adamw", model={"num_kv_heads": 4}),
    "accumulated": config_of(
        "nanogpt",
        "adamw",
        0.9,
        model={"num_layers": 2, "dropout": 0.2, "attention_window": 4, "remat": True},
        batch_size=48,
        micro_batches=2,
    ),
}


def in_float64(name: str) -> TrainConfig:
    dtypes = dict.fromkeys(("dtype", "param_dtype", "activation_dtype"), "float64")
    config = CONFIGS[name]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **dtypes))


RUNS = {name: in_float64(name) for name in ("lecture", "modern", "qwen3", "accumulated")}
ALL = "data=2,fsdp=2,tensor=2"
STEPS = 12


def trained(config: TrainConfig) -> tuple[np.ndarray, Any]:
    """The losses of the first steps and the norm of the weights after them; the state."""
    state = init_state(config)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
    windows = batches(TOKENS, config.seed, 0, STEPS, config.batch_size, 10)
    key = dropout_stream(config.seed)
    steps = make_train_steps(config)

    state, metrics = steps(state, windows, key, STEPS, 0)

    for leaf, sharding in zip(jax.tree.leaves(state), shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        # equal, so that the next call compiles nothing
        assert leaf.sharding == sharding
    norm = 0.0
    for leaf in jax.tree.leaves(state["model"]):
        norm += float(jnp.abs(leaf).sum())
    return np.append(np.asarray(metrics.loss), norm), state


@functools.cache
def losses_on_one_device(name: str) -> np.ndarray:
    with jax.enable_x64(True):
        return trained(RUNS[name])[0]


SAME = [  # each run, mesh and way with some of the others
    ("lecture", "fsdp=8", "loss in chunks"),  # an untied head
    ("modern", ALL, ""),
    ("lecture", "data=8", ""),
    ("lecture", "tensor=8", ""),
    ("qwen3", "fsdp=8", ""),
    ("modern", "tensor=8", ""),
    ("accumulated", ALL, "loss in chunks"),
]


@pytest.mark.parametrize(("name", "mesh", "how"), only([], SAME))
def test_steps_are_those_of_one_device(name, mesh, how, monkeypatch):
    *losses_on_one, norm_on_one = losses_on_one_device(name)
    if how == "loss in chunks":
        monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * 3 * 4)

    with jax.enable_x64(True), use_mesh(mesh):
        found, state = trained(RUNS[name])

    assert found.dtype == np.float64
    *losses, norm = found
    np.testing.assert_allclose(losses, losses_on_one, rtol=0, atol=1e-12)
    assert abs(norm / norm_on_one - 1) < 1e-12
    assert np.abs(np.diff(losses_on_one)).min() > 1e-9  # each step would show a mistake
    if (name, mesh) in (("lecture", "fsdp=8"), ("modern", ALL)):  # no device holds the whole state
        parts = set()
        for leaf in jax.tree.leaves(state):
            if leaf.ndim == 2:
                shard = leaf.addressable_shards[3].data
                parts.add(leaf.size // shard.size)
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
    counts: Counter = Counter()
    for (found_kind, found_dtype, shape), count in found.items():
        if found_kind == kind and found_dtype == dtype and len(shape) == 2:
            counts[shape] = count
    return counts


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
    sums = {shape: count for (_, _, shape), count in found.items() if np.prod(shape) >= ROWS}
    activations = {shape: count for shape, count in sums.items() if shape[-1] == 48}
    assert activations == {(24, 10, 48): 1, (ROWS, 48): 2 + 4 + 1}  # the embedding, the head
    # the loss: the largest logit, the sum of exponentials, the target's logit
    assert sum(sums.values()) == sum(activations.values()) + 3


def expected_of_muon(found: Counter) -> None:
    """Muon gathers each matrix and its momentum once more."""
    gathered = of_matrices(found, "all-gather", "f32")
    forward_and_backward = MATRICES + MATRICES
    expected = forward_and_backward + MATRICES + MATRICES
    for shape in MATRICES:
        assert gathered[shape] == expected[shape]


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
    monkeypatch.setattr(transformer, "gather_once", lambda *_: None)
    assert loops_around_gathers(tmp_path / "control") == [2]  # and that over the chunks


@pytest.mark.parametrize(("rows", "gathers"), [(24 * 10, 0), (24 * 10 - 1, 1)])
def test_an_evaluation_in_chunks_gathers_the_head_before_them(rows, gathers, monkeypatch):
    gathered = []

    def record_shape(head, *others):
        gathered.append(head.shape)
        return head

    monkeypatch.setattr(transformer, "gather_once", record_shape)
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * rows)
    config = config_of("nanogpt", "adamw")
    weights = abstract_state(config)["model"]
    windows = jnp.zeros((2, 24, 11), jnp.int32)
    counts = jnp.ones((2, 24, 10), bool)
    evaluate = make_eval_step(config.model)

    jax.eval_shape(evaluate, weights, windows, counts)

    assert gathered == [(40, 48)] * gathers


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rows"), only([(ALL, 24 * 10)], [("fsdp=8", 17), (ALL, 24 * 10)]))
def test_an_evaluation_is_that_of_one_device(mesh, rows, monkeypatch):
    """Also with rematerialised blocks, and in chunks, before which the head is gathered."""
    config = config_of("nanogpt", "adamw", model={"remat": True})
    windows = TOKENS[: 2 * 24 * 11].reshape(2, 24, 11)
    counts = jnp.arange(2 * 24 * 10).reshape(2, 24, 10) % 7 > 1

    def evaluated():
        evaluate = make_eval_step(config.model)
        weights = init_state(config)["model"]
        return evaluate(weights, windows, counts)

    expected = evaluated()
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 40 * rows // 8)
    with use_mesh(mesh):
        found = evaluated()

    np.testing.assert_allclose(found, expected, rtol=1e-6)


# --- what the names mean -------------------------------------------------------------------------

SHARDED = {
    "batch": ("data", "fsdp"),
    "embed_dim": ("fsdp",),
    "hidden_dim": ("tensor",),
    "num_heads": ("tensor",),
    "num_kv_heads": ("tensor",),
    "vocab_size": ("tensor",),
}


def test_each_rule_is_what_the_documentation_says():
    mesh = abstract_mesh(ALL)
    found = {name: axes_of(name, mesh) for name in rules.RULES}
    assert found == SHARDED


# --- faults are seen, and for the right reason ----------------------------------------------------

COMMUNICATED = {
    "not gathered": ("fsdp=8", gather, "_gathered", lambda dimensions, dtype, x: x),
    "gathered once and kept": ("fsdp=8", gather, "_is_kept", lambda *_, **__: True),
    "activations are gathered": ("data=8", depth, "shard_by_name", lambda x, *_: replicate(x)),
    "Muon's products gather": ("fsdp=8 with Muon", optimizer, "replicate", lambda x, *_: x),
}
"""What the program's collectives show. That a rule is another is seen by the rules' own test."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMUNICATED)
def test_a_fault_is_seen_in_what_is_communicated(name, tmp_path, monkeypatch):
    of, module, function, fault = COMMUNICATED[name]
    jax.clear_caches()  # or nothing is traced again
    monkeypatch.setattr(models, "_traced", models._traced.__wrapped__)
    monkeypatch.setattr(module, function, fault)

    with pytest.raises(AssertionError):
        test_what_is_communicated(of, tmp_path)


def test_a_mesh_with_explicit_axes_is_rejected_by_name():
    head = jgpt.Head(10, 4, rngs=nnx.Rngs(0))
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"))),
        pytest.raises(ValueError, match=r"explicit axes \(data, tensor\): make it with"),
    ):
        head(jnp.ones((8, 3, 10)))


@pytest.mark.parametrize("make", [init_state, make_train_steps])
def test_a_config_s_mesh_that_is_not_set_is_refused(make):
    config = dataclasses.replace(CONFIGS["nanogpt"], mesh="data=8")
    with pytest.raises(ValueError, match=r"^`mesh='data=8'` is set by `fit` alone: use jax.set_"):
        make(config)
    make(dataclasses.replace(config, mesh="data=1"))
