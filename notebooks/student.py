"""Write two editions of each lesson: for students, and solved for teachers.

`make student` runs this. A notebook that was changed since then is kept, and a
new edition is written beside it. The solution of an exercise is split at its
first check, an `assert` or a call of `np.testing`: what comes before it becomes
a starter for students, the rest stays as it is.
"""

import ast
import copy
import json
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

FOLDER = Path(__file__).resolve().parent
REPOSITORY = "OWNER/jgpt"  # on GitHub: to fill in
BRANCH = "editions"  # with the folders that this writes
FOLDED = re.compile(
    r"<details>\n<summary>Solution</summary>\n(.*?)\n</details>\n?", re.DOTALL
)
CODE = re.compile(r"^```python\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
STAMP = "# SHA-256 of what follows, as it was written: "
PICTURES = f"{REPOSITORY}/main/notebooks/pictures.py"
INSTALL = f"""\
import importlib.util

if importlib.util.find_spec("jgpt") is None:  # as on Colab
    %pip install --quiet "jgpt[notebooks] @ git+https://github.com/{REPOSITORY}"
    !wget -q https://raw.githubusercontent.com/{PICTURES}"""


@dataclass(frozen=True)
class Exercise:
    """A task, the explanation and the code of its solution, and its check."""

    task: str
    explanation: str
    solution: str

    @property
    def statements(self) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """The statements before the first check, and those from it on."""
        body = ast.parse(self.solution).body
        checks = [
            place for place, statement in enumerate(body) if _checks(statement)
        ]
        first = min(checks, default=len(body))
        return body[:first], body[first:]

    @property
    def starter(self) -> str:
        """The solution without what is to be found."""
        parts = [
            _starter(statement, self.solution)
            for statement in self.statements[0]
        ]
        code = "\n".join(["# Your code", *filter(None, parts)]).rstrip()
        return re.sub("\n{4,}", "\n\n\n", code)

    @property
    def check(self) -> str:
        """The lines from the first check on."""
        _, checks = self.statements
        lines = (
            self.solution.splitlines()[checks[0].lineno - 1 :] if checks else []
        )
        return "\n".join(lines)


def exercise_of(cell: nbformat.NotebookNode) -> Exercise | None:
    """The exercise in a Markdown cell."""
    found = FOLDED.search(cell.source) if cell.cell_type == "markdown" else None
    if found is None:
        return None
    task = FOLDED.sub("", cell.source).strip()
    code = "\n".join(CODE.findall(found[1]))
    return Exercise(task, CODE.sub("", found[1]).strip(), code)


def _checks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return False
    return any(
        isinstance(node, ast.Assert)
        or (
            isinstance(node, ast.Attribute)
            and ast.unparse(node).startswith("np.testing.")
        )
        for node in ast.walk(statement)
    )


def _starter(statement: ast.stmt, source: str) -> str:
    """What students get: imports, names, signatures with docstrings."""
    match statement:
        case ast.Import() | ast.ImportFrom():
            return ast.unparse(statement)
        case (
            ast.Assign(targets=[ast.Name(id=name)])
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return f"{name} = ..."
        case ast.Assign(targets=[ast.Tuple(elts=targets)]):
            names = [
                target for target in targets if isinstance(target, ast.Name)
            ]
            return "\n".join(
                f"{name.id} = ..." for name in names if name.id != "_"
            )
        case ast.FunctionDef():
            start = min(
                line.lineno for line in (statement, *statement.decorator_list)
            )
            inside = statement.body[ast.get_docstring(statement) is not None :]
            kept = source.splitlines()[start - 1 : inside[0].lineno - 1]
            return "\n".join(["\n", *kept, "    raise NotImplementedError\n\n"])
    return ""


def student_cells(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cell as it is, without outputs; or a task, a starter and a check."""
    if exercise := exercise_of(cell):
        check = f"# Check: fails until the exercise is solved\n{exercise.check}"
        return [
            new_markdown_cell(exercise.task, id=cell.id),
            new_code_cell(exercise.starter, id=f"{cell.id}-starter"),
            new_code_cell(check, id=f"{cell.id}-check"),
        ]
    plain = copy.deepcopy(cell)
    if plain.cell_type == "code":
        plain.outputs, plain.execution_count = [], None
    return [plain]


def teacher_cells(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cell as it is; or a task and its solution."""
    if exercise := exercise_of(cell):
        text = (
            f"{exercise.task}\n\n**Solution.** {exercise.explanation}".rstrip()
        )
        code = new_code_cell(
            exercise.solution.rstrip(), id=f"{cell.id}-solution"
        )
        return [new_markdown_cell(text, id=cell.id), code]
    return [cell]


EDITIONS = {"student": student_cells, "teacher": teacher_cells}


def edition(lesson: Path, name: str) -> nbformat.NotebookNode:
    """A lesson as a notebook of an edition."""
    notebook = nbformat.read(lesson, as_version=4)
    colab = "https://colab.research.google.com"
    badge = f"![Open in Colab]({colab}/assets/colab-badge.svg)"
    page = f"{colab}/github/{REPOSITORY}/blob/{BRANCH}/{name}"
    first = [
        new_markdown_cell(f"[{badge}]({page}/{lesson.name})", id="colab"),
        new_code_cell(INSTALL, id="install"),
    ]
    notebook.cells = first + [
        part for cell in notebook.cells for part in EDITIONS[name](cell)
    ]
    return notebook


def stamped(notebook: nbformat.NotebookNode) -> tuple[str, str]:
    """The notebook's text, with its digest in its metadata, and the digest."""
    digest = cells_digest(notebook)
    notebook.metadata["jgpt"] = {"edition": digest}
    return nbformat.writes(notebook), digest


def stamped_code(code: str) -> tuple[str, str]:
    """The code below a comment with its digest, and the digest."""
    digest = sha256(code.encode()).hexdigest()
    return f"{STAMP}{digest}\n{code}", digest


def cells_digest(notebook: nbformat.NotebookNode) -> str:
    """The SHA-256 of the cells and their outputs.

    Jupyter changes the rest of a notebook when it opens and saves one.
    """
    cells = [
        (cell.cell_type, cell.source, cell.get("outputs"))
        for cell in notebook.cells
    ]
    return sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def digests_in(path: Path) -> tuple[str, str | None]:
    """The digests of what is in a file now, and of what was written there.

    The second is None for a file from before digests were written.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    as_it_is = sha256(text.encode()).hexdigest()
    if path.suffix == ".ipynb":
        try:
            notebook = nbformat.reads(text, as_version=4)
            written = notebook.metadata.get("jgpt", {}).get("edition")
            return cells_digest(notebook), written
        except Exception:  # nbformat raises many kinds: it is no notebook
            return as_it_is, None
    first, _, code = text.partition("\n")
    if not first.startswith(STAMP):
        return as_it_is, None
    return sha256(code.encode()).hexdigest(), first.removeprefix(STAMP)


def write(path: Path, text: str, digest: str) -> None:
    """Write a file, unless someone has changed it since it was written.

    Then the new text goes to a file beside it, if it is new at all.
    """
    place = path
    if _is_changed(path, digest):
        _, written = digests_in(path)
        if written == digest:
            print(f"{path} was changed and is kept")
            return
        place = path.with_name(f"{path.stem}.new{path.suffix}")
        if _is_changed(place, digest):
            print(
                f"{path} and {place.name} were changed and are kept: "
                f"rename {place.name} to get the new edition"
            )
            return
        print(f"{path} was changed and is kept: {place.name} is new")
    place.write_text(text, encoding="utf-8")


def _is_changed(path: Path, digest: str) -> bool:
    """Whether a file is neither as it was written nor as it would be now."""
    if not path.exists():
        return False
    found, written = digests_in(path)
    return found not in (written, digest)


def write_editions(lessons: Path, target: Path) -> None:
    """Write both editions of all lessons, and keep what was changed there."""
    pictures = (lessons / "pictures.py").read_text(encoding="utf-8")
    for name in EDITIONS:
        folder = target / name
        folder.mkdir(exist_ok=True)
        write(folder / "pictures.py", *stamped_code(pictures))
        for lesson in sorted(lessons.glob("*.ipynb")):
            write(folder / lesson.name, *stamped(edition(lesson, name)))
        print(folder)


if __name__ == "__main__":
    write_editions(FOLDER, FOLDER.parent)
