"""`jgpt import` and `jgpt export` as a user types them."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.interop.nanogpt import load_nanogpt
from jgpt.runs.checkpoints import load
from jgpt.runs.directory import RunDirectory
from jgpt.runs.loop import evaluate
from tests.commands import refused, worked
from tests.interop.test_huggingface import assert_same_weights, random_model
from tests.models import random_gpt, to_torch, weights_of

TEXT = "abcdefghijklmnop\n" * 40


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "alphabet.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def write_nanogpt():
    """What writes a checkpoint of nanoGPT's, with PyTorch."""
    pytest.importorskip("torch")
    from tests.parity.test_nanogpt import write

    return write


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A directory with byte-pairs of its own, in GPT-2's files."""
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263)
    directory = tmp_path_factory.mktemp("models") / "gpt2"
    model = random_model(vocab_size=tokenizer.vocab_size)
    jgpt.save_gpt2(model, directory, tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="module")
def imported(gpt2, text_file):
    run = text_file.parent / "imported"
    said = worked("import", gpt2, "--out", run, "--data", text_file)
    assert said == f"2 layers, 21 features, vocabulary 263; next: jgpt sample {run}\n"
    return run


def test_an_imported_run_is_trained_further(imported, gpt2, tmp_path):
    run = shutil.copytree(imported, tmp_path / "run")
    model, tokenizer, config = load(run)
    assert_same_weights(model, jgpt.load_gpt2(gpt2))
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert config.optimizer.learning_rate == config.optimizer.min_learning_rate == 3e-5
    before = evaluate(run).loss
    worked("train", "--resume", "--out", run, "--steps", 3, "--sample-tokens", 0)
    after = [line for line in RunDirectory(run).metrics() if "validation_loss" in line]
    assert [line["validation_loss"] for line in after] == [pytest.approx(before, rel=0.01)]
    assert after[0]["validation_loss"] < before


def test_export_gives_back_what_was_imported(imported, gpt2, tmp_path):
    said = worked("export", imported, "--out", tmp_path / "again")
    assert "transformers.AutoModelForCausalLM.from_pretrained" in said
    names = sorted(path.name for path in gpt2.iterdir())
    assert names == ["config.json", "merges.txt", "model.safetensors", "vocab.json"]
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (gpt2 / name).read_bytes(), name


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_in_and_gpt2_out(bias, write_nanogpt, text_file, tmp_path):
    """Both loaders and both writers have tests of what they compute."""
    write_nanogpt(tmp_path / "ckpt.pt", bias=bias)
    run, out = tmp_path / "run", tmp_path / "gpt2"
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes().replace(b"\n", b"\r\n"))
    nanogpt = ("--from", "nanogpt", "--out", run, "--tokenizer", text)
    said = refused("import", tmp_path / "ckpt.pt", *nanogpt, "--no-universal-newlines")
    assert "the tokenizer has 18 tokens and the model" in said
    worked("import", tmp_path / "ckpt.pt", *nanogpt)
    model, tokenizer, _ = load(run)
    assert tokenizer.decode(range(17)) == "\nabcdefghijklmnop"
    assert_same_weights(model, load_nanogpt(tmp_path / "ckpt.pt"))
    if not bias:
        said = refused("export", run, "--out", out)
        assert "doesn't support qkv_bias=False: --zero-biases writes zeros" in said
        assert not out.exists()
    said = worked("export", run, "--out", out, "--zero-biases")
    assert "the tokenizer was not exported" in said
    again, mine = (to_torch(weights_of(each)) for each in (jgpt.load_gpt2(out), model))
    assert all(np.array_equal(again[name], its) for name, its in mine.items())
    assert not any(its.any() for name, its in again.items() if name not in mine)


def test_a_runs_tokenizer_json_is_a_tokenizer(gpt2, imported, tmp_path):
    own = ("--tokenizer", imported / "tokenizer.json", "--no-universal-newlines")
    worked("import", gpt2, "--out", tmp_path / "run", *own)
    assert not load(tmp_path / "run")[2].dataset.universal_newlines
    assert (tmp_path / "run" / "tokenizer.json").read_text() == (
        imported / "tokenizer.json"
    ).read_text()


def test_bad_input_is_one_line_and_writes_nothing(gpt2, imported, write_nanogpt, tmp_path):
    run, nanogpt = tmp_path / "run", ("--from", "nanogpt")
    text, config = imported.parent / "alphabet.txt", gpt2 / "config.json"
    bad, good = tmp_path / "bad.pt", tmp_path / "good.pt"
    bad.write_bytes(b"\x80\x04 not one")
    write_nanogpt(good)
    before = sorted(tmp_path.iterdir())
    for reason, *line in (
        ("config.json", "import", tmp_path / "nowhere", "--out", run),
        ("already exists", "import", gpt2, "--out", imported),
        ("they don't belong together", "import", gpt2, "--out", run, "--tokenizer", text),
        ("not a tokenizer", "import", gpt2, "--out", run, "--tokenizer", config),
        ("is not a run directory", "export", gpt2 / "nowhere", "--out", run),
        ("already exists", "export", imported, "--out", gpt2),
        ("not a nanoGPT checkpoint", "import", bad, *nanogpt, "--out", run, "--tokenizer", text),
        ("give --tokenizer", "import", good, *nanogpt, "--out", run),
        ("--block-size 3 needs rotary", "import", good, *nanogpt, "--out", run, "--block-size", 3),
    ):
        assert reason in refused(*line)
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A directory of a small Qwen3, with a vocabulary that is padded to 320."""
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263)
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    model = random_gpt("qwen3", vocab_size=320)
    jgpt.save_hf(model, directory, tokenizer=tokenizer)
    return directory


@pytest.mark.slow
def test_a_model_of_today_in_and_out_and_trained_further(qwen3, text_file, tmp_path):
    """In bfloat16 on a mesh, with a batch, a text and a learning rate of its own."""
    run, out = tmp_path / "run", tmp_path / "again"
    said = worked("import", qwen3, "--out", run, "--block-size", 6, "--dtype", "bfloat16")
    assert said == f"2 layers, 24 features, vocabulary 263; next: jgpt sample {run}\n"
    before, tokenizer, _ = load(run)
    text = jnp.asarray(tokenizer.encode(TEXT)[:70].reshape(10, 7))
    whole = jgpt.load_hf(qwen3)(text[:, :-1])[..., :263]
    start = float(jgpt.cross_entropy(before(text[:, :-1]), text[:, 1:]))
    assert start == pytest.approx(float(jgpt.cross_entropy(whole, text[:, 1:])), rel=0.01)
    assert worked("sample", run, "--prompt", "abc", "--max-new-tokens", 5).startswith("abc")
    assert "AutoModelForCausalLM" in worked("export", run, "--out", out)
    assert_same_weights(jgpt.load_hf(out), before)
    assert (out / "tokenizer.json").read_bytes() == (qwen3 / "tokenizer.json").read_bytes()
    assert (out / "tokenizer_config.json").read_text().endswith("}\n")

    trained = ("--data", text_file, "--batch-size", 8, "--learning-rate", 0.003, "--steps", 8)
    worked("train", "--resume", "--out", run, *trained, "--mesh", "data=2,fsdp=2,tensor=2")
    config = load(run)[2]
    assert (config.model.dtype, config.model.block_size, config.batch_size) == ("bfloat16", 6, 8)
    losses = [line["loss"] for line in RunDirectory(run).metrics() if "loss" in line]
    assert losses[0] == pytest.approx(start, rel=0.1)  # what was imported is what is trained
    assert losses[-1] < 0.8 * losses[0]
    said = refused("train", "--resume", "--out", run, "--batch-size", 4)  # a step was taken
    assert "--batch-size is 8 in the run, 4 in the config" in said
