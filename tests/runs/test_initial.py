"""Runs that start from weights, and train only some parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgpt
from jgpt.nn.models import named_parameters
from jgpt.runs import fit
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from tests.commands import jgpt as command
from tests.commands import refused
from tests.runs.harness import BIGRAM, path_of, stopping, with_changes


@pytest.fixture
def config(small_run, tmp_path):
    model = dataclasses.replace(small_run.model, dropout=0.0)
    return dataclasses.replace(
        small_run, model=model, sample_tokens=0, steps=4, out=str(tmp_path / "run")
    )


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf.get_value()) for name, leaf in named_parameters(model).items()}


class LoRA(jgpt.FeedForward):
    """A feed-forward layer with a trained product of two thin matrices beside it."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.lora_a = nnx.Param(0.1 * jax.random.normal(rngs.params(), (config.embed_dim, 2)))
        self.lora_b = nnx.Param(jnp.zeros((2, config.embed_dim)))

    def __call__(self, x, *, rngs=None):
        return super().__call__(x, rngs=rngs) + x @ self.lora_a[...] @ self.lora_b[...]


class LoRAGPT(jgpt.GPT):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        for block in self.blocks:
            block.feed_forward = LoRA(config, rngs=rngs)


@pytest.mark.slow
def test_lora_starts_from_a_run_freezes_the_rest_and_is_resumed_bitwise(trained, config, tmp_path):
    config = with_changes(config, batch_size=8, optimizer={"trainable": ("*.lora_?",)})
    out = tmp_path / "stopped"
    stopped_config = dataclasses.replace(config, out=str(out))
    given: dict[str, Any] = {"model": LoRAGPT, "initial": str(trained.path), "progress": None}
    before = arrays_of(jgpt.load(trained.path).model)
    run = jgpt.fit(config, **given)
    with pytest.raises(TrainingStopped):
        jgpt.fit(stopped_config, **given, should_stop=stopping(out, after=0))
    resumed = jgpt.fit(stopped_config, **given, resume=True)

    after = arrays_of(run.model)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    lora_a = "blocks.0.feed_forward.lora_a"
    lora_b = "blocks.0.feed_forward.lora_b"
    assert set(after) - set(before) == {lora_a, lora_b}
    assert np.abs(after[lora_b]).max() > 0
    np.testing.assert_array_equal(run.metrics["loss"], resumed.metrics["loss"])
    best = min((4, 8, 11), key=lambda step: trained.metrics["validation_loss"][step - 1])
    initial = RunDirectory.open(path_of(run)).provenance()[0]["initial"]
    assert initial == f"{trained.path}@{best}"
    # only the moments of the two trained arrays are stored
    stored = path_of(run) / "checkpoints" / "4" / "optimizer"
    moments = [path.name for path in stored.iterdir() if ".mu." in path.name]
    assert len(moments) == 2


REFUSED = [
    ({"model": {"hidden_dim": 31}}, None, r"another architecture: blocks.0.feed_forward.\S+ is \("),
    ({}, LoRAGPT, r"another architecture: blocks\.0\.feed_forward\.lora_a is a"),
    (
        {"optimizer": {"trainable": ("*.lora_a",)}},
        LoRAGPT,
        r"feed_forward\.lora_b is absent in it, .*`trainable=",
    ),
    ({"model": {"block_size": 14}}, None, r"with `positions='rotary'` a block has any"),
    ({"optimizer": {"trainable": ("*.lora",)}}, None, r"`trainable=\('\*\.lora',\)` fits no para"),
]


@pytest.mark.parametrize(("changes", "model", "message"), REFUSED)
def test_weights_of_another_architecture_and_patterns_are_refused(
    changes, model, message, trained, config, tmp_path
):
    with pytest.raises(ValueError, match=message):
        jgpt.fit(with_changes(config, **changes), model=model, initial=trained.path, progress=None)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_starts_from_a_hugging_face_folder(tmp_path, poem):
    tokenizer = jgpt.BPETokenizer.train([poem.read_text()], 263)
    config = jgpt.ModelConfig(
        vocab_size=tokenizer.vocab_size,
        block_size=7,
        num_layers=1,
        num_heads=2,
        embed_dim=12,
        qkv_bias=True,
        use_bias=True,
    )
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    jgpt.save_hf(model, tmp_path / "folder", tokenizer=tokenizer)
    shape = ("--block-size", 7, "--num-layers", 1, "--embed-dim", 12, "--qkv-bias", "--use-bias")
    start = ("train", "tiny", *shape, "--initial", "folder", "--trainable", "blocks.*")
    length = ("--data", poem, "--steps", 1, "--sample-tokens", 0)

    done = command(*start, *length, "--out", "r", cwd=tmp_path)

    assert done.code == 0, done.stderr
    loaded = jgpt.load(tmp_path / "r")
    after = arrays_of(loaded.model)["token_embedding.embedding"]
    assert (after == arrays_of(model)["token_embedding.embedding"]).all()
    assert loaded.tokenizer.encode("the").tolist() == tokenizer.encode("the").tolist()


def test_a_run_with_a_checkpoint_is_not_resumed_from_other_weights(trained, copy):
    with pytest.raises(ValueError, match="did not start from these weights: leave out `initial="):
        jgpt.fit(copy, resume=True, initial=trained.path, progress=None)


def test_a_run_that_would_delete_the_weights_it_starts_from_is_refused(config, tmp_path):
    config = with_changes(config, **BIGRAM)
    first = jgpt.fit(config, progress=None)
    link = tmp_path / "link"
    link.symlink_to(path_of(first))
    other = dataclasses.replace(config, steps=2)

    for initial in (path_of(first), link):
        with pytest.raises(
            ValueError, match=r"`overwrite=True` would delete the weights of .*: give"
        ):
            jgpt.fit(other, initial=initial, overwrite=True, progress=None)

    saved = jgpt.load(path_of(first))
    assert saved.config.steps == 4
    assert arrays_of(saved.model).keys() == arrays_of(first.model).keys()


# --- with moments --------------------------------------------------------------------------------

SCANNED = {"model": {"num_layers": 2, "scan_layers": True}, "sample_tokens": 0}


@pytest.mark.parametrize("changes", [BIGRAM, pytest.param(SCANNED, marks=pytest.mark.slow)])
def test_a_branch_goes_on_with_weights_moments_and_step(changes, small_run, tmp_path):
    """Where nothing else differs, it is the run; then the batch, the text and the rate may differ,
    and it is another one."""
    config = with_changes(small_run, **changes, steps=8, out=str(tmp_path / "whole"), keep_every=4)
    whole = jgpt.fit(config, progress=None)
    branch: dict[str, Any] = {"initial": f"{whole.path}@4", "with_optimizer": True}
    same = dataclasses.replace(config, out=str(tmp_path / "same"))
    other = with_changes(
        same, out=str(tmp_path / "other"), batch_size=3, optimizer={"learning_rate": 0.3}
    )

    again = jgpt.fit(same, **branch, progress=None)

    assert again.metrics["step"] == [5, 6, 7, 8]
    assert again.metrics["loss"] == whole.metrics["loss"][4:]
    assert again.metrics["validation_loss"][-1] == whole.metrics["validation_loss"][-1]
    (line,) = RunDirectory.open(path_of(again)).provenance()
    assert (line["step"], line["initial"]) == (4, f"{whole.path}@4")

    with pytest.raises(TrainingStopped, match="after step 7"):
        jgpt.fit(other, **branch, progress=None, should_stop=stopping(path_of(again), after=0))
    resumed = jgpt.fit(other, **branch, resume=True, progress=None)

    assert resumed.metrics["step"] == [5, 6, 7, 8]
    assert resumed.metrics["loss"][0] != whole.metrics["loss"][4]
    assert resumed.metrics["tokens"][-1] == 8 * 3 * 7


def test_moments_of_another_optimizer_are_refused(trained, config):
    branch: dict[str, Any] = {"with_optimizer": True, "progress": None}
    muon = with_changes(config, steps=12, optimizer={"optimizer": "muon"})
    wider = with_changes(config, steps=12, model={"hidden_dim": 31})
    last = f"{trained.path}@11"

    with pytest.raises(ValueError, match="it is damaged, or of another model or optimizer"):
        jgpt.fit(muon, initial=last, **branch)
    with pytest.raises(ValueError, match="another architecture"):
        jgpt.fit(wider, initial=last, **branch)
    with pytest.raises(ValueError, match="`with_optimizer=True` needs `initial=RUN@STEP`"):
        jgpt.fit(config, **branch)
    with pytest.raises(ValueError, match="`with_optimizer=True` needs `initial=RUN@STEP`"):
        jgpt.fit(config, initial=trained.model, **branch)
    with pytest.raises(ValueError, match="has no checkpoint 5: it has 8, 11"):
        jgpt.fit(config, initial=f"{trained.path}@5", **branch)


@pytest.mark.slow
def test_the_commands_take_a_checkpoint_by_its_step(config, tmp_path):
    jgpt.fit(with_changes(config, **BIGRAM), progress=None)
    last = f"{config.out}@4"
    words = ("train", "--initial", last, "--steps", 6, "--sample-tokens", 0, "--out", "r")

    done = command(*words, "--with-optimizer", cwd=tmp_path)

    assert done.code == 0, done.stderr
    assert jgpt.load(tmp_path / "r").metrics["step"] == [5, 6]
    drawn = command("sample", last, "--max-new-tokens", 5, "--seed", 3, cwd=tmp_path)
    assert drawn.code == 0, drawn.stderr


@pytest.mark.slow
def test_all_weights_are_those_of_the_model(trained, config):
    model = jgpt.load(trained.path).model
    config = dataclasses.replace(config, steps=1)
    run = jgpt.fit(config, initial=model, progress=None)
    other = jgpt.fit(dataclasses.replace(config, out=f"{config.out}-2"), progress=None)

    assert run.metrics["loss"][0] < 0.95 * other.metrics["loss"][0]
    assert arrays_of(model)  # the model's own arrays were not donated


@pytest.mark.parametrize(
    "named",
    [("--tokenizer", "bpe"), ("--tokenizer", "byte"), ("--bpe-vocab-size", 512)],
)
def test_options_of_another_tokenizer_than_that_of_the_weights_are_refused(
    named, trained, tmp_path
):
    for preset in ((), ("tiny",)):
        said = refused("train", *preset, "--initial", trained.path, *named, cwd=tmp_path)

        option, value = named
        assert said.endswith(f"has a tokenizer, which the run takes: leave out {option} {value}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_resumed_reads_the_weights_it_began_with_no_more(
    trained, config, monkeypatch
):
    given = {"initial": str(trained.path), "progress": None}
    jgpt.fit(dataclasses.replace(config, steps=2), **given)

    def refuse(*_: Any) -> None:
        raise AssertionError("the weights are read again")

    monkeypatch.setattr(fit, "read_initial", refuse)
    run = jgpt.fit(dataclasses.replace(config, steps=3, eval_interval=3), **given, resume=True)
    assert len(run.metrics["loss"]) == 3
