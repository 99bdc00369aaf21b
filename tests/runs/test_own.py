"""A user's own model and optimizer: from Python, by file on the command line, and their records."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgpt
from jgpt.config import TrainConfig
from jgpt.fields import Code, from_json, to_json
from jgpt.fitting.evaluate import evaluate
from jgpt.fitting.stopping import TrainingStopped
from jgpt.generation.text import stream_text
from jgpt.nn.costs import flops_per_token, parts_of
from jgpt.nn.models import create_model, weight_dimensions, weights_of
from jgpt.parallel.mesh import abstract_mesh
from jgpt.runs.directory import RunDirectory
from jgpt.runs.manifest import sha256_of
from jgpt.training.optimizer import make_optimizer, partition
from jgpt.training.placement import parameters_without_names
from jgpt.training.state import state_specs
from jgpt.user_code import changed_code, code_facts, load_code, with_code
from tests.commands import jgpt as command
from tests.commands import refused, worked
from tests.quick import only
from tests.runs.harness import Heard


@dataclass(frozen=True)
class SumsConfig(jgpt.ModelConfig):
    rank: int = 5


class Sums(nnx.Module):
    """Logits from the sum of the embeddings so far: causal, and without a cache."""

    def __init__(self, config: SumsConfig, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        shape = config.vocab_size, config.rank
        self.inner = nnx.Param(
            jax.random.normal(rngs.params(), shape), dimensions=("vocab_size", None)
        )
        self.outer = nnx.Param(jax.random.normal(rngs.params(), shape[::-1]))

    def hidden(self, tokens, *, rngs=None):
        x = self.inner[...][tokens]
        return jnp.cumsum(x, axis=1) - 3 * x

    def logits(self, x):
        return x @ self.outer[...]

    def __call__(self, tokens, *, rngs=None):
        return self.logits(self.hidden(tokens, rngs=rngs))


class OtherSums(Sums):
    """The same, as other code."""


def lion(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    return optax.chain(optax.lion(config.learning_rate), optax.apply_if_finite(optax.identity(), 3))


@pytest.fixture
def config(small_run, tmp_path):
    model = SumsConfig(block_size=small_run.model.block_size, rank=3)
    return dataclasses.replace(small_run, model=model, out=str(tmp_path / "run"), steps=4)


@pytest.fixture
def sums():
    return Sums(SumsConfig(vocab_size=11, block_size=7, rank=3), rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_run_of_its_own_is_saved_resumed_bitwise_and_loaded(
    config, tmp_path, capsys, monkeypatch
):
    own: dict[str, Any] = {"model": Sums, "optimizer": lion}
    run = jgpt.fit(config, **own, progress=None)
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"), steps_per_call=1)
    begun = tmp_path / "stopped/config.json"  # a text that is read asks for a stop, too
    stops = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        jgpt.fit(stopped, **own, should_stop=lambda: begun.exists() and next(stops))
    assert RunDirectory(tmp_path / "stopped").checkpoint_steps()[-1] == 2
    lacking: dict[str, Any]
    for lacking in ({}, {"model": Sums}):
        part = "optimizer" if lacking else "model"
        with pytest.raises(
            ValueError, match=rf"never loads by itself: give {part}=\S+test_own.py:"
        ):
            jgpt.fit(dataclasses.replace(stopped), resume=True, **lacking)
    wider = dataclasses.replace(stopped, model=SumsConfig(block_size=7, rank=4))
    with pytest.raises(ValueError, match=r"model.rank is 3 in the run, 4 in the config"):
        jgpt.fit(
            dataclasses.replace(wider, model=dataclasses.replace(config.model, rank=4)),
            resume=True,
            **own,
        )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    resumed = jgpt.fit(stopped, resume=True, **own)
    shown = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert f"4 steps into {tmp_path / 'stopped'}" in shown
    assert any(line.startswith("step 3/4  loss ") for line in shown)
    assert f"step 4: validation loss {resumed.validation_loss:.4f}" in shown
    jgpt.fit(stopped, resume=True, progress=None, **own)
    assert capsys.readouterr().err == ""
    heard = Heard()
    jgpt.fit(stopped, model=OtherSums, optimizer=lion, resume=True, progress=heard)
    (said,) = heard.messages
    assert said.startswith("the model ")
    assert said.endswith("test_own.py:OtherSums has changed since the run began")
    assert jgpt.load(run.directory, **own)[2] == run.config
    model, tokenizer, found = jgpt.load(run.directory, model=Sums)
    for other in (resumed.model, model):
        assert isinstance(other, Sums)
        np.testing.assert_array_equal(other.inner[...], run.model.inner[...])  # type: ignore[attr-defined]
    assert found.model == run.config.model
    assert type(found.model) is SumsConfig
    assert found.model.rank == 3
    assert tokenizer.vocab_size == model.vocab_size
    columns = run.metrics
    assert columns["step"] == [0, 1, 2, 3, 4]
    assert np.isnan(columns["loss"]).tolist() == [True] + [False] * 4
    assert columns["validation_loss"][4] == run.validation_loss
    assert evaluate(run.directory, model=Sums).loss == run.validation_loss
    with pytest.raises(ValueError, match=r"model is .*test_own.py:Sums, which a run never loads"):
        jgpt.load(run.directory)


def test_what_a_model_lacks_is_said_by_name():
    def refusal(make) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            create_model(jgpt.ModelConfig(vocab_size=11, make=make), rngs=nnx.Rngs(0))
        return str(caught.value)

    def of(**attributes):
        kind = type("Mine", (nnx.Module,), {"__call__": lambda self: 0, **attributes})
        return lambda config, *, rngs: kind()

    whole = {"vocab_size": 11, "block_size": 64, "hidden": 1, "logits": 1}
    assert "lacks vocab_size, block_size, hidden, logits, which" in refusal(of())
    assert "a Mine lacks hidden, which" in refusal(of(vocab_size=11, block_size=64, logits=1))
    assert "Mine.vocab_size is 9, not the config's 11" in refusal(of(**whole | {"vocab_size": 9}))
    assert "the model must be a flax.nnx.Module, not dict" in refusal(lambda config, *, rngs: {})

    def dropping(config, *, rngs):
        model: Any = of(**whole)(config, rngs=rngs)
        model.dropout = nnx.Dropout(0.1, rngs=rngs)
        return model

    assert "a Mine holds RngCount, RngKey: a model holds nnx.Param alone" in refusal(dropping)


def test_an_optimizer_is_made_from_the_config_and_the_steps_of_the_run():
    given = []

    def make(*arguments):
        given.append(arguments)
        return optax.sgd(0.1)

    config = jgpt.OptimizerConfig(make=make, schedule_steps=4)
    make_optimizer(config, 10)

    assert given == [(config, 10)]


def test_what_is_no_optimizer_is_rejected():
    config = jgpt.OptimizerConfig(make=lambda config, steps: 3)
    with pytest.raises(ValueError, match=r"must make an optax\.Gradient.*, not int"):
        make_optimizer(config, 10)


def test_a_model_without_a_cache_generates_as_it_predicts(sums):
    prompt = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], np.int32)
    lengths = np.array([5, 3])
    key = jax.random.key(0)
    out = jgpt.generate(sums, prompt, 6, key=key, lengths=lengths, temperature=0.0)
    inner = np.asarray(sums.inner[...])
    outer = np.asarray(sums.outer[...])
    for row, start in ((0, 5), (1, 3)):
        written = list(prompt[row, :start])
        for _ in range(6):
            x = inner[written[-7:]]
            written.append(int(np.argmax((x.sum(axis=0) - 3 * x[-1]) @ outer)))
        assert out[row, : len(written)].tolist() == written
        assert len(set(written[start:])) > 1  # a place off would be seen


def test_the_natural_session(sums):
    tokenizer = jgpt.CharTokenizer("\n abcdefghi")
    tokens = tokenizer.encode("bad")[None]
    key = jax.random.key(4)
    out = jgpt.generate(sums, tokens, 9, key=key)
    np.testing.assert_array_equal(out, jgpt.generate(sums, jnp.asarray(tokens), 9, key=key))
    text = tokenizer.decode(out[0])
    assert text[:3] == "bad"
    assert jgpt.generate_text(sums, tokenizer, "bad", 9, key=key) == text[3:]
    assert jgpt.generate_text(sums, tokenizer, ("bad",), 9, key=key) == (text[3:],)
    assert "".join(stream_text(sums, tokenizer, "bad", 9, key=key, stop=text[5])) == text[3:5]
    drawn = jgpt.generate_text(sums, tokenizer, "bad", 9)
    assert drawn == jgpt.generate_text(sums, tokenizer, "bad", 9, key=jax.random.key(0))


def test_a_model_from_a_loop_of_ones_own_becomes_a_run(sums, tmp_path):
    tokenizer = jgpt.CharTokenizer("\n abcdefghi")
    config = SumsConfig(vocab_size=11, block_size=7, rank=3)
    path = jgpt.save(sums, tmp_path / "mine", tokenizer=tokenizer, config=config)
    with pytest.raises(
        ValueError, match=r"never loads by itself: give model='\S+test_own.py:Sums'"
    ):
        jgpt.load(path)
    model, loaded, found = jgpt.load(path, model=Sums)
    assert loaded.encode("bad").tolist() == tokenizer.encode("bad").tolist()
    np.testing.assert_array_equal(model(jnp.ones((1, 2), int)), sums(jnp.ones((1, 2), int)))
    assert (found.name, found.out, type(found.model)) == ("mine", str(path), SumsConfig)
    for message, changes in (
        (
            "the model has 11 tokens and the tokenizer 4",
            {"tokenizer": jgpt.CharTokenizer("abcd")},
        ),
        (
            r"inner is (11, 3) in the model and (11, 4) in one of",
            {"config": dataclasses.replace(config, rank=4)},
        ),
    ):
        options: dict[str, Any] = {"tokenizer": tokenizer, "config": config} | changes
        with pytest.raises(ValueError, match=r".") as caught:
            jgpt.save(sums, tmp_path / "other", **options)
        assert message in str(caught.value)
    assert not (tmp_path / "other").exists()
    with pytest.raises(FileExistsError):
        jgpt.save(sums, path, tokenizer=tokenizer, config=config)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "my_gpt.py"
    worked("new", path)
    return path


def test_the_new_model_is_jgpts_own(template):
    assert len(template.read_text().splitlines()) <= 150
    config = jgpt.ModelConfig(vocab_size=23, block_size=9, num_layers=3, num_heads=2, embed_dim=20)
    own = with_code(jgpt.TrainConfig(model=config), f"{template}:GPT").model
    model: Any
    model, ours = (create_model(it, rngs=nnx.Rngs(0)) for it in (own, config))
    random = np.random.default_rng(2)
    tokens = jnp.asarray(random.integers(23, size=(4, 7)))
    weights = nnx.to_pure_dict(nnx.state(ours, nnx.Param))

    def put(target, *path) -> None:
        *parents, name = path
        tree: Any = functools.reduce(lambda tree, name: tree[name], parents, weights)
        tree[name] = tree[name] + 0.3 * random.standard_normal(tree[name].shape, np.float32)
        target.set_value(tree[name])

    put(model.token_embedding, "token_embedding", "embedding")
    put(model.position_embedding, "position_embedding", "embedding")
    put(model.final_norm.scale, "final_norm", "scale")
    for i, block in enumerate(model.blocks):
        put(block.attention_norm.scale, "blocks", i, "attention_norm", "scale")
        put(block.mlp_norm.scale, "blocks", i, "feed_forward_norm", "scale")
        for name in ("query", "key", "value", "projection"):
            put(getattr(block.attention, name), "blocks", i, "attention", name, "kernel")
        put(block.mlp.expansion, "blocks", i, "feed_forward", "expansion", "kernel")
        put(block.mlp.projection, "blocks", i, "feed_forward", "projection", "kernel")
    ours = nnx.merge(nnx.graphdef(ours), weights)
    logits = nnx.jit(lambda model, rngs: model(tokens, rngs=rngs))
    found = logits(model, None)
    expected = logits(ours, None)
    assert float(jnp.abs(expected).mean()) > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(logits(model, nnx.Rngs(dropout=0)), found)  # dropout is 0
    counts = [sum(part.parameters for part in parts_of(it)) for it in (own, config)]
    assert counts[0] == counts[1]


def test_the_new_model_starts_as_jgpts_own_and_drops_out_in_training(template):
    config = jgpt.ModelConfig(vocab_size=230, num_layers=3, num_heads=2, embed_dim=200, dropout=0.5)
    own = with_code(jgpt.TrainConfig(model=config), f"{template}:GPT").model
    model: Any = create_model(own, rngs=nnx.Rngs(0))
    assert 1 < flops_per_token(own) / flops_per_token(config) < 1.1
    small = 0.02 / 6**0.5
    for kernel, std in (
        (model.token_embedding, 0.02),
        (model.blocks[1].attention.key, 0.02),
        (model.blocks[1].attention.projection, small),
        (model.blocks[2].mlp.projection, small),
    ):
        assert np.std(kernel[...]) == pytest.approx(std, rel=0.03)
    tokens = jnp.ones((2, 5), int)
    assert float(jnp.abs(model(tokens, rngs=nnx.Rngs(dropout=0)) - model(tokens)).max()) > 1e-3


def test_a_mesh_shards_by_the_users_names(template):
    config = jgpt.TrainConfig(model=jgpt.ModelConfig(vocab_size=24, num_layers=1, embed_dim=32))
    mesh = abstract_mesh("fsdp=2,tensor=2")
    own = with_code(config, f"{template}:GPT")
    ours, its = (state_specs(each, mesh).weights["blocks"][0] for each in (config, own))
    for name in ("query", "projection"):
        assert its["attention"][name] == ours["attention"][name]["kernel"]
    assert its["mlp"]["expansion"] == ours["feed_forward"]["expansion"]["kernel"]
    assert any(its["mlp"]["expansion"])
    assert parameters_without_names(own.model, mesh) == []
    sums = with_code(config, Sums).model
    assert parameters_without_names(sums, mesh) == ["outer"]
    assert parameters_without_names(sums, abstract_mesh("data=4")) == []


def test_code_is_named_found_and_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def lion(config, steps):\n    return 7\n\nlevel = 3\n")
    Path("wrong.py").write_text("x = 1\n1 / 0\n")
    Path("odd.py").write_text("x = (\n")
    Path("deep.py").write_text("import parts_of_deep\n")
    Path("parts_of_deep.py").write_text("import json\njson.loads('{')\n")
    Path("quits.py").write_text("raise SystemExit(3)\n")
    lion = load_code("mine.py:lion")
    assert lion(None, 3) == 7
    assert load_code("mine.py:lion") is lion
    record = Code.of(lion)
    assert (record.named, len(str(record.sha256))) == ("mine.py:lion", 64)
    assert Code.of(lambda: 0).name == "test_code_is_named_found_and_recorded.<locals>.<lambda>"
    for named, message in (
        ("mine:lion", "'mine:lion' must be a file and a name in it, as in my_gpt.py:GPT"),
        ("mine.py:lino", "mine.py has no function or class 'lino' (did you mean 'lion'?)"),
        ("mine.py:level", "mine.py has no function or class 'level'"),
        ("wrong.py:x", "wrong.py, line 2: 1 / 0: ZeroDivisionError: division by zero"),
        ("odd.py:x", "odd.py, line 1: x = (: SyntaxError: '(' was never closed"),
        ("quits.py:x", "quits.py, line 1: raise SystemExit(3): SystemExit: 3"),
        ("deep.py:x", "parts_of_deep.py, line 2: json.loads('{'): JSONDecodeError: Expecting"),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            load_code(named)
        assert str(caught.value).startswith(message)
    with pytest.raises(FileNotFoundError):
        load_code("none.py:x")


def test_code_that_takes_other_arguments_is_rejected():
    class Alone(nnx.Module):
        def __init__(self): ...

    class Empty(nnx.Module): ...

    for make in (Alone, Empty, lambda config: None):
        with pytest.raises(ValueError, match=r"the model must take \(config, rngs=\): "):
            with_code(TrainConfig(), make)
    for make in (Alone, Empty, lambda config: None):
        with pytest.raises(ValueError, match=r"\(config, steps\) or \(config, steps, model\): "):
            with_code(TrainConfig(), optimizer=make)


@pytest.mark.slow
def test_a_run_by_file_says_what_it_needs_and_never_loads_it(template, poem, tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "my.py").write_text(template.read_text())
    (folder / "text.txt").write_text(poem.read_text())
    small = ("--block-size", 8, "--num-layers", 1, "--embed-dim", 8, "--num-heads", 2, "--steps", 2)
    data = ("--data", "text.txt", "--out", "r", "--sample-tokens", 3, "--mlp-ratio", 3)
    (folder / "opt.py").write_text(
        "import optax\n\ndef sgd(config, steps):\n    return optax.sgd(1.0)\n"
    )
    own = ("--model", "my.py:GPT", "--optimizer", "opt.py:sgd")
    said = worked("train", *own, *small, *data, cwd=folder)
    assert "next: jgpt sample r --model my.py:GPT" in said
    saved = json.loads((folder / "r" / "config.json").read_text())
    assert saved["model"]["mlp_ratio"] == 3
    assert {**saved["optimizer"]["make"], "sha256": 0} == {
        "name": "sgd",
        "file": "opt.py",
        "sha256": 0,
    }
    for words in (("sample", "r"), ("eval", "r"), ("look", "r", "--prompt", "a")):
        line = refused(*words, cwd=folder)
        assert line.endswith("which a run never loads by itself: give --model my.py:GPT"), line
    assert "validation loss" in worked("eval", "r", "--model", "my.py:GPT", cwd=folder)
    assert "training memory" in worked("info", "r", *own, cwd=folder)
    with (folder / "my.py").open("a") as file:
        file.write("# changed\n")
    done = command("eval", "r", "--model", "my.py:GPT", cwd=folder)
    assert done.code == 0
    assert done.stderr.count("jgpt: the model my.py:GPT has changed since the run began\n") == 1
    assert "a model of your own has no attention weights" in refused(
        "attention", "r", "--prompt", "So", "--model", "my.py:GPT", cwd=folder
    )
    worked("look", "r", "--prompt", "So", "--model", "my.py:GPT", cwd=folder)
    worked("plot", "r", cwd=folder)
    assert "my.py already exists" in refused("new", "my.py", cwd=folder)


SMALL = ("--block-size", 8, "--num-layers", 1, "--embed-dim", 8, "--num-heads", 2, "--steps", 2)

MISTAKES = {
    "a method raises": (
        "def hidden(self, tokens, *, cache=None, rngs=None):\n        raise ValueError('steps=3')",
        "raise ValueError('steps=3'): ValueError: steps=3",
        4,
    ),
    "shapes differ": (
        "def logits(self, x):\n        return x + x[..., :3]",
        "return x + x[..., :3]: TypeError: ",
        4,
    ),
    "a check fails": (
        "@jgpt.typed\n    def logits(self, x) -> jgpt.GPT:\n        return x",
        "def logits(self, x) -> jgpt.GPT:: TypeCheckError: ",
        4,
    ),
    "the class is wrong": ("steps = 1 / 0", "steps = 1 / 0: ZeroDivisionError: division", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["shapes differ"], MISTAKES))
def test_a_mistake_in_custom_code_has_a_place_and_one_line(poem, tmp_path, monkeypatch, name):
    source, message, line = MISTAKES[name]
    (tmp_path / "mine.py").write_text(f"import jgpt\nclass GPT(jgpt.GPT):\n    {source}\n")
    words = ("train", "--model", "mine.py:GPT", *SMALL, "--data", poem, "--out", "r")
    said = refused(*words, cwd=tmp_path)
    assert said.startswith(f"jgpt: mine.py, line {line}: {message}"), said
    assert not (tmp_path / "r").exists()
    monkeypatch.setenv("JGPT_TRACEBACK", "1")
    with pytest.raises(Exception, match=r"."):
        command(*words, cwd=tmp_path)


def test_a_mistake_in_an_optimizer_has_a_place(poem, tmp_path):
    (tmp_path / "opt.py").write_text(
        "import optax\n\ndef sgd(config, steps):\n    return optax.sgd(config.nothing)\n"
    )
    own = ("--optimizer", "opt.py:sgd")
    said = "jgpt: opt.py, line 4: return optax.sgd(config.nothing): AttributeError: "
    words = ("train", *own, *SMALL, "--data", poem, "--out", "r")

    assert refused(*words, cwd=tmp_path).startswith(said)
    assert refused("info", "tiny", *own, cwd=tmp_path).startswith(said)
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_run_with_an_optimizer_of_one_s_own_is_sampled_without_it(poem, tmp_path):
    """Its weights need no optimizer; `jgpt sample` has no such option."""
    (tmp_path / "opt.py").write_text(
        "import optax\n\ndef sgd(config, steps):\n    return optax.sgd(config.learning_rate)\n"
    )
    words = ("train", "--optimizer", "opt.py:sgd", *SMALL, "--data", poem, "--out", "r")

    said = worked(*words, cwd=tmp_path)

    assert said.splitlines()[-1] == "next: jgpt sample r   or   jgpt eval r"


def test_every_command_that_takes_custom_code_loads_it(trained, tmp_path):
    run = trained.directory
    model = ("--model", "nothere.py:GPT")
    for words in (
        ("train", *model),
        ("plan", "tiny", *model),
        ("train", "--optimizer", "nothere.py:x"),
        ("plan", "--optimizer", "nothere.py:x"),
        ("sample", run, *model),
        ("eval", run, *model),
        ("attention", run, "--prompt", "a", *model),
        ("look", run, "--prompt", "a", *model),
        ("info", "tiny", *model),
        ("info", run, *model),
        ("info", "tiny", "--optimizer", "nothere.py:x"),
        ("info", run, "--optimizer", "nothere.py:x"),
        ("shapes", "tiny", *model),
        ("shapes", run, *model),
    ):
        assert "nothere.py: No such file" in refused(*words, cwd=tmp_path), words


@pytest.mark.slow
def test_info_is_of_the_custom_model(tmp_path):
    (tmp_path / "wide.py").write_text(
        "import dataclasses\nimport jgpt\n\n\nclass GPT(jgpt.GPT):\n"
        "    def __init__(self, config: jgpt.ModelConfig, *, rngs):\n"
        "        super().__init__(dataclasses.replace(config, hidden_dim=77), rngs=rngs)\n"
    )
    lines = worked("info", "tiny", "--model", "wide.py:GPT", cwd=tmp_path).splitlines()
    config = dataclasses.replace(jgpt.preset("tiny").model, hidden_dim=77)
    (counted,) = [line.split()[1] for line in lines if line.startswith("all ")]

    assert counted == f"{sum(part.parameters for part in parts_of(config)):,}"
    assert not any(line.startswith("shapes for") for line in lines)


def test_files_beside_custom_code_are_recorded_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sizes.py").write_text("WIDTH = 3\n")
    Path("layers").mkdir()
    Path("layers/__init__.py").write_text("from .norm import scale\n")
    Path("layers/norm.py").write_text("import sizes\n\nscale = sizes.WIDTH\n")
    Path("unused.py").write_text("import mine\n")
    Path("mine.py").write_text(
        "import json\nfrom layers import scale\n\n\ndef make(config, steps):\n    return scale\n"
    )
    begun = with_code(TrainConfig(), optimizer="mine.py:make")
    record = Code.of(begun.optimizer.make)
    files = ["layers/__init__.py", "layers/norm.py", "sizes.py"]
    assert [name for name, _ in record.modules] == files
    saved = from_json(TrainConfig, to_json(begun))
    assert saved.optimizer.make == record
    assert changed_code(saved, begun) == []
    facts = code_facts(begun)
    Path("sizes.py").write_text("WIDTH = 4\n")
    line = "sizes.py of the optimizer mine.py:make has changed since the run began"
    assert changed_code(saved, begun) == [line]
    digest = hashlib.sha256(b"WIDTH = 4\n").hexdigest()
    assert code_facts(begun) == facts | {"sizes.py of the optimizer": f"SHA-256 {digest}"}
    assert code_facts(begun) != facts
    assert code_facts(begun)["model_code"] is None
    old = dataclasses.replace(record, modules=())  # of a run from before this record
    optimizer = dataclasses.replace(saved.optimizer, make=old)
    before = from_json(TrainConfig, to_json(dataclasses.replace(saved, optimizer=optimizer)))
    assert before.optimizer.make == old
    assert changed_code(before, begun) == []


def test_processes_with_other_code_are_rejected(config, monkeypatch):
    seen = []
    monkeypatch.setattr("jgpt.fitting.fit.require_same", lambda facts: seen.append(facts) or stop())

    def stop():
        raise ValueError("enough")

    for make in (Sums, OtherSums):
        with pytest.raises(ValueError, match="enough"):
            jgpt.fit(config, model=make, progress=None)
    first, second = (facts["model_code"] for facts in seen)
    digest = sha256_of(Path(__file__))
    assert first == f"test_own.py:Sums of SHA-256 {digest}"
    assert second == f"test_own.py:OtherSums of SHA-256 {digest}"


@pytest.mark.slow
def test_the_embeddings_of_the_new_model_have_their_own_learning_rate(template):
    optimizer = jgpt.OptimizerConfig(optimizer="muon", embedding_learning_rate=0.5)
    model = jgpt.ModelConfig(vocab_size=24, num_layers=2, embed_dim=32)
    config = jgpt.TrainConfig(model=model, optimizer=optimizer)

    def groups(config):
        weights = weights_of(create_model(config.model, rngs=nnx.Rngs(0)))
        labels = partition(optimizer, weights, weight_dimensions(config.model))
        sizes: Counter[str] = Counter()
        for label, leaf in zip(jax.tree.leaves(labels), jax.tree.leaves(weights), strict=True):
            sizes[label] += leaf.size
        return sizes

    own = groups(with_code(config, f"{template}:GPT"))

    assert own == groups(config)
    assert own["embedding"] == 32 * (24 + 64)
