"""Tokens a second when sampling, beside what people use on a CPU, alternating in one run.

    pip install ctranslate2
    python benchmarks/sampling.py --nanogpt PATH

PATH is a checkout of nanoGPT. All models of a size are random, begin with one token, and draw at
temperature 0.8 from the whole vocabulary: nanoGPT's Shakespeare setting (10.7M parameters), and
GPT-2's (124M, where nanoGPT has no cache and is left out). transformers and CTranslate2 use their
cache; CTranslate2 runs with one thread and with two, in float32 and in int8, and its faster one
counts. Then each reads a prompt of 1,000 tokens and draws one more. The memory's bandwidth is that
of summing 512 MiB in two threads.
"""

import dataclasses
import functools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ctranslate2
import jax
import jax.numpy as jnp
import record
import tokenizers
import torch
import transformers
import tyro
from flax import nnx

import jgpt
from jgpt.nn.models import parts_of

TEMPERATURE = 0.8
MODELS = {
    "10.7M": dataclasses.replace(jgpt.preset("nanogpt-char").model, dropout=0.0),
    "124M": dataclasses.replace(jgpt.preset("gpt2").model, dropout=0.0, dtype="float32"),
}
NEW_TOKENS = {"10.7M": 255, "124M": 96}
PROMPT = 1000
Sampler = Callable[[int, int, int, int], None]
"""Continues a prompt: (batch, its tokens, new tokens, seed); back when all of them are there."""


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    models: tuple[str, ...] = tuple(MODELS)
    batches: tuple[int, ...] = (1, 16)
    """Texts side by side."""
    repeats: int = 3
    """How often each of them draws."""


def main(options: Options) -> None:
    transformers.utils.logging.set_verbosity(logging.ERROR)
    bandwidth = memory_bandwidth()
    results: dict[str, Any] = {"temperature": TEMPERATURE, "bandwidth": bandwidth, "models": {}}
    print(f"memory: {bandwidth / 1e9:.1f} GB/s")
    for name in options.models:
        samplers = samplers_of(name, options)
        batches: dict[int, Any] = {}
        print(f"| {name}, batch | who | tokens/s, median (range) | of the fastest |")
        print("|---|---|---|---|")
        for batch in options.batches:
            batches[batch] = alternate(samplers, batch, 1, NEW_TOKENS[name], options)
            tell(batch, batches[batch])
        results["models"][name] = {"new_tokens": NEW_TOKENS[name], "batches": batches}
        read = 4 * sum(part.product_parameters for part in parts_of(MODELS[name]))
        speed = middle(batches[options.batches[0]]["jgpt"])
        results["models"][name]["bandwidth_share"] = share = read * speed / bandwidth
        print(f"jgpt reads weights at {share:.0%} of the memory's bandwidth")
        if MODELS[name].block_size > PROMPT:
            results["prefill"] = alternate(samplers, 1, PROMPT, 1, options)
            print(f"a prompt of {PROMPT} tokens:")
            for who, speeds in results["prefill"].items():
                print(f"{who}: {1 / middle(speeds):.3f} s")
    print(record.write("sampling", results))


def middle(speeds: list[float]) -> float:
    return statistics.median(speeds)


def tell(batch: int, measured: dict[str, list[float]]) -> None:
    fastest = max(map(middle, measured.values()))
    for who, speeds in measured.items():
        print(f"| {batch} | {who} | {record.spread(speeds)} | {middle(speeds) / fastest:.2f} |")


def alternate(
    samplers: dict[str, Sampler], batch: int, prompt: int, new: int, options: Options
) -> dict[str, list[float]]:
    """New tokens a second of each; the first call, which may compile, is left out."""
    measured: dict[str, list[float]] = {name: [] for name in samplers}
    for sample in samplers.values():
        sample(batch, prompt, new, 0)
    for repeat in range(options.repeats):
        for name, sample in samplers.items():
            began = time.perf_counter()
            sample(batch, prompt, new, 1 + repeat)
            measured[name].append(batch * new / (time.perf_counter() - began))
    return measured


def memory_bandwidth() -> float:
    """In bytes/s: the best of ten sums."""
    numbers = torch.ones(1 << 27)
    least = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        numbers.sum()
        least = min(least, time.perf_counter() - began)
    return numbers.nbytes / least


def samplers_of(name: str, options: Options) -> dict[str, Sampler]:
    config = MODELS[name]
    model = jgpt.GPT(config, rngs=nnx.Rngs(0))
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_embd=config.embed_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).eval()
    return {
        "jgpt": ours(model),
        "jgpt, int8": ours(jgpt.with_int8_weights(model)),
        **({"nanoGPT": nanogpt(options.nanogpt, config)} if name == "10.7M" else {}),
        "transformers": functools.partial(of_transformers, theirs),
        **of_ctranslate2(theirs),
    }


def ours(model: jgpt.GPT) -> Sampler:
    def sample(batch: int, prompt: int, new: int, seed: int) -> None:
        tokens = jnp.ones((batch, prompt), jnp.int32)
        key = jax.random.key(seed)
        jgpt.generate(model, tokens, new, key=key, temperature=TEMPERATURE).block_until_ready()

    return sample


def nanogpt(checkout: Path, config: jgpt.ModelConfig) -> Sampler:
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(
        GPTConfig(
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_embd=config.embed_dim,
            dropout=0.0,
            bias=False,
        )
    ).eval()

    def sample(batch: int, prompt: int, new: int, seed: int) -> None:
        torch.manual_seed(seed)
        tokens = torch.ones((batch, prompt), dtype=torch.long)
        model.generate(tokens, new, temperature=TEMPERATURE)

    return sample


def of_transformers(
    model: transformers.GPT2LMHeadModel, batch: int, prompt: int, new: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens = torch.ones((batch, prompt), dtype=torch.long)
    drawn = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        use_cache=True,
    )
    assert drawn.shape == (batch, prompt + new)


def of_ctranslate2(model: transformers.GPT2LMHeadModel) -> dict[str, Sampler]:
    """In float32 and int8, with one thread and with two."""
    words = {f"t{index}": index for index in range(model.config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "t0")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    samplers: dict[str, Sampler] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        converter = ctranslate2.converters.TransformersConverter(folder)
        for kind in ("float32", "int8"):
            converter.convert(f"{folder}/{kind}", quantization=kind)
            for threads in (1, 2):
                generator = ctranslate2.Generator(
                    f"{folder}/{kind}", compute_type=kind, intra_threads=threads
                )
                name = f"CTranslate2, {kind}, {threads} thread{'s' * (threads > 1)}"
                samplers[name] = functools.partial(of_generator, generator)
    return samplers


def of_generator(
    generator: ctranslate2.Generator, batch: int, prompt: int, new: int, seed: int
) -> None:
    ctranslate2.set_random_seed(seed)
    drawn = generator.generate_batch(
        [["t1"] * prompt] * batch,
        max_length=new,
        min_length=new,
        sampling_topk=0,
        sampling_temperature=TEMPERATURE,
        end_token=[],
        include_prompt_in_result=False,
    )
    assert all(len(each.sequences_ids[0]) >= new for each in drawn)


if __name__ == "__main__":
    main(tyro.cli(Options))
