"""The page of `jgpt look`: HTML around the numbers; its style and scripts are in `page/`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.nn.models import LanguageModel
from jgpt.pictures.numbers import Look, encode_text
from jgpt.refusal import Field, Message
from jgpt.shapes.contract import typed

NEW_TOKENS = 48
"""The default number of tokens that a page samples, if they fit."""


def look_page(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int | None, name: str
) -> str:
    """Return an HTML page of the forward pass over a prompt and its sampled continuation.

    The continuation is sampled from the model's distribution (temperature 1), with a fixed key, and
    stops at `block_size`. If `max_new_tokens` is None, it is `NEW_TOKENS`, or fewer if the page has
    no room. Raises the errors of `encode_text`, and ValueError for more tokens than the block or a
    page holds.
    """
    prompt_tokens = encode_text(tokenizer, prompt)
    look = Look(model, tokenizer, name)
    if max_new_tokens is None:
        room = look.most_tokens() - len(prompt_tokens)
        max_new_tokens = max(0, min(NEW_TOKENS, room))
    if max_new_tokens < 0:
        raise ValueError(Message(Field("max_new_tokens", max_new_tokens), " must be 0 or more"))
    tokens = jnp.asarray(prompt_tokens)[None]
    # Past the block, the first tokens would leave the context, and the page shows one context.
    count = max(0, min(max_new_tokens, model.block_size - len(prompt_tokens)))
    if count > 0:
        # Temperature 1: the page states the bits of what was sampled, and their mean is the entropy
        # of the model's own distribution at this temperature alone.
        tokens = generate(model, tokens, count, key=jax.random.key(1337), temperature=1.0)
    numbers = look(np.asarray(tokens[0]).tolist(), len(prompt_tokens))
    return page_of(numbers)


def page_of(data: dict[str, Any], *, live: bool = False) -> str:
    """Return the page for some data; only a live page may send requests, and only to its server."""
    folder = Path(__file__).with_name("page")
    scripts = []
    for path in sorted(folder.glob("[0-9]*.js")):  # in the order of the numbers in their names
        scripts.append(path.read_text(encoding="utf-8"))
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join(scripts),
        # No text may end the script element that contains it.
        "data": numbers.replace("<", "\\u003c"),
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    if live:
        page = page.replace("connect-src 'none'", "connect-src 'self'")
    # In one pass, since a prompt may contain the name of a part and is not a template.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


@dataclass(frozen=True)
class Page:
    """An HTML page, which a notebook shows."""

    html: str

    def _repr_html_(self) -> str:
        # A separate frame, so that neither its styles nor its scripts affect the notebook.
        source = self.html.replace("&", "&amp;").replace('"', "&quot;")
        style = "width: 100%; height: 900px; border: 0"
        return f'<iframe srcdoc="{source}" style="{style}" sandbox="allow-scripts"></iframe>'


@typed
def look(model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 0) -> Page:
    """Return the page of `jgpt look` for a notebook.

    Raises ValueError for a prompt or a model for which the command ends with an error.
    """
    return Page(look_page(model, tokenizer, prompt, max_new_tokens, type(model).__name__))
