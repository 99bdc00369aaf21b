"""`jgpt shapes --source --follow`: shown again at each save, each time from a new process."""

import inspect
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from jgpt.cli import follow
from jgpt.cli.commands.shapes import shapes
from jgpt.cli.follow import FollowedFiles
from jgpt.cli.options import parse, words_of
from tests.cli.screen import in_a_terminal
from tests.commands import jgpt as command
from tests.commands import on_terminal, refused

FAKE = """
import json, sys, time
line = sys.stdin.readline()
if not line:
    sys.exit()
words = json.loads(line)["words"]
assert words[:2] == ["shapes", "tiny"] and "--follow" not in words, words
text = open("my_gpt.py").read()
if "loop" in text:
    time.sleep(60)
if "wrong" in text:
    sys.exit("jgpt: wrong")
print(json.dumps(text))
"""
"""Stands for the process that traces: it prints the file."""
FOLLOW = ("shapes", "tiny", "--model", "my_gpt.py:GPT", "--source", "--follow")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, and processes that begin fast."""
    monkeypatch.setattr(follow, "PROGRAM", (sys.executable, "-c", FAKE))
    monkeypatch.setattr(follow, "SECONDS_PER_LOOK", 0.01)
    (tmp_path / "my_gpt.py").write_text("first")
    return tmp_path


@pytest.fixture
def saves(monkeypatch) -> Callable[..., None]:
    """Sets what happens after each print; then comes Ctrl-C."""

    def set_actions(*actions: Callable[[], object]) -> None:
        left = list(actions)

        def wait(files: FollowedFiles) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()
            assert files.have_changed()

        monkeypatch.setattr(FollowedFiles, "wait", wait)

    return set_actions


def test_a_file_is_shown_again_at_each_save(place, saves):
    file = place / "my_gpt.py"
    saves(lambda: file.write_text("second"), lambda: file.write_text("wrong"), file.unlink)
    done = command(*FOLLOW, cwd=place)

    assert done.code == 130
    assert done.stdout == '"first"\n\n"second"\n'
    first, *_, last = done.stderr.splitlines()
    assert first == "jgpt: wrong"
    assert "No such file" in last


def test_each_print_is_one_line_of_json(place, saves):
    file = place / "my_gpt.py"
    saves(lambda: file.write_text("wrong"), lambda: file.write_text("third"))
    done = command(*FOLLOW, "--json", cwd=place)

    first, second, third = map(json.loads, done.stdout.splitlines())
    assert (first, third) == ("first", "third")
    assert second == {
        "functions": [],
        "error": {"message": "wrong", "path": None, "line": None},
        "reason": None,
        "note": None,
    }
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminal")
def test_a_terminal_is_cleared_before_each_print(place, saves):
    saves(lambda: (place / "my_gpt.py").write_text("second"))
    code, shown = on_terminal(80, *FOLLOW, cwd=place)

    assert code == 130
    prints = shown.split("\x1b[2J\x1b[H")
    assert [re.findall('"(.*?)"', part) for part in prints] == [[], ["first"], ["second"]]
    assert "following my_gpt.py; Ctrl-C ends" in prints[2]


def test_a_trace_without_an_end_is_ended(place, saves, monkeypatch):
    file = place / "my_gpt.py"
    file.write_text("loop")
    monkeypatch.setattr(follow, "SECONDS", 0.3)

    def save() -> None:
        monkeypatch.setattr(follow, "SECONDS", 60.0)
        file.write_text("second")

    saves(save)
    done = command(*FOLLOW, cwd=place)

    assert (done.code, done.stdout) == (130, '"second"\n')
    assert done.stderr == "jgpt: the trace took longer than 0.3 s and was ended\n"


def test_a_save_during_a_trace_begins_it_again(place, saves):
    file = place / "my_gpt.py"
    file.write_text("loop")
    saves()
    timer = threading.Timer(0.3, file.write_text, ["second"])
    timer.start()
    done = command(*FOLLOW, cwd=place)

    assert (done.code, done.stdout) == (130, '"second"\n')


def test_saves_deletions_and_new_imports_are_noticed(tmp_path):
    file = tmp_path / "model.py"
    part = tmp_path / "part.py"
    file.write_text("import part\n")
    files = FollowedFiles(file)
    assert not files.have_changed()

    def changes(act: Callable[[], object]) -> bool:
        act()
        changed = files.have_changed()
        assert not files.have_changed()
        return changed

    assert not changes(lambda: (tmp_path / "other.py").write_text(""))
    assert changes(lambda: part.write_text("def f(:\n"))  # imported, and can't be run
    assert changes(lambda: part.write_text("def f():\n"))
    (tmp_path / "saved").write_text("import part, more\n")
    assert changes(lambda: (tmp_path / "saved").replace(file))
    assert changes(lambda: (tmp_path / "more.py").write_text(""))
    assert changes(file.unlink)
    assert changes(lambda: part.write_text(""))
    assert changes(lambda: file.write_text("import part, more\n"))


def test_what_is_written_in_steps_is_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "model.py"
    file.write_text("first")
    files = FollowedFiles(file)
    steps = [lambda: None, file.unlink, lambda: file.write_text("x"), lambda: file.write_text("xy")]
    monkeypatch.setattr(follow.time, "sleep", lambda _: steps.pop(0)() if steps else None)
    files.wait()
    assert file.read_text() == "xy"


def test_words_are_those_that_were_typed():
    typed = ["tiny", "--model=m.py:GPT", "--batch=3", "--train", "--source", "--of=embed x"]
    defaults = {}
    for name, parameter in inspect.signature(shapes).parameters.items():
        defaults[name] = parameter.default
    values = defaults | parse(shapes, "shapes", typed)

    assert words_of(shapes, values) == typed

    typed = ["m.py:attend", "float32[b t 8]", "f32[8]", "--source"]
    values = defaults | parse(shapes, "shapes", typed)

    assert words_of(shapes, values) == typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "--follow"), "--follow shows --source again: give both"),
        (("tiny", "--source", "--follow"), "--follow needs a file of yours"),
        (("tiny", "--model", "no.py:GPT", "--source", "--follow"), "no.py doesn't exist"),
    ],
)
def test_what_can_t_be_followed_is_named(words, message):
    assert message in refused("shapes", *words)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such terminal")
def test_in_a_terminal_a_save_is_shown_and_ctrl_c_ends_all(tmp_path):
    file = tmp_path / "my_gpt.py"
    text = "import jgpt\n\n\nclass GPT(jgpt.GPT):\n    def logits(self, x):\n        y = x * 2\n"
    file.write_text(f"{text}        return super().logits(y)\n")
    words = ("tiny", "--model", f"{file}:GPT", "--source", "--of", "GPT.logits", "--follow")
    with in_a_terminal("shapes", *words) as (process, screen):
        shown = b""
        while b"Ctrl-C ends" not in shown:
            shown += os.read(screen, 4096)
        assert b"y: float32[b t 32]" in shown
        file.write_text(f"{text}        return y @ y\n")
        shown = b""
        while b"Ctrl-C ends" not in shown:
            shown += os.read(screen, 4096)
        assert re.search(rb"return y @ y +! y: float32\[b t 32\]", shown)
        assert b"jgpt: TypeError: dot_general" in shown
        time.sleep(0.3)
        os.write(screen, b"\x03")
        assert process.wait(30) == 130
        assert b"Traceback" not in os.read(screen, 4096)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
