"""The page of `jgpt look`: HTML around the numbers; its style and scripts are in `browser/`."""

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.data.encode import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.nn.models import LanguageModel
from jgpt.page.code import code_of
from jgpt.page.model import page_model
from jgpt.page.numbers import Look, encode_text
from jgpt.page.program import Uncomputable
from jgpt.page.vocabulary import vocabulary_of
from jgpt.page.weights import pack_json, pack_weights
from jgpt.shapes.contract import typed
from jgpt.shapes.proofs import prove

FOLDER = Path(__file__).with_name("browser")
MOST_PARAMETERS = 150_000_000
"""The limit of a model in a page: some 185 MB as text. A page of 124 million parameters took 9 s to
open in Chromium on two cores, and 3.6 GB of memory; 4 tokens a second were written on it."""
POSITIONS_OF_PROOF = 8
"""At this length it is proven that a model is causal, in a part of a second."""
NEW_TOKENS = 48
"""The default number of tokens that a page samples, if they fit."""


def model_page(
    model: LanguageModel,
    tokenizer: Tokenizer,
    name: str,
    prompt: str | None = None,
    max_new_tokens: int | None = 0,
) -> str:
    """Return an HTML page that holds a model, its tokenizer and the programs of its numbers.

    The page computes, and everything on it follows what is typed and changed. It begins with the
    prompt and its continuation, as `first_text` makes them. Raises Uncomputable for a model that is
    too large or has an operation that the page lacks, and for a tokenizer that it can't encode
    with; ValueError for a model that is not causal; and the errors of `first_text`.
    """
    require_room(model)
    _require_causal(model)
    vocabulary = vocabulary_of(tokenizer)
    look = Look(model, tokenizer, name)
    text = first_text(look, prompt, max_new_tokens)
    weights = pack_weights(look.named_weights())
    anatomy = look.anatomy
    data = {
        "name": name,
        "text": text.text,
        "prompt": text.prompt,
        **_expected(look, text, weights.unpacked),
        "precision": weights.precision,
        "heads": anatomy.heads,
        "paths": {
            "heads": anatomy.head_outputs,
            "branches": anatomy.branches,
            "blocks": anatomy.blocks,
        },
        "vocabulary": vocabulary,
        "description": pack_json(page_model(look)),
        "weights": weights.as_data(),
        "worker": worker_script(),
        "code": code_of(model),
    }
    return page_of(data)


def require_room(model: LanguageModel) -> None:
    """Raise Uncomputable for a model that is too large for a page. The model may be abstract."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if parameters > MOST_PARAMETERS:
        raise Uncomputable(
            f"{parameters:,} parameters are too many for a page, which holds {MOST_PARAMETERS:,}"
        )


def _require_causal(model: LanguageModel) -> None:
    """Raise ValueError for a model whose numbers may depend on the padding behind a text."""
    time = min(model.block_size, POSITIONS_OF_PROOF)
    proof = prove(model, "int32[b t]", causal="t", sizes={"t": time})
    if not proof:
        raise ValueError(
            f"a page shows what each token predicts from those before it, and "
            f"{type(model).__name__} is {proof}"
        )


@dataclass(frozen=True)
class FirstText:
    """The text that a page begins with."""

    text: str
    tokens: list[int]
    prompt: int
    """The number of its first tokens that are the prompt; the model has sampled the others."""


def first_text(look: Look, prompt: str | None, max_new_tokens: int | None = 0) -> FirstText:
    """Return a prompt and its continuation, or a text that the model writes without a prompt.

    The continuation is sampled from the model's distribution (temperature 1), with a fixed key, and
    ends where the page has no more room. If `max_new_tokens` is None, it has up to `NEW_TOKENS`.
    Raises the errors of `encode_text`, and ValueError for too many tokens.
    """
    tokenizer = look.tokenizer
    if prompt is None:
        beginning = default_prompt(tokenizer).tolist()
        prompt = tokenizer.decode(beginning)
        max_new_tokens = max_new_tokens or None
    else:
        beginning = encode_text(tokenizer, prompt).tolist()
    look.require_room(len(beginning))
    if max_new_tokens is None:
        max_new_tokens = NEW_TOKENS
    most_tokens = look.most_tokens()
    count = min(max_new_tokens, most_tokens - len(beginning))
    continued = _continued(look.model, beginning, count)
    # The prompt as it was given, which decoding may change.
    text = prompt + tokenizer.decode(continued)[len(tokenizer.decode(beginning)) :]
    # The page encodes the text, and a sampled text may have other tokens than those sampled.
    tokens = encode_text(tokenizer, text).tolist()
    if len(tokens) > most_tokens:
        text = prompt
        tokens = beginning
    of_prompt = len(tokens)
    if tokens[: len(beginning)] == beginning:
        of_prompt = len(beginning)
    return FirstText(text, tokens, of_prompt)


def _continued(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return a prompt and `count` tokens that the model samples after it."""
    if count == 0:
        return prompt
    # Temperature 1: the page states the bits of what was sampled, and their mean is the entropy of
    # the model's own distribution at this temperature alone.
    key = jax.random.key(1337)
    continued = generate(model, jnp.asarray(prompt)[None], count, key=key, temperature=1.0)
    return np.asarray(continued[0]).tolist()


def _expected(look: Look, text: FirstText, unpacked: dict[str, Any]) -> dict[str, Any]:
    """Return what JAX computes of a text, for a page to say how close its own numbers are.

    `unpacked` are the weights that the page has. If they are rounded, `expected_unpacked` is what
    JAX computes with them.
    """
    expected_unpacked = None
    weights = look.named_weights()
    if any(not np.array_equal(unpacked[path], array) for path, array in weights.items()):
        rounded = look.weights_named(unpacked)
        expected_unpacked = look.log_probabilities(text.tokens, rounded)
    return {
        "expected": look.log_probabilities(text.tokens, look.weights),
        "expected_unpacked": expected_unpacked,
    }


def worker_script() -> str:
    """Return the script of the page's worker."""
    product = base64.b64encode((FOLDER / "product.wasm").read_bytes()).decode()
    scripts = [_script(name) for name in ("interpreter", "model", "weights", "worker")]
    return "\n".join([f'const PRODUCT = "{product}";', *scripts])


def _script(name: str) -> str:
    return (FOLDER / f"{name}.js").read_text(encoding="utf-8")


def page_of(data: dict[str, Any]) -> str:
    """Return the page for some data."""
    scripts = [_script("tokenizer")]
    for path in sorted(FOLDER.glob("[0-9]*.js")):  # in the order of the numbers in their names
        scripts.append(path.read_text(encoding="utf-8"))
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join(scripts),
        # No text may end the script element that contains it.
        "data": numbers.replace("<", "\\u003c"),
    }
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    # In one pass, since a prompt may contain the name of a part and is not a template.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


@dataclass(frozen=True)
class Page:
    """An HTML page, which a notebook shows."""

    html: str

    def __repr__(self) -> str:
        return f"Page({len(self.html):,} characters of HTML)"

    def _repr_html_(self) -> str:
        # A separate frame, so that neither its styles nor its scripts affect the notebook.
        source = self.html.replace("&", "&amp;").replace('"', "&quot;")
        style = "width: 100%; height: 900px; border: 0"
        return f'<iframe srcdoc="{source}" style="{style}" sandbox="allow-scripts"></iframe>'


@typed
def look(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | None = None,
    max_new_tokens: int = 0,
) -> Page:
    """Return the page of `jgpt look` for a notebook. It holds the model and computes.

    It begins with the prompt and `max_new_tokens` tokens that are sampled after it; without a
    prompt, with a text that the model writes. Raises ValueError for a prompt or a model for which
    the command ends with an error.
    """
    return Page(model_page(model, tokenizer, type(model).__name__, prompt, max_new_tokens))
