"""Annotated sources and trees of calls: printed, or as JSON."""

import dataclasses
from json import dumps
from typing import Any

from jgpt.cli.arguments import Lines
from jgpt.cli.terminal import open_console, say

_STYLES = {
    "heading": "bold",
    "reached": "",
    "not reached": "dim",
    "failed": "red",
    "not finite": "red",
}


class SourceError(ValueError):
    """The error that ended a trace, with the source up to its line as JSON."""

    def __init__(self, message: str, document: dict[str, Any]) -> None:
        super().__init__(message)
        self.document = document


def lines_of_source(source: Any, *, json: bool) -> Lines:
    """Print an `AnnotatedSource`, or return it as JSON. Raises SourceError if it has an error."""
    if not json:
        print_lines(source, open_console())
    if source.error is not None:
        raise SourceError(source.error, source.as_json())
    if json:
        return [dumps(source.as_json(), allow_nan=False)]
    return []


def print_lines(source: Any, console: Any) -> None:
    """Print an `AnnotatedSource` without its error, which is a command's last line."""
    from jgpt.shapes.trace import name_colours

    colours = name_colours(str(source))
    for line, kind in dataclasses.replace(source, error=None).lines():
        say(console, line, colours=colours, style=_STYLES[kind])


def lines_of_tree(tree: Any, depth: int, *, json: bool) -> Lines:
    """Print a `ShapeTrace`, or return it as JSON."""
    from jgpt.shapes.trace import name_colours

    if json:
        return [dumps(tree.as_json(), allow_nan=False)]
    lines = tree.lines(depth)
    say(open_console(), *lines, colours=name_colours("\n".join(lines)))
    return []
