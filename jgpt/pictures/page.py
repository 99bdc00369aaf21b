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
from jgpt.nn.consistency import is_causal
from jgpt.nn.models import LanguageModel
from jgpt.pictures.code import code_of
from jgpt.pictures.model import page_model, require_primitives
from jgpt.pictures.numbers import Look, encode_text
from jgpt.pictures.program import Uncomputable
from jgpt.pictures.vocabulary import vocabulary_of
from jgpt.pictures.weights import OTHER, pack_json, pack_weights
from jgpt.refusal import Field, Message
from jgpt.shapes.contract import typed

FOLDER = Path(__file__).with_name("page")
MOST_PARAMETERS = 150_000_000
"""The limit of a model in a page: some 185 MB as text. A page of 124 million parameters took 9 s to
open in Chromium on two cores, and 3.6 GB of memory; 4 tokens a second were written on it."""
NEW_TOKENS = 48
"""The default number of tokens that a page samples, if they fit."""
NAMES = ("model", "other")
"""What a page calls two models that have no names of their own."""


def make_page(
    model: LanguageModel,
    tokenizer: Tokenizer,
    name: str,
    prompt: str | None = None,
    max_new_tokens: int | None = 0,
    other: LanguageModel | None = None,
    names: tuple[str, str] = NAMES,
) -> "Page":
    """Return the page that computes; for a model that no page holds, that of the prompt alone.

    Arguments are those of `model_page`. Raises ValueError for a model that no page holds if there
    is no prompt or another model, and the errors of `model_page` and `look_page`.
    """
    try:
        return Page(model_page(model, tokenizer, name, prompt, max_new_tokens, other, names))
    except Uncomputable as error:
        reason = str(error)
    if other is not None:
        raise ValueError(f"{reason}: leave the other model out, for a page of one text alone")
    if prompt is None:
        raise ValueError(
            Message(f"{reason}: give a ", Field("prompt"), ", for a page of that text alone")
        )
    return Page(look_page(model, tokenizer, prompt, max_new_tokens, name, reason), reason)


def look_page(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int | None,
    name: str,
    reason: str | None = None,
) -> str:
    """Return an HTML page of the forward pass over a prompt and its sampled continuation.

    The page has the numbers of this text alone. It says the reason why it doesn't compute. The
    continuation is sampled from the model's distribution (temperature 1), with a fixed key, and
    stops at `block_size`. If `max_new_tokens` is None, it is `NEW_TOKENS`, or fewer if the page has
    no room. Raises the errors of `encode_text`, and ValueError for more tokens than the block or a
    page holds.
    """
    prompt_tokens = encode_text(tokenizer, prompt)
    _require_causal(model)
    look = Look(model, tokenizer, name)
    most_tokens = look.most_tokens()
    count = _count_of_new_tokens(look, len(prompt_tokens), max_new_tokens, most_tokens)
    tokens = _continued(model, prompt_tokens.tolist(), count)
    return page_of(look(tokens, len(prompt_tokens)) | {"reason": reason})


def model_page(
    model: LanguageModel,
    tokenizer: Tokenizer,
    name: str,
    prompt: str | None = None,
    max_new_tokens: int | None = 0,
    other: LanguageModel | None = None,
    names: tuple[str, str] = NAMES,
) -> str:
    """Return an HTML page that holds a model, its tokenizer and the programs of its numbers.

    The page computes, and everything on it follows what is typed and changed. It begins with the
    prompt and its continuation, sampled as in `look_page`; without a prompt, with a text of
    `NEW_TOKENS` that the model writes. With another model, the page has the weights of both and
    shows them side by side; `names` are what it calls them. Raises Uncomputable for a model that is
    too large or has an operation that the page lacks, and for a tokenizer that it can't encode
    with; ValueError for another model that differs in more than its weights, or not at all; and the
    errors of `look_page`.
    """
    if other is None:
        require_room(model)
    else:
        require_room(model, other)
    vocabulary_for_page(tokenizer)
    look = Look(model, tokenizer, name)
    other_look = None
    if other is not None:
        other_look = Look(other, tokenizer, name, like=look)
        _require_other_weights(look, other_look, names)
    text = first_text(look, prompt, max_new_tokens)
    return ModelPages(look).page(look, text, other=other_look, names=names)


def require_room(*models: LanguageModel) -> None:
    """Raise Uncomputable for models that are too large for a page. They may be abstract."""
    parameters = 0
    for model in models:
        parameters += sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if parameters > MOST_PARAMETERS:
        of_both = ""
        if len(models) > 1:
            of_both = " of both models together"
        raise Uncomputable(
            f"{parameters:,} parameters{of_both} are too many for a page, "
            f"which holds {MOST_PARAMETERS:,}"
        )


def _require_other_weights(look: Look, other: Look, names: tuple[str, str]) -> None:
    """Raise ValueError for a second model that differs in more than its weights, or not at all."""
    first_name, second_name = names
    first = look.named_weights()
    second = other.named_weights()
    for path in first | second:
        shapes = []
        for weights in (first, second):
            described = "missing"
            if path in weights:
                described = f"{weights[path].dtype}{list(weights[path].shape)}"
            shapes.append(described)
        if shapes[0] != shapes[1]:
            weight = path.partition("/")[2].replace("/", ".")
            raise ValueError(
                f"{weight} is {shapes[0]} in {first_name} and {shapes[1]} in {second_name}: "
                "a page shows two models of one architecture"
            )
    if not other.has_programs_of(look):
        raise ValueError(
            f"{first_name} and {second_name} differ in more than their weights: "
            "a page shows two models of one architecture"
        )
    if all(np.array_equal(first[path], second[path]) for path in first):
        raise ValueError(f"{first_name} and {second_name} have equal weights: give one of them")


def _require_causal(model: LanguageModel) -> None:
    """Raise ValueError for a model whose numbers depend on the padding behind a text."""
    if not is_causal(model):
        kind = type(model).__name__
        raise ValueError(
            f"{kind} is not causal: its logits depend on what follows a token, and a page shows "
            "what each token predicts from those before it"
        )


def vocabulary_for_page(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a page encodes text with. Raises Uncomputable if it can't be put into a page."""
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary["kind"] == "list":
        raise Uncomputable(
            f"a page can't encode text with this tokenizer, because {vocabulary['reason']}"
        )
    return vocabulary


def require_computable(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Raise Uncomputable for a model or a tokenizer that no page can compute with.

    The model may be abstract. Nothing is computed.
    """
    require_room(model)
    vocabulary_for_page(tokenizer)
    graph, weights = nnx.split(model)

    def trace(weights: Any) -> None:
        require_primitives(Look(nnx.merge(graph, weights), tokenizer, ""))

    jax.eval_shape(trace, weights)


@dataclass(frozen=True)
class FirstText:
    """The text that a page begins with."""

    text: str
    tokens: list[int]
    prompt: int
    """The number of its first tokens that are the prompt; the model has sampled the others."""
    numbers: dict[str, Any]
    """Its numbers as JAX computes them."""


def first_text(look: Look, prompt: str | None, max_new_tokens: int | None = 0) -> FirstText:
    """Return a prompt and its continuation, or a text that the model writes without a prompt.

    Raises the errors of `encode_text`, and ValueError for too many tokens.
    """
    tokenizer = look.tokenizer
    if prompt is None:
        beginning = default_prompt(tokenizer).tolist()
        prompt = tokenizer.decode(beginning)
        max_new_tokens = max_new_tokens or None
    else:
        beginning = encode_text(tokenizer, prompt).tolist()
    most_tokens = look.most_computed_tokens()
    if len(beginning) > most_tokens:
        look.require_room(len(beginning))
        vocabulary = f"a vocabulary of {look.model.vocab_size:,}"
        raise ValueError(
            f"{len(beginning)} tokens are too many for a page that computes with {vocabulary}: "
            f"at most {most_tokens}"
        )
    count = _count_of_new_tokens(look, len(beginning), max_new_tokens, most_tokens)
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
    return FirstText(text, tokens, of_prompt, look(tokens, of_prompt))


def _count_of_new_tokens(
    look: Look, prompt: int, max_new_tokens: int | None, most_tokens: int
) -> int:
    """Return the number of tokens to sample after a prompt of so many tokens."""
    if max_new_tokens is None:
        return max(0, min(NEW_TOKENS, most_tokens - prompt))
    if max_new_tokens < 0:
        raise ValueError(Message(Field("max_new_tokens", max_new_tokens), " must be 0 or more"))
    # Past the block, the first tokens would leave the context, and the page shows one context.
    return max(0, min(max_new_tokens, look.model.block_size - prompt))


def _continued(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Return a prompt and `count` tokens that the model samples after it."""
    if count == 0:
        return prompt
    # Temperature 1: the page states the bits of what was sampled, and their mean is the entropy of
    # the model's own distribution at this temperature alone.
    key = jax.random.key(1337)
    continued = generate(model, jnp.asarray(prompt)[None], count, key=key, temperature=1.0)
    return np.asarray(continued[0]).tolist()


class ModelPages:
    """Pages that hold one model, with different weights: they share its tokenizer and programs.

    Raises Uncomputable for a model or a tokenizer that no page can compute with.
    """

    def __init__(self, look: Look) -> None:
        require_room(look.model)
        _require_causal(look.model)
        self._vocabulary = vocabulary_for_page(look.tokenizer)
        self._description = pack_json(page_model(look))
        self._code = code_of(look.model)

    def page(
        self,
        look: Look,
        text: FirstText,
        training: dict[str, Any] | None = None,
        other: Look | None = None,
        names: tuple[str, str] = NAMES,
    ) -> str:
        """Return the page of a model's weights, which begins with a text.

        `training` is the progress of a run, for `page/7_training.js`. With `other` the page has the
        weights of two models, which it calls by their names.
        """
        named = look.named_weights()
        if other is not None:
            # Packed together, so that the size of both decides on their precision.
            for path, array in other.named_weights().items():
                named[OTHER + path] = array
        weights = pack_weights(named)
        models = [{"name": names[0]} | _expected(look, text, text.numbers, weights.unpacked)]
        if other is not None:
            numbers = other(text.tokens, text.prompt)
            its = {path: weights.unpacked[OTHER + path] for path in look.named_weights()}
            models.append({"name": names[1]} | _expected(other, text, numbers, its))
        anatomy = look.anatomy
        worker = [_script(name) for name in ("interpreter", "model", "weights", "worker")]
        data = {
            "name": look.name,
            "computes": True,
            "text": text.text,
            "prompt": text.prompt,
            "models": models,
            "precision": weights.precision,
            "heads": anatomy.heads,
            "paths": {
                "heads": anatomy.head_outputs,
                "branches": anatomy.branches,
                "blocks": anatomy.blocks,
            },
            "vocabulary": self._vocabulary,
            "description": self._description,
            "weights": weights.as_data(),
            "worker": "\n".join(worker),
            "code": self._code,
            "training": training,
        }
        # The worker's script is text in the page, which the browser runs from memory.
        policy = "connect-src 'none'; worker-src blob:"
        return page_of(data, policy=policy, libraries=("tokenizer",))


def _expected(
    look: Look, text: FirstText, numbers: dict[str, Any], unpacked: dict[str, Any]
) -> dict[str, Any]:
    """Return what JAX computes of a text, for a page to say how close its own numbers are.

    `unpacked` are the weights that the page has. If they are rounded, `expected_unpacked` is what
    JAX computes with them.
    """
    expected_unpacked = None
    weights = look.named_weights()
    if any(not np.array_equal(unpacked[path], array) for path, array in weights.items()):
        rounded = look.with_named_weights(unpacked)
        expected_unpacked = _last_log_probabilities(rounded(text.tokens, text.prompt))
    return {
        "expected": _last_log_probabilities(numbers),
        "expected_unpacked": expected_unpacked,
    }


def _last_log_probabilities(numbers: dict[str, Any]) -> list[float]:
    """Return those of the model's own predictions."""
    return np.ravel(numbers["log_probabilities"][-1]).tolist()


def _script(name: str) -> str:
    return (FOLDER / f"{name}.js").read_text(encoding="utf-8")


def page_of(
    data: dict[str, Any], *, policy: str = "connect-src 'none'", libraries: tuple[str, ...] = ()
) -> str:
    """Return the page for some data, with scripts that the page's own scripts need.

    The policy forbids the page to send requests, and says what else it may load.
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
    reason: str | None = None
    """Why the page has the numbers of one text and doesn't compute; None for one that does."""

    def __repr__(self) -> str:
        return f"Page({len(self.html):,} characters of HTML, reason={self.reason!r})"

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
    *,
    other: LanguageModel | None = None,
    names: tuple[str, str] = NAMES,
) -> Page:
    """Return the page of `jgpt look` for a notebook. It holds the model and computes.

    It begins with the prompt and `max_new_tokens` tokens that are sampled after it; without a
    prompt, with a text that the model writes. With `other`, such as another checkpoint of the run,
    it holds both models and shows them side by side, and `names` are what it calls them. For a
    model that is too large for a page, the page has the numbers of the prompt alone, and `reason`
    says why. Raises ValueError for a prompt or a model for which the command ends with an error.
    """
    name = type(model).__name__
    return make_page(model, tokenizer, name, prompt, max_new_tokens, other, names)
