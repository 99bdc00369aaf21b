"""Which models are causal, and what of a GPT is not its config's."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

import jgpt
from jgpt.nn.consistency import changed_parts, is_causal
from jgpt.nn.int8 import with_int8_weights
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


class Doubled(jgpt.GPT):
    def embed(self, tokens, *, documents=None, cache=None, rngs=None):
        return 2 * super().embed(tokens, documents=documents, cache=cache, rngs=rngs)


class Named(jgpt.GPT):
    """Only a name, and a method of its own."""

    def describe(self) -> str:
        return "named"


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (jgpt.GPT, []),
        (Named, []),
        (SineGPT, ["blocks.0.feed_forward overrides __call__ in Sine"]),
        (Tanh, ["blocks.0.feed_forward has other settings"]),
        (Doubled, ["the model overrides embed in Doubled"]),
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
