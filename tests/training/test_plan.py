"""What a plan says of a run before it starts, computed by hand."""

import dataclasses
import types
from pathlib import Path
from typing import Any

from jgpt import ModelConfig, TrainConfig
from jgpt.data.dataset import load_dataset
from jgpt.parallel.mesh import abstract_mesh, use_mesh
from jgpt.training import plan
from jgpt.training.memory import TrainingMemory, memory_of
from jgpt.training.placement import bytes_of, bytes_on_each, replicated_dimensions
from jgpt.training.plan import make_plan
from jgpt.training.state import abstract_state, state_specs

MODEL = ModelConfig(vocab_size=21, block_size=7, num_layers=1, num_heads=2, embed_dim=12)
BLOCK = 4 * 12 * 12 + 2 * 12 * 48
HEAD = 12 * 21
FORWARD = 2 * (BLOCK + HEAD) + 2 * (2 * 7 * 12)


def test_a_plan_by_hand(small_run, poem, monkeypatch):
    memory = TrainingMemory(1, 2)
    monkeypatch.setattr(plan, "training_memory", lambda config: memory)
    model = dataclasses.replace(small_run.model, vocab_size=21)
    config = dataclasses.replace(small_run, model=model)
    characters = len(poem.read_text())
    planned = make_plan(config, load_dataset(config.dataset, 7), Path("out"))

    assert planned == plan.Plan(
        config,
        Path("out"),
        int(characters * 0.9),
        characters - int(characters * 0.9),  # held out
        # the tied embedding, positions, the block with two norms, and the last norm
        parameters=21 * 12 + 7 * 12 + BLOCK + 2 * 12 + 12,
        memory=memory,
        # eleven steps of 5 x 7 tokens; a backward pass costs two forward passes
        flops=3 * FORWARD * 11 * 5 * 7,
        evaluation_targets=characters - int(characters * 0.9) - 1,
    )


def compiled_with(**sizes: int) -> Any:
    """A program of which a compiler says that it has arguments, results and the rest of so many."""
    kinds = ("argument", "output", "alias", "temp")
    analysis = {f"{kind}_size_in_bytes": sizes.get(kind, 0) for kind in kinds}
    return types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**analysis))


def test_the_donated_state_is_counted_once():
    config = TrainConfig(model=MODEL)
    state = bytes_of(abstract_state(config))
    # the state goes in and, in the same memory, comes out
    sizes = {"argument": state + 300, "output": state + 50, "alias": state, "temp": 7000}
    assert memory_of(compiled_with(**sizes), config) == TrainingMemory(state, 300 + 50 + 7000)
    silent: Any = types.SimpleNamespace(memory_analysis=lambda: None)
    assert memory_of(silent, config) is None


def test_a_mesh_shards_the_state_and_says_what_it_cannot():
    """Over fsdp=4 and tensor=2: 21 tokens can't be halved, two heads can."""
    config = TrainConfig(model=MODEL, batch_size=4, mesh="fsdp=4,tensor=2")
    mesh = abstract_mesh(config.mesh)
    on_each = bytes_on_each(abstract_state(config), state_specs(config, mesh), mesh)
    # four attention matrices and the MLP's two in eighths, two tables in quarters, norms whole
    parameters = 4 * 12 * 12 // 8 + 2 * 12 * 48 // 8 + (21 + 7) * 12 // 4 + 3 * 12
    assert on_each == 4 * (3 * parameters + 2)
    with use_mesh(config.mesh):  # memory is that of each device
        found = memory_of(compiled_with(argument=9000), config)
    assert found == TrainingMemory(on_each, 9000 - on_each)
    assert replicated_dimensions(config.model, abstract_mesh("fsdp=4")) == ()
    # a table and a head, in quarters instead of eighths; its bias is a vector and not worth a word
    untied = dataclasses.replace(MODEL, tie_embeddings=False, head_bias=True)
    assert replicated_dimensions(untied, mesh) == (
        "vocab_size=21 is not divided by tensor=2 and is replicated: "
        f"{2 * 4 * 21 * 12 // 8} bytes more parameters on each device",
    )
