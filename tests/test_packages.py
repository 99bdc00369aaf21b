"""What the source archive and the wheel contain."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from tests.test_documents import ROOT

PLACEHOLDER = "OWNER" + "/jgpt"  # in two parts: this file is searched, too


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both packages, as `python -m build` writes them."""
    if not find_spec("hatchling"):
        pytest.skip("the extra `test` installs hatchling, which builds the packages")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    return zipfile.ZipFile(path)


def files_of_the_package() -> set[str]:
    """The files under `jgpt/` that git tracks, or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "jgpt"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("git lists the package's files")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_a_wheel_has_the_package_and_nothing_else(wheel):
    names = set(wheel.namelist())
    metadata = {name for name in names if name.startswith("jgpt-")}
    assert names - metadata == files_of_the_package()
    assert {PurePosixPath(name).name for name in metadata} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "LICENSE",
    }


def test_a_source_archive_has_what_a_wheel_is_built_from(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = [
            PurePosixPath(name).relative_to(path.name[: -len(".tar.gz")])
            for name in archive.getnames()
        ]
    package = {str(name) for name in inside if name.parts[0] == "jgpt"}
    others = {str(name) for name in inside if name.parts[0] != "jgpt"}
    assert package == files_of_the_package()
    assert others == {
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
        "pyproject.toml",
    }


def test_no_link_leads_to_an_address_that_is_still_to_be_filled_in():
    command = ["git", "grep", "--ignore-case", "--files-with-matches", PLACEHOLDER]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode not in (0, 1):  # 1: nothing was found
        pytest.skip("git searches the tracked files")
    assert found.stdout == ""


BESIDE_ANOTHER_LIBRARY = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, TypeCheckError

from jgpt.shapes import source
from jgpt.shapes.calls import watching
from jgpt.shapes.edits import capture
from jgpt.shapes.contract import typed
from jgpt.shapes.trace import shape_trace

if sys.argv[1] == "equinox":
    import equinox
    Module = equinox.Module
else:
    from flax import linen
    Module = linen.Module


class Doubled(Module):
    features: int

    @typed
    def twice(
        self, x: Float[Array, "time {self.features}"]
    ) -> Float[Array, "time 2*{self.features}"]:
        return jnp.concatenate([x, x], axis=-1)

    def __call__(self, x):
        y = self.twice(x)
        return y[1:]


def model(x):
    return Doubled(3)(x) if sys.argv[1] == "equinox" else Doubled(3).apply({}, x)


assert Path(source.__file__).is_relative_to(sys.argv[2])
assert not [name for name in sys.modules if name.startswith("jgpt.nn")], "the model is imported"
x = jnp.ones((5, 3))
try:
    model(jnp.ones((5, 4)))
except TypeCheckError as error:
    print(str(error).splitlines()[-1])
calls = []
with watching(calls.append):
    model(x)
print([call.function.__name__ for call in calls])
print(capture(model, "twice")(x)["twice"].shape)
print(shape_trace(model, x))
print(source.annotated_source(model, "float32[t 3]", of="__call__"))
"""


SAID = """\
Reason: the dimension size 4 does not equal the existing value of {self.features}=3.
['twice']
(5, 6)
twice(x: float32[time=5 features=3])
result  float32[time=5 2*features=6]
program.py: Doubled.__call__
    def __call__(self, x): | x: float32[t 3]
        y = self.twice(x)  | y: float32[t 6]
        return y[1:]       | return: float32[t-1 6]
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "linen"])
def test_the_shapes_of_a_wheel_serve_another_library(built, library, tmp_path):
    """Without the repository: the contract and what is drawn need nothing of jgpt's models."""
    [path] = built.glob("*.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(target)
    program = tmp_path / "program.py"
    program.write_text(BESIDE_ANOTHER_LIBRARY)
    command = [sys.executable, "-P", str(program), library, str(target)]
    environment = os.environ | {"PYTHONPATH": str(target)}

    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )

    assert (done.returncode, done.stdout) == (0, SAID), done.stderr
