"""Every code block of the README and the documentation is run, and the output compared.

A block that starts with `$` shows a command and the output, in which `...` stands for anything;
one that starts with `jgpt:` is a message.
"""

import ast
import contextlib
import doctest
import functools
import io
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from markdown_it import MarkdownIt

import jgpt
from jgpt.cli.commands import COMMANDS
from tests.commands import jgpt as command
from tests.commands import typist, worked
from tests.generation.test_chat import with_chat_tokens
from tests.models import random_gpt

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / page for page in ("README.md", "docs/look.md", "docs/runs.md", "docs/weights.md")]
"""Pages whose commands are all run. On other pages, commands without output are only parsed: they
start many processes, or train large models."""
SESSION = ROOT / "docs" / "idea.md"
"""A page whose commands and Python are run in turn, in one folder."""
SAME = functools.partial(
    doctest.OutputChecker().check_output,
    optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
)


class Block(NamedTuple):
    """A block of code, and the block of text right below it."""

    line: int
    language: str
    code: str
    shown: str


def blocks(text: str) -> list[Block]:
    tokens = MarkdownIt().parse(text)
    found = []
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        if token.info.startswith("{"):  # the site's, not code
            continue
        first = token.content.split()[0]
        language = token.info or {"$": "console", "jgpt:": "text"}.get(first, "sh")
        shown = after.content if after and (after.type, after.info) == ("fence", "text") else ""
        found.append(Block(token.map[0] + 2, language, token.content, shown))
    return found


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a block, each with the output that it shows."""
    text = block.code.replace("\\\n", " ")
    if block.language == "sh":
        lines = [line for line in text.splitlines() if line.split("#")[0].strip()]
        return [(each, "") for line in lines for each in unrolled(line)]
    parts = re.split(r"^\$ (.*\n)", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def unrolled(line: str) -> list[str]:
    """The commands of a loop in one line."""
    loop = re.fullmatch(r"for (\w+) in (.*?); do (.*); done", line)
    if loop is None:
        return [line]
    return [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()]


ALL = [(page, block) for page in PAGES for block in blocks(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_MAKES = r'out="(runs/\w+)"'
COMMANDS_MAKE = r"--out (runs/\w+)"


def copy_runs(page: Path, run: Path, folder: Path, made: str) -> None:
    """Copy a run to each directory that the page uses but doesn't create.

    `made` finds the directories that are created by the blocks that are executed.
    """
    text = page.read_text()
    created = set(re.findall(made, text))
    for place in set(re.findall(r"\b(runs/\w+)", text)) - created:
        shutil.copytree(run, folder / place)


# --- Python --------------------------------------------------------------------------------------


def without_lines(text: str) -> str:
    """A text whose places in the package have no line number, which any edit above them moves."""
    return re.sub(r"\b(transformer\.py):\d+", r"\1:N", text)


def run_python(block: Block, names: dict[str, Any], page: str) -> str:
    """The output of a block, or the error if the page shows one."""
    code = compile("\n" * (block.line - 1) + block.code, page, "exec")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    except Exception as error:
        if "Error: " not in block.shown:
            raise
        return f"{type(error).__module__}.{type(error).__name__}: {error}\n"
    return printed.getvalue()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name in ("api.md", "runs.md")))
        for page in sorted({page for page, block in ALL if block.language == "python"} - {SESSION})
    ],
    ids=name,
)
def test_python_gives_what_the_page_shows(page, trained, tmp_path):
    copy_runs(page, trained.directory, tmp_path, PYTHON_MAKES)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path), np.printoptions():
        for block in blocks(page.read_text()):
            if block.language == "python":
                printed = run_python(block, names, name(page))
                assert without_lines(printed) == without_lines(block.shown), block


# --- commands ------------------------------------------------------------------------------------


def jgpt_words(line: str) -> list[str] | None:
    """The arguments of jgpt in a line of shell; None for another command."""
    line = re.sub(r"\$'(.*?)'", lambda quoted: f"'{quoted[1]}'", line)
    line = re.sub(r'"\$\(cat .*?\)"', "'So long'", line)
    words = shlex.split(line.split(" & ")[0], comments=True)
    for word in words:  # gcloud --command='jgpt train ...'
        if " jgpt " in f" {word.partition('=')[2]}":
            words = shlex.split(word.partition("=")[2])
    return words[words.index("jgpt") + 1 :] if "jgpt" in words else None


def check_other_command(line: str) -> None:
    """Check that the targets, extras and files in a line of another command exist."""
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), line
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        assert words[0] == "install", line
        assert {extra for word in words for extra in re.findall(r"\[(.*)\]", word)} <= set(extras)
    elif program == "python":
        script = Path(*words[1].split(".")).with_suffix(".py") if words[0] == "-m" else words[0]
        assert (ROOT / script).exists(), line
    elif program not in ("git", "sed", "diff", "tar", "export"):
        assert (ROOT / program).exists(), line


@pytest.fixture
def parse_only(monkeypatch):
    """Commands parse their options and do nothing."""

    def parsed(it: Callable[..., Any]) -> Callable[..., None]:
        return functools.wraps(it)(lambda *args, **options: None)

    for each, it in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, each, parsed(it))


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory) -> Path:
    """A folder with each run that a page names, and a model of one file."""
    folder = tmp_path_factory.mktemp("named")
    for file in {file for page in PAGES for file in re.findall(r"(\w+\.py):GPT", page.read_text())}:
        worked("new", folder / file)
    for run in {run for page in PAGES for run in re.findall(r"\bruns/\w+", page.read_text())}:
        (folder / run).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(trained.directory / file, folder / run)
    return folder


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("page", sorted({page for page, _ in ALL} - {SESSION}), ids=name)
def test_commands_can_be_typed(page, runs):
    for block in blocks(page.read_text()):
        if block.language in ("sh", "console"):
            for line, _ in commands(block):
                words = jgpt_words(line)
                if words is None:
                    check_other_command(line)
                else:
                    worked(*words, cwd=runs)


INLINE = {
    (path, line)
    for path in [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]
    for line in re.findall(r"`(jgpt [a-z]+ [^`\\]*--[a-z][^`\\]*)`", path.read_text())
}


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(("page", "line"), sorted(INLINE), ids=lambda it: str(it)[-30:])
def test_commands_within_a_text_have_options_that_exist(page, line, runs):
    """What is left out, as a value or --out, may be refused."""
    said = command(*(jgpt_words(line) or ()), cwd=runs).stderr
    assert "unknown option" not in said, said


@pytest.fixture(scope="module")
def files(tmp_path_factory, shakespeare, poem) -> Path:
    """A folder with the files that the commands read."""
    torch = pytest.importorskip("torch")
    from tests.parity.test_nanogpt import write

    folder = tmp_path_factory.mktemp("place")
    notes = poem.read_text().replace("So long", "Dear Yours")
    (folder / "my_notes").mkdir()
    (folder / "my_notes" / "letters.txt").write_text(notes)
    (folder / "notes.txt").write_text(notes)
    (folder / "input.txt").write_text(shakespeare)
    documents = (json.dumps({"body": line}) + "\n" for line in notes.splitlines())
    (folder / "lines.jsonl").write_text("".join(documents))
    (folder / "records.json").write_text("[]")
    tokenizer = with_chat_tokens(jgpt.BPETokenizer.train([notes], 263))
    model = random_gpt("qwen3", vocab_size=320, block_size=128)
    jgpt.save_hf(model, folder / "DIR", tokenizer=tokenizer)
    (folder / "out").mkdir()
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 32, "vocab_size": 65}
    write(folder / "out" / "ckpt.pt", sizes=sizes)
    return folder


@pytest.fixture
def place(files, tmp_path) -> Path:
    return shutil.copytree(files, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    sorted({page for page, block in ALL if page in RUN or block.language == "console"} - {SESSION}),
    ids=name,
)
def test_commands_give_what_the_page_shows(page, place, trained):
    copy_runs(page, trained.directory, place, COMMANDS_MAKE)
    languages = ("sh", "console") if page in RUN else ("console",)
    fewer = "--steps 20 --eval-tokens 4096 "  # all of them take a minute
    text = re.sub("--steps [16]00 ", fewer, page.read_text())
    for block in blocks(text):
        for line, shown in commands(block) if block.language in languages else ():
            words = jgpt_words(line)
            if words is None:
                continue
            done = command(*words, cwd=place)
            said = done.stdout + done.stderr
            assert done.code == (2 if "jgpt: " in shown else 0), said
            assert block.language == "sh" or SAME(shown, said), f"{line}\n{said}"


@pytest.fixture
def shell(tmp_path, monkeypatch) -> Iterator[Callable[[str], str]]:
    """Types a line, and gives what is printed.

    Commands run in one process with the page's two devices, and one in the background in another.
    """
    program = tmp_path / "bin" / "jgpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m jgpt.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (devices,) = re.findall("export XLA_FLAGS=(.*)", SESSION.read_text())
    monkeypatch.setenv("XLA_FLAGS", f"{devices} {os.environ['XLA_FLAGS']}")
    with typist(tmp_path) as type_in:

        def run(line: str) -> str:
            words = jgpt_words(line)
            if words is not None and " & " not in line:
                _, said, complained = type_in(*words)
                return said + complained
            return subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120
            ).stdout

        yield run


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a session of a Unix shell")
def test_a_page_is_a_session(shell, tmp_path):
    names: dict[str, Any] = {"__name__": "__main__"}
    killed = tmp_path / "runs" / "squared_relu-5"
    text = SESSION.read_text()  # with two of its five seeds, which would take half a minute more
    for five, two in ((" 2 3 4", ""), ("range(1, 6)", "(1, 5)"), ("(5, 4)", "(2, 4)")):
        assert five in text
        text = text.replace(five, two)
    for block in blocks(text):
        if block.language == "python":
            with contextlib.chdir(tmp_path):
                said = run_python(block, names, name(SESSION))
            assert said == block.shown or SAME(block.shown, said), said
        for line, shown in commands(block) if block.language in ("sh", "console") else ():
            said = shell(line)
            assert SAME(shown, said) if shown else "jgpt: " not in said, f"{line}\n{said}"
            if "kill" in line:
                assert len((killed / "metrics.jsonl").read_text().splitlines()) < 60
            if "--resume" in line:
                assert "resumed at step" in said

    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "rates.svg").stat().st_size > 10_000


# --- the checks themselves -----------------------------------------------------------------------


def test_no_block_is_passed_over():
    assert {block.language for _, block in ALL} == {"python", "sh", "console", "text", "diff"}
    assert len([block for _, block in ALL if block.language == "python"]) >= 8


def test_what_a_diff_keeps_and_removes_is_in_the_package():
    """Runs of such lines, each as it stands in the file that the diff names."""
    runs = 0
    for page, block in ALL:
        if block.language != "diff":
            continue
        for part in re.split("^--- a/", block.code, flags=re.M)[1:]:
            file, _, text = part.partition("\n")
            source = (ROOT / file).read_text()
            for run in re.split(r"^(?:\+.*|@@)\n", text, flags=re.M):
                kept = "".join(line[1:] for line in run.strip("\n").splitlines(keepends=True))
                if kept:
                    assert source.count(kept) == 1, f"{name(page)}: {file} has no\n{kept}"
                    runs += 1
    assert runs >= 6


PAGE = """
```python
x = 2
print(x + 1)
```

```text
3
```

    jgpt train tiny --stepz 3   # no such option

Text.

    $ jgpt --version
    jgpt 9.9
"""


def test_what_is_wrong_is_seen(tmp_path):
    python, shown, shell, console = blocks(PAGE)
    assert (python.shown, shown.language) == ("3\n", "text")
    assert run_python(python, {}, "") == "3\n"
    assert run_python(python._replace(code="print(4)"), {}, "") != python.shown
    with pytest.raises(NameError):
        run_python(python._replace(code="print(y)"), {}, "")
    ((line, _),) = commands(shell)
    assert command(*(jgpt_words(line) or ()), cwd=tmp_path).code == 2
    ((line, shown),) = commands(console)
    assert not SAME(shown, worked(*(jgpt_words(line) or ())))
    with pytest.raises(AssertionError):
        check_other_command("make nothing")
    with pytest.raises(AssertionError):
        check_other_command("python benchmarks/nothing.py")


# --- lessons -------------------------------------------------------------------------------------


def test_the_readme_lists_the_lessons():
    listed = re.findall(r"^\| \[(.*?)\]\((notebooks/.*?)\)", (ROOT / "README.md").read_text(), re.M)
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    titles = [re.findall(r"\"# (\d+\. .*?)\\n", path.read_text())[0] for path in lessons]

    assert listed == [(title, name(path)) for title, path in zip(titles, lessons, strict=True)]


def test_the_readme_is_short_and_shows_what_its_pictures_were_made_with():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 130
    script = (ROOT / "docs" / "pictures.py").read_text()
    (shell,) = [block for block in blocks(readme) if block.language == "sh"]
    for line, _ in commands(shell)[1:]:
        assert f"{line}\n" in shell.code
        assert f'"{line}"' in script or f"'{line}'" in script


def names_in_modules(code: str) -> set[str]:
    """What code takes from modules of the package, such as data.batches.batches."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("jgpt."):
            for imported in node.names:
                names.add(f"{node.module}.{imported.name}")
        elif isinstance(node, ast.Import):
            names.update(imported.name for imported in node.names)
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    inside = set()
    for name in names:
        first, _, rest = name.partition(".")
        # Attributes of public names, such as jgpt.CharTokenizer.from_text, are in no module.
        is_plain = re.fullmatch(r"[\w.]+", rest)  # no call such as jgpt.GPT(config).blocks
        if first == "jgpt" and is_plain and "." in rest and rest.split(".")[0] not in jgpt.__all__:
            inside.add(rest)
    # `jgpt.shapes.calls.TypedCall` is one name, though it has `jgpt.shapes.calls` in it.
    return {name for name in inside if not any(other.startswith(f"{name}.") for other in inside)}


def names_that_documents_use() -> set[str]:
    """What pages and lessons take from modules of the package, in their code and in their prose."""
    texts = [page.read_text() for page in PAGES]
    sources = [block.code for _, block in ALL if block.language == "python"]
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(lesson.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                sources.append(source)
            else:
                texts.append(source)
                # solutions and answers, which are folded
                sources += re.findall(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    names = set()
    for source in sources:
        names |= names_in_modules(source)
    for text in texts:
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for quoted in re.findall(r"`jgpt\.([a-z]\w*(?:\.\w+)+)[^`]*`", prose):
            if quoted.split(".")[0] not in jgpt.__all__:
                names.add(quoted)
    return names


def is_on_the_api_page(name: str, reference: str) -> bool:
    if name.rpartition(".")[2] in jgpt.__all__:
        return False  # such a name is taken from jgpt
    while name:
        if f"`{name}`" in reference or f"[{name}]" in reference or f":: jgpt.{name}\n" in reference:
            return True
        name = name.rpartition(".")[0]  # all names of a listed module are public
    return False


def test_what_a_page_or_a_lesson_uses_is_public():
    reference = (ROOT / "docs" / "api.md").read_text()
    names = names_that_documents_use()
    private = [name for name in sorted(names) if not is_on_the_api_page(name, reference)]

    assert private == []
    assert "data.batches.batches" in names  # the control
    assert len(jgpt.__all__) <= 45


def test_a_name_inside_a_module_is_found_however_it_is_taken():
    assert names_in_modules("from jgpt.nn.heads import (\n    Head as H,\n)") == {"nn.heads.Head"}
    assert names_in_modules("    from jgpt.nn import heads") == {"nn.heads"}
    assert names_in_modules("import jgpt.nn.heads as heads") == {"nn.heads"}
    assert names_in_modules("x = jgpt.nn.heads.Head(3).query") == {"nn.heads.Head"}
    assert names_in_modules("import jgpt\njgpt.GPT.hidden(flax.nnx.Rngs(0))") == set()
    assert not is_on_the_api_page("nn.heads.Head", "`nn.heads.Head`")  # jgpt.Head


def test_a_public_name_that_went_says_its_successor():
    with pytest.raises(AttributeError, match=r"no attribute 'load_gpt2': it is jgpt\.load_hf now"):
        jgpt.load_gpt2  # type: ignore[attr-defined]  # noqa: B018
    for successor in vars(jgpt)["_SUCCESSORS"].values():
        assert pkgutil.resolve_name(successor) is not None
