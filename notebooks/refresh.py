"""Execute lessons from top to bottom, each in a fresh process, and keep what they give.

`make notebooks` runs this on all of them; names of notebooks choose some.
"""

import base64
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # the package that lies beside the notebooks, whichever is installed
    client.execute(env={"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(FOLDER.parent)})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def save_pictures(notebook: nbformat.NotebookNode) -> None:
    """Write the pictures that the README shows: those of cells that name one."""
    for cell in notebook.cells:
        if name := cell.metadata.get("picture"):
            picture = next(output.data["image/png"] for output in cell.outputs if "data" in output)
            (FOLDER / f"{name}.png").write_bytes(base64.b64decode(picture))


def main() -> None:
    """Refresh the notebooks named, or all."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for path in chosen:
        start = time.perf_counter()
        notebook = execute(path)
        nbformat.write(notebook, path)
        save_pictures(notebook)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
