"""Sphinx configuration of the site: `make docs`. The pages are the files of the repository.

With `--fail-on-warning` a broken link, a public name or a parameter without documentation and a
page that asks another host for something are errors.
"""

import dataclasses
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import (
    desc,
    desc_parameter,
    desc_sig_literal_string,
    desc_signature,
    pending_xref,
)
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.logging import getLogger

import jgpt
from jgpt.words import LEGEND

logger = getLogger(__name__)
HERE = Path(__file__).resolve().parent

project = html_title = "jgpt"
author = "the authors of jgpt"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "notebooks/*.ipynb", "benchmarks/*.md"]
include_patterns += ["notebooks/README.md"]
include_patterns += ["benchmarks/results/*.md", "tests/contract/README.md"]
CONTENTS = """
```{toctree}
:hidden:
:caption: Start here
docs/start
docs/from_nanogpt
docs/train
docs/troubleshooting
```
```{toctree}
:hidden:
:caption: How to
docs/change
docs/weights
docs/elsewhere
docs/colab
docs/scale
docs/look
```
```{toctree}
:hidden:
:caption: Shapes
docs/shapes
docs/read_the_model
```
```{toctree}
:hidden:
:glob:
:caption: Lessons
notebooks/*
docs/one_page_gpt
```
```{toctree}
:hidden:
:caption: Reference
docs/api
docs/design
docs/parity
docs/benchmarks
```
```{toctree}
:hidden:
:caption: The project
CONTRIBUTING
SECURITY
CHANGELOG
```
"""
suppress_warnings = ["toc.not_included"]  # reports are reached by links
nitpicky = True
# other projects' types are no links, nor are type variables
nitpick_ignore_regex = [
    ("py:.*", r"(?!jgpt).*|jgpt\.shapes\.contract\.(Parameters|Result|Record)|.*\bTexts")
]

html_theme = "furo"
html_copy_source = html_show_copyright = html_show_sphinx = False
html_static_path = html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search.js")
pygments_style, pygments_dark_style = "a11y-light", "monokai"

myst_heading_anchors = 3
nb_execution_mode = "off"  # lessons are shown as they were executed
nb_merge_streams = True

autodoc_default_options = {"members": True, "undoc-members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
default_role = "code"
smartquotes = False


class Legend(SphinxDirective):
    """`LEGEND` as a glossary."""

    def run(self) -> list[nodes.Node]:
        entries = "\n\n".join(f"{name}\n  {meaning}" for name, meaning in LEGEND.items())
        return self.parse_text_to_nodes(f"```{{glossary}}\n{entries}\n```")


class Annotated(SphinxDirective):
    """A file of the repository, with the shapes of each line in the margin."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if str(HERE) not in sys.path:
            sys.path.insert(0, str(HERE))
        # here, since only the page that needs it should wait for the model to be traced
        from annotated import annotated_file

        path = HERE.parent / self.arguments[0]
        self.env.note_dependency(str(path))
        folder = "../" * self.env.docname.count("/") + "notebooks"
        text = annotated_file(path, lambda lesson: f"{folder}/{lesson}.html")
        return [nodes.raw("", text, format="html")]


class LinkDimensions(SphinxPostTransform):
    """Link each dimension name in a signature to its meaning in the legend."""

    default_priority = 5  # before references are resolved

    def run(self) -> None:
        for signature in self.document.findall(desc_signature):
            for text in list(signature.findall(desc_sig_literal_string)):
                parts = re.split(r"({self\.\w+}|{.*?}|\w+)", text.astext().replace("'", '"'))
                text.replace_self(desc_sig_literal_string("", "", *map(self.linked, parts)))

    def linked(self, text: str) -> nodes.Node:
        # a module's num_heads and vocab_size are the sizes of `heads` and `vocab`
        name = re.sub(r"{self\.(?:num_)?(\w+?)(?:_size)?}", r"\1", text)
        if name not in LEGEND:
            return nodes.Text(text)
        return pending_xref(
            "",
            nodes.Text(text),
            refdomain="std",
            reftype="term",
            reftarget=name,
            refdoc=self.env.docname,
            refwarn=True,
        )


class UnlinkFolders(SphinxPostTransform):
    """Show links to folders of the repository, which have no page, as text."""

    default_priority = 5

    def run(self) -> None:
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(pending_xref)):
            if link["reftype"] == "myst" and (folder / link["reftarget"]).is_dir():
                link.replace_self(link.children)


def simplify_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, arguments: str, result: str
) -> tuple[str | None, str | None]:
    """Write types as in the source; omit the signature of a config, whose fields are listed."""
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing) and options.members:
        thing.__annotations__ = typing.get_type_hints(thing)  # without bounds
        return "", ""
    if getattr(thing, "_is_protocol", False):
        return "", ""
    return plain(arguments), plain(result)


def plain(text: str | None) -> str | None:
    for pattern, name in (
        (r"jax\w*\.[\w.]+\bArray\b", "Array"),
        (r"str \| type\[.*?\] \| \S*dtype \| \S*SupportsDType", "DTypeLike"),
        (r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1"),
        (r"<function <lambda>>", "..."),
    ):
        text = text and re.sub(pattern, name, text)
    return text


ENTRY = re.compile(r"^### \[([\w.]+)\].*?\n(.*?)(?=^##|^```{)", re.MULTILINE | re.DOTALL)
"""A public name with its parameters, example and lesson, as a hosting site shows it."""


def add_signature(found: re.Match[str]) -> str:
    """An entry of the API reference, under the signature and docstring that autodoc writes."""
    name, body = found.groups()
    kind = "class" if inspect.isclass(pkgutil.resolve_name(f"jgpt.{name}")) else "function"
    body = re.sub(r"\[(.+?)\]\(([\w./]+)\.\w+\)", r":doc:`\1 <\2>`", body)
    for language, code in re.findall(r"```(\w+)\n(.*?)```", body, re.DOTALL):
        block = f".. code-block:: {language}\n\n{textwrap.indent(code, '   ')}"
        body = body.replace(f"```{language}\n{code}```", block)
    body = textwrap.indent(body, "   ")
    return f"```{{eval-rst}}\n.. auto{kind}:: jgpt.{name}\n\n{body}\n```\n\n"


def require_documentation(app: Sphinx, page: nodes.document) -> None:
    """Warn of an undocumented name, and of a parameter that neither its text nor a table names."""
    tables = {
        it.astext() for table in page.findall(nodes.table) for it in table.findall(nodes.literal)
    }
    for thing in page.findall(desc):
        # a field that is only a name and a type may say enough
        if thing["objtype"] != "attribute" and not thing[-1].children:
            logger.warning("%s has no documentation", thing[0]["fullname"], location=thing)
        around = [thing, thing.parent.parent if isinstance(thing.parent.parent, desc) else thing]
        named = tables | {it.astext() for each in around for it in each.findall(nodes.literal)}
        for parameter in thing[0].findall(desc_parameter):
            name = parameter.astext().split(":")[0].strip("*")
            if thing[0]["module"] == "jgpt" and name and name not in named:
                where = f"{thing[0]['fullname']}({name})"
                logger.warning("%s is not described", where, location=thing)


def require_public_names(app: Sphinx, env: Any) -> None:
    domain: PythonDomain = env.domains.python_domain
    for name in sorted({f"jgpt.{name}" for name in jgpt.__all__} - set(domain.objects)):
        logger.warning("%s is not in the API reference", name)


PLAYGROUND = """
```{raw} html
<iframe class="playground" src="FOLDERplayground.html" title="A page that holds a small GPT"
  loading="lazy"></iframe>
<p><a href="FOLDERplayground.html">The same page in a window of its own</a></p>
```
"""
"""A page of `jgpt look`, which is trained when the site is built."""
PLAYED_IN = {root_doc: "docs/pictures/look-letters.png)\n", "docs/look": "pictures/look.png)\n"}
"""The pages that show it, and what it comes after."""


def add_to_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the table of contents to the README, add signatures to the API reference, and show the
    page to play with."""
    if docname in PLAYED_IN:
        before, place, after = source[0].partition(PLAYED_IN[docname])
        if place:
            frame = PLAYGROUND.replace("FOLDER", "../" * docname.count("/"))
            source[0] = before + place + frame + after
    if docname == root_doc:
        source[0] += CONTENTS
    if docname == "docs/api":
        source[0] = ENTRY.sub(add_signature, source[0])


def without_back_links(app: Sphinx, page: str, _: str, context: dict[str, Any], __: Any) -> None:
    """Drop the links from sources back to the API, wrong for names that `jgpt` doesn't give."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context.get("body", ""))


FETCHED = re.compile(
    r"""<(?!a\b)[^>]*\b(?:src|href|srcset|data|action|poster)\s*=\s*["']?\s*((?:https?:)?//[^\s"'>]+)"""
    r"""|(?:url\(|@import|\bfetch\(|\bimport\()\s*["']?((?:https?:)?//[^\s"')]+)"""
)
"""Addresses that a page, a style or a script loads from another host; links don't count."""


def check_pages(app: Sphinx, exception: Exception | None) -> None:
    """Copy the README to the index, write the page to play with, and reject pages that load from
    another host."""
    if exception is not None:
        return
    if "docs/look" in app.env.found_docs:
        # In a process of its own, since what JAX logs would be a warning of Sphinx here.
        command = [sys.executable, HERE / "playground.py", Path(app.outdir, "playground.html")]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(HERE.parent)}, check=True)
    shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
    for path in Path(app.outdir).rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            for found in FETCHED.finditer(path.read_text(encoding="utf-8")):
                address = found[1] or found[2]
                logger.warning("%s fetches %s", path, address)


def setup(app: Sphinx) -> None:
    app.add_directive("legend", Legend)
    app.add_directive("annotated", Annotated)
    app.add_post_transform(LinkDimensions)
    app.add_post_transform(UnlinkFolders)
    app.connect("source-read", add_to_source)
    app.connect("autodoc-process-signature", simplify_signature)
    app.connect("doctree-read", require_documentation)
    app.connect("env-check-consistency", require_public_names)
    app.connect("html-page-context", without_back_links)
    app.connect("build-finished", check_pages)
