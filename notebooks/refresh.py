"""Execute lessons, each in a fresh process, and save the outputs.

`make notebooks` runs this on all lessons; arguments choose some by path. Each
runs in a folder of its own, in which an exercise may save a part. The
alternative text of a picture comes from the metadata of the cell, as MyST-NB
has it: `{"mystnb": {"image": {"alt": "..."}}}`.

A page of `jgpt.look` holds a model. What is saved of it is a picture, which
Chromium takes, of the part that the metadata names: `{"page": "attention"}`.
"""

import base64
import html
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

FOLDER = Path(__file__).resolve().parent
NBCONVERT = [
    *(sys.executable, "-m", "nbconvert", "--execute"),
    *("--to", "notebook", "--inplace"),
    "--ExecutePreprocessor.record_timing=False",
    "--ExecutePreprocessor.startup_timeout=300",  # beside other tests
    "--ExecutePreprocessor.timeout=600",  # of a cell
]


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. Raises RuntimeError if a cell stops.

    It runs by `jupyter nbconvert --execute`, in a folder with what lies beside
    it here, and no parts of another run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "notebooks")
        folder.mkdir()
        for beside in (*FOLDER.glob("*.py"), FOLDER / "docstrings_model"):
            if not beside.name.startswith("my_"):
                (folder / beside.name).symlink_to(beside)
        benchmarks = FOLDER.parent / "benchmarks"  # some lessons read records
        Path(temporary, "benchmarks").symlink_to(benchmarks)
        copy = folder / path.name
        copy.write_bytes(path.read_bytes())
        # this checkout's package, not an installed one
        package = {"PYTHONPATH": str(FOLDER.parent)}
        done = subprocess.run(
            [*NBCONVERT, str(copy)],
            env={"JAX_PLATFORMS": "cpu", **os.environ, **package},
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{path.name} stops:\n{done.stderr}")
        notebook = nbformat.read(copy, as_version=4)
    code = (cell for cell in notebook.cells if cell.cell_type == "code")
    # nbconvert itself would join the pieces of a text before they are written
    joining = CoalesceStreamsPreprocessor()
    for count, cell in enumerate(code, 1):
        joining.preprocess_cell(cell, {}, count)
        cell.execution_count = count
        for output in cell.outputs:
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    image = cell.metadata.get("mystnb", {}).get("image", {})
                    output.metadata[kind] = {"alt": image.get("alt", "")}
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    return notebook


def replace_pages(notebook: nbformat.NotebookNode) -> None:
    """Put a picture in the place of each page."""
    for cell in notebook.cells:
        if "page" not in cell.metadata:
            continue
        (output,) = cell.outputs
        (source,) = re.findall('srcdoc="([^"]*)"', output.data["text/html"])
        page = html.unescape(source)
        kind = "image/png"
        picture = picture_of_page(page, cell.metadata["page"])
        output.data = {kind: base64.b64encode(picture).decode()}
        output.metadata[kind] = {"alt": cell.metadata["mystnb"]["image"]["alt"]}


def picture_of_page(page: str, part: str) -> bytes:
    """A PNG of a page, from the element with this id on."""
    sys.path.insert(0, str(FOLDER.parent))
    from tests.browser import TWO_FRAMES, browser

    with tempfile.TemporaryDirectory() as folder, browser() as shown:
        path = Path(folder, "page.html")
        path.write_text(page, encoding="utf-8")
        shown.open(path, 900)
        shown.run(COMPUTED)
        shown.run(f"$({part!r}).scrollIntoView()")
        shown.run(TWO_FRAMES)
        return shown.screenshot(whole=False)


COMPUTED = """
new Promise(done => {
  const look = () => {
    if ($("closeness").textContent) done(0);
    else setTimeout(look, 20);
  };
  look();
})
"""


def main() -> None:
    """Refresh the notebooks named, or all."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or sorted(
        FOLDER.glob("*.ipynb")
    )
    for path in chosen:
        start = time.perf_counter()
        notebook = execute(path)
        replace_pages(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
