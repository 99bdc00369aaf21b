"""The page of the site that holds a model: one is trained for seconds while the site is built.

python docs/playground.py site/playground.html
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jgpt
from jgpt.data.sources import has_shakespeare
from jgpt.page.html import model_page
from jgpt.page.opening import opening_text
from jgpt.presets import preset

NO_LESSON = '<span id="lesson"></span>'
LESSON = """<span id="lesson"><a href="notebooks/03_one_head.html" target="_top">Lesson 3</a> builds
    the part of it that looks back.</span>"""


def write_playground(path: Path) -> None:
    """Train a small GPT, on Shakespeare if it is at hand, and write the page that holds it."""
    modern = preset("modern")
    data = "pydocs"  # nothing is downloaded to build the site
    if has_shakespeare():
        data = "shakespeare"
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            modern,
            # Half of the preset's layers and block: the page is opened on phones, too.
            model=replace(modern.model, num_layers=2, block_size=64),
            dataset=jgpt.DataConfig(data=(data,)),
            steps=500,
            eval_interval=500,
            sample_tokens=0,
            out=f"{folder}/run",
        )
        run = jgpt.fit(config, progress=None)
        prompt = opening_text(run.path, config, run.tokenizer, run.model.block_size)
        page = model_page(run.model, run.tokenizer, "a small GPT", prompt)
    # Only on the site does a page know where the lessons are.
    path.write_text(page.replace(NO_LESSON, LESSON), encoding="utf-8")


if __name__ == "__main__":
    write_playground(Path(sys.argv[1]))
