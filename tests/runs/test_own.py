"""A user's own model and optimizer: from Python, by file on the command line, and their records."""

import dataclasses
import json
import re
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
from jgpt.fields import Code
from jgpt.files import sha256_of
from jgpt.nn.costs import flops_per_token
from jgpt.nn.models import abstract_model, create_model, named_parameters, require_parameters_only
from jgpt.parallel.mesh import abstract_mesh
from jgpt.runs.directory import RunDirectory
from jgpt.runs.fit import TrainingStopped
from jgpt.training.optimizer import make_optimizer
from jgpt.training.placement import parameters_without_names
from jgpt.training.state import state_specs
from jgpt.user_code import describe_error, load_code, with_code
from tests.commands import jgpt as command
from tests.commands import refused, worked
from tests.models import loud
from tests.runs.harness import path_of, stopping


@dataclass(frozen=True)
class SumsConfig(jgpt.ModelConfig):
    rank: int = 5


class Sums(nnx.Module):
    """Logits from the sum of the embeddings so far: causal, and without a cache."""

    def __init__(self, config: SumsConfig, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        inner = jax.random.normal(rngs.params(), (config.vocab_size, config.rank))
        outer = jax.random.normal(rngs.params(), (config.rank, config.vocab_size))
        self.inner = nnx.Param(inner, dimensions=("vocab_size", None))
        self.outer = nnx.Param(outer)

    def hidden(self, tokens, *, rngs=None):
        x = self.inner[...][tokens]
        return jnp.cumsum(x, axis=1) - 3 * x

    def logits(self, x):
        return x @ self.outer[...]

    def __call__(self, tokens, *, rngs=None):
        return self.logits(self.hidden(tokens, rngs=rngs))


def lion(config: jgpt.OptimizerConfig, steps: int) -> optax.GradientTransformation:
    finite = optax.apply_if_finite(optax.identity(), 3)
    return optax.chain(optax.lion(config.learning_rate), finite)


SMALL = ("--block-size", 8, "--num-layers", 1, "--embed-dim", 8, "--num-heads", 2, "--steps", 2)
OF_FILES = ("--model", "my.py:GPT", "--optimizer", "opt.py:sgd")
OWN: dict[str, Any] = {"model": Sums, "optimizer": lion}


def config_of_sums(small_run, out):
    model = SumsConfig(block_size=small_run.model.block_size, rank=3)
    return dataclasses.replace(small_run, model=model, out=str(out), steps=4)


@pytest.fixture
def sums() -> Any:
    return Sums(SumsConfig(vocab_size=11, block_size=7, rank=3), rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_run_of_its_own_is_resumed_bitwise_with_its_code_alone(
    small_run, tmp_path, capsys, monkeypatch
):
    """And loaded and evaluated."""
    own_config = config_of_sums(small_run, tmp_path / "own")
    own_run: Any = jgpt.fit(own_config, **OWN, progress=None)
    assert jgpt.load(path_of(own_run), **OWN).config == own_run.config
    assert jgpt.evaluate(path_of(own_run), model=Sums).loss == own_run.validation_loss
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    out = tmp_path / "stopped"
    stopped = dataclasses.replace(config_of_sums(small_run, out), steps_per_call=1)
    with pytest.raises(TrainingStopped):
        jgpt.fit(stopped, **OWN, should_stop=stopping(out))
    assert RunDirectory(out).checkpoint_steps()[-1] == 2
    given: dict[str, Any] = {}
    for lacking in ("model", "optimizer"):
        message = rf"never loads by itself: give `{lacking}=\S+test_own.py:"
        with pytest.raises(ValueError, match=message):
            jgpt.fit(stopped, resume=True, **given)
        given = {"model": Sums}
    wider = dataclasses.replace(stopped, model=dataclasses.replace(stopped.model, rank=4))
    with pytest.raises(ValueError, match=r"`model.rank` is 3 in the run, 4 in the config"):
        jgpt.fit(wider, resume=True, **OWN)
    capsys.readouterr()

    resumed = jgpt.fit(stopped, resume=True, **OWN)

    shown = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert f"4 steps into {stopped.out}" in shown
    assert any(line.startswith("step 3/4  loss ") for line in shown)
    assert f"step 4: validation loss {resumed.validation_loss:.4f}" in shown
    assert isinstance(resumed.model, Sums)
    np.testing.assert_array_equal(resumed.model.inner[...], own_run.model.inner[...])

    jgpt.fit(stopped, resume=True, progress=None, **OWN)

    assert capsys.readouterr().err == ""


def test_what_a_model_lacks_is_said_by_name(sums):
    def check(model):
        config = jgpt.ModelConfig(vocab_size=11, block_size=7, make=lambda config, *, rngs: model)
        require_parameters_only(create_model(config, rngs=nnx.Rngs(0)))

    with pytest.raises(ValueError, match="a Dropout lacks vocab_size, block_size, hidden"):
        check(nnx.Dropout(0.1))
    sums.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"a Sums holds RngCount, RngKey: `fit` trains nnx\.Param"):
        check(sums)
    sums.vocab_size = 9
    with pytest.raises(ValueError, match=r"Sums\.vocab_size is 9, not the config's 11"):
        check(sums)


def test_an_optimizer_is_made_from_the_config_and_the_steps_of_the_run():
    given = []

    def make(*arguments):
        given.append(arguments)
        return optax.sgd(0.1)

    config = jgpt.OptimizerConfig(make=make, schedule_steps=4)
    make_optimizer(config, 10)

    assert given == [(config, 10)]


def test_a_model_without_a_cache_generates_as_it_predicts(sums):
    prompt = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], np.int32)
    lengths = np.array([5, 3])
    inner = np.asarray(sums.inner[...])
    outer = np.asarray(sums.outer[...])

    out = jgpt.generate(sums, prompt, 6, key=jax.random.key(0), lengths=lengths, temperature=0.0)

    for row, start in enumerate(lengths):
        written = prompt[row, :start].tolist()
        for _ in range(6):
            x = inner[written[-7:]]
            logits = (x.sum(axis=0) - 3 * x[-1]) @ outer
            written.append(int(logits.argmax()))
        assert out[row, : len(written)].tolist() == written
        assert len(set(written[start:])) > 1  # a place off would be seen


def test_a_model_from_a_loop_of_ones_own_becomes_a_run(sums, tmp_path):
    tokenizer = jgpt.CharTokenizer("\n abcdefghi")
    config = SumsConfig(vocab_size=11, block_size=7, rank=3)
    tokens = jnp.ones((1, 2), int)

    path = jgpt.save(sums, tmp_path / "mine", tokenizer=tokenizer, config=config)
    model, loaded, found = jgpt.load(path, model=Sums)

    assert loaded.encode("bad").tolist() == tokenizer.encode("bad").tolist()
    np.testing.assert_array_equal(model(tokens), sums(tokens))
    assert found.name == "mine"
    assert found.out == str(path)
    assert type(found.model) is SumsConfig
    message = r"never loads by itself: give `model='\S+test_own.py:Sums'`"
    with pytest.raises(ValueError, match=message):
        jgpt.load(path)
    with pytest.raises(FileExistsError):
        jgpt.save(sums, path, tokenizer=tokenizer, config=config)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "my_gpt.py"
    worked("new", path)
    return path


def test_the_new_model_is_jgpts_own(template):
    config = jgpt.ModelConfig(vocab_size=23, block_size=9, num_layers=3, num_heads=2, embed_dim=20)
    own_config = with_code(jgpt.TrainConfig(model=config), f"{template}:GPT").model
    model: Any = create_model(own_config, rngs=nnx.Rngs(0))
    expected_model = create_model(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(2).integers(23, size=(4, 7)))
    theirs = named_parameters(expected_model)
    for name, parameter in named_parameters(loud(model, 0.2)).items():
        name = name.replace("mlp", "feed_forward")
        if "embedding" in name:
            name += ".embedding"
        elif not name.endswith("scale"):
            name += ".kernel"
        theirs.pop(name).set_value(parameter.get_value())
    assert theirs == {}

    @nnx.jit
    def logits_of(model, rngs):
        return model(tokens, rngs=rngs)

    found = logits_of(model, None)
    expected = logits_of(expected_model, None)
    in_training = logits_of(model, nnx.Rngs(dropout=0))

    assert float(jnp.abs(expected).mean()) > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(in_training, found)  # dropout is 0


@pytest.mark.slow
def test_the_new_model_starts_as_jgpts_own_and_drops_out_in_training(template):
    config = jgpt.ModelConfig(vocab_size=230, num_layers=3, num_heads=2, embed_dim=200, dropout=0.5)
    own_config = with_code(jgpt.TrainConfig(model=config), f"{template}:GPT").model
    tokens = jnp.ones((2, 5), int)

    model: Any = create_model(own_config, rngs=nnx.Rngs(0))

    assert 1 < flops_per_token(own_config) / flops_per_token(config) < 1.1
    small = 0.02 / 6**0.5
    for kernel, deviation in (
        (model.token_embedding, 0.02),
        (model.blocks[1].attention.key, 0.02),
        (model.blocks[1].attention.projection, small),
        (model.blocks[2].mlp.projection, small),
    ):
        assert np.std(kernel[...]) == pytest.approx(deviation, rel=0.03)
    in_training = model(tokens, rngs=nnx.Rngs(dropout=0))
    in_evaluation = model(tokens)
    assert float(jnp.abs(in_training - in_evaluation).max()) > 1e-3


def test_a_mesh_shards_by_the_users_names(template):
    config = jgpt.TrainConfig(model=jgpt.ModelConfig(vocab_size=24, num_layers=1, embed_dim=32))
    own_config = with_code(config, f"{template}:GPT")
    config_of_sums = with_code(config, Sums).model
    mesh = abstract_mesh("fsdp=2,tensor=2")
    without_sharding = abstract_mesh("data=4")

    expected = state_specs(config, mesh)["model"]["blocks"][0]
    found = state_specs(own_config, mesh)["model"]["blocks"][0]

    for name in ("query", "projection"):
        assert found["attention"][name] == expected["attention"][name]["kernel"]
    expansion = found["mlp"]["expansion"]
    assert expansion == expected["feed_forward"]["expansion"]["kernel"]
    assert any(expansion)
    assert parameters_without_names(own_config.model, mesh) == []
    assert parameters_without_names(config_of_sums, mesh) == ["outer"]
    assert parameters_without_names(config_of_sums, without_sharding) == []


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "mine.py": "def lion(config, steps):\n    return 7\n\nlevel = 3\n",
        "wrong.py": "x = 1\n1 / 0\n",
        "deep.py": "import parts_of_deep\n",
        "parts_of_deep.py": "import json\njson.loads('{')\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)


@pytest.mark.usefixtures("code")
def test_code_is_named_found_and_recorded():
    lion = load_code("mine.py:lion")
    record = Code.of(lion)

    assert lion(None, 3) == 7
    assert load_code("mine.py:lion") is lion
    assert record.named == "mine.py:lion"
    assert len(str(record.sha256)) == 64


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("mine:lion", "'mine:lion' must be a file and a name in it, as in my_gpt.py:GPT"),
        ("mine.py:lino", "mine.py has no function or class 'lino' (did you mean 'lion'?)"),
        ("wrong.py:x", "wrong.py, line 2: 1 / 0: ZeroDivisionError: division by zero"),
        ("deep.py:x", "parts_of_deep.py, line 2: json.loads('{'): JSONDecodeError: Expecting"),
    ],
)
def test_code_that_can_t_be_loaded_has_a_place(named, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        load_code(named)


class WithoutArguments(nnx.Module):
    def __init__(self): ...


@pytest.mark.parametrize("make", [WithoutArguments, nnx.Module, lambda config: None])
def test_code_that_takes_other_arguments_is_rejected(make):
    with pytest.raises(ValueError, match=r"the model must take \(config, rngs=\): "):
        with_code(TrainConfig(), make)
    with pytest.raises(ValueError, match=r"\(config, steps\) or \(config, steps, model\): "):
        with_code(TrainConfig(), optimizer=make)
    with pytest.raises(ValueError, match=r"the objective must take \(model, tokens, rngs\): "):
        with_code(TrainConfig(), objective=make)


SGD = "import optax\n\ndef sgd(config, steps):\n    return optax.sgd(config.learning_rate)\n"


@pytest.mark.slow
def test_a_run_by_file_records_its_code_and_says_how_to_load_it(template, poem, tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "my.py").write_text(template.read_text())
    (folder / "opt.py").write_text(SGD)
    (folder / "text.txt").write_text(poem.read_text())
    data = ("--data", "text.txt", "--out", "r", "--sample-tokens", 3, "--mlp-ratio", 3)
    said = worked("train", *OF_FILES, *SMALL, *data, cwd=folder)
    config = json.loads((folder / "r" / "config.json").read_text())

    assert "next: jgpt sample r --model my.py:GPT" in said
    assert config["model"]["mlp_ratio"] == 3
    digest = sha256_of(folder / "opt.py")
    assert config["optimizer"]["make"] == {"name": "sgd", "file": "opt.py", "sha256": digest}

    needed = "which a run never loads by itself: give --model my.py:GPT"

    for words in (("sample", "r"), ("eval", "r"), ("look", "r", "--prompt", "a")):
        assert refused(*words, cwd=folder).endswith(needed)

    assert "validation loss" in worked("eval", "r", "--model", "my.py:GPT", cwd=folder)
    assert "training memory" in worked("info", "r", *OF_FILES, cwd=folder)
    worked("look", "r", "--prompt", "So", "--model", "my.py:GPT", cwd=folder)
    worked("plot", "r", cwd=folder)
    assert "my.py already exists" in refused("new", "my.py", cwd=folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def logits(self, x):\n        return x + x[..., :3]",
            "return x + x[..., :3]: TypeError: ",
        ),
        (
            "@jgpt.typed\n    def logits(self, x) -> jgpt.GPT:\n        return x",
            "def logits(self, x) -> jgpt.GPT:: TypeCheckError: ",
        ),
    ],
    ids=["shapes differ", "a check fails"],
)
def test_a_mistake_in_custom_code_has_a_place_and_one_line(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"import jgpt\nclass GPT(jgpt.GPT):\n    {source}\n")
    config = jgpt.ModelConfig(make=load_code("mine.py:GPT"), num_layers=1, vocab_size=11)
    model = abstract_model(config)

    with pytest.raises(Exception, match=r".") as error:
        nnx.eval_shape(lambda model, tokens: model(tokens), model, jnp.ones((1, 3), int))

    described = describe_error(error.value)
    assert described is not None
    assert described.startswith(f"mine.py, line 4: {message}")
    assert "\n" not in described


def test_a_mistake_in_an_optimizer_has_a_place(poem, tmp_path, monkeypatch):
    (tmp_path / "opt.py").write_text(SGD.replace("learning_rate", "nothing"))
    own = ("--optimizer", "opt.py:sgd")
    place = "jgpt: opt.py, line 4: return optax.sgd(config.nothing): AttributeError: "

    of_train = refused("train", *own, *SMALL, "--data", poem, "--out", "r", cwd=tmp_path)
    of_info = refused("info", "tiny", *own, cwd=tmp_path)

    assert of_train.startswith(place)
    assert of_info.startswith(place)
    assert not (tmp_path / "r").exists()
    monkeypatch.setenv("JGPT_TRACEBACK", "1")
    with pytest.raises(AttributeError):
        command("info", "tiny", *own, cwd=tmp_path)
