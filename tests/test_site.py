"""The site is whole: it builds without a warning, and no link is broken."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import jgpt
from jgpt.words import LEGEND
from tests.browser import CHROMIUM, browser
from tests.page.test_page import STARTED
from tests.test_documents import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("sphinx"), reason="`make docs` installs Sphinx"),
]


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its = dict(attrs)
        self.anchors |= {its.get("id") or ""}
        for name in ("href", "src"):
            if tag in ("a", "link", "img", "script") and its.get(name):
                self.links.append(its[name] or "")


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "--fail-on-warning", "--keep-going", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What `make docs` has built, if nothing was written since; else built anew."""
    out = ROOT / "site"
    sources = [ROOT / "README.md"]
    for folder in ("docs", "notebooks", "jgpt"):
        sources += [path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]
    written = max(path.stat().st_mtime for path in sources)
    if not (built := out / "index.html").exists() or built.stat().st_mtime < written:
        out = tmp_path_factory.mktemp("site")
        done = build(ROOT, out)
        assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.fixture(scope="module")
def site(folder) -> dict[Path, Page]:
    return {path.relative_to(folder): Page(path) for path in folder.rglob("*.html")}


def test_each_public_name_and_dimension_is_in_the_reference(site):
    anchors = site[Path("docs/api.html")].anchors
    assert {f"jgpt.{name}" for name in jgpt.__all__} <= anchors
    assert {f"term-{name}" for name in LEGEND} <= anchors


def test_links_lead_somewhere(site):
    """Sphinx checks the links that it writes, and not those in HTML of a page's own."""
    checked = 0
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name in ("genindex.html", "search.html"):
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            name = Path(os.path.normpath(target))
            if name in site:
                checked += 1
                assert not parts.fragment or unquote(parts.fragment) in site[name].anchors, link
    assert checked > 500


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_front_page_has_a_page_to_play_with(folder, site):
    for name, source in (("index", "playground.html"), ("docs/look", "../playground.html")):
        assert f'src="{source}"' in (folder / f"{name}.html").read_text()
        assert source in site[Path(f"{name}.html")].links  # in a window of its own
    path = folder / "playground.html"
    assert path.stat().st_size < 2_000_000
    lesson = "notebooks/03_one_head.html"
    assert lesson in site[Path("playground.html")].links

    with browser() as page:
        page.open(path)
        page.run(STARTED)
        text = page.run("data.text")
        before = page.run("data.log_probabilities.at(-1).length")
        page.run("change({ prompt: data.text.slice(0, 5) })")
        after = page.run("data.log_probabilities.at(-1).length")
        errors = page.errors

    assert before == len(text) > 20
    assert after == 5
    assert errors == []
