"""`jgpt import` and `jgpt export` as a user types them."""

import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgpt
from jgpt.data.encode import read_tokenizer
from jgpt.files import read_json
from jgpt.interop.nanogpt import load_nanogpt
from jgpt.interop.text_files import read_folder_tokenizer
from jgpt.runs.directory import RunDirectory
from jgpt.runs.load import load
from tests.commands import jgpt as command
from tests.commands import refused, worked
from tests.interop.test_huggingface import assert_same_weights, random_model
from tests.models import compiled, random_gpt

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
    jgpt.save_hf(model, directory, tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="module")
def imported(gpt2, text_file):
    run = text_file.parent / "imported"
    said = worked("import", gpt2, "--out", run, "--data", text_file)
    assert said == f"2 layers, 21 features, vocabulary 263; next: jgpt sample {run}\n"
    return run


@pytest.mark.slow
def test_an_imported_run_keeps_its_tokenizer(imported):
    """With another one, each embedding would be that of another text."""
    resume = ("train", "--resume", "--out", imported, "--steps", 1)

    said = refused(*resume, "--tokenizer", "byte")

    assert "--tokenizer is 'bpe' in the run, 'byte' in the config" in said
    worked(*resume, "--tokenizer", "bpe", "--dry-run")


def test_nanogpt_in_and_gpt2_out(write_nanogpt, text_file, tmp_path):
    """Both loaders and both writers have tests of what they compute."""
    checkpoint = tmp_path / "ckpt.pt"
    write_nanogpt(checkpoint, bias=True)
    run = tmp_path / "run"
    out = tmp_path / "gpt2"
    text = tmp_path / "text.txt"
    text.write_bytes(text_file.read_bytes() + b"z")  # one character more than the model's 17
    options = ("--from", "nanogpt", "--out", run, "--tokenizer", text)

    said = refused("import", checkpoint, *options)
    assert "the tokenizer has 18 tokens and the model" in said

    text.write_bytes(text_file.read_bytes().replace(b"\n", b"\r\n"))
    worked("import", checkpoint, *options)
    model, tokenizer, _ = load(run)
    assert tokenizer.decode(range(17)) == "\nabcdefghijklmnop"
    assert_same_weights(model, load_nanogpt(checkpoint))

    said = worked("export", run, "--out", out)
    assert said == f"wrote {out}, for transformers.AutoModelForCausalLM.from_pretrained\n"
    assert read_tokenizer(out / "tokenizer.json").decode(range(17)) == "\nabcdefghijklmnop"
    assert_same_weights(jgpt.load_hf(out), model)


def test_a_run_and_an_export_are_named_after_what_they_are_made_of(gpt2, tmp_path):
    said = worked("import", gpt2, cwd=tmp_path)
    assert said.endswith("next: jgpt sample runs/gpt2\n")
    said = worked("export", "runs/gpt2", cwd=tmp_path)
    assert said.startswith("wrote exports/gpt2, ")
    assert_same_weights(jgpt.load_hf(tmp_path / "exports" / "gpt2"), jgpt.load_hf(gpt2))

    assert "runs/gpt2 already exists" in refused("import", gpt2, cwd=tmp_path)
    assert "exports/gpt2 already exists" in refused("export", "runs/gpt2", cwd=tmp_path)


def test_bad_input_is_one_line_and_writes_nothing(gpt2, imported, write_nanogpt, tmp_path):
    run = tmp_path / "run"
    nanogpt = ("--from", "nanogpt")
    text = imported.parent / "alphabet.txt"
    config = gpt2 / "config.json"
    bad = tmp_path / "bad.pt"
    good = tmp_path / "good.pt"
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


@pytest.mark.slow
def test_what_a_folder_says_about_its_text_is_kept_until_the_run_is_replaced(
    gpt2, text_file, tmp_path
):
    source = shutil.copytree(gpt2, tmp_path / "source")
    run = tmp_path / "run"
    kept = {
        "generation_config.json": b'{"eos_token_id": [5, 7], "pad_token_id": 4}\r\n',
        "chat_template.jinja": b"{{ messages }}\r\n",
        "special_tokens_map.json": b"{}",
    }
    for name, data in kept.items():
        (source / name).write_bytes(data)
    config = read_json(source / "config.json")
    rates = {"attn_pdrop": 0.25, "resid_pdrop": 0.5, "embd_pdrop": 0.125}
    added = {"pad_token_id": 4, "temperature": 0.5, "n_ctx": 3, **rates}
    (source / "config.json").write_text(json.dumps({**config, **added}))
    out = tmp_path / "out"

    worked("import", source, "--out", run, "--data", text_file)
    worked("export", run, "--out", out)

    for name, data in kept.items():
        assert (out / name).read_bytes() == data, name
    # n_ctx is a size of the model, which its block size decides
    assert read_json(out / "config.json") == {**config, **added, "n_ctx": 11}
    _, _, run_config = load(run)
    assert run_config.model.dropout == 0.125  # the lowest rate

    other = ("train", "bigram", "--data", text_file, "--steps", 1, "--sample-tokens", 0)
    worked(*other, "--out", run, "--overwrite")
    assert not (run / "imported").exists()


@pytest.mark.parametrize("name", ["import", "export"])
def test_an_interruption_leaves_nothing_of_what_was_written(
    name, gpt2, imported, text_file, tmp_path, monkeypatch
):
    def interrupted(path):
        assert len(list(path.iterdir())) > 1  # nearly all is written
        os.kill(os.getpid(), signal.SIGINT)

    source = {"import": gpt2, "export": imported}[name]
    more = {"import": ("--data", text_file), "export": ()}[name]
    monkeypatch.setattr("jgpt.files.sync_below", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = command(name, source, "--out", tmp_path / "out", *more)
    finally:
        signal.signal(signal.SIGINT, before)

    assert (done.code, done.stdout, done.stderr) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_tokens_that_other_files_add(gpt2, tmp_path):
    """As transformers adds them, up to the vocabulary of the model."""
    folder = shutil.copytree(gpt2, tmp_path / "folder")
    config = folder / "tokenizer_config.json"
    config.write_text('{"pad_token": "<pad>", "eos_token": "<end>"}')

    tokenizer = read_folder_tokenizer(folder, 264)

    assert tokenizer.vocab_size == 264
    assert tokenizer.encode("<end>").tolist() == [263]
    assert len(tokenizer.encode("<pad>")) > 1  # there is no room for it

    end = {"content": "<end>", "special": True, "normalized": False, "lstrip": True}
    more = {**end, "content": "<more>"}
    decoder = {"263": end, "264": more}
    config.write_text(json.dumps({"added_tokens_decoder": decoder}))

    tokenizer = read_folder_tokenizer(folder, 264)

    assert tokenizer.vocab_size == 264
    assert tokenizer.encode("  <end>").tolist() == [263]

    (folder / "added_tokens.json").write_text('{"<end>": 263, "<start>": 264}')
    with pytest.raises(ValueError, match=r"added_tokens\.json has '<start>', an unknown token"):
        read_folder_tokenizer(folder, 264)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A directory of a small Qwen3, with a vocabulary that is padded to 320."""
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263)
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    model = random_gpt("qwen3", vocab_size=320)
    jgpt.save_hf(model, directory, tokenizer=tokenizer)
    return directory


@pytest.mark.slow
def test_an_export_is_imported_again_however_small_its_tokenizer_is(tmp_path):
    """Of a model whose embedding is padded by more than a tokenizer from elsewhere may lack."""
    tokenizer = jgpt.BPETokenizer.train([TEXT], 263).padded_to(1007)
    model = random_model(vocab_size=1007)
    config = jgpt.TrainConfig(model=model.config)
    jgpt.save(model, tmp_path / "first", tokenizer=tokenizer, config=config)

    worked("export", tmp_path / "first", "--out", tmp_path / "folder")
    worked("import", tmp_path / "folder", "--out", tmp_path / "second")

    again, tokenizer_again, _ = load(tmp_path / "second")
    tokens = jnp.asarray(tokenizer_again.encode("abc"))[None]
    np.testing.assert_array_equal(again(tokens), model(tokens))
    assert again(tokens).shape[-1] == tokenizer_again.vocab_size == 1007
    assert tokenizer_again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    # a tokenizer from elsewhere is told by its size alone
    elsewhere = ("--tokenizer", tmp_path / "folder" / "tokenizer.json")
    said = refused("import", tmp_path / "folder", "--out", tmp_path / "third", *elsewhere)
    assert "has 263 tokens and the model" in said


def loss_of(model, text):
    """The loss of rows of tokens, as a number."""
    return float(compiled(lambda: jgpt.cross_entropy(model(text[:, :-1]), text[:, 1:])))


@pytest.mark.slow
def test_a_model_of_today_in_and_out_and_trained_further(qwen3, text_file, tmp_path):
    """In bfloat16 on a mesh, with a batch, a text and a learning rate of its own."""
    run = tmp_path / "run"
    out = tmp_path / "again"

    said = worked("import", qwen3, "--out", run, "--block-size", 6, "--dtype", "bfloat16")

    assert said == f"2 layers, 24 features, vocabulary 320; next: jgpt sample {run}\n"
    imported, tokenizer, _ = load(run)
    rows = tokenizer.encode(TEXT)[:70].reshape(10, 7)
    loss = loss_of(imported, jnp.asarray(rows))
    loss_in_float32 = loss_of(jgpt.load_hf(qwen3), jnp.asarray(rows))
    assert loss == pytest.approx(loss_in_float32, rel=0.01)

    sampled = worked("sample", run, "--prompt", "abc", "--max-new-tokens", 5)
    exported = worked("export", run, "--out", out)

    assert sampled.startswith("abc")
    assert "AutoModelForCausalLM" in exported
    assert_same_weights(jgpt.load_hf(out), imported)
    assert (out / "tokenizer.json").read_bytes() == (qwen3 / "tokenizer.json").read_bytes()
    assert (out / "tokenizer_config.json").read_text().endswith("}\n")

    further = ("--data", text_file, "--batch-size", 8, "--learning-rate", 0.003, "--steps", 8)
    further = (*further, "--eval-tokens", 60, "--sample-tokens", 0)
    worked("train", "--resume", "--out", run, *further, "--mesh", "data=2,fsdp=2,tensor=2")

    _, _, config = load(run)
    assert config.model.dtype == "bfloat16"
    assert config.model.block_size == 6
    assert config.batch_size == 8
    losses = [line["loss"] for line in RunDirectory(run).metrics() if "loss" in line]
    assert losses[0] == pytest.approx(loss, rel=0.1)  # what was imported is what is trained
    assert losses[-1] < 0.8 * losses[0]
    said = refused("train", "--resume", "--out", run, "--batch-size", 4)  # a step was taken
    assert "--batch-size is 8 in the run, 4 in the config" in said


def test_a_folder_is_loaded_with_its_tokenizer_and_a_config_to_fine_tune_it(gpt2):
    """Into one thing, which unpacks as what `load` returns, and goes from text to text."""
    pretrained = jgpt.load_pretrained(gpt2)
    model, tokenizer, config = pretrained

    assert_same_weights(model, jgpt.load_hf(gpt2))
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert config.model == jgpt.load_hf(gpt2).config
    assert config.optimizer.schedule == "constant"
    assert config.optimizer.learning_rate == config.optimizer.min_learning_rate == 3e-5
    options = {"key": jax.random.key(3), "stop": "x", "top_k": 9}
    continuation = jgpt.generate_text(model, tokenizer, "the cat", 5, **options)
    assert continuation != ""
    assert not continuation.startswith("the cat")
    assert pretrained.generate("the cat", 5, **options) == continuation


def test_a_pretrained_model_has_its_tokenizers_vocabulary_and_a_block_size_of_millions(qwen3):
    """A model is often padded to a multiple of 64 rows, which its tokenizer has no tokens for."""
    pretrained = jgpt.load_pretrained(qwen3, block_size=10_000_000)

    assert pretrained.model.vocab_size == 320
    assert pretrained.tokenizer.vocab_size == 320
    assert pretrained.tokenizer.decode([262, 319]) == pretrained.tokenizer.decode([262])
    assert pretrained.model.block_size == 10_000_000
    assert pretrained.config.model.block_size == 10_000_000


def test_a_folder_without_a_tokenizer_is_not_loaded(tmp_path):
    bare = tmp_path / "bare"
    jgpt.save_hf(random_model(), bare)
    with pytest.raises(FileNotFoundError, match=r"bare has no tokenizer\.json"):
        jgpt.load_pretrained(bare)

    (bare / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json: it is a pointer of Git LFS"):
        jgpt.load_pretrained(bare)
