"""The site is whole: shapes in its signatures, lessons as executed, no link broken."""

import html
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from jaxtyping import AbstractArray

import jgpt
from jgpt.words import LEGEND
from tests.browser import CHROMIUM, browser
from tests.page.test_page import STARTED
from tests.test_documents import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
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


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lessons_are_there_as_executed(path, site):
    page = site[Path("notebooks", f"{path.stem}.html")]
    outputs = [
        output
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    pictures = {
        data for o in outputs for kind, data in o.get("data", {}).items() if "image/" in kind
    }
    assert len(page.pictures) >= len(pictures)
    # of a picture without alternative text, Sphinx gives the file's name
    assert all(alt and not alt.endswith((".png", ".svg")) for alt in page.pictures.values())
    text = "".join(page.text.split())
    for output in outputs:
        if output.output_type == "stream":
            assert "".join(output.text.split()) in text


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


ANSWERS = {
    "does it run on my GPU": ["docs/scale", "#does-it-run-on-my-gpu"],
    "Mac, Windows": ["docs/troubleshooting", ""],
    "which preset": ["docs/presets", "#which-preset"],
    "how long does GPT-2 take": ["docs/scale", "#how-long-does-gpt-2-take"],
    "out of memory": ["docs/troubleshooting", "#out-of-memory"],
    "why not just jaxtyping with beartype": [
        "docs/shapes_in_your_code",
        "#why-not-just-jaxtyping-with-beartype",
    ],
    "a Hugging Face model with its tokenizer from Python": [
        "docs/weights",
        "#a-hugging-face-model-with-its-tokenizer-from-python",
    ],
    "evaluate from Python": ["docs/runs", "#train-load-and-evaluate-from-python"],
    "will the next version load my runs": ["docs/runs", "#will-the-next-version-load-my-runs"],
}


@pytest.mark.skipif(not shutil.which("node"), reason="the search of the site runs in node")
def test_the_search_finds_the_answer_first(folder):
    script = ROOT / "tests" / "site_search.js"
    done = subprocess.run(["node", script, folder, *ANSWERS], capture_output=True, text=True)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert dict(zip(ANSWERS, found, strict=True)) == ANSWERS


MODEL_LINES = {
    "scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)": "scores: float32[b 4 t t]",
    "separate = x.reshape(batch, time, heads, features // heads)": "separate: float32[b t 4 32]",
    "y = self.projection(merge_heads(heads))  # batch time embed_dim": "y: float32[b t 128]",
    "hidden = self.expansion(x)": "hidden: float32[b t 512]",
    "logits = project_to_tied_vocabulary(x, table, self.dtype, self.activation_dtype)": (
        "logits: float32[b t 65]"
    ),
    "loss, gradients, extra = gradients_of(setup, weights, arrays, batch, step_key)": (
        "loss: float32[]; gradients: 11 arrays"
    ),
    'x = x + attention(block, layer_norm(block["attention_norm"], x))': "x: float32[b t 64] x 2",
    'batch = rules.shard_by_name(batch, "batch", None)': "batch: int32[b t+1]",
}
"""Lines of each file that `docs/read_the_model.md` shows."""


def test_lines_of_the_model_have_their_shapes(folder, site):
    page = (folder / "docs" / "read_the_model.html").read_text()
    shown: dict[str, str] = {}
    for kind, code, margin in re.findall(
        r'<div class="(line[^"]*)"><code>(.*?)</code>(.*?)</div>', page
    ):
        text = html.unescape(re.sub("<.*?>", "", code)).strip()
        shown[text] = html.unescape(re.sub("<.*?>", "", margin))
        if text == "return mask & ~too_long_ago":  # there is no window
            assert kind == "line not-reached"
    lessons = [
        link for link in site[Path("docs/read_the_model.html")].links if "notebooks/" in link
    ]

    for line, shapes in MODEL_LINES.items():
        assert shown[line] == shapes
    assert "?" not in "".join(shown.values())
    assert len(set(lessons)) > 15
    for link in lessons:
        assert Path(os.path.normpath(Path("docs") / link)) in site


def test_faults_are_rejected(tmp_path):
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "README.md").write_text(
        "# Page\n\n[gone](docs/gone.md) [no such heading](docs/api.md#nowhere)\n\n"
        '<img src="https://elsewhere.org/picture.png">\n\n<a href="https://elsewhere.org">fine</a>\n'
    )
    (source / "docs" / "api.md").write_text(
        "# API\n\n```{eval-rst}\n.. py:function:: jgpt.attend(x)\n\n"
        ".. autofunction:: jgpt.causal_mask\n```\n"
    )
    built = build(source, tmp_path / "out")

    assert built.returncode == 1
    for fault in (
        "target not found: 'docs/gone.md'",
        "local id not found in doc 'docs/api': 'nowhere'",
        "README.html fetches https://elsewhere.org/picture.png",
        "jgpt.attend has no documentation",
        "jgpt.Head is not in the API reference",
    ):
        assert fault in built.stderr, built.stderr
    assert "jgpt.causal_mask is not" not in built.stderr
    assert built.stderr.count("fetches") == 2  # the README is the index too
