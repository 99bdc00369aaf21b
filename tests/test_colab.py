"""What the lines of docs/colab.md change in the kernel of a notebook that has packages already."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_documents import ROOT

pytestmark = pytest.mark.slow
LINES = re.findall(r"`%pip install jgpt-\*\.whl \"(.*?)\"`", (ROOT / "docs/colab.md").read_text())
IMAGE = {
    "jax": "0.7.2",
    "jaxlib": "0.7.2",
    "jax-cuda12-plugin": "0.7.2",
    "jax-cuda12-pjrt": "0.7.2",
    "numpy": "2.1.3",
    "flax": "0.11.2",
    "matplotlib": "3.10.0",
    "rich": "13.9.4",
}
"""Of Colab's image of August 2026. The plugins are those of its GPU."""


def pip(python: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run"]
    return subprocess.run(
        [*command, "--report", "-", "--quiet", *arguments], capture_output=True, text=True
    )


@functools.cache
def kernel_python() -> str:
    """The image's Python, or the one of this process: an older one has no newer JAX."""
    found = shutil.which("python3.13")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    if sys.version_info < (3, 12):
        pytest.skip("there is no python3.13")
    return sys.executable


@pytest.fixture
def kernel(tmp_path) -> Path:
    """The Python of an environment that has the image's packages by name alone."""
    command = [kernel_python(), "-m", "venv", "--without-pip", str(tmp_path / "kernel")]
    subprocess.run(command, check=True)
    [packages] = (tmp_path / "kernel").glob("lib/python*/site-packages")
    for name, version in IMAGE.items():
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(facts)
    python = tmp_path / "kernel" / "bin" / "python"
    if pip(python, "--no-deps", "filelock").returncode != 0:
        pytest.skip("there is no package index")
    return python


def moved(kernel: Path, *wanted: str) -> dict[str, Any]:
    """The image's packages that are replaced, with their new versions."""
    resolved = pip(kernel, str(ROOT), *wanted)
    assert resolved.returncode == 0, resolved.stderr
    packages = [each["metadata"] for each in json.loads(resolved.stdout)["install"]]
    return {each["name"]: each["version"] for each in packages if each["name"] in IMAGE}


@pytest.mark.parametrize("jax", LINES)
def test_a_line_of_the_page_keeps_the_kernel_s_numpy(jax, kernel):
    found = moved(kernel, jax)
    replaced = {"jax", "jaxlib", "flax", "rich"}
    if "cuda12" in jax:
        replaced |= {"jax-cuda12-plugin", "jax-cuda12-pjrt"}
    assert set(found) == replaced  # and neither numpy nor matplotlib
    of_jax = {version for name, version in found.items() if name.startswith("jax")}
    assert len(of_jax) == 1  # JAX ignores a plugin of another version


def test_the_page_has_a_line_for_each_machine():
    assert LINES == ["jax<0.11", "jax[cuda12]<0.11", "jax[tpu]<0.11"]


def test_without_the_limit_numpy_is_replaced(kernel):
    assert "numpy" in moved(kernel)  # the control


def test_each_lesson_begins_with_the_lines():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        for jax in LINES:
            assert f'"{jax}"' in first, path.name
