"""The floors: a folder imports from the floors below it, never from a sibling."""

import ast
import graphlib
from pathlib import Path

import jgpt

PACKAGE = Path(jgpt.__file__).parent
FLOORS = (
    ("contracts",),
    ("config", "presets", "hardware"),
    ("nn", "data"),
    ("training", "generation", "interop"),
    ("runs",),
    ("cli",),
)
"""From the ground up. Files of one folder, and of the second floor, are free but for cycles."""
FREE_AMONG_THEMSELVES = FLOORS[1]


def imports(source: str) -> set[str]:
    """The modules of the package that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it leads"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "jgpt"}


def room_of(module: str) -> str:
    return module.split(".")[1]


def floor_of(module: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room_of(module) in rooms)


def violations(sources: dict[str, str]) -> list[str]:
    """What is wrong between modules, by the names of those that import."""
    wrong, graph = [], {}
    for module, source in sources.items():
        needed = imports(source)
        # `from jgpt.nn import heads` is of a module, `from jgpt.nn.heads import Head` of a name
        needed = {name if name in sources else name.rpartition(".")[0] for name in needed}
        graph[module] = needed & set(sources)
        for other in needed:
            if other in ("jgpt", ""):
                wrong.append(f"{module} imports from the package, which is its roof")
                continue
            siblings = room_of(module) == room_of(other) or {
                room_of(module),
                room_of(other),
            } <= set(FREE_AMONG_THEMSELVES)
            if not (floor_of(other) < floor_of(module) or siblings):
                wrong.append(f"{module} imports {other}, which is not on a floor below it")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"a cycle: {' -> '.join(error.args[1])}")
    return wrong


def package() -> dict[str, str]:
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    names = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in files}
    return {
        ".".join(("jgpt", *(part for part in parts if part != "__init__"))): path.read_text()
        for path, parts in names.items()
    }


def test_the_floors_hold():
    assert violations(package()) == []
    planted = {
        "jgpt.config": "def f():\n    from jgpt.presets import preset",
        "jgpt.presets": "import jgpt.config",
        "jgpt.nn.loss": "from jgpt.data import corpus",
        "jgpt.data.corpus": "from jgpt import fit",
        "jgpt.nn.heads": "if True:\n    from jgpt.training.step import init_state",
        "jgpt.training.step": "from jgpt.nn.loss import cross_entropy",
        "jgpt.runs.loop": "",
    }
    assert sorted(violations(planted)) == [
        "a cycle: jgpt.config -> jgpt.presets -> jgpt.config",
        "jgpt.data.corpus imports from the package, which is its roof",
        "jgpt.nn.heads imports jgpt.training.step, which is not on a floor below it",
        "jgpt.nn.loss imports jgpt.data.corpus, which is not on a floor below it",
    ]


def test_every_public_name_is_there():
    assert "fit" in jgpt.__all__
    assert all(getattr(jgpt, name) is not None for name in jgpt.__all__)


def test_readme_names_the_same_floors():
    text = (PACKAGE.parent / "README.md").read_text()
    section = text[text.index("## Architecture") :].partition("```text\n")[2].partition("```")[0]
    lines = [line.split("  ")[0] for line in section.splitlines()]
    rooms = [[name.strip(" /") for name in line.split(",")] for line in lines if line]
    assert rooms == [list(floor) for floor in FLOORS]
