"""A command that is run again whenever a Python file is saved, each time in a new process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jgpt.cli.terminal import open_console, spinner
from jgpt.fields import imported_beside

SECONDS = 60.0
"""The limit of one run: a file may have a loop without an end."""
SECONDS_PER_LOOK = 0.1
"""Between two looks at the files. A look at a few files takes microseconds."""
PROGRAM = [sys.executable, "-P", "-m", "jgpt.cli.waiting"]
"""-P: without it, a secrets.py in the working directory would be run."""


class Finished(NamedTuple):
    """What a run has printed."""

    output: str
    errors: str


class FollowedFiles:
    """A Python file and the files in its folder that it imports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {path}
        self._seen: dict[Path, Any] = {}
        self._folder: Any = None
        self.have_changed()

    def have_changed(self) -> bool:
        """Return whether a file was saved, deleted or restored since this was last called."""
        before = self._seen
        self._seen = self._look()
        return self._seen != before

    def wait(self) -> None:
        """Return when the files stay the same after a change.

        An editor may write a file in two steps, or delete it before it renames another.
        """
        while not self.have_changed():
            time.sleep(SECONDS_PER_LOOK)
        self.settle()

    def settle(self) -> None:
        """Return when two looks find the same."""
        while True:
            time.sleep(SECONDS_PER_LOOK)
            if not self.have_changed():
                return

    def _look(self) -> dict[Path, Any]:
        seen = {}
        for file in self._files:
            seen[file] = _stamp(file)
        folder = _stamp(self.path.parent)
        # A new file may be one that an import has waited for. A file that isn't imported any more
        # stays, since a syntax error hides all imports.
        if seen != self._seen or folder != self._folder:
            self._folder = folder
            self._files.update(imported_beside(self.path))
            for file in self._files:
                seen.setdefault(file, _stamp(file))
        return seen


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is saved, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class WaitingProcess:
    """A process that imports JAX, and then waits for the words of one command.

    With it, a run begins at once: the import takes as long as many a trace.
    """

    def __init__(self) -> None:
        # Files and not pipes: whatever a user's code starts could keep a pipe open.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # The terminal's Ctrl-C is for the parent alone, which ends this process.
        process_group = 0
        if sys.platform == "win32":
            process_group = None
        self._process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            # Nothing is computed, and an accelerator's memory would be taken from others.
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            process_group=process_group,
        )

    def begin(self, words: Sequence[str], environment: dict[str, str]) -> None:
        """Run a command."""
        line = json.dumps({"words": list(words), "environment": environment}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended says why
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def is_running(self) -> bool:
        """Return whether the command has not ended."""
        return self._process.poll() is None

    def printed(self) -> Finished:
        """Return what the command has printed, or how it was ended."""
        output = _read(self._output)
        errors = _read(self._errors)
        code = self._process.returncode
        if code is not None and code < 0:
            errors += f"jgpt: the process was ended by {signal.Signals(-code).name}\n"
        return Finished(output, errors)

    def end(self) -> None:
        """End the process, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._output.close()
        self._errors.close()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def follow(path: Path, words: Sequence[str], *, is_json: bool) -> NoReturn:
    """Run a command now, and again whenever a file or what it imports is saved.

    A terminal is cleared before each print. With `is_json`, each print is one line. It ends by
    KeyboardInterrupt.
    """
    console = open_console()
    files = FollowedFiles(path)
    process = WaitingProcess()
    has_printed = False
    try:
        while True:
            with spinner(open_console(stderr=True), "tracing"):
                finished = _run(process, words, files, console)
            process.end()
            process = WaitingProcess()
            if finished is None:
                files.settle()
                continue
            if is_json:
                print(_document(finished), flush=True)
            else:
                # Where nothing is cleared, an empty line is between two prints.
                if has_printed and finished.output and not console.is_terminal:
                    print()
                _show(finished, path, console)
                has_printed = has_printed or bool(finished.output)
            files.wait()
    finally:
        process.end()


def _run(
    process: WaitingProcess, words: Sequence[str], files: FollowedFiles, console: Any
) -> Finished | None:
    """Run a command. Return None if a file was saved meanwhile: what it prints is outdated."""
    end = time.monotonic() + SECONDS
    process.begin(words, _environment(console))
    while process.is_running():
        time.sleep(SECONDS_PER_LOOK)
        if files.have_changed():
            return None
        if time.monotonic() > end:
            message = f"jgpt: the trace took longer than {SECONDS:g} s and was ended\n"
            return Finished("", message)
    return process.printed()


def _environment(console: Any) -> dict[str, str]:
    """Return the variables with which a command prints into a file as it would on the terminal."""
    if not console.is_terminal or console.is_dumb_terminal:
        return {}
    size = shutil.get_terminal_size()
    return {"FORCE_COLOR": "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _show(finished: Finished, path: Path, console: Any) -> None:
    """Print what a command has printed, on a cleared terminal."""
    if console.is_terminal:
        console.clear()
    # Not by the console, which would wrap it again.
    console.file.write(finished.output)
    console.file.flush()
    print(finished.errors, end="", file=sys.stderr, flush=True)
    if console.is_terminal:
        print(f"\nfollowing {path.name}; Ctrl-C ends", flush=True)


def _document(finished: Finished) -> str:
    """Return the JSON that a command has printed, or its error as JSON."""
    lines = finished.output.strip().splitlines()
    if lines:
        with contextlib.suppress(ValueError):
            json.loads(lines[-1])
            return lines[-1]
    errors = finished.errors.strip().splitlines() or ["the trace ended without a result"]
    message = errors[-1].removeprefix("jgpt: ")
    error = {"message": message, "path": None, "line": None}
    return json.dumps({"functions": [], "error": error, "reason": None, "note": None})
