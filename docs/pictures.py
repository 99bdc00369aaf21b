"""The pictures of the README and of docs/look.md: `make pictures`, which needs a Chromium.

docs/pictures/look*.png show the page of a model that is trained for a minute.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jgpt
from jgpt.page.html import model_page

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
TRAINING = ("train", "--data", "shakespeare", "--steps", "600", "--out", "runs/will")
LINE = "To be, or not to be, that is the question"

sys.path.insert(0, str(ROOT))
from tests.browser import Page, browser  # noqa: E402


def _wait(page: Page, condition: str) -> None:
    until = time.monotonic() + 120
    while not page.run(f"Boolean({condition})"):
        if time.monotonic() > until:
            raise TimeoutError(f"the page didn't come to {condition}")
        time.sleep(0.1)


def draw_look(run: Path) -> None:
    """Draw the run's page, and an answer that is found in it by clicking."""

    def clicked(page: Page, element: str) -> None:
        page.run(f"{element}.scrollIntoView({{ block: 'center' }})")
        middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        page.click(*page.run(f"{middle}({element}.getBoundingClientRect())"))

    def picture(page: Page, section: str, name: str) -> None:
        page.run("hideTip()")
        page.run(f"{section}.scrollIntoView()")
        (PICTURES / f"{name}.png").write_bytes(page.screenshot(whole=False))

    model, tokenizer, _ = jgpt.load(run)
    written = run / "look.html"
    written.write_text(model_page(model, tokenizer, run.name, LINE), encoding="utf-8")
    with browser() as page:
        page.open(written)
        _wait(page, "data && !asking")
        clicked(page, "textSpans[30]")
        clicked(page, "headButtons[heads + 2]")
        picture(page, "document.body", "look")
        page.run(
            "choose({ key: Array.from({ length: 31 }, (_, key) => weight(1, 2, 30, key))"
            ".reduce((best, w, key, all) => w > all[best] ? key : best, 0) })"
        )
        picture(page, "$('map').closest('section')", "look-letters")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "jgpt", *TRAINING], cwd=folder, check=True)
        draw_look(Path(folder, "runs/will"))


if __name__ == "__main__":
    main()
