"""Tokens a second when sampling, beside nanoGPT's and transformers' own, alternating in one run.

    python benchmarks/sampling.py --nanogpt PATH

PATH is a checkout of nanoGPT. All are of one size (nanoGPT's Shakespeare setting, 10.7M
parameters), random and in float32, begin with one token, and draw at temperature 1 from the 200
likeliest. transformers' GPT-2 uses its cache, and can't go past the block. The last row is jgpt
with products in bfloat16.
"""

import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import record
import torch
import transformers
import tyro
from flax import nnx

import jgpt

TOP_K = 200
MODEL = dataclasses.replace(jgpt.preset("nanogpt-char").model, dropout=0.0)
Sampler = Callable[[int, int, int], None]
"""Draws (batch, tokens, seed), and comes back when all of them are there."""


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    tokens: int = MODEL.block_size - 1
    """Tokens to draw after the first; with it, at most a whole block."""
    batches: tuple[int, ...] = (1, 16)
    """Texts side by side."""
    repeats: int = 5
    """How often each of them draws."""


def main(options: Options) -> None:
    if not 1 <= options.tokens < MODEL.block_size:
        raise SystemExit(f"--tokens must be from 1 to {MODEL.block_size - 1}: one is the prompt's")
    samplers = {
        "nanoGPT": nanogpt(options.nanogpt),
        "transformers": of_transformers(),
        "jgpt": ours(MODEL),
        "jgpt, bfloat16": ours(dataclasses.replace(MODEL, dtype="bfloat16")),
    }
    results: dict[str, Any] = {"tokens": options.tokens, "batches": {}}
    print("| batch | who | tokens/s, median (range) | jgpt is | first call, s |")
    print("|---|---|---|---|---|")
    for batch in options.batches:
        results["batches"][batch] = measured = alternate(samplers, batch, options)
        for name, its in measured.items():
            speed, ratio = record.spread(its["tokens_per_second"]), its["jgpt_ratio"]
            print(f"| {batch} | {name} | {speed} | {ratio:.2f} x | {its['first_call']:.1f} |")
    print(record.write("sampling", results))


def alternate(samplers: dict[str, Sampler], batch: int, options: Options) -> dict[str, Any]:
    """Each sampler's speed, and how many times as fast jgpt is; its first call, which may compile,
    is told apart."""
    measured: dict[str, Any] = {}
    for name, sample in samplers.items():
        first = seconds(sample, batch, options.tokens, 0)
        measured[name] = {"first_call": first, "tokens_per_second": []}
    for repeat in range(options.repeats):
        for name, sample in samplers.items():
            took = seconds(sample, batch, options.tokens, 1 + repeat)
            measured[name]["tokens_per_second"].append(batch * options.tokens / took)
    medians = {name: statistics.median(its["tokens_per_second"]) for name, its in measured.items()}
    for name, its in measured.items():
        its["jgpt_ratio"] = medians["jgpt"] / medians[name]
    return measured


def seconds(sample: Sampler, *arguments: int) -> float:
    began = time.perf_counter()
    sample(*arguments)
    return time.perf_counter() - began


def ours(config: jgpt.ModelConfig) -> Sampler:
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))

    def sample(batch: int, tokens: int, seed: int) -> None:
        prompt = jnp.zeros((batch, 1), jnp.int32)
        key = jax.random.key(seed)
        jgpt.generate(model, prompt, tokens, key=key, top_k=TOP_K).block_until_ready()

    return sample


def nanogpt(checkout: Path) -> Sampler:
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            block_size=MODEL.block_size,
            vocab_size=MODEL.vocab_size,
            n_layer=MODEL.num_layers,
            n_head=MODEL.num_heads,
            n_embd=MODEL.embed_dim,
            dropout=0.0,
            bias=False,
        )
    ).eval()

    def sample(batch: int, tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        model.generate(torch.zeros((batch, 1), dtype=torch.long), tokens, top_k=TOP_K)

    return sample


def of_transformers() -> Sampler:
    transformers.utils.logging.set_verbosity(logging.ERROR)
    config = transformers.GPT2Config(
        vocab_size=MODEL.vocab_size,
        n_positions=MODEL.block_size,
        n_embd=MODEL.embed_dim,
        n_layer=MODEL.num_layers,
        n_head=MODEL.num_heads,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()

    def sample(batch: int, tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        drawn = model.generate(
            torch.zeros((batch, 1), dtype=torch.long),
            attention_mask=torch.ones((batch, 1), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=TOP_K,
            use_cache=True,
        )
        assert drawn.shape == (batch, 1 + tokens)

    return sample


if __name__ == "__main__":
    main(tyro.cli(Options))
