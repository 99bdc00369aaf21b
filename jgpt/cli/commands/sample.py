"""`jgpt sample`: text from a trained model."""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from jgpt.cli import runs
from jgpt.cli.arguments import (
    Checkpoint,
    LatestRun,
    MeshOption,
    ModelOption,
    Probability,
    Texts,
)
from jgpt.cli.options import (
    File,
    OptionSpec,
)
from jgpt.config import DEFAULT_TEMPERATURE

BATCH_SIZE = 16
"""The number of texts that are sampled side by side."""
SEPARATOR = "---------------"


def sample(
    run: LatestRun = None,
    prompt: Texts = (),
    prompt_file: File = None,
    max_new_tokens: int = 500,
    temperature: float = DEFAULT_TEMPERATURE,
    top_k: Annotated[int | None, OptionSpec("K")] = None,
    top_p: Probability = None,
    min_p: Probability = None,
    stop: Texts = (),
    num_samples: int = 1,
    seed: int = 1337,
    weights: Literal["saved", "int8"] = "saved",
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
    mesh: MeshOption = None,
) -> None:
    """Generate text with a trained model, streamed as it is sampled.

    Args:
        prompt: The text to continue; a newline by default. Several prompts are sampled as one
            batch.
        prompt_file: A UTF-8 file with the prompt; - is standard input.
        max_new_tokens: The number of tokens to generate; the context is the last block-size tokens.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_k: Sample from the k most likely tokens only.
        top_p: Nucleus sampling: sample from the smallest set of tokens with this total probability.
        min_p: Sample from tokens with at least this fraction of the highest probability only.
        stop: End a text before this string.
        num_samples: Samples per prompt.
        seed: The random seed.
        weights: int8 quantises the weights and the inputs of each matrix product. It is faster on a
            CPU.
    """
    run = runs.run_or_latest(run)
    with runs.loaded_run(run, checkpoint, mesh, model, weights) as opened:
        import jax

        from jgpt.generation.text import stream_text

        loaded, used_tokenizer, _ = opened
        texts = [text for text in _prompts(prompt, prompt_file) for _ in range(num_samples)]
        key = jax.random.key(seed)
        for first in range(0, len(texts), BATCH_SIZE):
            rows = tuple(texts[first : first + BATCH_SIZE])
            pieces = stream_text(
                loaded,
                used_tokenizer,
                rows,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                stop=stop,
                # another key for each batch, or all batches of one prompt would be the same
                key=jax.random.fold_in(key, first),
            )
            if first > 0:
                print(SEPARATOR)
            _print_texts(rows, pieces)


def _print_texts(prompts: tuple[str, ...], pieces: Iterable[Sequence[str]]) -> None:
    """Print the texts of a batch, each of which begins with its prompt.

    A terminal has one cursor, so only the first text is printed while it is sampled. The others are
    printed when all have ended.
    """
    first_prompt, *texts = prompts
    print(first_prompt, end="", flush=True)
    for first_piece, *other_pieces in pieces:
        print(first_piece, end="", flush=True)
        for index, piece in enumerate(other_pieces):
            texts[index] += piece
    print()
    for text in texts:
        print(SEPARATOR)
        print(text)


def _prompts(prompts: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    """The prompts; a file is read as the run's text was. By default one that is empty."""
    from jgpt.data.sources import read_stream

    if path is None:
        return prompts or ("",)
    if prompts:
        raise ValueError("give --prompt or --prompt-file, not both")
    if path == "-":
        return (read_stream(sys.stdin.buffer, "standard input"),)
    with open(path, "rb") as file:
        return (read_stream(file, path),)
