"""One HTML page that shows a forward pass: attention, the logit lens and surprisal."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jgpt.contracts import typed
from jgpt.data.tokenizers import Tokenizer
from jgpt.generation.decoding import generate
from jgpt.nn.bigram import BigramLM
from jgpt.nn.models import LanguageModel
from jgpt.nn.transformer import GPT

MOST_WEIGHTS = 4_000_000
"""The limit of a page, at ten bytes each."""


@typed
def encode_prompt(
    model: LanguageModel, tokenizer: Tokenizer, text: str
) -> tuple[GPT, Int[np.ndarray, " tokens"]]:
    """A GPT and its prompt's tokens. Raises ValueError for another model or an empty prompt."""
    if not isinstance(model, GPT):
        kind = "a bigram model" if isinstance(model, BigramLM) else "a model of your own"
        raise ValueError(f"{kind} has no attention weights: choose a GPT run")
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: give at least one character")
    return model, tokens


@typed
def logit_lens(
    model: GPT, tokens: Int[Array, " time"]
) -> Float[Array, "{len(model.blocks)+1} time {model.vocab_size}"]:
    """Log-probabilities of the next token in nats, decoded from each block's input and the output.

    The logit lens: nostalgebraist 2020, "interpreting GPT".
    """
    states = jnp.concatenate(model.hidden_states(tokens[None]))
    logits = model.logits(model.final_norm(states))
    return jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))


def look_page(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, name: str
) -> str:
    """An HTML page of the forward pass over a prompt and what the model samples after it.

    Sampling is deterministic and stops at `block_size`. Raises ValueError as `encode_prompt`, and
    for more tokens than the block or a page holds.
    """
    model, given = encode_prompt(model, tokenizer, prompt)
    size, layers, heads = model.block_size, len(model.blocks), model.config.num_heads
    if len(given) > size:
        raise ValueError(f"the prompt has {len(given)} tokens, more than block_size={size}")
    time = min(len(given) + max_new_tokens, size)
    if layers * heads * time**2 > 2 * MOST_WEIGHTS:
        raise ValueError(f"{time} tokens are too many for a page: {layers} layers, {heads} heads")
    new, key = time - len(given), jax.random.key(1337)
    tokens = generate(model, jnp.asarray(given)[None], new, key=key)
    attention = model.attention_weights(tokens)[:, 0]
    lens = logit_lens(model, tokens[0])
    likeliest, candidates = jax.lax.top_k(lens, min(10, model.vocab_size))
    following = jnp.take_along_axis(lens[:, :-1], tokens[..., 1:, None], axis=-1)
    rounded = lambda array: np.asarray(array, float).round(7).tolist()  # noqa: E731
    ids = {*tokens.ravel().tolist(), *candidates.ravel().tolist()}
    data = {
        "name": name,
        "vocab_size": model.vocab_size,
        "prompt": len(given),
        "tokens": tokens[0].tolist(),
        "texts": {token: tokenizer.decode([token]) for token in sorted(ids)},
        "candidates": candidates.tolist(),
        "next_ranks": (1 + (lens[:, :-1] > following).sum(-1)).tolist(),
        "attention": rounded(attention[..., *np.tril_indices(time)]),
        "log_probabilities": rounded(likeliest),
        "next_log_probabilities": rounded(following[..., 0]),
    }
    # nothing in a text may end the script element that holds it
    script = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("look.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", script)
