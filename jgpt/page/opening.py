"""The text that a page begins with: the beginning of what a run's model is validated on."""

from pathlib import Path

from jgpt.config import TrainConfig
from jgpt.data.dataset import load_dataset
from jgpt.data.encode import Tokenizer
from jgpt.data.sources import has_shakespeare
from jgpt.page.numbers import tokens_with_logits
from jgpt.runs.directory import RunDirectory

MOST_BYTES = 1 << 24
"""The limit of the text that is read for its validation split; it takes about a second."""
OPENING_TOKENS = 64
LINE_WITHIN = 200
"""The number of tokens in which a line may begin, since the split begins anywhere."""


def opening_text(
    directory: str | Path, config: TrainConfig, tokenizer: Tokenizer, block_size: int
) -> str | None:
    """Return the beginning of a run's validation split, or None if it can't be read quickly.

    `block_size` is the model's, which may be shorter than the config's: a bigram model's is 1.

    That is the case for a text that is gone, has changed, is large, or must be downloaded, and for
    a model that was imported and not trained.
    """
    known = RunDirectory.open(directory).recorded("tokens_sha256")
    if known is None:
        return None
    try:
        if not all(_is_small_and_here(source) for source in config.dataset.data):
            return None
        dataset = load_dataset(
            config.dataset, config.model.block_size, tokenizer=tokenizer, digest=known
        )
    except (OSError, ValueError):
        return None
    text = tokenizer.decode(dataset.validation[:LINE_WITHIN])
    _, newline, next_lines = text.partition("\n")
    # At the beginning of a line, unless most of the text is lost by that.
    if newline and len(next_lines) > len(text) / 2:
        text = next_lines.lstrip("\n")
    most_tokens = min(OPENING_TOKENS, block_size)
    # With a large vocabulary a page has room for fewer tokens.
    most_tokens = tokens_with_logits(config.model.num_layers, tokenizer.vocab_size, most_tokens)
    return _beginning(text, tokenizer, most_tokens)


def _beginning(text: str, tokenizer: Tokenizer, most_tokens: int) -> str | None:
    """Return the longest beginning of a text that is encoded with the tokens that it has there.

    Some tokens may end inside a character, or be encoded with more tokens when the text ends.
    """
    tokens = tokenizer.encode(text)[:most_tokens].tolist()
    while tokens:
        beginning = tokenizer.decode(tokens)
        if tokenizer.encode(beginning).tolist() == tokens:
            return beginning
        tokens.pop()
    return None


def _is_small_and_here(source: str) -> bool:
    """Return whether a source is a corpus on this machine, or a small file."""
    if source == "pydocs":
        return True
    if source == "shakespeare":
        return has_shakespeare()
    path = Path(source)
    return path.is_file() and path.stat().st_size <= MOST_BYTES
