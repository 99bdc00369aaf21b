"""Data flows one way: no file imports from one below it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jgpt

PACKAGE = Path(jgpt.__file__).parent
REPOSITORY = Path(__file__).parent.parent
MODULES = sorted(PACKAGE.glob("*.py"))
SOURCES = [*MODULES, *sorted(REPOSITORY.glob("tests/**/*.py"))]
ROOMS = (
    "contracts",
    "pytree",
    "config",
    "presets",
    "tokenizer",
    "corpus",
    "data",
    "device",
    "attention",
    "layers",
    "cache",
    "bigram",
    "heads",
    "blocks",
    "model",
    "size",
    "loss",
    "optimizer",
    "step",
    "generation",
    "text",
    "layout",
    "interop",
    "run_directory",
    "manifest",
    "checkpoint",
    "plan",
    "provenance",
    "tracker",
    "metrics",
    "report",
    "train",
    "console",
    "signals",
    "options",
    "cli",
)
"""From the foundation to the roof; each may use what stands before it."""


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """What a file imports anywhere in it, in functions and under conditions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "jgpt":
                yield from (f"jgpt.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def imported_rooms(source: str) -> set[str]:
    names = [name.split(".") for name in imported_modules(ast.parse(source))]
    return {name[1] if len(name) > 1 else "jgpt" for name in names if name[0] == "jgpt"}


def of(path: Path) -> str:
    return path.name


def test_every_file_has_its_place_in_the_order():
    assert {path.stem for path in MODULES} - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=of)
def test_a_file_imports_only_from_files_above_it(path):
    above = ROOMS[: ROOMS.index(path.stem)] if path.stem in ROOMS else ROOMS
    assert imported_rooms(path.read_text()) <= set(above)


def test_a_local_import_does_not_hide_from_the_order():
    hidden = "def f():\n    if True:\n        from jgpt.train import fit\n    import jgpt.cli\n"
    assert imported_rooms(hidden + "from jgpt import data") == {"train", "cli", "data"}


@pytest.mark.parametrize("path", MODULES, ids=of)
def test_only_the_command_line_imports_the_package_within_functions(path):
    if path.stem == "cli":
        return  # so that --help needs no jax
    tree = ast.parse(path.read_text())
    everywhere = [name for name in imported_modules(tree) if name.startswith("jgpt")]
    top = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
    assert everywhere == [name for name in imported_modules(top) if name.startswith("jgpt")]


@pytest.mark.parametrize("path", SOURCES, ids=of)
def test_no_import_escapes_run_time_checks(path):
    """Postponed annotations and names for the type checker alone are never checked."""
    tree = ast.parse(path.read_text())
    assert not {"__future__", "pickle"} & set(imported_modules(tree))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    aliases = {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    assert "TYPE_CHECKING" not in names | aliases


@pytest.mark.parametrize("name", jgpt.__all__)
def test_every_public_name_is_there(name):
    value = getattr(jgpt, name)
    assert name == "LEGEND" or value.__module__.startswith("jgpt.")  # a dict has no module
