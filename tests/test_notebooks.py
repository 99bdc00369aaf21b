"""Each lesson runs from top to bottom as it is committed, and gives what its pages show."""

import ast
import importlib
import re
import runpy
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import nbformat
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMPILE = {"00", "02", "03", "04", "06", "08", "10", "14", "15"}
"""Lessons that hardly train: as in other tests, compiling is what takes time."""
COMPARE = {"08", "15"}
"""Lessons that need PyTorch and transformers."""
TRAIN = " ".join(
    (
        "--xla_backend_optimization_level=1",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
"""XLA's flags for the others: they train as fast as by default, and compile a tenth faster."""
MODULES = {"jnp": "jax.numpy", "nnx": "flax.nnx"}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
sys.path.append(str(ROOT / "notebooks"))
execute = runpy.run_path(str(ROOT / "notebooks" / "refresh.py"))["execute"]
student = runpy.run_path(str(ROOT / "notebooks" / "student.py"))
exercises_of_cells = student["exercises_in"]
edition = student["edition"]
write_editions = student["write_editions"]
checks = importlib.import_module("checks")
NotSolved = checks.NotSolved
require_close = checks.require_close
require_solved = checks.require_solved
is_answer = checks.is_answer
digest_of = checks.digest_of


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures_of(output) -> list[str]:
    """The kinds of its pictures; a page, of which a picture is committed, counts as one."""
    kinds = output.get("data", {})
    return [kind for kind in kinds if kind.startswith("image/") or kind == "text/html"]


def pictures_in(cell) -> int:
    return sum(map(len, map(pictures_of, cell.outputs)))


def words_of(text: str) -> str:
    return " ".join(NUMBER.sub("#", text).split())


def numbers_of(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def exercises_in(cells) -> list:
    return list(exercises_of_cells(cells).values())


def outputs_in(notebook) -> list:
    outputs = []
    for cell in code_cells(notebook):
        outputs += cell.outputs
    return outputs


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_committed_pages_are_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    last = [cell for cell in cells if "solution" not in cell.metadata.get("tags", ())][-1]
    outputs = outputs_in(notebook)
    text = "".join(map(printed, cells))

    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert printed(last) == "All of it holds.\n"
    assert last.source.count("assert") >= 5
    assert path.stat().st_size < 650_000
    for output in outputs:
        assert output.output_type in ("stream", "display_data")
        assert output.get("name") != "stderr"
    assert not re.search(r"/(home|root|tmp|Users|usr)/", text)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_answers_are_folded_and_solutions_checked(path):
    cells = nbformat.read(path, as_version=4).cells
    exercises = exercises_in(cells)
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    prose += "\n"

    assert prose.count("**Question.**") == prose.count("<summary>Answer</summary>")
    assert prose.count("<details>") == prose.count("</details>\n")
    assert len(exercises) >= 2
    for place, exercise in exercises_of_cells(cells).items():
        solution = cells[place]
        assert solution.metadata["jupyter"] == {"source_hidden": True}
        assert solution.metadata["cellView"] == "form"
        assert "hide-input" in solution.metadata["tags"]
        assert cells[place - 1].cell_type == "markdown"
        assert solution.outputs == []
        assert re.search("assert|require_close", exercise.check), exercise.solution
        assert "= ..." in exercise.starter or "NotImplementedError" in exercise.starter, exercise


def test_answers_are_compared_by_digest():
    for answer, same in ((3, np.float32(3)), ("q", "q"), ((1, 2), [1.0, jnp.asarray(2)])):
        assert is_answer(same, digest_of(answer))
    for answer, other in ((3, 4), ("q", "r"), ([1, 2], [2, 1]), ("3", 3)):
        assert not is_answer(other, digest_of(answer))
    with pytest.raises(NotSolved, match="not solved yet: b, c"):
        require_solved(a=1, b=..., c=...)


def test_numbers_that_differ_are_described_without_the_right_ones():
    right = np.arange(6.0).reshape(2, 3)
    require_close(right + 1e-9, right, atol=1e-6)
    require_close(np.ones(3), 1)
    for wrong, said in ((right.T, "transposed"), (2 * right, "2 times"), (right + 1, "1 is added")):
        with pytest.raises(AssertionError, match=said):
            require_close(wrong, right)
    with pytest.raises(AssertionError, match="near, but not equal"):
        require_close(right + 1e-6, right)


def test_each_starter_is_said_to_be_not_solved_yet():
    """Whatever else its check does, which may need the cells before."""
    checked = 0
    for path in LESSONS:
        for exercise in exercises_in(nbformat.read(path, as_version=4).cells):
            code = f"from __future__ import annotations\n{exercise.starter}\n{exercise.check}"
            names = ["jax", "jnp", "jgpt", "nnx", "rungs"]
            given = {name: importlib.import_module(MODULES.get(name, name)) for name in names}
            with pytest.raises(NotSolved, match=f"^not solved yet: {', '.join(exercise.names)}$"):
                exec(compile(code, path.stem, "exec"), given)
            checked += 1
    assert checked >= 60


def loaded_in(code: str) -> set[str]:
    nodes = ast.walk(ast.parse(code))
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def defined_by(source: str) -> set[str]:
    return set(student["_defined_by"](ast.parse(source).body))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_starter_defines_and_the_task_names_what_is_read_later(path):
    """By its own check, by the checks of later exercises and by later cells."""
    pending: dict[str, str] = {}  # names of solutions alone, and where they are defined
    defined: set[str] = set()
    cells = nbformat.read(path, as_version=4).cells
    exercises = exercises_of_cells(cells)
    for place, cell in enumerate(cells):
        exercise = exercises.get(place)
        if exercise is None:
            if cell.cell_type == "code":
                assert not loaded_in(cell.source) & pending.keys() - defined
                defined |= defined_by(cell.source)
            continue
        in_solution = set(student["_defined_by"](exercise.statements[0]))
        in_starter = defined_by(exercise.starter)
        read = loaded_in(exercise.check)
        assert read & in_solution <= in_starter
        for name in in_starter:
            assert re.search(rf"`[^`]*\b{name}\b", exercise.student_task), name
        missing = read & pending.keys() - in_starter - defined
        assert not missing, {name: pending[name] for name in missing}
        for name in in_solution - in_starter:
            pending[name] = exercise.task
        defined |= in_starter


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_check_has_a_comment_or_an_answer(path):
    for exercise in exercises_in(nbformat.read(path, as_version=4).cells):
        assert "#" not in exercise.check
        assert "np.testing" not in exercise.check
        for node in ast.walk(ast.parse(exercise.check)):
            match node:
                case ast.Assert(msg=None):
                    raise AssertionError(f"nothing is said of a wrong answer: {exercise.check}")
                case ast.Assert(
                    test=ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value)])
                ):
                    assert str(value) in exercise.task, exercise.check


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_editions_have_every_exercise(path):
    cells = nbformat.read(path, as_version=4).cells
    exercises = exercises_in(cells)
    for name, more in (("student", 1), ("teacher", 0)):
        notebook = edition(path, name)
        sources = [cell.source for cell in notebook.cells]

        nbformat.validate(notebook)
        assert len(sources) == len(cells) + more * len(exercises)
        assert "<summary>About the solution</summary>" not in "\n".join(sources)
        for exercise in exercises:
            assert (exercise.solution in sources) == (name == "teacher")
            assert (exercise.starter in sources) == (name == "student")
            if name == "student":
                assert exercise.student_task in sources
        assert bool(outputs_in(notebook)) == (name == "teacher")
        mistaken = [each for each in exercises if each.names[0] in student["MISTAKES"]]
        shown = "\n".join(sources).count("**Common mistakes**")
        assert shown == (len(mistaken) if name == "teacher" else 0)


@pytest.fixture
def lessons(tmp_path) -> Path:
    """A folder with one lesson and what it imports."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(LESSONS[2], folder / "lesson.ipynb")
    (folder / "pictures.py").write_text("first = 1\n")
    for name in sorted({*student["MODULES"]} - {"pictures.py"}):
        (folder / name).write_text("")
    return folder


def solve(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].source = "my solution"
    nbformat.write(notebook, path)


def revise(lessons: Path) -> None:
    """What a new edition brings."""
    notebook = nbformat.read(lessons / "lesson.ipynb", as_version=4)
    notebook.cells[0].source = "# A new title"
    nbformat.write(notebook, lessons / "lesson.ipynb")
    (lessons / "pictures.py").write_text("second = 2\n")


def test_a_solution_is_kept_and_a_new_edition_is_written_beside_it(lessons, capsys):
    target = lessons.parent
    mine = target / "student" / "lesson.ipynb"
    write_editions(lessons, target)
    solve(mine)
    solved = mine.read_text()

    capsys.readouterr()
    write_editions(lessons, target)  # of the same lesson
    assert mine.read_text() == solved
    assert f"{mine} was changed and is kept\n" in capsys.readouterr().out
    assert sorted(path.name for path in mine.parent.iterdir()) == [
        "checks.py",
        "circuits.py",
        "experiments.py",
        "given.py",
        "lesson.ipynb",
        "mine.py",
        "parts.py",
        "pictures.py",
        "rungs.py",
    ]

    revise(lessons)
    write_editions(lessons, target)
    beside = mine.with_name("lesson.new.ipynb")
    assert mine.read_text() == solved
    assert f"{mine} was changed and is kept: lesson.new.ipynb is new\n" in capsys.readouterr().out
    assert "A new title" in beside.read_text()

    solve(beside)  # in the wrong one of the two
    also_solved = beside.read_text()
    revise(lessons)
    write_editions(lessons, target)
    assert mine.read_text() == solved
    assert beside.read_text() == also_solved

    beside.replace(mine)  # which is of the newest edition
    beside.unlink(missing_ok=True)
    write_editions(lessons, target)
    assert mine.read_text() == also_solved
    assert not beside.exists()


@pytest.mark.parametrize("text", ["{}", "not a notebook", '{"cells": []}'])
def test_a_file_that_is_no_written_notebook_is_kept(lessons, text):
    mine = lessons.parent / "student" / "lesson.ipynb"
    mine.parent.mkdir()
    mine.write_text(text)
    (mine.parent / "pictures.py").write_text("mine = 3\n")
    write_editions(lessons, lessons.parent)

    assert mine.read_text() == text
    assert (mine.parent / "pictures.py").read_text() == "mine = 3\n"
    assert "first = 1" in (mine.parent / "pictures.new.py").read_text()
    assert nbformat.read(mine.with_name("lesson.new.ipynb"), as_version=4).cells


@pytest.mark.slow
@pytest.mark.usefixtures("data_directory")
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs_and_gives_what_its_page_shows(path, tmp_path, monkeypatch):
    if path.stem[:2] in COMPARE:
        pytest.importorskip("transformers", reason="the extra `parity` is not installed")
    # TMPDIR too: some lessons train into a folder of tempfile.mkdtemp, which nothing deletes
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        monkeypatch.setenv(folder, str(tmp_path))
    if path.stem[:2] not in COMPILE:
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        monkeypatch.setenv("XLA_FLAGS", TRAIN)
    committed = code_cells(nbformat.read(path, as_version=4))
    fresh = code_cells(execute(path))
    for old, new in zip(committed, fresh, strict=True):
        assert pictures_in(old) == pictures_in(new), new.source
        if "varies" in old.metadata.get("tags", ()):  # times, and text of a trained model
            continue
        assert words_of(printed(old)) == words_of(printed(new)), new.source
        shown = pytest.approx(numbers_of(printed(old)), rel=0.05, abs=0.02)
        assert numbers_of(printed(new)) == shown, new.source
