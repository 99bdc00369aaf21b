"""The mutation runner itself, and a small sample of what it does to the whole package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jgpt
from tests.contract.edits import Editor
from tests.contract.mutants import kind_of, mutants, summary

SOURCE = """
@typed
def f(x: Float[Array, "*batch time"], count: int) -> Callable[[Int[Array, "time"]], int]:
    y = check(jnp.where(x > 0.0, x, -x).mean(axis=-1), Float[Array, "*batch"])
    return y if count < 2 else y * count
"""


def test_the_edits_of_a_function():
    editor = Editor("nn/attention.py", SOURCE)
    edits = {(edit.kind, edit.before, edit.after) for edit in editor.edits}
    assert edits >= {
        ("drop @typed", "@typed", ""),
        ("dtype", "Float", '__import__("jaxtyping").Shaped'),
        ("weaken", '"*batch time"', '"... time"'),
        ("weaken", '"*batch time"', '"*batch _"'),
        ("rename", '"*batch time"', '"*held_out time"'),
        ("swap", '"*batch time"', '"time *batch"'),
        ("any shape", '"*batch time"', '" ..."'),
        ("lazy weaken", '"time"', '" _"'),
        ("where", "jnp.where(x > 0.0, x, -x)", "jnp.where(x > 0.0, -x, x)"),
        ("axis", "axis=-1", "axis=-1 - 1"),
        ("comparison", "count < 2", "count <= 2"),
        ("operator", "y * count", "y / count"),
        ("condition", "y if count < 2 else y * count", "y * count if count < 2 else y"),
    }
    assert [edit.before for edit in editor.edits if edit.kind == "drop check"]
    assert {edit.where for edit in editor.edits} == {"jgpt.nn.attention.f"}


def test_an_edit_has_a_name_of_its_own_wherever_its_function_stands():
    method = "class G:\n    def f(self, x):\n        return x * 2\n"
    source = f"def f(x):\n    return x * 2 + x * 2\n\n\n{method}"
    names = [str(edit) for edit in Editor("nn/attention.py", source).edits]
    times = "operator: x * 2 -> x / 2"
    assert [name for name in names if times in name] == [
        f"nn/attention.py:f {times}",
        f"nn/attention.py:f {times} (2)",
        f"nn/attention.py:G.f {times}",
    ]
    moved = Editor("nn/attention.py", "y = 1\n\n\n" + source).edits
    assert [str(edit) for edit in moved] == names


@pytest.mark.slow
def test_every_edit_of_the_package_is_python():
    package = Path(jgpt.__file__).parent
    sources = {
        path.relative_to(package).as_posix(): path.read_bytes() for path in package.rglob("*.py")
    }
    edits = mutants([])
    kinds = [kind_of(edit.kind) for edit in edits]
    assert kinds.count("contract") > 1500
    assert kinds.count("value") > 500
    assert len(set(map(str, edits))) == len(edits)
    for edit in edits:
        ast.parse(edit.apply(sources[edit.file]))


@pytest.mark.slow
def test_a_sample_of_mutants_is_killed():
    root = Path(jgpt.__file__).parents[1]
    options = ["--files", "attention", "--kind", "contract", "--every", "41", "--green"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.contract.mutants", *options],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("killed by tests/contract") >= 3


def test_a_report_s_summary_counts_by_module():
    outcomes = {
        "nn/loss.py:f axis: a -> b": "killed by x",
        "nn/loss.py:g axis: a -> b": "killed: it ran for long",
        "data/dataset.py:g sign: -a -> a": "survived",
        "nn/loss.py:f sign: -a -> a": "not tried",
        "nn/loss.py:f where: a -> b": "equivalent: both are zero",
    }
    lines = summary({"commands": ["python -m tests"], "outcomes": outcomes}).splitlines()
    assert "    python -m tests" in lines
    assert "| data/dataset.py | 1 | 0 | 1 | 0 | 0 |" in lines
    assert "| nn/loss.py | 4 | 2 | 0 | 1 | 1 |" in lines
    assert "| all | 5 | 2 | 1 | 1 | 1 |" in lines
    assert any(line.endswith("value 2/3, value: axis 2/2, value: sign 0/1.") for line in lines)
    assert "- 1: both are zero" in lines
    assert lines[-1] == "- `data/dataset.py:g sign: -a -> a`"
