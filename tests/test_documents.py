"""Every code block of the README and the documentation is run, and the output compared.

A block that starts with `$` shows a command and the output, in which `...` stands for anything;
one that starts with `jgpt:` is a message.
"""

import contextlib
import doctest
import functools
import io
import json
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from markdown_it import MarkdownIt

import jgpt
from jgpt.cli.commands import COMMANDS
from jgpt.runs.resume import MAY_BE_LOWERED, MAY_DIFFER
from tests.commands import jgpt as command
from tests.commands import typist, worked
from tests.generation.test_chat import with_chat_tokens
from tests.models import random_gpt

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
_NAMES_OF_RUN = ("from_nanogpt", "look", "train", "weights")
RUN = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _NAMES_OF_RUN)]
"""Pages whose commands are all run. On other pages, commands without output are only parsed: they
start many processes, or train large models."""
SESSION = ROOT / "docs" / "change.md"
"""A page whose commands and Python are run in turn, in one folder."""
OTHER_PROGRAMS = (
    *("git", "sed", "diff", "tar", "export"),
    *("llama-cli", "ollama", "ct2-transformers-converter", "lm_eval"),
)
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
        language = token.info or language_of(token.content)
        shown = ""
        if after is not None and after.type == "fence" and after.info == "text":
            shown = after.content
        first_line = token.map[0] + 2
        found.append(Block(first_line, language, token.content, shown))
    return found


def language_of(code: str) -> str:
    """That of an indented block, by its first word."""
    first_word = code.split()[0]
    return {"$": "console", "jgpt:": "text"}.get(first_word, "sh")


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a block, each with the output that it shows."""
    text = block.code.replace("\\\n", " ")
    if block.language == "sh":
        found = []
        for line in text.splitlines():
            without_comment = line.split("#")[0]
            if without_comment.strip():
                found += [(command, "") for command in unrolled(line)]
        return found
    parts = re.split(r"^\$ (.*\n)", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def unrolled(line: str) -> list[str]:
    """The commands of a loop in one line."""
    loop = re.fullmatch(r"for (\w+) in (.*?); do (.*); done", line)
    if loop is None:
        return [line]
    variable, values, body = loop.groups()
    return [body.replace(f"${variable}", value) for value in values.split()]


ALL = [(page, block) for page in PAGES for block in blocks(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_MAKES = r'(?:out=|Run\.start\()"(runs/\w+)"'
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
    """A text whose lines of the package and of the page have no number: any edit moves them."""
    return re.sub(r"\b(transformer\.py|\w+\.md):\d+", r"\1:N", text)


def run_python(block: Block, names: dict[str, Any], page: str) -> str:
    """The output of a block, or the error if the page shows one."""
    source = "\n" * (block.line - 1) + block.code
    code = compile(source, page, "exec")
    # The page's source up to here, for what reads the source of a function of an earlier block.
    lines = source.splitlines(keepends=True)
    if names.get("__page__") == page:
        earlier = linecache.getlines(page)
        lines = earlier + lines[len(earlier) :]
    names["__page__"] = page
    linecache.cache[page] = (len(source), None, lines, page)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    except Exception as error:
        if "Error: " not in block.shown:
            raise
        return f"{type(error).__module__}.{type(error).__name__}: {error}\n"
    return printed.getvalue()


def pages_with_python() -> list[Any]:
    pages = {page for page, block in ALL if block.language == "python"}
    cases = []
    for page in sorted(pages - {SESSION}):
        if page.name in ("api.md", "train.md"):
            cases.append(pytest.param(page, marks=pytest.mark.slow))
        else:
            cases.append(page)
    return cases


@pytest.mark.parametrize("page", pages_with_python(), ids=name)
def test_python_gives_what_the_page_shows(page, trained, tmp_path):
    copy_runs(page, trained.path, tmp_path, PYTHON_MAKES)
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
        _, _, value = word.partition("=")
        if " jgpt " in f" {value}":
            words = shlex.split(value)
    if "jgpt" not in words:
        return None
    return words[words.index("jgpt") + 1 :]


def check_other_command(line: str) -> None:
    """Check that the targets, extras and files in a line of another command exist."""
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
        assert set(words) <= set(targets), line
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert words[0] == "install", line
        for extra in re.findall(r"(?:jgpt|\.)\[(.*?)\]", line):
            assert extra in project["optional-dependencies"], line
    elif program == "python":
        script = Path(words[0])
        if words[0] == "-m":
            module = words[1]
            script = Path(*module.split(".")).with_suffix(".py")
        assert (ROOT / script).exists(), line
    elif program not in OTHER_PROGRAMS:
        assert (ROOT / program).exists(), line


@pytest.fixture
def parse_only(monkeypatch):
    """Commands parse their options and do nothing."""

    def without_effect(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def nothing(*arguments, **options):
            return None

        return nothing

    for command_name, function in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, command_name, without_effect(function))


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory) -> Path:
    """A folder with each run that a page names, and a model of one file."""
    folder = tmp_path_factory.mktemp("named")
    text = "\n".join(page.read_text() for page in PAGES)
    for file in set(re.findall(r"(\w+\.py):GPT", text)):
        worked("new", folder / file)
    for run in set(re.findall(r"\bruns/\w+", text)):
        (folder / run / "checkpoints").mkdir(parents=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(trained.path / file, folder / run)
    return folder


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize("page", sorted({page for page, _ in ALL} - {SESSION}), ids=name)
def test_commands_can_be_typed(page, runs):
    for block in blocks(page.read_text()):
        if block.language not in ("sh", "console"):
            continue
        for line, _ in commands(block):
            words = jgpt_words(line)
            if words is None:
                check_other_command(line)
            else:
                worked(*words, cwd=runs)


def commands_within_texts() -> list[tuple[Path, str]]:
    """Commands with options that stand in a sentence, each once for a page."""
    found = set()
    for path in [*PAGES, *(ROOT / "notebooks").glob("*.ipynb")]:
        for line in re.findall(r"`(jgpt [a-z]+ [^`\\]*--[a-z][^`\\]*)`", path.read_text()):
            found.add((path, line))
    return sorted(found)


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    ("page", "line"), commands_within_texts(), ids=lambda part: str(part)[-30:]
)
def test_commands_within_a_text_have_options_that_exist(page, line, runs):
    """What is left out, as a value or --out, may be refused."""
    words = jgpt_words(line)
    assert words is not None

    finished = command(*words, cwd=runs)

    assert "unknown argument" not in finished.stderr, finished.stderr


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
    documents = ""
    for line in notes.splitlines():
        documents += json.dumps({"body": line}) + "\n"
    (folder / "lines.jsonl").write_text(documents)
    np.save(folder / "notes.npy", np.tile([60, 62, 64, 65, 67, 69, 71, 72], 60))
    (folder / "other.txt").write_text("Yours as men can see\n" * 9)
    (folder / "other.csv").write_text('line,act\n"Yours as men",3\n')
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


def pages_with_commands_to_run() -> list[Path]:
    pages = {page for page, block in ALL if page in RUN or block.language == "console"}
    return sorted(pages - {SESSION})


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands_to_run(), ids=name)
def test_commands_give_what_the_page_shows(page, place, trained):
    copy_runs(page, trained.path, place, COMMANDS_MAKE)
    languages = ["console"]
    if page in RUN:
        languages.append("sh")
    # all steps take a minute
    text = re.sub("--steps [16]00 ", "--steps 20 --eval-tokens 512 ", page.read_text())
    for block in blocks(text):
        if block.language not in languages:
            continue
        for line, shown in commands(block):
            words = jgpt_words(line)
            if words is None:
                continue
            finished = command(*words, cwd=place)
            said = finished.stdout + finished.stderr
            expected_code = 2 if "jgpt: " in shown else 0
            assert finished.code == expected_code, said
            if block.language == "console":
                assert SAME(shown, said), f"{line}\n{said}"


@pytest.fixture
def shell(tmp_path, monkeypatch) -> Iterator[Callable[[str], str]]:
    """Types a line, and gives what is printed.

    Commands run in one process with the page's two devices, and one in the background in another.
    """
    program = tmp_path / "bin" / "jgpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m jgpt "$@"\n')
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
def test_a_page_is_a_session(shell, tmp_path):
    names: dict[str, Any] = {"__name__": "__main__"}
    metrics_of_killed = tmp_path / "runs" / "squared_relu-5" / "metrics.jsonl"
    text = SESSION.read_text()  # with two of its five seeds, and without samples
    for whole, part in (
        *((" 2 3 4", ""), ("range(1, 6)", "(1, 5)"), ("(5, 4)", "(2, 4)")),
        ("--eval-tokens 4096", "--eval-tokens 512 --sample-tokens 0"),
    ):
        assert whole in text
        text = text.replace(whole, part)
    for block in blocks(text):
        if block.language == "python":
            with contextlib.chdir(tmp_path):
                said = run_python(block, names, name(SESSION))
            assert said == block.shown or SAME(block.shown, said), said
        if block.language not in ("sh", "console"):
            continue
        for line, shown in commands(block):
            said = shell(line)
            if shown:
                assert SAME(shown, said), f"{line}\n{said}"
            else:
                assert "jgpt: " not in said, f"{line}\n{said}"
            if "kill" in line:
                steps = metrics_of_killed.read_text().splitlines()
                assert len(steps) < 60
            if "--resume" in line:
                assert "resumed at step" in said

    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "rates.svg").stat().st_size > 10_000


# --- the checks themselves -----------------------------------------------------------------------


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


# --- resuming ---------------------------------------------------------------------------------


def test_the_page_of_training_lists_the_options_that_may_differ():
    page = (ROOT / "docs" / "train.md").read_text()
    _, _, table = page.partition("**Other options.**")
    table, _, _ = table.partition("**A NaN.**")
    listed = set(re.findall(r"`--([\w-]+)`", table))
    fields = {name.rpartition(".")[2] for name in (*MAY_DIFFER, *MAY_BE_LOWERED)}

    assert listed == {name.replace("_", "-") for name in fields - {"vocab_size"}}
