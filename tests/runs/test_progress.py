"""What `fit` shows by default: a curve in a notebook, a line on a terminal, nothing elsewhere."""

import re
import sys
import types

import IPython
import pytest

from jgpt import fit
from jgpt.runs.progress import LineProgress, NotebookProgress, Progress, default_progress
from tests.runs.harness import BIGRAM, with_changes


@pytest.fixture
def kernel(monkeypatch):
    """As in a notebook."""
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=None))


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_notebook_draws_the_curve_in_one_place(small_run, tmp_path, monkeypatch, capsys):
    drawn = []
    shown = types.SimpleNamespace(update=lambda picture: drawn.append(("update", picture.data)))

    def display(picture, display_id):
        drawn.append(("display", picture.data, display_id))
        return shown

    def image(metrics, title, format):
        steps = [line["step"] for line in metrics if "validation_loss" in line]
        return f"<svg>{title} {format} {steps}</svg>".encode()

    monkeypatch.setattr("IPython.display.display", display)
    with monkeypatch.context() as patched:
        patched.setattr("jgpt.runs.plots.losses_image", image)
        fit(with_changes(small_run, **BIGRAM, out=str(tmp_path / "run")))
    assert drawn == [
        ("display", "<svg>run svg [4]</svg>", True),
        ("update", "<svg>run svg [4, 8]</svg>"),
        ("update", "<svg>run svg [4, 8, 11]</svg>"),
    ]
    assert len(re.findall(r"step \d+: validation loss", capsys.readouterr().err)) == 3
    progress = NotebookProgress()
    progress.started(small_run, None, None, 0, tmp_path / "run")  # type: ignore[arg-type]
    progress.evaluated(11, 1.5)
    assert drawn[-1][1].startswith("<svg ")
    assert drawn[-1][1].endswith("</svg>")


def test_a_terminal_has_a_line_and_a_file_nothing(monkeypatch):
    for is_terminal, kind in ((True, LineProgress), (False, Progress)):
        stream = types.SimpleNamespace(isatty=lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        assert type(default_progress()) is kind
    monkeypatch.setattr(sys, "stderr", None)
    assert type(default_progress()) is Progress
