"""Progress of training that also has the run's page written, by a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from jgpt.cli.console import ConsoleProgress
from jgpt.config import TrainConfig
from jgpt.data.dataset import Dataset
from jgpt.fields import Code
from jgpt.training.state import TrainState

PROMPT_TOKENS = 32
SECONDS_UNTIL_SAID = 1.0
"""The time in which the last page may come without a word about it."""
SECONDS_TO_END = 5.0
PROGRAM = "import gc; gc.disable(); from jgpt.pictures.training_page import main; main()"
"""Collections are off while the process imports, and until it has prepared the page: they took a
fifth of its time, which training wants."""


class PageProgress(ConsoleProgress):
    """Has the run's page written after each evaluation, until training ends.

    The process gets what processors training leaves idle, and never the accelerator. It ends when
    its standard input is closed, as the system does even for a trainer that was killed.
    """

    def __init__(self, console: Console, doing: str) -> None:
        super().__init__(console, doing)
        self._hearing: threading.Thread | None = None
        self._is_written = False
        self._is_left = False

    def __enter__(self) -> Self:
        """Start the process, which imports its modules while the data is read."""
        # the terminal's Ctrl-C is the trainer's; a session of its own would have its own share of
        # the processors
        process_group = 0
        if sys.platform == "win32":
            process_group = None
        self._page = subprocess.Popen(
            # -P: without it, a secrets.py in the working directory would be run
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            process_group=process_group,
        )
        if sys.platform == "linux":
            os.sched_setscheduler(self._page.pid, os.SCHED_IDLE, os.sched_param(0))
        elif sys.platform != "win32":
            os.setpriority(os.PRIO_PROCESS, self._page.pid, 19)
        return super().__enter__()

    def prepared(self, config: TrainConfig, dataset: Dataset) -> None:
        """Refuse a run of which there can be no page. Raises ValueError with the reason."""
        from jgpt.hardware import Platform
        from jgpt.nn.models import abstract_model
        from jgpt.nn.precision import for_platform
        from jgpt.pictures.page import require_computable
        from jgpt.pictures.program import Uncomputable
        from jgpt.refusal import Field, Message

        model = abstract_model(for_platform(config.model, Platform("cpu")))
        try:
            require_computable(model, dataset.tokenizer)
        except Uncomputable as error:
            raise ValueError(Message(f"{error}: leave out ", Field("page", True))) from None

    def started(self, config: TrainConfig, dataset: Dataset, state: TrainState, out: Path) -> None:
        """Have the run's page written, over the beginning of the validation split."""
        super().started(config, dataset, state, out)
        first_tokens = dataset.validation[: min(PROMPT_TOKENS, config.model.block_size)]
        prompt = dataset.tokenizer.decode(first_tokens)
        codes = []
        for make in (config.model.make, config.dataset.make):
            named = None
            if make is not None:
                named = Code.of(make).named
            codes.append(named)
        self._tell([str(out), prompt, *codes])
        # in a thread, for answers come when the page has imported JAX, and training goes on
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()

    def _tell(self, request: Any) -> None:
        """Send a line to the process. One that has ended has said why."""
        assert self._page.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._page.stdin, flush=True)

    def _hear(self) -> None:
        """Say where the page is once it is written, and why there won't be another one."""
        assert self._page.stdout is not None
        has_failed = False
        for line in self._page.stdout:
            answer = json.loads(line)
            if "failed" in answer:
                has_failed = True
                self.say(f"the page ended: {answer['failed']}")
            elif not self._is_written:
                self._is_written = True
                self.say(f"look inside: open {answer['written']} in a browser")
        code = self._page.wait()
        if code != 0 and not has_failed and not self._is_left:
            self.say(f"the page ended: its process exited with {code}")

    def __exit__(self, *error: object) -> None:
        """Wait for the last page, which Ctrl-C leaves out."""
        super().__exit__(*error)
        if self._hearing is None:  # training was refused
            self._page.kill()
        else:
            self._tell("end")
            with contextlib.suppress(KeyboardInterrupt):
                self._wait()
        self._is_left = True
        self._end()

    def _wait(self) -> None:
        try:
            self._page.wait(SECONDS_UNTIL_SAID)
        except subprocess.TimeoutExpired:
            self.say("writing the last page of the run (Ctrl-C leaves it out)")
            self._page.wait()

    def _end(self) -> None:
        """End the process: when its input is closed, it ends at once, but never while it writes."""
        assert self._page.stdin is not None
        assert self._page.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._page.stdin.close()
        try:
            self._page.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._page.kill()
            self._page.wait()
        if self._hearing is not None:
            self._hearing.join()
        self._page.stdout.close()
