"""The text that a page begins with is the beginning of the run's validation split."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import jgpt
from jgpt.cli.commands.look import look
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


def test_a_beginning_ends_at_a_whole_character_and_fits():
    tokenizer = jgpt.ByteTokenizer()
    text = "\u0441\u044a\u0435\u0448\u044c"  # two bytes each

    for most_tokens, characters in ((10, 5), (5, 2), (4, 2), (3, 1)):
        assert _beginning(text, tokenizer, most_tokens) == text[:characters]
    assert _beginning(text, tokenizer, 1) is None
