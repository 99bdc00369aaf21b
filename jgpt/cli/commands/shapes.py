"""`jgpt shapes`: a forward pass as a tree of calls."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from jgpt.cli import runs, sources, terminal
from jgpt.cli.arguments import Lines, ModelOption
from jgpt.cli.options import OptionError, OptionSpec
from jgpt.cli.terminal import on_one_line
from jgpt.config import TrainConfig
from jgpt.presets import DEFAULT_PRESET
from jgpt.user_code import describe_error, load_code, place_of_error, require_call


def shapes(
    what: Annotated[
        str,
        OptionSpec(
            "PRESET|RUN|FILE:NAME",
            "A preset, a run directory, or a model or function such as my_gpt.py:GPT.",
            positional=True,
        ),
    ],
    arrays: Annotated[
        tuple[str, ...],
        OptionSpec(
            "ARRAY",
            "The arrays that a function gets, such as 'float32[b t 8]'.",
            positional=True,
        ),
    ] = (),
    model: ModelOption = None,
    batch: int | None = None,
    time: int | None = None,
    depth: int = 3,
    decode: bool = False,
    train: bool = False,
    source: bool = False,
    of: Annotated[str | None, OptionSpec("TEXT")] = None,
    prompt: Annotated[str | None, OptionSpec("TEXT")] = None,
    causal: bool = False,
    json: bool = False,
) -> Lines:
    """Show the forward pass as a tree of calls, with the shape of each result.

    Args:
        batch: The number of sequences; the symbol b by default.
        time: The number of positions; the symbol t by default.
        depth: Levels of the tree.
        decode: Trace one step of decoding, over a KV cache.
        train: Trace a train step.
        source: Show the source instead, with the shapes of what each line computes.
        of: The source of functions with this text in their name or their file's.
        prompt: The source of a run's model, computed for this text: with the mean, the standard
            deviation and what is not finite.
        causal: Prove instead that no output reads a later position, nor another sequence. The
            exit code is 1 if that is not proven.
        json: Print one JSON object.
    """
    if arrays and not _is_code(what):
        raise OptionError(
            f"{' '.join(arrays)!r} was not expected: only a function gets arrays, as in "
            "jgpt shapes my.py:attend 'float32[b t 8]'"
        )
    wants_source = source or of is not None or prompt is not None
    stdout = sys.stdout
    if json:  # what a user's code prints is not in the JSON that a program reads
        stdout = sys.stderr
    with contextlib.redirect_stdout(stdout):
        try:
            if prompt is not None:
                found = _source_with_values(what, prompt, model)
            else:
                with terminal.importing():
                    asked = _asked(what, arrays, model, batch, time, decode, train)
                    if causal:
                        found = asked.proof()
                    elif wants_source:
                        found = asked.source()
                    else:
                        found = _tree(asked)
            if of is not None:
                found = found.of(of)
        except Exception as error:
            if not (json and wants_source):
                raise
            found = _failed_source(error)
    if wants_source:
        return sources.lines_of_source(found, json=json)
    if not causal:
        return sources.lines_of_tree(found, depth, json=json)
    print(found)
    if not found:
        sys.exit(1)
    return []


@dataclass(frozen=True)
class _Function:
    """A function of a user's file, and the arrays that it gets, written as text."""

    function: Callable[..., Any]
    arrays: tuple[str, ...]
    time: int | None

    def tree(self) -> Any:
        from jgpt.shapes.source import annotated_tree

        return annotated_tree(self.function, *self.arrays)

    def source(self) -> Any:
        from jgpt.shapes.source import annotated_source

        return annotated_source(self.function, *self.arrays)

    def proof(self) -> Any:
        from jgpt.shapes.proofs import prove

        return prove(self.function, *self.arrays, causal="t", sizes=_sizes(self.time))


@dataclass(frozen=True)
class _Model:
    """A program of a model: its forward pass, a step of decoding, or a train step."""

    config: TrainConfig
    make_program: Callable[..., Any]
    batch: int | None
    time: int | None

    def tree(self) -> Any:
        from jgpt.shapes.expressions import name_sizes

        symbols, programs = sources.programs_at_sizes(*self._parts())
        return name_sizes((program.trace() for program in programs), symbols).tree

    def source(self) -> Any:
        return sources.source_of_model(*self._parts())

    def proof(self) -> Any:
        from jgpt.nn.models import abstract_model
        from jgpt.shapes.proofs import prove

        model = abstract_model(self.config.model)
        return prove(model, "int32[b t]", causal="t", separate="b", sizes=_sizes(self.time))

    def _parts(self) -> tuple[Any, ...]:
        return self.config, self.make_program, self.batch, self.time


def _sizes(time: int | None) -> dict[str, int] | None:
    if time is None:
        return None
    return {"t": time}


def _is_code(what: str) -> bool:
    """Whether a word is FILE.py:NAME."""
    file, _, name = what.rpartition(":")
    return file.endswith(".py") and name != ""


def _asked(
    what: str,
    arrays: tuple[str, ...],
    model: str | None,
    batch: int | None,
    time: int | None,
    decode: bool,
    train: bool,
) -> _Function | _Model:
    """What to show of a function of a user's file, or of a model."""
    from jgpt.training import programs

    if _is_code(what):
        function = load_code(what)
        if arrays or not _makes_model(function):
            rule = f"write each argument of {what} as an array, such as 'float32[b t 8]'"
            require_call(function, rule, *arrays)
            return _Function(function, arrays, time)
        model = what
        what = DEFAULT_PRESET
    config = dataclasses.replace(runs.config_of(what, model), micro_batches=1)
    make_program = programs.forward_program
    if decode:
        make_program = programs.decode_program
    elif train:
        make_program = programs.train_program
    return _Model(config, make_program, batch, time)


def _makes_model(function: Callable[..., Any]) -> bool:
    """Whether a class or function takes a config and `rngs`."""
    if isinstance(function, type):  # NNX's metaclass hides the signature of a class
        function = function.__init__
    return "rngs" in inspect.signature(function).parameters


def _tree(asked: _Function | _Model) -> Any:
    """The tree of calls. If the code fails, its source up to that line is printed."""
    try:
        return asked.tree()
    except Exception:
        sources.print_failing_source(asked.source)
        raise


def _source_with_values(run: str, prompt: str, model: str | None) -> Any:
    """The source of a run's model with the values of a prompt."""
    with runs.loaded_run(run, "best", model=model) as (loaded, tokenizer, _):
        import jax.numpy as jnp

        from jgpt.shapes.source import annotated_source

        tokens = tokenizer.encode(prompt)[-loaded.block_size :]
        return annotated_source(loaded, jnp.asarray(tokens)[None], values=True)


def _failed_source(error: Exception) -> Any:
    """An error as a source without lines, with the place in the user's file where there is one."""
    from jgpt.shapes.source import AnnotatedSource

    message = on_one_line(describe_error(error) or str(error) or repr(error))
    place = place_of_error(error)
    if place is not None:
        path, line = place
        place = (str(path), line)
    return AnnotatedSource((), error=message, error_place=place)
