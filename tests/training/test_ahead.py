"""Train steps compiled for chips that this machine lacks."""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jgpt import ModelConfig, TrainConfig
from jgpt.cli.report import describe_ahead
from jgpt.machine import Machine, Platform
from jgpt.training import ahead
from jgpt.training.ahead import CHIPS, CompiledStep, compile_ahead, topology
from jgpt.training.memory import TrainingMemory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
benchmark = importlib.import_module("ahead")
sum_by_kind = importlib.import_module("collectives").sum_by_kind
BUDGET = json.loads((ROOT / "benchmarks" / "results" / "budget.json").read_text())

# --- chips ---------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=512,
    block_size=128,
    num_layers=2,
    num_heads=4,
    embed_dim=256,
    hidden_dim=640,
    tie_embeddings=False,
    dtype="auto",
)
CONFIG = TrainConfig(model=MODEL, batch_size=16, steps_per_call=3, mesh="fsdp=4")
PARAMETERS = 2 * 512 * 256 + 128 * 256 + 2 * (4 * 256 * 256 + 2 * 256 * 640)
NORMS = 5 * 256


@pytest.mark.parametrize("on", ["v5e", "v5e:", "v5e:4y4", "v9:2x2", "h100:8;", "h100:12345"])
def test_a_chip_that_isn_t_one(on):
    with pytest.raises(
        ValueError, match=f"`on={re.escape(repr(on))}` must be a chip and its arrangement"
    ):
        topology(on)


def test_a_step_that_doesn_t_fit(monkeypatch):
    def too_much(config):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 15.88G exceeds 15.75G\nmore")

    monkeypatch.setattr(ahead, "topology", lambda on: (CHIPS["v5e"], jax.devices()[:4]))
    monkeypatch.setattr(ahead, "compile_steps", too_much)

    with pytest.raises(ValueError, match=r"^a step doesn't fit into v5e:2x2: RESOURCE.*15.75G$"):
        compile_ahead(CONFIG, "v5e:2x2")


MATRICES = PARAMETERS - 512 * 256 - 128 * 256


"""The parameters that tokens are multiplied with: all but the tables of tokens and positions."""


@pytest.mark.parametrize(
    "chip", [{"peak_flops": 1e3}, {"memory_bandwidth": 1e-3}, {"memory": 340}, {"memory": 339}]
)
def test_the_least_time_of_a_step_by_hand(chip, monkeypatch):
    chip = dataclasses.replace(CHIPS["v5e"], **{"peak_flops": 1e5, **chip})
    monkeypatch.setattr(ahead, "topology", lambda on: (chip, jax.devices()[:4]))
    monkeypatch.setattr(ahead, "compile_steps", lambda config: types.SimpleNamespace())
    monkeypatch.setattr(ahead, "memory_of", lambda steps, config: TrainingMemory(300, 40))
    machine = Machine(chip.platform, 4, chip.memory, host_memory=0)

    def decide(config, of_machine):
        assert of_machine == machine
        return dataclasses.replace(config, micro_batches=2)

    monkeypatch.setattr(ahead, "complete", decide)
    config = dataclasses.replace(CONFIG, micro_batches=8)

    step = compile_ahead(config, "v5e:2x2")

    assert step.micro_batches == 2
    assert step.fits == (chip.memory >= 340)
    # forward and backward of every token; attention's two products over all 128 positions
    tokens = 16 * 128
    attention = 2 * 2 * 128 * 256
    flops = 3 * 2 * (MATRICES + attention) * tokens // 4
    assert step.flops == flops
    assert step.compute_seconds == flops / chip.peak_flops
    assert step.memory_seconds == 2 * 340 / chip.memory_bandwidth  # read, and written
    assert "v5e:2x2" in describe_ahead(step)[0]


def compiled(on: str, package: str) -> tuple[CompiledStep, str]:
    """CONFIG's step for chips, and its program."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"compiling for {on} needs {package}: make test-ahead installs it")
    with benchmark.compiled_text() as texts:
        return compile_ahead(CONFIG, on), texts[0]


@contextlib.contextmanager
def caching_in(folder: Path):
    """Keep every compiled program in a folder."""
    how = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in how}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(how)
    try:
        yield
    finally:
        use(before)


def products(text: str) -> set[str]:
    """The dtypes of what is multiplied."""
    found = re.findall(r"(?:dot|convolution)\((\w+)\[[\d,]*\][^ ]* %[\w.-]+, (\w+)\[", text)
    named = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    for one, other in re.findall(r"(?:dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", text):
        found.append((named.get(one, "?"), named.get(other, "?")))
    return {dtype for pair in found for dtype in pair}


@pytest.mark.slow
@pytest.mark.parametrize(("on", "package"), [("v5e:2x2", "libtpu"), ("h100:4", "jax_plugins")])
def test_a_step_for_chips(on, package, tmp_path):
    with caching_in(tmp_path):
        step, text = compiled(on, package)
        assert jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]

    assert list(tmp_path.iterdir()) == []  # from where the program for a TPU could not be read
    assert step.chips == 4
    assert step.mesh == "fsdp=4"
    # parameters and two moments of each, and two counters
    state = 4 * (3 * (PARAMETERS // 4 + NORMS)) + 2 * 4
    assert step.memory.state == state
    assert step.fits
    assert 0 < step.memory.working < 100 << 20

    attention = 2 * 2 * 2 * 128 * 256
    flops_of_a_token = 3 * (2 * MATRICES + attention)
    assert step.flops == flops_of_a_token * 16 * 128 // 4
    assert step.compute_seconds == step.flops / step.chip.peak_flops
    kept = step.memory.state + step.memory.working
    assert step.memory_seconds == 2 * kept / step.chip.memory_bandwidth
    sent = {collective.kind: collective.sent for collective in sum_by_kind(text)}

    assert "bf16" in products(text)
    # each matrix is gathered in 16 bits, forward and backward
    gathered = 2 * 2 * MATRICES * 3 // 4
    assert sent["all-gather"] + sent.get("collective-permute", 0) >= gathered
    assert sent["all-gather"] < 2 * gathered
    if on.startswith("h100"):
        assert step.chip.platform == Platform("gpu", 9.0)
        assert tuple(benchmark.kernels(text)[:2]) == (
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxBackward",
        )
        assert sent["reduce-scatter"] >= 4 * MATRICES * 3 // 4


@pytest.mark.slow
def test_a_t4_multiplies_in_float16_with_a_loss_scale(monkeypatch):
    monkeypatch.setattr(f"{__name__}.CONFIG", dataclasses.replace(CONFIG, mesh=None))
    step, text = compiled("t4:1", "jax_plugins")

    # two counters, and the loss scale's three numbers
    assert step.memory.state == 4 * 3 * (PARAMETERS + NORMS) + 2 * 4 + 3 * 4
    assert step.fits
    assert "bf16" not in text  # which a T4 would emulate
    named = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", text))
    of_cublas = r"custom-call\(%([\w.-]+), %([\w.-]+)[^)]*\), custom_call_target=\"__cublas"
    operands = re.findall(of_cublas, text)
    assert len(operands) >= 3 * 2 * 4  # forward and twice backward, of each block's matrices
    wide = [pair for pair in operands if {named[name] for name in pair} != {"f16"}]
    assert len(wide) == 2 * 2  # the gradients of queries and keys, in each block


# --- costs of the presets' programs beside a record of them ---------------------------------------


@pytest.mark.parametrize("case", benchmark.BUDGET, ids=str)
def test_products_are_those_of_the_budget(case):
    """Traced, without a compiler for the chip."""
    name, _, batch_size, mesh = case
    flops = benchmark.product_flops(benchmark.configured(name, batch_size, mesh))
    assert flops == BUDGET[benchmark.title(*case)]["FLOPs of products"]


@pytest.mark.slow
@pytest.mark.parametrize("case", benchmark.BUDGET, ids=str)
def test_a_program_costs_what_its_budget_says(case):
    package = "libtpu" if "v5e" in case[1] else "jax_plugins"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"compiling for {case[1]} needs {package}: make test-ahead installs it")
    found = benchmark.costs(*case)
    budget = BUDGET[benchmark.title(*case)]
    about = {
        name: pytest.approx(cost, rel=0.02) if isinstance(cost, int) else cost
        for name, cost in budget.items()
    }

    assert found == about, (
        f"the budget is of JAX {BUDGET['versions']['jax']}, this is {jax.__version__}. "
        "If it is worth that: JAX_PLATFORMS=cpu .venv-ahead/bin/python benchmarks/ahead.py --budget"
    )
