"""The site is whole: shapes in its signatures, lessons as executed, no link broken."""

import inspect
import os
import subprocess
import sys
import typing
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from jaxtyping import AbstractArray

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
    """Text, signatures with their links, pictures with alternative text, and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = self.signature = ""
        self.signatures: dict[str, str] = {}
        self.linked: dict[str, set[str]] = {}
        self.links: list[str] = []
        self.pictures: dict[str, str] = {}
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its = dict(attrs)
        self.anchors |= {its.get("id") or ""}
        if tag in ("a", "link") and its.get("href"):
            self.links.append(its["href"] or "")
            self.linked.setdefault(self.signature, set()).add(its["href"] or "")
        if tag in ("img", "script") and its.get("src"):
            self.links.append(its["src"] or "")
        if tag == "img":
            self.pictures[its["src"] or ""] = its.get("alt") or ""
        if tag == "dt":
            self.signature = its.get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "dt":
            self.signature = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.signature:
            self.signatures[self.signature] = self.signatures.get(self.signature, "") + data


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


def arrays(hint: object) -> list[str]:
    """The dimension strings of the arrays in an annotation."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return [hint.dim_str]
    return [dims for part in typing.get_args(hint) for dims in arrays(part)]


def public_calls() -> dict[str, object]:
    found = {}
    for name in set(jgpt.__all__) - {"PRESETS"}:
        thing = getattr(jgpt, name)
        if inspect.isclass(thing):
            for method, it in vars(thing).items():
                if inspect.isfunction(it) and (method == "__call__" or method[0] != "_"):
                    found[f"jgpt.{name}.{method}"] = it
        else:
            found[f"jgpt.{name}"] = thing
    return found


def test_signatures_have_their_shapes_and_link_them(site):
    page = site[Path("docs/api.html")]
    assert {f"jgpt.{name}" for name in jgpt.__all__} <= page.anchors
    shapes = links = 0
    for name, function in public_calls().items():
        for hint in typing.get_type_hints(function).values():
            for dimensions in arrays(hint):
                shapes += 1
                assert f'"{dimensions}"' in page.signatures[name], name
                for dimension in set(dimensions.replace("*", " ").split()) & set(LEGEND):
                    links += 1
                    assert f"#term-{dimension}" in page.linked[name]
    assert min(shapes, links) > 40
    assert "#term-embed_dim" in page.linked["jgpt.Head.__call__"]
    assert {f"term-{name}" for name in LEGEND} <= page.anchors
    assert all(meaning.replace("`", "") in page.text for meaning in LEGEND.values())


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
