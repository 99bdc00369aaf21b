"""Nothing escapes the contract: the whole package is walked, and a planted escape is found."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import jgpt
from jgpt.contracts import LEGEND
from jgpt.nn.models import LanguageModel
from tests.contract.inspection import (
    annotations,
    callables,
    modules,
    source_of,
    unbraced,
    violations,
    with_arrays,
)
from tests.contract.programs import PROGRAMS, heard


def test_every_callable_is_checked_and_annotated():
    found = violations(jgpt, set(LEGEND))
    assert not found, "\n" + "\n".join(found)


def test_every_callable_with_arrays_is_called_by_a_program():
    called = set().union(*map(heard, PROGRAMS))
    assert not set(with_arrays(jgpt)) - called, "let a program in tests/contract/programs.py do so"


def test_the_walk_finds_the_package():
    names = {name for module in modules(jgpt) for name, _ in callables(module)}
    assert {
        "jgpt.nn.attention.attend",
        "jgpt.nn.heads.Head.__init__",
        "jgpt.nn.heads._Attention._mask",
        "jgpt.generation.decoding._draw",  # below jax.jit
        "jgpt.data.tokenizers.BPETokenizer.end_of_text",  # a property
        "jgpt.training.step.Metrics.__init__",  # a record's
    } <= names


PLANTED = {
    "not checked": (
        "def f(x: Float[Array, 'batch']) -> Float[Array, 'batch']: return x",
        "planted.escape.f is not checked: put @typed on it",
    ),
    "public function": ("def f(n: int) -> int: return n", "planted.escape.f is not checked"),
    "needlessly": (
        "@typed\ndef _f(n: str) -> str: return n",
        "planted.escape._f has neither arrays nor sizes: pyright is enough for it",
    ),
    "private": (
        "def _f(x: Float[Array, 'batch']) -> None: return None",
        "planted.escape._f is not checked",
    ),
    "no annotation": (
        "@typed\ndef f(x) -> None: return None",
        "planted.escape.f: x has no annotation",
    ),
    "no result": ("@typed\ndef f(x: int): return x", "f: its result has no annotation"),
    "string": ("@typed\ndef f(x: 'int') -> None: return None", "the annotation 'int' is a string"),
    "string inside": (
        "@typed\ndef f(x: tuple['int', int]) -> None: return None",
        "the annotation 'int' is a string",
    ),
    "bare array": ("@typed\ndef f(x: Array) -> None: return None", "f: x has no shape"),
    "list": (
        "@typed\ndef f(x: list[Float[Array, 'batch']]) -> None: return None",
        "which is not checked whole: use a tuple",
    ),
    "no name": (
        "@typed\ndef f(x: Float[Array, 'batch _']) -> None: return None",
        "planted.escape.f: x leaves a dimension without a name",
    ),
    "any shape": (
        "@typed\ndef f() -> tuple[Float[Array, '...'], int]: return None",
        "planted.escape.f: its result leaves a dimension without a name",
    ),
    "any dtype": (
        "@typed\ndef f(x: Shaped[Array, 'batch'] | None) -> None: return None",
        "planted.escape.f: x has no dtype",
    ),
    "legend": (
        "@typed\ndef f(x: Float[Array, 'batch tmie']) -> None: return None",
        "dimension 'tmie' is not in LEGEND",
    ),
    "legend of a check": (
        "@typed\ndef f() -> None: check(1, Float[Array, '*bacth'])",
        "dimension 'bacth' is not in LEGEND",
    ),
    "method": (
        "class C:\n    def f(self, x: Float[Array, 'batch']) -> int: return x",
        "planted.escape.C.f is not checked",
    ),
    "init": (
        "class C(nnx.Module):\n    def __init__(self, x: int) -> None: pass",
        "planted.escape.C.__init__ is not checked",
    ),
    "size": (
        "class C(nnx.Module):\n    def f(self, batch: int) -> str: return ''",
        "planted.escape.C.f is not checked",
    ),
    "classmethod": (
        "class C:\n    @classmethod\n    def f(cls, x: Float[Array, 'batch']) -> int: return x",
        "planted.escape.C.f is not checked",
    ),
    "property": (
        "class C:\n    @property\n    def f(self) -> Float[Array, 'batch']: return 1",
        "planted.escape.C.f is not checked",
    ),
    "jitted": (
        "@jax.jit\ndef f(x: Float[Array, 'batch']) -> None: return None",
        "planted.escape.f is not checked",
    ),
    "record": (
        "@dataclass\nclass C:\n    x: Float[Array, 'batch']",
        "planted.escape.C.__init__ is not checked: put @record above @dataclass",
    ),
    "nested": (
        "@typed\ndef f() -> None:\n    def g(x: Float[Array, 'batch']) -> int: return 1",
        "planted.escape.f.<locals>.g annotates arrays and is not checked",
    ),
    "nested without a result": (
        "@typed\ndef f() -> None:\n    @typed\n    def g(x: Float[Array, 'batch']): return 1",
        "planted.escape.f.<locals>.g is not annotated in full",
    ),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def plant(source: str):
        package = tmp_path / "planted"
        package.mkdir()
        (package / "__init__.py").write_text("from planted.escape import *\n")
        (package / "escape.py").write_text(
            "import jax\nfrom flax import nnx\nfrom dataclasses import dataclass\n"
            "from jaxtyping import Array, Float, Shaped\n"
            f"from jgpt.contracts import check, record, typed\n{source}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("planted", "planted.escape"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module("planted")

    return plant


@pytest.mark.parametrize(("source", "message"), PLANTED.values(), ids=PLANTED)
def test_an_escape_is_found(source: str, message: str, plant):
    found = violations(plant(source), set(LEGEND))
    assert any(message in each for each in found), found


def test_what_keeps_the_contract_is_left_alone(plant):
    source = (
        "@record\n@dataclass\nclass R:\n    x: Float[Array, 'batch']\n"
        "@dataclass\nclass D:\n    n: int\n"
        "@typed\ndef f(x: Float[Array, 'batch time']) -> tuple[Float[Array, 'time'], int]: ...\n"
        "def _host(n): return n\n"
    )
    package = plant(source)
    assert violations(package, set(LEGEND)) == []
    assert with_arrays(package) == ["planted.escape.R.__init__", "planted.escape.f"]


@pytest.mark.parametrize("model", [jgpt.GPT, jgpt.BigramLM])
@pytest.mark.parametrize("name", ["hidden", "logits", "__call__"])
def test_models_keep_the_protocol(model: type, name: str):
    """Its annotations are never run: they are compared with those that are."""
    promised = arrays_of(LanguageModel, name)
    kept = arrays_of(model, name)
    assert promised.keys() == kept.keys()
    for argument, theirs in promised.items():
        assert theirs.dtypes == kept[argument].dtypes
        shared = unbraced(kept[argument].dim_str).split()
        assert theirs.dim_str.split()[: len(shared)] == shared
    last = {argument: theirs.dim_str.split()[-1] for argument, theirs in promised.items()}
    assert (
        last
        == {
            "hidden": {"tokens": "time", "return": "features"},
            "logits": {"x": "features", "return": "vocab"},
            "__call__": {"tokens": "time", "return": "vocab"},
        }[name]
    )
    assert all(len(theirs.dim_str.split()) <= 3 for theirs in promised.values())


def arrays_of(owner: type, name: str) -> dict[str, Any]:
    hints = annotations(getattr(owner, name))
    return {argument: hint for argument, hint in hints.items() if hasattr(hint, "dim_str")}


def test_typed_is_innermost():
    """Below a decorator that hides the signature, sizes would not be checked.

    `laid_out` shows it, and what it lays out is to be checked.
    """
    for module in modules(jgpt):
        for node in ast.walk(ast.parse(source_of(module))):
            if isinstance(node, ast.FunctionDef):
                names = [getattr(each, "id", "") for each in node.decorator_list]
                names = [name for name in names if name != "laid_out"]
                assert "typed" not in names[:-1], f"{module.__name__}.{node.name}"


def test_the_legend_explains_every_name():
    assert all(name.isidentifier() and len(text) > 10 for name, text in LEGEND.items())


@pytest.mark.parametrize(
    "source", ["from __future__ import annotations\n", "from typing import TYPE_CHECKING\n"]
)
def test_lint_bans_what_switches_checks_off(source: str, tmp_path: Path):
    import subprocess

    root = Path(jgpt.__file__).parents[1]
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--config"]
    file = tmp_path / "module.py"
    file.write_text(source)
    run = subprocess.run(
        [*command, str(root / "pyproject.toml"), str(file)], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "TID251" in run.stdout
