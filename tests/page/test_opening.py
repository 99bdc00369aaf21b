"""The text that a page begins with is the beginning of the run's validation split."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import jgpt
from jgpt.cli.commands.look import look
from jgpt.page import model as page_model
from jgpt.page import numbers
from jgpt.page.opening import _beginning, opening_text

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind\n" * 40


def trained(preset: str, folder: Path) -> tuple[Path, Path]:
    """A run of a text, and the text's file."""
    file = folder / "text.txt"
    file.write_text(TEXT)
    config = jgpt.preset(preset)
    config = dataclasses.replace(
        config,
        out=str(folder / "run"),
        steps=2,
        dataset=dataclasses.replace(config.dataset, data=(str(file),)),
    )
    jgpt.fit(config)
    return folder / "run", file


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained("tiny", tmp_path_factory.mktemp("opening"))


@pytest.mark.slow
def test_a_page_begins_with_a_line_of_the_validation_split(run, tmp_path):
    directory, _ = run
    _, tokenizer, config = jgpt.load(directory)
    validation = jgpt.load_dataset(
        config.dataset, config.model.block_size, tokenizer=tokenizer
    ).validation

    text = opening_text(directory, config, tokenizer, config.model.block_size)

    assert text is not None
    assert len(text) == config.model.block_size
    assert text.startswith(("To be, or", "Whether 'tis"))
    beginning = tokenizer.decode(validation[:200])
    assert beginning.index("\n" + text) == beginning.index("\n")
    look(str(directory), out=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert json.loads(re.findall(r'"text":("[^"]*")', page)[0]) == text


@pytest.mark.slow
def test_a_model_with_a_large_vocabulary_begins_with_a_shorter_text(run, monkeypatch, tmp_path):
    directory, _ = run
    _, tokenizer, config = jgpt.load(directory)
    depths = config.model.num_layers + 1
    # room for nine tokens, of which eight are a power of two
    monkeypatch.setattr(numbers, "MOST_LOGITS", 9 * depths * tokenizer.vocab_size)
    for module in (numbers, page_model):
        monkeypatch.setattr(module, "SHORTEST", 2)

    look(str(directory), out=str(tmp_path / "page.html"))

    page = (tmp_path / "page.html").read_text()
    (text,) = re.findall(r'"text":("[^"]*")', page)[:1]
    assert len(json.loads(text)) == 8


@pytest.mark.slow
def test_a_text_that_has_changed_or_is_large_or_gone_is_not_read(run, monkeypatch):
    directory, file = run
    _, tokenizer, config = jgpt.load(directory)
    assert (
        opening_text(directory, config, tokenizer, config.model.block_size) is not None
    )  # the control
    monkeypatch.setattr("jgpt.page.opening.MOST_BYTES", len(TEXT) - 1)
    assert opening_text(directory, config, tokenizer, config.model.block_size) is None
    monkeypatch.undo()
    file.write_text(TEXT[::-1])
    assert opening_text(directory, config, tokenizer, config.model.block_size) is None
    file.unlink()
    assert opening_text(directory, config, tokenizer, config.model.block_size) is None
    file.write_text(TEXT)


@pytest.mark.slow
def test_nothing_is_downloaded_for_a_page(run, tmp_path, monkeypatch):
    directory, _ = run
    _, tokenizer, config = jgpt.load(directory)
    dataset = dataclasses.replace(config.dataset, data=("shakespeare",))
    config = dataclasses.replace(config, dataset=dataset)
    monkeypatch.delenv("JGPT_DATA_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path))
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *request, **_: asked.append(request))

    assert opening_text(directory, config, tokenizer, config.model.block_size) is None
    assert asked == []


@pytest.mark.slow
def test_a_bigram_model_begins_with_one_token_of_the_validation_split(tmp_path):
    directory, _ = trained("bigram", tmp_path)
    # the text that it is trained on in one piece
    assert jgpt.preset("bigram").model.block_size > 1

    look(str(directory), out=str(tmp_path / "page.html"))

    page = (tmp_path / "page.html").read_text()
    assert re.findall(r'"text":("[^"]*"),"prompt":(\d+)', page) in ([('"T"', "1")], [('"W"', "1")])


def test_a_beginning_ends_at_a_whole_character_and_fits():
    tokenizer = jgpt.ByteTokenizer()
    text = "\u0441\u044a\u0435\u0448\u044c"  # two bytes each

    for most_tokens, characters in ((10, 5), (5, 2), (4, 2), (3, 1)):
        assert _beginning(text, tokenizer, most_tokens) == text[:characters]
    assert _beginning(text, tokenizer, 1) is None


@pytest.mark.slow
def test_a_run_that_was_never_trained_has_no_validation_text(run, tmp_path):
    directory, _ = run
    model, tokenizer, config = jgpt.load(directory)
    jgpt.save(model, tmp_path / "saved", tokenizer=tokenizer, config=config)

    assert opening_text(tmp_path / "saved", config, tokenizer, config.model.block_size) is None
