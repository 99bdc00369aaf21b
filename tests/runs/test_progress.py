"""What `fit` shows by default: a curve in a notebook, a line on a terminal, nothing elsewhere."""

import sys
import types

from jgpt.runs.progress import LineProgress, Progress, default_progress


def test_a_terminal_has_a_line_and_a_file_nothing(monkeypatch):
    for is_terminal, kind in ((True, LineProgress), (False, Progress)):
        stream = types.SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        assert type(default_progress()) is kind
    monkeypatch.setattr(sys, "stderr", None)
    assert type(default_progress()) is Progress
