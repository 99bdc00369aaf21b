"""`jgpt chat` in a pipe and on a terminal."""

import os
import select

import pytest

from tests.cli.screen import in_a_terminal
from tests.generation.test_chat import chat_run

GREEDY = ("--temperature", "0", "--max-new-tokens")


@pytest.mark.slow
def test_a_terminal_edits_a_line_and_ctrl_c_ends_an_answer_alone(tmp_path):
    run = chat_run(tmp_path / "run", block_size=4096)
    with in_a_terminal("chat", run, *GREEDY, 3000) as (process, screen):
        shown = b""

        def until(text: bytes) -> bytes:
            """What is shown up to a text."""
            nonlocal shown
            while text not in shown:
                ready, _, _ = select.select([screen], [], [], 60)
                assert ready, f"no {text!r} in {shown[-999:]!r}"
                shown += os.read(screen, 4096)
            before, _, shown = shown.partition(text)
            return before

        assert b"Ctrl-C stops an answer" in until(b"> ")
        os.write(screen, b"helo\x1b[Dl\r")  # the cursor left, and a letter put in
        until(b"!!!!!")
        os.write(screen, b"\x03")
        assert until(b"> ").count(b"!") < 2000
        os.write(screen, b"\x1b[A")  # the line before
        until(b"hello")
        for _ in range(60):  # Python hears a signal at the prompt only while it waits for a key
            os.write(screen, b"\x03")
            if select.select([screen], [], [], 1)[0]:
                break
        assert b"Traceback" not in until(b"> ")
        os.write(screen, b"\x04")
        assert process.wait(60) == 0
    os.close(screen)
