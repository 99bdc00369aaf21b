"""Progress of training that also serves the run's page, from a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Self

from rich.console import Console

from jgpt.cli.console import ConsoleProgress
from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.fields import Code
from jgpt.training.state import TrainState

PROMPT_TOKENS = 32


class LiveProgress(ConsoleProgress):
    """Serves the page from the first step until training ends.

    The process gets what processors training leaves idle, and never the accelerator. It ends when
    its standard input is closed, as the system does even for a trainer that was killed.
    """

    def __init__(self, console: Console, doing: str, *, browser: bool) -> None:
        super().__init__(console, doing)
        self._browser = browser

    def __enter__(self) -> Self:
        """Start the process, which imports its modules while the data is read."""
        # the terminal's Ctrl-C is the trainer's; a session of its own would have its own share of
        # the processors
        process_group = 0
        if sys.platform == "win32":
            process_group = None
        self._page = subprocess.Popen(
            # -P: without it, a secrets.py in the working directory would be run
            [sys.executable, "-P", "-m", "jgpt.pictures.live"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            process_group=process_group,
        )
        if sys.platform == "linux":
            os.sched_setscheduler(self._page.pid, os.SCHED_IDLE, os.sched_param(0))
        elif sys.platform != "win32":
            os.setpriority(os.PRIO_PROCESS, self._page.pid, 19)
        return super().__enter__()

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Serve the run, over the beginning of the validation split."""
        super().started(config, dataset, state, out)
        first_tokens = dataset.validation[: min(PROMPT_TOKENS, config.model.block_size)]
        prompt = dataset.tokenizer.decode(first_tokens)
        codes = []
        for make in (config.model.make, config.dataset.make):
            named = None
            if make is not None:
                named = Code.of(make).named
            codes.append(named)
        assert self._page.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended says why
            print(json.dumps([str(out), prompt, *codes]), file=self._page.stdin, flush=True)
        # in a thread, for the address comes when the page has imported JAX, and training goes on
        threading.Thread(target=self._announce, args=(self._page,), daemon=True).start()

    def _announce(self, page: "subprocess.Popen[str]") -> None:
        """Say the page's address when it has one, and its last words if it ends by an error."""
        assert page.stdout is not None
        assert page.stderr is not None
        address = page.stdout.readline().strip()  # empty if the process has ended
        if address:
            self.say(f"look inside at {address}")
            if self._browser:
                webbrowser.open(address)
        lines = page.stderr.read().splitlines()  # waits for the end of the process
        # below 0 it was killed by a signal, as at the end of training
        if lines and lines[-1] and page.wait() > 0:
            self.say(f"the page ended: {lines[-1]}")

    def __exit__(self, *error: object) -> None:
        """End the page with training."""
        super().__exit__(*error)
        self._page.kill()
        self._page.wait()
