"""`jgpt chat`: a conversation with an imported model."""

import contextlib
import signal
import sys
import threading
from collections.abc import Generator
from typing import Annotated, Any, Literal

from jgpt.cli import runs
from jgpt.cli.arguments import Checkpoint, LatestRun, ModelOption, Probability
from jgpt.cli.options import OptionSpec
from jgpt.cli.signals import interrupted_by
from jgpt.cli.terminal import open_console, say
from jgpt.config import CHAT_TOP_P, DEFAULT_TEMPERATURE


def chat(
    run: LatestRun = None,
    system: Annotated[str | None, OptionSpec("TEXT")] = None,
    max_new_tokens: int = 512,
    temperature: float = DEFAULT_TEMPERATURE,
    top_p: Probability = CHAT_TOP_P,
    seed: int = 1337,
    weights: Literal["saved", "int8"] = "saved",
    checkpoint: Checkpoint = "best",
    model: ModelOption = None,
) -> None:
    """Chat with an imported model, such as SmolLM2 or Qwen3, in the ChatML template.

    Args:
        system: The system message, which always stays in the context.
        max_new_tokens: The largest number of tokens in an answer.
        temperature: 0 is greedy; 1 samples from the model's distribution.
        top_p: Nucleus sampling: sample from the smallest set of tokens with this total probability.
        seed: The random seed.
        weights: int8 quantises the weights and the inputs of each matrix product. It is faster on a
            CPU.
    """
    run = runs.run_or_latest(run)
    with runs.loaded_run(run, checkpoint, model=model, weights=weights) as (loaded, tokenizer, _):
        import jax

        from jgpt.generation.chat import Chat

        conversation = Chat(
            loaded,
            tokenizer,
            system,
            max_new_tokens,
            key=jax.random.key(seed),
            temperature=temperature,
            top_p=top_p,
        )
    _converse(conversation)


def _converse(conversation: Any) -> None:
    """Answer each line of standard input, until it ends."""
    console = open_console()
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # a Python may lack it
            import readline  # noqa: F401  # history and editing, for input
        say(console, "Ctrl-C stops an answer, Ctrl-D ends the chat")
        prompt = "> "
    while True:
        try:
            with interrupted_by(signal.default_int_handler):
                line = input(prompt)
        except EOFError:
            if prompt:  # the shell's prompt would stand behind this one
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            dropped, answer = conversation.reply(line)
        except ValueError as error:
            say(console, str(error))
            continue
        if dropped:
            say(console, f"[the context is full: it loses {dropped} messages]")
        _print_until_interrupted(answer)


def _print_until_interrupted(answer: Generator[str, None, None]) -> None:
    """Print the pieces of an answer. One that Ctrl-C cuts short is remembered so."""
    interrupted = threading.Event()
    with contextlib.closing(answer), interrupted_by(lambda *_: interrupted.set()):
        for piece in answer:
            print(piece, end="", flush=True)
            if interrupted.is_set():
                break
    print()
