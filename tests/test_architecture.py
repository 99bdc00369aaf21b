"""The layers of the package: a folder imports from the layers below it, never from a sibling."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jgpt

PACKAGE = Path(jgpt.__file__).parent
LAYERS = (
    ("words", "fields", "config", "user_code", "files", "presets", "machine"),
    ("shapes",),
    ("parallel",),
    ("nn", "data"),
    ("training", "generation", "interop"),
    ("runs",),
    ("page",),
    ("cli",),
    ("__main__",),
)
"""From the bottom up. Inside a folder and inside the first layer, only cycles are forbidden."""
MAY_IMPORT_EACH_OTHER = LAYERS[0]


def imports(source: str) -> set[str]:
    """The modules of the package that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: no relative imports"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.split(".")[0] == "jgpt"}


def folder_of(module: str) -> str:
    return module.split(".")[1]


def layer_of(module: str) -> int:
    for number, folders in enumerate(LAYERS):
        if folder_of(module) in folders:
            return number
    raise ValueError(f"{module} is in no layer")


def may_import(module: str, other: str) -> bool:
    """Whether one is above the other, or both are in one folder or in the first layer."""
    folders = {folder_of(module), folder_of(other)}
    if len(folders) == 1 or folders <= set(MAY_IMPORT_EACH_OTHER):
        return True
    return layer_of(other) < layer_of(module)


def violations(sources: dict[str, str]) -> list[str]:
    """The forbidden imports and cycles, one line each."""
    wrong = []
    graph = {}
    for module, source in sources.items():
        needed = set()
        for name in imports(source):
            # `from jgpt.nn import heads` is of a module, `from jgpt.nn.heads import Head` of a name
            needed.add(name if name in sources else name.rpartition(".")[0])
        graph[module] = needed & set(sources)
        for other in needed:
            if other in ("jgpt", ""):
                wrong.append(f"{module} imports from the package's root")
            elif not may_import(module, other):
                wrong.append(f"{module} imports {other}, which is not in a layer below it")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"a cycle: {' -> '.join(error.args[1])}")
    return wrong


def package() -> dict[str, str]:
    """The source of each module."""
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        sources[module] = path.read_text()
    return sources


def test_the_layers_hold():
    assert violations(package()) == []
    planted = {
        "jgpt.config": "def f():\n    from jgpt.presets import preset",
        "jgpt.presets": "import jgpt.config",
        "jgpt.nn.loss": "from jgpt.data import sources",
        "jgpt.data.sources": "from jgpt import fit",
        "jgpt.nn.heads": "if True:\n    from jgpt.training.step import init_state",
        "jgpt.training.step": "from jgpt.nn.loss import cross_entropy",
        "jgpt.runs.fit": "",
    }
    assert sorted(violations(planted)) == [
        "a cycle: jgpt.config -> jgpt.presets -> jgpt.config",
        "jgpt.data.sources imports from the package's root",
        "jgpt.nn.heads imports jgpt.training.step, which is not in a layer below it",
        "jgpt.nn.loss imports jgpt.data.sources, which is not in a layer below it",
    ]


def test_shapes_stand_alone():
    """The shape contract can be used, and lifted out, without the rest of the package."""
    modules = [f"jgpt.shapes.{path.stem}" for path in (PACKAGE / "shapes").glob("[!_]*.py")]
    loaded = (
        f"import sys, {', '.join(modules)}; "
        "print(*sorted(name for name in sys.modules if name.startswith('jgpt')))"
    )
    command = [sys.executable, "-c", loaded]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout.split() == sorted(["jgpt", "jgpt.shapes", *modules])


def test_the_files_of_shapes_import_each_other_in_the_order_of_its_readme():
    folder = PACKAGE / "shapes"
    (order,) = re.findall(
        r"^    describe < .*(?:\n    .*)*", (folder / "README.md").read_text(), re.M
    )
    names = re.findall(r"\w+", order)
    assert sorted(names) == sorted(path.stem for path in folder.glob("[!_]*.py"))
    for place, name in enumerate(names):
        needed = {module.split(".")[2] for module in imports((folder / f"{name}.py").read_text())}
        assert needed <= set(names[:place]), name


def identifiers(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
    return found


MACHINERY = re.compile(
    r"mesh|shard_by|constrain|replicate|remember|remat|checkpoint|scan|custom_|pad$|[Pp]latform"
)


@pytest.mark.parametrize("name", ["attention", "heads", "layers", "transformer"])
def test_the_model_reads_as_mathematics(name):
    """What a reader of the lecture opens has no sharding, padding, scan or gradient of its own."""
    source = (PACKAGE / "nn" / f"{name}.py").read_text()
    assert [each for each in identifiers(source) if MACHINERY.search(each)] == []
    depth = (PACKAGE / "nn" / "depth.py").read_text()
    assert {"shard_by_name", "remat", "scan"} <= identifiers(depth)  # the control


def test_the_stub_lists_each_public_name_and_where_it_is_defined():
    """Type checkers read it, and at run time the names are found by it."""
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = {}
    listed = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.name] = f"jgpt.{node.module}"
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    assert sorted(imported) == sorted(listed)
    for name, module in imported.items():
        value = getattr(importlib.import_module(module), name)
        assert getattr(value, "__module__", module) == module, name
