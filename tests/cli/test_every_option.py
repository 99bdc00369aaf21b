"""Every option of every command reaches the library, each at a value that isn't its default.

The library's functions are replaced by ones that note what they are called with. A command that
drops an option, or gives it to the wrong parameter, fails here.
"""

import contextlib
import dataclasses
import inspect
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from jgpt import ModelConfig, TrainConfig
from jgpt.cli import options
from jgpt.cli.commands import COMMANDS
from jgpt.fields import to_json
from jgpt.presets import PRESETS
from jgpt.runs.evaluate import Evaluation
from jgpt.shapes.source import AnnotatedSource, FunctionSource, SourceLine
from tests.commands import jgpt

STOP = "the library was reached"
MODEL_FILE = """
import optax
from jgpt import GPT

def lion(config, steps):
    return optax.lion(1e-3)

def ours(model, tokens, rngs):
    return 0
"""


class Calls(dict[str, dict]):
    """What functions of the library were called with, by name and parameter."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch

    def note(self, target: str, result=None, *, stop: bool = False, during=lambda call: None):
        """Replace a function by one that notes its arguments and returns `result`.

        With `stop`, the command ends there, with an error. `during` may do what the function does.
        """
        module, _, name = target.rpartition(".")
        signature = inspect.signature(getattr(import_module(module), name))

        def noted(*arguments, **keywords):
            received = dict(signature.bind(*arguments, **keywords).arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    received |= received.pop(parameter.name, {})
            self[name] = received
            during(received)
            if stop:
                raise ValueError(STOP)
            return result

        self.monkeypatch.setattr(target, noted)


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return Calls(monkeypatch)


TOKENIZER = SimpleNamespace(name="the tokenizer", vocab_size=65)
RUN_CONFIG = SimpleNamespace()


@pytest.fixture
def loaded(calls):
    """A run that is loaded without a file."""
    calls.note("jgpt.runs.load.load", ("the model", TOKENIZER, RUN_CONFIG))
    calls.note("jgpt.nn.int8.with_int8_weights", "the model in int8")
    calls.note("jgpt.parallel.mesh.use_mesh", contextlib.nullcontext())
    for command in ("look", "new", "plot"):
        calls.note(f"jgpt.cli.commands.{command}.write_file")
    return calls


CODE = {"model": "m.py:GPT"}
TYPED: dict[str, set[str]] = {}
"""The options that a test of this file has typed, by command."""


def type_in(command: str, *words: object, cwd=None) -> str:
    """Run a command; return what it printed. Its error, if any, is that the library was reached."""
    flags = {str(word).partition("=")[0] for word in words if str(word).startswith("--")}
    TYPED.setdefault(command, set()).update(flags)
    done = jgpt(command, *words, cwd=cwd)
    assert done.code == 0 or STOP in done.stderr, done.stderr
    return done.stdout


TRAIN_CONFIG = {
    "name": "my_run",
    "out": "my_out",
    "seed": 7,
    "steps": 12,
    "batch_size": 6,
    "micro_batches": 3,
    "eval_interval": 4,
    "eval_tokens": 123,
    "steps_per_call": 2,
    "patience": 5,
    "keep_best": 8,
    "keep_last": 9,
    "keep_every": 10,
    "trackers": ("wandb", "tensorboard"),
    "sample_tokens": 11,
    "mesh": "data=1",
}
MODEL_CONFIG = {
    "architecture": "bigram",
    "block_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 10,
    "embed_dim": 44,
    "hidden_dim": 50,
    "activation": "silu",
    "gated": True,
    "qkv_bias": True,
    "use_bias": True,
    "head_bias": True,
    "tie_embeddings": False,
    "positions": "rotary",
    "rotary_base": 500.5,
    "norm": "rms",
    "norm_scale": False,
    "norm_epsilon": 1e-4,
    "qk_norm": True,
    "qk_norm_scale": True,
    "qk_norm_epsilon": 1e-3,
    "attention_scale": 0.3,
    "attention_window": 13,
    "ngram_sizes": (2, 5),
    "ngram_rows": 99,
    "ngram_dropout": 0.15,
    "zero_init": True,
    "embedding_shortcut": True,
    "logit_softcap": 17.5,
    "dropout": 0.25,
    "dtype": "float64",
    "activation_dtype": "bfloat16",
    "attention_kernel": "xla",
    "param_dtype": "bfloat16",
    "remat": True,
    "scan_layers": True,
}
OPTIMIZER_CONFIG = {
    "optimizer": "muon",
    "learning_rate": 0.5,
    "min_learning_rate": 0.4,
    "schedule": "wsd",
    "decay_fraction": 0.35,
    "schedule_steps": 14,
    "warmup_steps": 15,
    "weight_decay": 0.45,
    "beta1": 0.55,
    "beta2": 0.65,
    "gradient_clip": 0.75,
    "muon_learning_rate": 0.85,
    "muon_weight_decay": 0.95,
    "embedding_learning_rate": 0.61,
    "trainable": ("blocks.*",),
    "ema_decay": 0.71,
}
DATA_CONFIG = {
    "data": ("a.txt", "b_c.txt"),
    "tokenizer": "bpe",
    "bpe_vocab_size": 300,
    "tokenizer_files": "vocabulary",
    "validation_fraction": 0.2,
    "test_fraction": 0.3,
    "data_field": "body",
}
PARTS = {
    None: TRAIN_CONFIG,
    "model": MODEL_CONFIG,
    "optimizer": OPTIMIZER_CONFIG,
    "dataset": DATA_CONFIG,
}


def words_of(fields: dict) -> list[str]:
    words = []
    for name, value in fields.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={value}")
    return words


CODE_AND_PARTS = {"make", "objective", "vocab_size", "model", "optimizer", "dataset"}


@pytest.mark.parametrize(("called", "more"), [("fit", []), ("plan", ["--dry-run"])])
def test_every_field_of_the_config_reaches_the_run(called, more, calls):
    calls.note(f"jgpt.runs.fit.{called}", stop=True)
    words = []
    for fields in PARTS.values():
        words += words_of(fields)

    type_in("train", "tiny", *more, *words)

    config = calls[called]["config"]
    _, default = PRESETS["tiny"]
    for part, fields in PARTS.items():
        received = config
        unchanged = default
        if part is not None:
            received = getattr(config, part)
            unchanged = getattr(default, part)
        names = {field.name for field in dataclasses.fields(received)}
        untyped = {"make"} if part == "optimizer" else CODE_AND_PARTS
        assert set(fields) == names - untyped
        for name, value in fields.items():
            assert getattr(received, name) == value, name
            assert getattr(unchanged, name) != value, f"{name} is typed at its default"


@pytest.mark.parametrize(("called", "more"), [("fit", []), ("plan", ["--dry-run"])])
def test_the_options_beside_the_config_reach_the_run(called, more, calls, tmp_path):
    """What to do with the directory, and custom code."""
    calls.note(f"jgpt.runs.fit.{called}", stop=True)
    (tmp_path / "own.py").write_text(MODEL_FILE)
    code = ("--model", "own.py:GPT", "--optimizer", "own.py:lion", "--objective", "own.py:ours")
    initial = ("--initial", "other@40", "--with-optimizer")

    type_in("train", "tiny", *more, "--resume", *initial, *code, cwd=tmp_path)
    first = calls.pop(called)
    type_in("train", "tiny", *more, "--overwrite", cwd=tmp_path)
    second = calls.pop(called)

    assert first == first | {"initial": "other@40", "with_optimizer": True}
    assert first == first | {"resume": True, "overwrite": False}
    assert second == second | {"resume": False, "overwrite": True}
    config = first["config"]
    made = (config.model.make, config.optimizer.make, config.objective)
    assert [each.__name__ for each in made] == ["GPT", "lion", "ours"]


def test_other_hardware_reaches_the_compiler(calls):
    calls.note("jgpt.training.ahead.compile_ahead", stop=True)

    type_in("train", "tiny", "--dry-run", "--on", "v5e:2x4")

    assert calls["compile_ahead"]["on"] == "v5e:2x4"


@pytest.mark.parametrize(
    ("words", "called"),
    [(("train", "tiny", "--dry-run"), "fit.plan"), (("eval", "run"), "evaluate.evaluate")],
)
def test_warnings_are_not_in_the_json(words, called, calls):
    found = Evaluation(0.5, 2.0, 3.0, 7)
    during = lambda call: call["progress"].warned("a warning")  # noqa: E731
    calls.note(f"jgpt.runs.{called}", found, during=during)
    calls.note("jgpt.cli.report.describe", [])
    done = jgpt(*words, "--json")

    assert json.loads(done.stdout) == dataclasses.asdict(found)
    assert "a warning" in done.stderr
    TYPED.setdefault(words[0], set()).add("--json")


def test_the_processes_of_a_run_reach_jax(calls):
    calls.note("jgpt.parallel.processes.joined", stop=True)
    type_in("train", "tiny", "--coordinator", "host:1", "--processes", 3, "--process", 2)
    received = calls["joined"]
    assert received == received | {"coordinator": "host:1", "processes": 3, "process": 2}
    type_in("train", "tiny", "--distributed")
    received = calls["joined"]
    assert received == received | dict.fromkeys(("coordinator", "processes", "process"))


@pytest.mark.parametrize(("command", "takes"), [("sample", "load"), ("eval", "evaluate")])
def test_a_run_at_a_step_is_that_checkpoint(command, takes, calls):
    calls.note(f"jgpt.runs.{takes}.{takes}", stop=True)

    jgpt(command, "runs/r@40")

    assert next(iter(calls[takes].values())) == Path("runs/r")
    assert calls[takes]["which"] == 40


def test_a_config_file_is_the_run_s_config(calls, tmp_path):
    config = dataclasses.replace(PRESETS["tiny"][1], steps=17, seed=3)
    (tmp_path / "config.json").write_text(to_json(config))
    calls.note("jgpt.runs.fit.fit", stop=True)
    type_in("train", "--config", "config.json", cwd=tmp_path)

    assert calls["fit"]["config"] == config


def test_sample(loaded, tmp_path):
    loaded.note("jgpt.generation.text.stream_text", ())
    rules: dict = {"max_new_tokens": 5, "temperature": 0.3, "top_k": 4, "top_p": 0.6, "min_p": 0.2}
    words = ("--prompt", "a b", "--prompt", "c", "--stop", "x", "--stop", "y z")
    more = ("--seed", 9, "--weights", "int8", "--checkpoint", 30, "--model", "m.py:GPT")
    type_in(
        "sample", "run", *words_of(rules), *words, *more, "--mesh", "data=1", "--num-samples", 2
    )
    received = loaded["stream_text"]
    rules |= {"prompts": ("a b", "a b", "c", "c"), "stop": ("x", "y z")}
    rules |= {"model": "the model in int8", "tokenizer": TOKENIZER}
    assert {name: received[name] for name in rules} == rules
    expected = jax.random.fold_in(jax.random.key(9), 0)
    assert (jax.random.key_data(received["key"]) == jax.random.key_data(expected)).all()
    assert loaded["load"] == {"run_directory": Path("run"), "which": 30, **CODE}
    assert loaded["use_mesh"] == {"mesh": "data=1"}

    (tmp_path / "prompt.txt").write_text("of a file")
    type_in("sample", "run", "--prompt-file", "prompt.txt", cwd=tmp_path)
    assert loaded["stream_text"]["prompts"] == ("of a file",)
    assert loaded["stream_text"]["model"] == "the model"
    assert loaded["load"]["which"] == "best"


@pytest.mark.parametrize(
    ("command", "words", "takes"),
    [
        ("sample", (), "jgpt.runs.load.load"),
        ("chat", (), "jgpt.runs.load.load"),
        ("look", ("--prompt", "a"), "jgpt.runs.load.load"),
        ("look", (), "jgpt.runs.load.load"),
        ("eval", (), "jgpt.runs.evaluate.evaluate"),
    ],
)
def test_without_a_run_the_latest_one_is_taken_and_named(command, words, takes, calls, monkeypatch):
    monkeypatch.setattr("jgpt.runs.directory.RunDirectory.latest", lambda: Path("runs", "two"))
    calls.note(takes, stop=True)
    done = jgpt(command, *words)

    assert done.stderr.startswith(f"the latest run is {Path('runs', 'two')}\n")
    assert STOP in done.stderr
    assert next(iter(calls[takes.rsplit(".", 1)[1]].values())) == Path("runs", "two")


def test_chat(loaded):
    loaded.note("jgpt.generation.chat.Chat", stop=True)
    rules = {"max_new_tokens": 5, "temperature": 0.3, "top_p": 0.7, "system": "be brief"}
    words = ("--seed", 9, "--weights", "int8", "--checkpoint", "last", "--model", "m.py:GPT")
    type_in("chat", "run", *words_of(rules), *words)
    received = loaded["Chat"]
    assert received == received | rules | {"model": "the model in int8"}
    assert received["key"] == jax.random.key(9)
    assert loaded["load"] == {"run_directory": Path("run"), "which": "last", **CODE}


def test_eval(calls):
    calls.note("jgpt.parallel.mesh.use_mesh", contextlib.nullcontext())
    calls.note("jgpt.runs.evaluate.evaluate", stop=True)
    words = ("--checkpoint", 30, "--split", "test", "--model", "m.py:GPT", "--mesh", "data=1")
    type_in("eval", "run", "--json", *words)
    received = calls["evaluate"]

    expected = {"run": Path("run"), "which": 30, "split": "test", **CODE}
    assert received == received | expected
    assert calls["use_mesh"] == {"mesh": "data=1"}

    type_in("eval", "run", "--data", "a.txt", "b.txt", "--data-field", "body")
    received = calls["evaluate"]
    assert received == received | {"data": ("a.txt", "b.txt"), "data_field": "body"}


def test_info(calls):
    calls.note("jgpt.cli.report.describe_placements", [])
    calls.note("jgpt.cli.runs.config_of", PRESETS["tiny"][1])
    words = ("--model", "m.py:GPT", "--optimizer", "o.py:lion", "--mesh", "tensor=2")
    type_in("info", "run", *words)

    assert list(calls["config_of"].values()) == ["run", "m.py:GPT", "o.py:lion"]
    assert calls["describe_placements"]["config"].mesh == "tensor=2"


@pytest.mark.parametrize(
    ("switch", "trace"), [((), "forward"), (("--decode",), "decode"), (("--train",), "train")]
)
def test_shapes(switch, trace, calls):
    traced = Mock(as_json=lambda: {"in": "json"})
    traced.lines = lambda depth: [f"a line of depth {depth}"]
    program = SimpleNamespace(trace=lambda: traced)
    calls.note("jgpt.cli.runs.config_of", PRESETS["tiny"][1])
    calls.note(f"jgpt.training.programs.{trace}_program", program)
    words = ("shapes", "run", *switch, "--batch", 5, "--time", 7, "--model", "m.py:GPT")

    drawn = type_in(*words, "--depth", 2)
    as_json = type_in(*words, "--json")

    assert drawn == "a line of depth 2\n"
    assert json.loads(as_json) == {"in": "json"}
    received = calls[f"{trace}_program"]
    assert received == received | {"batch": 5, "time": 7}
    assert list(calls["config_of"].values()) == ["run", "m.py:GPT"]


@pytest.mark.parametrize(
    ("given", "symbol"), [(("--time", 7), "[batch=b time=7]"), (("--batch", 5), "[batch=5 time=t]")]
)
def test_a_size_that_is_not_given_is_a_symbol_beside_one_that_is(calls, given, symbol):
    calls.note("jgpt.cli.runs.config_of", PRESETS["tiny"][1])

    assert symbol in type_in("shapes", "run", *given, "--depth", 1)


def test_a_proof_of_sight_is_asked_at_a_length(calls):
    calls.note("jgpt.cli.runs.config_of", PRESETS["tiny"][1])

    said = type_in("shapes", "run", "--causal", "--time", 3)

    assert said.splitlines()[0] == "proven for t = 3"


def test_the_source_of_shapes(calls, monkeypatch):
    line = SourceLine(1, "a line", (), is_reached=True)
    functions = [FunctionSource("file.py", name, 1, (line,)) for name in ("attend", "embed")]
    source = AnnotatedSource(tuple(functions))
    monkeypatch.setattr("jgpt.shapes.source.source_of_calls", lambda *_: source)
    calls.note("jgpt.cli.runs.config_of", PRESETS["tiny"][1])
    said = type_in("shapes", "run", "--source", "--of", "attend")
    assert said == "file.py: attend\na line\n"

    calls.note("jgpt.cli.commands.shapes._source_with_values", source)
    words = ("--model", "m.py:GPT", "--of", "attend", "--prompt", "a b")
    assert type_in("shapes", "run", *words) == said
    assert calls["_source_with_values"] == {"run": "run", "prompt": "a b", "model": "m.py:GPT"}


def test_pictures(loaded, calls, monkeypatch, tmp_path):
    calls.note("jgpt.runs.plots.runs_image", b"losses")
    calls.note("jgpt.runs.plots.metric_image", b"a metric")
    calls.note("jgpt.page.html.model_page", "a page")
    monkeypatch.setattr("jgpt.runs.directory.RunDirectory.open", lambda path: f"run {path}")
    type_in("plot", "one", "two", "--out", "my_losses.svg", cwd=tmp_path)
    assert calls["runs_image"] == {"runs": ["run one", "run two"], "format": "svg"}
    assert str(calls["write_file"]["path"]) == "my_losses.svg"
    type_in("plot", "one", "--metric", "my/z", cwd=tmp_path)
    assert calls["metric_image"] == {"runs": ["run one"], "metric": "my/z", "format": "png"}

    words = ("--prompt", "a b", "--checkpoint", 30, "--model", "m.py:GPT")
    type_in("look", "run", *words, "--out", "c.html", "--max-new-tokens", 6, cwd=tmp_path)
    received = calls["model_page"]
    assert (received["prompt"], received["max_new_tokens"]) == ("a b", 6)
    assert str(calls["write_file"]["path"]) == "c.html"
    assert calls["load"] == {"run_directory": Path("run"), "which": 30, **CODE}


def test_new(tmp_path):
    type_in("new", "my_gpt.py", cwd=tmp_path)
    assert "class GPT" in (tmp_path / "my_gpt.py").read_text()
    type_in("new", "--training", "train.py", cwd=tmp_path)
    assert "def train_step" in (tmp_path / "train.py").read_text()


def test_prepare(calls):
    calls.note("jgpt.data.prepared.prepare", 3)
    fields = {
        "data_field": "body",
        "tokenizer": "bpe",
        "bpe_vocab_size": 300,
        "tokenizer_files": "vocabulary",
    }
    type_in("prepare", "first.txt", "second.txt", "--out", "my_folder", *words_of(fields))
    config = calls["prepare"]["config"]

    assert {name: getattr(config, name) for name in fields} == fields
    assert config.data == ("first.txt", "second.txt")
    assert str(calls["prepare"]["folder"]) == "my_folder"


def test_import(calls):
    model = SimpleNamespace(config=ModelConfig(), vocab_size=65)
    folder = Path("a folder")
    calls.note("jgpt.interop.hub.find_model", folder)
    calls.note("jgpt.interop.text_files.read_text_files", {})
    calls.note("jgpt.interop.huggingface.load_hf", model)
    calls.note("jgpt.interop.nanogpt.load_nanogpt", model)
    calls.note("jgpt.interop.names.with_padding", TOKENIZER)
    calls.note("jgpt.cli.commands.import_._tokenizer", TOKENIZER)
    calls.note("jgpt.runs.load.save")
    words = ("--dtype", "bfloat16", "--data", "a.txt", "b.txt")
    more = ("--block-size", 12, "--tokenizer", "t.json", "--out", "my_run")
    type_in("import", "somewhere", *words, *more)
    assert calls["find_model"] == {"source": "somewhere"}
    assert calls["load_hf"]["block_size"] == 12
    text_folders = {"model_folder": folder, "tokenizer_folder": Path("t.json")}
    assert calls["read_text_files"] == text_folders
    assert "t.json" in calls["_tokenizer"].values()
    config = calls["save"]["config"]
    assert config.model.dtype == "bfloat16"
    assert config.dataset.data == ("a.txt", "b.txt")
    assert str(calls["save"]["directory"]) == "my_run"
    type_in("import", "ckpt.pt", "--from", "nanogpt", "--out", "my_run")
    assert list(calls["load_nanogpt"].values()) == ["ckpt.pt"]


def test_export(loaded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(config=TrainConfig, imported=lambda: "the folder imported from")
    monkeypatch.setattr("jgpt.runs.directory.RunDirectory.open", lambda path: run)
    loaded.note("jgpt.interop.formats.hf_config")
    loaded.note("jgpt.interop.huggingface.save_hf")
    type_in("export", "run", "--out", "my_folder", "--checkpoint", 30)
    received = loaded["save_hf"]

    like = {"like": "the folder imported from"}
    assert received == received | like | {"directory": Path("my_folder"), "tokenizer": TOKENIZER}
    assert loaded["load"]["which"] == 30

    loaded.note("jgpt.interop.gguf.save_gguf")
    loaded.note("jgpt.interop.gguf.remarks", [])
    model = SimpleNamespace(block_size=24)
    loaded.note("jgpt.runs.load.load", (model, TOKENIZER, RUN_CONFIG))
    gguf = ("--to", "gguf", "--out", "my.gguf", "--weights", "q8_0", "--modelfile")
    type_in("export", "run", *gguf)
    received = loaded["save_gguf"]
    assert received == received | like | {"file": Path("my.gguf"), "weights": "q8_0"}
    assert Path("Modelfile").read_text() == "FROM ./my.gguf\nPARAMETER num_ctx 24\n"


def flags_of(command, name: str) -> list[str]:
    if name == "train":
        return options._training_parser(command, PRESETS["tiny"][1]).flags
    return options._parser_of(command, name).flags


def test_no_option_was_left_out():
    """The tests above, which run before this one, typed every option of every command."""
    missing = {}
    for name, command in COMMANDS.items():
        flags = set(flags_of(command, name))
        typed = {flag.replace("--no-", "--").replace("_", "-") for flag in TYPED.get(name, ())}
        if untyped := flags - typed:
            missing[name] = sorted(untyped)
    assert missing == {}
