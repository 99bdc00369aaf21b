"""Progress of training that also serves the run's page, from a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any, Self

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

    def __init__(self, *how: Any, browser: bool) -> None:
        super().__init__(*how)
        self._browser = browser

    def __enter__(self) -> Self:
        """Start the process, which imports its modules while the data is read."""
        self._page = page = subprocess.Popen(
            # -P: without it, a secrets.py in the working directory would be run
            [sys.executable, "-P", "-m", "jgpt.pictures.live"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            # the terminal's Ctrl-C is the trainer's; a session of its own would have its own share
            # of the processors
            process_group=None if sys.platform == "win32" else 0,
        )
        if sys.platform == "linux":
            os.sched_setscheduler(page.pid, os.SCHED_IDLE, os.sched_param(0))
        elif sys.platform != "win32":
            os.setpriority(os.PRIO_PROCESS, page.pid, 19)
        return super().__enter__()

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Serve the run, over the beginning of the validation split."""
        super().started(config, dataset, state, out)
        few = dataset.validation[: min(PROMPT_TOKENS, config.model.block_size)]
        make = config.model.make
        model = None if make is None else Code.of(make).named
        assert self._page.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended says why
            print(
                json.dumps([str(out), dataset.tokenizer.decode(few), model]),
                file=self._page.stdin,
                flush=True,
            )
        threading.Thread(target=self._announce, args=(self._page,), daemon=True).start()

    def _announce(self, page: "subprocess.Popen[str]") -> None:
        assert page.stdout is not None
        assert page.stderr is not None
        if address := page.stdout.readline().strip():
            self.say(f"look inside at {address}")
            if self._browser:
                webbrowser.open(address)
        *_, last = page.stderr.read().splitlines() or [""]
        if last and page.wait() > 0:
            self.say(f"the page ended: {last}")

    def __exit__(self, *error: object) -> None:
        """End the page with training."""
        super().__exit__(*error)
        self._page.kill()
        self._page.wait()
