"""Custom models that compute one thing in training and another elsewhere, and those that don't."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgpt
from jgpt.nn.consistency import changed_parts, inconsistencies, is_causal
from jgpt.nn.int8 import with_int8_weights
from jgpt.nn.models import weights_of
from tests.models import config_of

CONFIG = config_of("gpt2", num_layers=1)


class Sums(nnx.Module):
    """Causal, without a cache."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.vocab_size = config.vocab_size
        self.block_size = config.block_size
        shape = (config.vocab_size, config.vocab_size)
        self.table = nnx.Param(jnp.zeros(shape))  # all logits begin alike

    def hidden(self, tokens, *, rngs=None):
        return jnp.cumsum(self.table[...][tokens], axis=1)

    def logits(self, x):
        return x

    def __call__(self, tokens, *, rngs=None):
        return self.logits(self.hidden(tokens))


class Peeks(Sums):
    def hidden(self, tokens, *, rngs=None):
        x = self.table[...][tokens]
        return x + 0.1 * x.mean(axis=1, keepdims=True)


class CountsFromTheEnd(Sums):
    def hidden(self, tokens, *, rngs=None):
        x = super().hidden(tokens)
        return x * jnp.arange(1, 1 + x.shape[1])[::-1, None]


class Doubles(Sums):
    def __call__(self, tokens, *, rngs=None):
        return 2 * super().__call__(tokens)


class WithoutCache(jgpt.GPT):
    def hidden(self, tokens, *, rngs=None):  # type: ignore[override]
        return super().hidden(tokens, rngs=rngs)

    def __call__(self, tokens, *, rngs=None):  # type: ignore[override]
        return self.logits(self.hidden(tokens))


class Uncached(WithoutCache):
    empty_cache: Any = None


class ForgetsItsCache(jgpt.GPT):
    # Without `documents`, which a subclass of an earlier version doesn't know.
    def embed(self, tokens, *, cache=None, rngs=None):  # type: ignore[override]
        x = super().embed(tokens, cache=cache, rngs=rngs)
        return x + jnp.cumsum(x, axis=1)


class Sine(jgpt.FeedForward):
    def __call__(self, x, *, rngs=None):
        return self.projection(jnp.sin(self.expansion(x)))


class SineGPT(jgpt.GPT):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        for block in self.blocks:
            block.feed_forward = Sine(config, rngs=rngs)


class Tanh(jgpt.GPT):
    """A part of the config's kind, with another config."""

    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        other = dataclasses.replace(config, activation="relu")
        self.blocks[0].feed_forward = jgpt.FeedForward(other, rngs=rngs)


class Wider(jgpt.GPT):
    def __init__(self, config: jgpt.ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(dataclasses.replace(config, hidden_dim=37), rngs=rngs)


class Named(jgpt.GPT):
    """Only a name, and a method of its own."""

    def describe(self) -> str:
        return "named"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "sentences"),
    [
        (Sums, []),
        (Peeks, ["Peeks is not causal: its logits depend on later tokens"]),
        (Doubles, ["Doubles: its call differs from logits(hidden(tokens))"]),
        (
            WithoutCache,
            [
                "WithoutCache (the model overrides hidden in WithoutCache) can't be sampled with "
                "its KV cache (TypeError: "
            ],
        ),
        (Uncached, []),
        (
            ForgetsItsCache,
            [
                "ForgetsItsCache (the model overrides embed in ForgetsItsCache) computes other "
                "logits with its KV cache"
            ],
        ),
        (SineGPT, []),
    ],
)
def test_what_is_computed_in_two_ways_is_said(make, sentences):
    model = make(CONFIG, rngs=nnx.Rngs(0))
    found = inconsistencies(model, weights_of(model))

    assert len(found) == len(sentences), found
    for sentence, beginning in zip(found, sentences, strict=True):
        assert sentence.startswith(beginning), sentence


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (jgpt.GPT, []),
        (Named, []),
        (SineGPT, ["blocks.0.feed_forward overrides __call__ in Sine"]),
        (Tanh, ["blocks.0.feed_forward has other settings"]),
        (ForgetsItsCache, ["the model overrides embed in ForgetsItsCache"]),
        (Wider, ["blocks.0.feed_forward.expansion has other settings"]),
    ],
)
def test_the_parts_of_a_gpt_that_are_not_its_config_s_are_named(make, changed):
    model = nnx.eval_shape(lambda: make(CONFIG, rngs=nnx.Rngs(0)))
    model.config = CONFIG
    assert changed_parts(model)[: len(changed) or None] == changed


def test_what_train_and_eval_switch_is_no_change():
    model = nnx.eval_shape(lambda: jgpt.GPT(CONFIG, rngs=nnx.Rngs(0)))
    model.train()
    assert changed_parts(model) == []


def test_the_check_leaves_the_weights_as_they_are():
    model = Sums(CONFIG, rngs=nnx.Rngs(0))
    inconsistencies(model, weights_of(model))
    assert jax.tree.all(jax.tree.map(lambda leaf: (leaf == 0).all(), weights_of(model)))


@pytest.mark.parametrize(
    ("kind", "causal"), [(Sums, True), (Peeks, False), (CountsFromTheEnd, False)]
)
def test_a_model_is_causal_if_nothing_that_follows_changes_its_logits(kind, causal):
    model = kind(CONFIG, rngs=nnx.Rngs(0))

    assert is_causal(model) == causal


@pytest.mark.parametrize("prompt", [None, "abc"])
def test_there_is_no_page_of_a_model_that_is_not_causal(prompt):
    tokenizer = jgpt.CharTokenizer("\nabcdefghijklmnop")
    jgpt.look(Sums(CONFIG, rngs=nnx.Rngs(0)), tokenizer, prompt)  # the control

    with pytest.raises(ValueError, match=r"^CountsFromTheEnd is not causal: its logits depend"):
        jgpt.look(CountsFromTheEnd(CONFIG, rngs=nnx.Rngs(0)), tokenizer, prompt)


def test_a_diverged_model_is_not_said_to_depend_on_later_tokens():
    model = Sums(CONFIG, rngs=nnx.Rngs(0))
    model.table[...] = jnp.full_like(model.table[...], jnp.nan)

    assert is_causal(model)


def test_a_model_with_int8_weights_is_causal():
    model = jgpt.GPT(CONFIG, rngs=nnx.Rngs(0))

    assert is_causal(with_int8_weights(model))
