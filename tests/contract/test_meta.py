"""Nothing escapes the contract: the whole package is walked, and a planted escape is found."""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import jgpt
from jgpt import GPT, BigramLM
from jgpt.nn.models import CachedLanguageModel, LanguageModel
from jgpt.words import LEGEND
from tests.contract.inspection import modules, source_of, violations


def test_every_callable_is_checked_and_annotated():
    found = violations(jgpt, set(LEGEND))
    assert not found, "\n" + "\n".join(found)


X = "x: Float[Array, 'batch']"
G = f"def g({X}) -> int: return 1"
PLANTED = [
    (f"def f({X}) -> {X[3:]}: return x", "f is not checked: put @typed on it"),
    ("@typed\ndef f(x: Array) -> None: ...", "f: x has no shape"),
    (
        "@typed\ndef f(x: Float[Array, 'batch _']) -> None: ...",
        "f: x leaves a dimension without a name",
    ),
    (
        "@typed\ndef f(x: Float[Array, 'batch tmie']) -> None: ...",
        "dimension 'tmie' is not in LEGEND",
    ),
    (
        "@typed\ndef f() -> None: check(1, Float[Array, '*bacth'])",
        "dimension 'bacth' is not in LEGEND",
    ),
    (
        "class C(nnx.Module):\n    def __init__(self, x: int) -> None: pass",
        "C.__init__ is not checked",
    ),
    (f"@dataclass\nclass C:\n    {X}", "C.__init__ is not checked: put @record above @dataclass"),
    (f"@typed\ndef f() -> None:\n    {G}", "f.<locals>.g annotates arrays and is not checked"),
    (
        f"@typed\ndef f() -> None:\n    @typed\n    {G.replace(' -> int', '')}",
        "f.<locals>.g is not annotated in full",
    ),
]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def plant(source: str):
        package = tmp_path / "planted"
        package.mkdir()
        (package / "__init__.py").write_text("from planted.escape import *\n")
        (package / "escape.py").write_text(
            "import jax\nfrom flax import nnx\nfrom dataclasses import dataclass\n"
            "from jaxtyping import Array, Float, Shaped\n"
            f"from jgpt.shapes.contract import check, record, typed\n{source}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("planted", "planted.escape"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module("planted")

    return plant


@pytest.mark.parametrize(("source", "message"), PLANTED)
def test_an_escape_is_found(source: str, message: str, plant):
    found = violations(plant(source), set(LEGEND))
    assert any(message in each.removeprefix("planted.escape.") for each in found), found


def test_what_keeps_the_contract_is_left_alone(plant):
    source = (
        "@record\n@dataclass\nclass R:\n    x: Float[Array, 'batch']\n"
        "@dataclass\nclass D:\n    n: int\n"
        "@typed\ndef f(x: Float[Array, 'batch time']) -> tuple[Float[Array, 'time'], int]: ...\n"
        "def _host(n): return n\n"
    )

    assert violations(plant(source), set(LEGEND)) == []


def test_typed_is_innermost():
    """Below a decorator that hides the signature, sizes would not be checked."""
    for module in modules(jgpt):
        for node in ast.walk(ast.parse(source_of(module))):
            if isinstance(node, ast.FunctionDef):
                names = [getattr(each, "id", "") for each in node.decorator_list]
                assert "typed" not in names[:-1], f"{module.__name__}.{node.name}"


@pytest.mark.parametrize("protocol", [LanguageModel, CachedLanguageModel])
@pytest.mark.parametrize("model", [GPT, BigramLM])
@pytest.mark.parametrize("method", ["hidden", "logits", "__call__"])
def test_a_protocol_says_of_arrays_what_its_models_say(protocol, model, method):
    """Where a model has sizes of its own, a protocol has names."""

    def written(kind):
        hints = get_type_hints(getattr(kind, method))
        arrays = {name: str(hint) for name, hint in hints.items() if "Array" in str(hint)}
        for own, name in (("embed_dim", "features"), ("vocab_size", "vocab")):
            size = re.compile(rf"{{self\.(\w+\.)?{own}}}")
            arrays = {each: size.sub(name, hint) for each, hint in arrays.items()}
        return arrays

    of_model = written(model)
    of_model.pop("documents", None)  # a model need not take it
    assert written(protocol) == of_model
    assert len(written(protocol)) == 2
