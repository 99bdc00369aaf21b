"""The page of `jgpt look`: HTML around the numbers; its style and scripts are in `page/`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.generation.text import default_prompt
from jgpt.nn.models import LanguageModel
from jgpt.pictures.code import code_of
from jgpt.pictures.model import page_model
from jgpt.pictures.numbers import Look, encode_text
from jgpt.pictures.vocabulary import vocabulary_of
from jgpt.pictures.weights import pack_json, pack_weights
from jgpt.refusal import Field, Message
from jgpt.shapes.contract import typed

FOLDER = Path(__file__).with_name("page")
MOST_PARAMETERS = 32_000_000
"""The limit of a model in a page: 64 MB in 16 bits, 85 MB as text."""
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
    # Past the block, the first tokens would leave the context, and the page shows one context.
    count = max(0, min(max_new_tokens, model.block_size - len(prompt_tokens)))
    tokens = _continued(model, prompt_tokens.tolist(), count)
    return page_of(look(tokens, len(prompt_tokens)))


def _continued(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return a prompt and `count` tokens that the model samples after it."""
    if count == 0:
        return prompt
    # Temperature 1: the page states the bits of what was sampled, and their mean is the entropy of
    # the model's own distribution at this temperature alone.
    key = jax.random.key(1337)
    continued = generate(model, jnp.asarray(prompt)[None], count, key=key, temperature=1.0)
    return np.asarray(continued[0]).tolist()


def model_page(
    model: LanguageModel, tokenizer: Tokenizer, name: str, prompt: str | None = None
) -> str:
    """Return an HTML page that holds a model, its tokenizer and the programs of its numbers.

    The page computes: it begins with the prompt, by default a text that the model writes, and
    everything on it follows what is typed and changed. Raises ValueError for a model that is too
    large or has an operation that the page lacks, for a tokenizer that it can't encode with, and
    the errors of `encode_text`.
    """
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if parameters > MOST_PARAMETERS:
        raise ValueError(
            Message(
                f"{parameters:,} parameters are too many for a page, which holds "
                f"{MOST_PARAMETERS:,}: give a ",
                Field("prompt"),
                ", for a page of that text alone",
            )
        )
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary["kind"] == "list":
        raise ValueError(
            Message(
                f"a page can't encode text with this tokenizer, because {vocabulary['reason']}: "
                "give a ",
                Field("prompt"),
                ", for a page of that text alone",
            )
        )
    look = Look(model, tokenizer, name)
    if prompt is None:
        beginning = default_prompt(tokenizer)
        count = max(0, min(NEW_TOKENS, look.most_tokens() - len(beginning)))
        prompt = tokenizer.decode(_continued(model, beginning.tolist(), count))
    tokens = encode_text(tokenizer, prompt)
    # From JAX, for the page to say how close its own numbers are.
    expected = look(tokens.tolist(), len(tokens))["log_probabilities"][-1]
    weights = pack_weights(look.named_weights())
    anatomy = look.anatomy
    worker = [_script(name) for name in ("interpreter", "model", "weights", "worker")]
    data = {
        "name": name,
        "live": True,
        "text": prompt,
        "checkpoint": None,
        "expected": np.ravel(expected).tolist(),
        "precision": weights.precision,
        "paths": {
            "heads": anatomy.head_outputs,
            "branches": anatomy.branches,
            "blocks": anatomy.blocks,
        },
        "vocabulary": vocabulary,
        "description": pack_json(page_model(look)),
        "weights": weights.as_data(),
        "worker": "\n".join(worker),
        "code": code_of(model),
    }
    # The worker's script is text in the page, which the browser runs from memory.
    policy = "connect-src 'none'; worker-src blob:"
    return page_of(data, policy=policy, libraries=("tokenizer",))


def _script(name: str) -> str:
    return (FOLDER / f"{name}.js").read_text(encoding="utf-8")


def page_of(
    data: dict[str, Any], *, policy: str = "connect-src 'none'", libraries: tuple[str, ...] = ()
) -> str:
    """Return the page for some data, with scripts that the page's own scripts need.

    The policy says where the page may send requests: nowhere, unless it is live.
    """
    scripts = [_script(name) for name in libraries]
    for path in sorted(FOLDER.glob("[0-9]*.js")):  # in the order of the numbers in their names
        scripts.append(path.read_text(encoding="utf-8"))
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join(scripts),
        "policy": policy,
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
