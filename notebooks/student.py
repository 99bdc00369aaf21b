"""Write two editions of each lesson: for students, and for teachers.

`make student` runs this. A notebook that was changed since then is kept, and a
new edition is written beside it. In a lesson, the solution of an exercise is a
code cell with the tag `solution`, which Jupyter and Colab fold; its task is the
cell before. The solution is split at the line `# Check`, or else at its first
`assert` or call of `np.testing`. What comes before becomes a starter: it has
the names that the check reads. The rest is the check. For students, the check
says "not solved yet" until there is a solution, has no comments, and has
digests in place of answers that the task doesn't mention. For teachers, up
to five wrong answers of `mistakes.json` follow a solution.
"""

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import nbformat
from checks import digest_of
from nbformat.v4 import new_code_cell, new_markdown_cell

FOLDER = Path(__file__).resolve().parent
ABOUT = re.compile(
    r"<details>\n<summary>About the solution</summary>\n(.*?)\n</details>\n?",
    re.DOTALL,
)
STAMP = "# SHA-256 of what follows, as it was written: "
MODULES = (
    "pictures.py",
    "checks.py",
    "circuits.py",
    "experiments.py",
    "given.py",
    "mine.py",
    "parts.py",
    "rungs.py",
)
MISTAKES = json.loads((FOLDER / "mistakes.json").read_text(encoding="utf-8"))
"""What is replaced by what in a solution, and words of what the check says.

The first five of each exercise are the commonest.
"""
CHECK = "# Check"
CHECK_TITLE = "# Check: fails until the exercise is solved"


@dataclass(frozen=True)
class Exercise:
    """A task, the explanation and the code of its solution, and its check."""

    task: str
    explanation: str
    solution: str
    id: str

    @property
    def statements(self) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """The statements before the check, and those of the check."""
        body = ast.parse(self.solution).body
        lines = self.solution.splitlines()
        if CHECK in lines:
            marked = lines.index(CHECK) + 1
            places = [
                place
                for place, statement in enumerate(body)
                if statement.lineno > marked
            ]
        else:
            places = [
                place
                for place, statement in enumerate(body)
                if _checks(statement)
            ]
        first = min(places, default=len(body))
        return body[:first], body[first:]

    @property
    def names(self) -> list[str]:
        """What a student has to define: what the check or the task names."""
        solution, checks = self.statements
        read = {
            node.id
            for statement in checks
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        return [
            name
            for name in _defined_by(solution)
            if name in read or f"`{name}`" in self.task
        ]

    @property
    def student_task(self) -> str:
        """The task, which names all that the check reads."""
        unnamed = [
            f"`{name}`"
            for name in self.names
            if not re.search(rf"`[^`]*\b{name}\b[^`]*`", self.task)
        ]
        if not unnamed:
            return self.task
        return f"{self.task}\n\nDefine {_list_of(unnamed)}."

    @property
    def starter(self) -> str:
        """The solution without what is to be found."""
        solution, _ = self.statements
        parts: list[str] = []
        begun: set[str] = set()
        for statement in solution:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                parts.append(ast.unparse(statement))
            for name in _defined_by([statement]):
                if name not in self.names or name in begun:
                    continue
                begun.add(name)
                if isinstance(statement, ast.FunctionDef):
                    parts.append(self._signature(statement))
                elif isinstance(statement, ast.ClassDef):
                    parts.append(self._class_signature(statement))
                else:
                    parts.append(f"{name} = ...")
        code = "\n".join(["# Your code", *parts]).rstrip()
        return re.sub("\n{4,}", "\n\n\n", code)

    @property
    def check(self) -> str:
        """The check as students get it."""
        _, checks = self.statements
        given = ", ".join(f"{name}={name}" for name in self.names)
        lines = [f"require_solved({given})"]
        lines += [self._without_answer(statement) for statement in checks]
        code = "\n".join(lines)
        helpers = ("is_answer", "require_close", "require_solved")
        used = [name for name in helpers if name in code]
        return f"from checks import {', '.join(used)}\n\n{code}"

    def _signature(self, function: ast.FunctionDef) -> str:
        """A function without its body; without its annotations if they are
        what is to be found.
        """
        return "\n".join(["\n", *self._without_body(function), "\n"])

    def _class_signature(self, statement: ast.ClassDef) -> str:
        """A class with its docstring, and with methods without bodies."""
        methods = [
            each for each in statement.body if isinstance(each, ast.FunctionDef)
        ]
        lines = self.solution.splitlines()
        parts = ["\n", *lines[statement.lineno - 1 : _begin(methods[0]) - 1]]
        for number, method in enumerate(methods):
            if number > 0:
                parts.append("")
            parts += self._without_body(method)
        return "\n".join([*parts, "\n"])

    def _without_body(self, function: ast.FunctionDef) -> list[str]:
        """The lines of a function that raises where its body was."""
        indent = " " * function.col_offset
        body = f'{indent}    raise NotImplementedError("not solved yet")'
        # the sizes that a module is made with are given
        if "nnotate" in self.task and function.name != "__init__":
            names = ", ".join(each.arg for each in function.args.args)
            return [f"{indent}def {function.name}({names}):", body]
        inside = function.body[ast.get_docstring(function) is not None :]
        lines = self.solution.splitlines()
        kept = lines[_begin(function) - 1 : _begin(inside[0]) - 1]
        return ["\n".join(kept).rstrip(), body]

    def _without_answer(self, statement: ast.stmt) -> str:
        """A statement of the check; `== ANSWER` is a digest of the answer."""
        match statement:
            case ast.Assert(
                test=ast.Compare(
                    left=left, ops=[ast.Eq()], comparators=[right]
                ),
                msg=ast.expr() as message,
            ):
                text = ast.unparse(right)
                if _is_literal(right) and text not in self.task:
                    digest = digest_of(ast.literal_eval(text))
                    found = ast.unparse(left)
                    said = ast.unparse(message)
                    return f'assert is_answer({found}, "{digest}"), {said}'
        lines = self.solution.splitlines()
        source = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
        # NumPy's would print the answer.
        source = re.sub(
            r"np\.testing\.assert_(allclose|array_equal)",
            "require_close",
            source,
        )
        return _without_comments(source)


def exercises_in(cells: list[nbformat.NotebookNode]) -> dict[int, Exercise]:
    """The exercises of a lesson, each at the place of its solution."""
    found = {}
    for place, cell in enumerate(cells):
        if "solution" in cell.metadata.get("tags", ()):
            task = cells[place - 1]
            about = ABOUT.search(task.source)
            found[place] = Exercise(
                ABOUT.sub("", task.source).strip(),
                about[1].strip() if about else "",
                cell.source,
                task.id,
            )
    return found


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


def _defined_by(statements: list[ast.stmt]) -> list[str]:
    """The names that statements define, in order."""
    names: dict[str, None] = {}
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names[statement.name] = None
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        inside = {  # of comprehensions and lambdas, whose names end with them
            node
            for part in ast.walk(statement)
            if isinstance(part, ast.comprehension | ast.Lambda)
            for node in ast.walk(part)
        }
        for node in ast.walk(statement):
            if node in inside or not isinstance(node, ast.Name):
                continue
            if isinstance(node.ctx, ast.Store) and node.id != "_":
                names[node.id] = None
    return list(names)


def _begin(statement: ast.stmt) -> int:
    """The first line of a statement, or of its decorators."""
    decorators = getattr(statement, "decorator_list", [])
    return min(line.lineno for line in (statement, *decorators))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _without_comments(source: str) -> str:
    """Code without comments, which may say what the answer is."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "\n".join(line for line in lines if line.strip())


def _list_of(words: list[str]) -> str:
    """Words as a sentence lists them."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def student_cells(exercise: Exercise) -> list[nbformat.NotebookNode]:
    """A task, a starter and a check."""
    check = f"{CHECK_TITLE}\n{exercise.check}"
    return [
        new_markdown_cell(exercise.student_task, id=exercise.id),
        new_code_cell(exercise.starter, id=f"{exercise.id}-starter"),
        new_code_cell(check, id=f"{exercise.id}-check"),
    ]


def teacher_cells(exercise: Exercise) -> list[nbformat.NotebookNode]:
    """A task and its solution, and the commonest wrong answers to it."""
    text = f"{exercise.task}\n\n**Solution.** {exercise.explanation}".rstrip()
    mistakes = MISTAKES.get(exercise.names[0], [])
    if mistakes:
        text += "\n\n**Common mistakes**, and what the check says of them:\n"
    for right, wrong, says in mistakes[:5]:
        written = _on_one_line(wrong) or "nothing"
        text += f"\n- {written} in place of {_on_one_line(right)}: *{says}*"
    code = new_code_cell(exercise.solution, id=f"{exercise.id}-solution")
    return [new_markdown_cell(text, id=exercise.id), code]


def _on_one_line(code: str) -> str:
    """Code within a sentence."""
    return f"`{' '.join(code.split())}`" if code.strip() else ""


EDITIONS = {"student": student_cells, "teacher": teacher_cells}


def edition(lesson: Path, name: str) -> nbformat.NotebookNode:
    """A lesson as a notebook of an edition."""
    notebook = nbformat.read(lesson, as_version=4)
    exercises = exercises_in(notebook.cells)
    cells: list[nbformat.NotebookNode] = []
    for place, cell in enumerate(notebook.cells):
        if place in exercises:
            cells[-1:] = EDITIONS[name](exercises[place])
            continue
        if name == "student" and cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        cells.append(cell)
    notebook.cells = cells
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
    for name in EDITIONS:
        folder = target / name
        folder.mkdir(exist_ok=True)
        for module in MODULES:
            code = (lessons / module).read_text(encoding="utf-8")
            write(folder / module, *stamped_code(code))
        for lesson in sorted(lessons.glob("*.ipynb")):
            write(folder / lesson.name, *stamped(edition(lesson, name)))
        print(folder)


if __name__ == "__main__":
    write_editions(FOLDER, FOLDER.parent)
