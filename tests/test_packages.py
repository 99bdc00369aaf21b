"""What the source archive and the wheel contain."""

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
