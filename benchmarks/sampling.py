"""Measure the engines that people sample with on a CPU, each in a process of its own.

All engines of a size have the same random weights, begin with one token and draw at temperature 0.8
from the whole vocabulary: nanoGPT's Shakespeare setting (10.7M parameters), and GPT-2's (124M). All
but nanoGPT use a cache; it has random weights of its own, too, and is left out at 124M. Then each
reads a prompt of 1,000 tokens and draws one more. Each process loads its engine, draws once to warm
up, and then measures. xllamacpp brings llama.cpp as a wheel, and has no call without its server's
queue. ONNX Runtime GenAI 0.18 can't be measured: its model builder knows no GPT-2.
"""

import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from runner import Variant, draws, python

from jgpt.presets import preset

TEMPERATURE, PROMPT = 0.8, 1000
MODELS = {
    "10.7M": replace(preset("nanogpt-char").model, dropout=0.0, dtype="float32"),
    "124M": replace(preset("gpt2").model, dropout=0.0, dtype="float32"),
}
TOKENS = {"10.7M": 128, "124M": 48}
ENGINES = (
    *("jgpt float32", "jgpt bfloat16", "jgpt int8"),
    *(f"CTranslate2 {dtype} {threads}" for dtype in ("float32", "int8") for threads in (1, 2)),
    *("llama.cpp F16", "llama.cpp Q8_0", "transformers", "nanoGPT"),
)
"""The number after CTranslate2's dtype is that of its threads. llama.cpp has two."""
PACKAGES = {"CTranslate2": "ctranslate2", "llama.cpp": "xllamacpp"}
"""What an engine needs, to be measured."""
Draw = Callable[[int, int, int], None]
"""Continues a prompt: (batch, its tokens, new tokens); back when all of them are there."""


@dataclass(frozen=True)
class Options:
    model: str = "10.7M"
    folder: Path = Path()
    """Where `prepare` wrote the models."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT."""
    tokens: int = 128
    """How many to draw."""
    batches: tuple[int, ...] = (1, 16)
    """Texts side by side."""
    draws: int = 2
    """How often each batch is measured, of which the mean counts."""


def variants(
    folder: Path,
    tokens: Mapping[str, int],
    *,
    nanogpt: Path | None,
    batches: tuple[int, ...] = (1, 16),
    names: tuple[str, ...] = ENGINES,
) -> list[Variant]:
    """The engines that are installed, for the models that draw tokens; nanoGPT's if there is a
    checkout."""
    found = []
    environment = {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for model, engine in itertools.product(tokens, names):
        command = python("sampling.py", "measure", "--engine", engine, "--model", model)
        command += ["--folder", str(folder), "--tokens", str(tokens[model])]
        command += ["--batches", *map(str, batches)]
        if engine == "nanoGPT":
            command += ["--nanogpt", str(nanogpt)]
        needed = PACKAGES.get(engine.split()[0], "numpy")
        if not importlib.util.find_spec(needed):
            print(f"{engine} is left out: it needs pip install {needed}")
        elif engine != "nanoGPT" or (nanogpt and model == "10.7M"):
            found.append(Variant(f"{model} {engine}", command, environment=environment))
    return found


def measure(engine: str, options: Options) -> None:
    """Print tokens a second of each batch, and the seconds for a long prompt."""
    kind, *how = engine.split()
    draw, tokens = DRAWS[kind](options, *how), options.tokens
    figures: dict[str, float] = {}
    for batch in options.batches:
        # the first draw is as long as the measured ones: CTranslate2, too, prepares each length
        taken = draws(lambda _, batch=batch: draw(batch, 1, tokens), options.draws)
        figures[f"batch {batch}"] = batch * tokens / statistics.mean(taken)
    if MODELS[options.model].block_size > PROMPT:
        taken = draws(lambda _: draw(1, PROMPT, 1), options.draws)
        figures["prompt_seconds"] = statistics.mean(taken)
    print(json.dumps(figures))


def of_jgpt(options: Options, dtype: str) -> Draw:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jgpt

    model = jgpt.load_gpt2(options.folder / options.model)
    if dtype == "int8":
        model = jgpt.with_int8_weights(model)
    else:
        graph = nnx.graphdef(jgpt.GPT(replace(model.config, dtype=dtype), rngs=nnx.Rngs(0)))
        model = nnx.merge(graph, nnx.state(model))

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens, key = jnp.ones((batch, prompt), jnp.int32), jax.random.key(0)
        jgpt.generate(model, tokens, new, key=key, temperature=TEMPERATURE).block_until_ready()

    return draw


def of_nanogpt(options: Options) -> Draw:
    import torch
    from nanogpt import nanogpt_model

    assert options.nanogpt is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nanogpt_model(options.nanogpt, MODELS[options.model]).to(device).eval()

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = torch.ones((batch, prompt), dtype=torch.long, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # as its sample.py
            model.generate(tokens, new, temperature=TEMPERATURE)[0, -1].item()

    return draw


def of_transformers(options: Options) -> Draw:
    import torch
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(options.folder / options.model).eval()
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = torch.ones((batch, prompt), dtype=torch.long)
        length = {"max_new_tokens": new, "min_new_tokens": new}
        drawn = model.generate(tokens, attention_mask=torch.ones_like(tokens), **length, **how)
        assert drawn.shape == (batch, prompt + new)

    return draw


def of_ctranslate2(options: Options, dtype: str, threads: str) -> Draw:
    import ctranslate2

    folder = options.folder / f"{options.model}-{dtype}"
    generator = ctranslate2.Generator(str(folder), compute_type=dtype, intra_threads=int(threads))

    def draw(batch: int, prompt: int, new: int) -> None:
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

    return draw


def of_llamacpp(options: Options, dtype: str) -> Draw:
    import xllamacpp

    parameters, slots = xllamacpp.CommonParams(), max(options.batches)
    parameters.model.path = str(options.folder / f"{options.model}-{dtype}.gguf")
    parameters.n_parallel = slots
    parameters.n_ctx = slots * MODELS[options.model].block_size
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 2
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    how = {"samplers": ["temperature"], "temperature": TEMPERATURE}
    how |= {"ignore_eos": True, "cache_prompt": False}

    def draw(batch: int, prompt: int, new: int) -> None:
        asked = {"prompt": [[1] * prompt] * batch, "n_predict": new}
        drawn = server.handle_completions(asked | how)
        assert [each["finish_reason"] for each in drawn["choices"]] == ["length"] * batch

    return draw


DRAWS: dict[str, Callable[..., Draw]] = {
    "jgpt": of_jgpt,
    "nanoGPT": of_nanogpt,
    "transformers": of_transformers,
    "CTranslate2": of_ctranslate2,
    "llama.cpp": of_llamacpp,
}


def prepare(folder: Path, models: tuple[str, ...] = tuple(MODELS)) -> None:
    """Each model as a Hugging Face directory, and in the formats of the engines that are there."""
    import tokenizers
    import torch
    import transformers

    for name in models:
        shape = MODELS[name]
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.block_size,
            n_embd=shape.embed_dim,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / name)
        words = {f"t{index}": index for index in range(shape.vocab_size)}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "t0")),
            **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "t0"),
        )
        tokenizer.save_pretrained(folder / name)
        if importlib.util.find_spec("ctranslate2"):
            import ctranslate2

            converter = ctranslate2.converters.TransformersConverter(str(folder / name))
            for dtype in ("float32", "int8"):
                converter.convert(str(folder / f"{name}-{dtype}"), quantization=dtype)
        if importlib.util.find_spec("xllamacpp"):
            for dtype in ("F16", "Q8_0"):
                write_gguf(folder / name, dtype)


def write_gguf(folder: Path, dtype: str) -> None:
    """A GPT-2 of transformers as llama.cpp reads it, beside its folder."""
    import gguf
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    shape, kind = model.config, gguf.GGMLQuantizationType[dtype]
    writer = gguf.GGUFWriter(f"{folder}-{dtype}.gguf", "gpt2")
    writer.add_context_length(shape.n_positions)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(4 * shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_eps(shape.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(shape.vocab_size)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, shape.n_layer)
    for path, parameter in model.transformer.named_parameters():
        array = parameter.detach().numpy()
        if path.startswith("h.") and array.ndim == 2:
            array = array.T.copy()  # transformers stores (in, out)
        name = names.get_name(path, try_suffixes=(".weight", ".bias"))
        is_quantised = array.ndim == 2 and path != "wpe.weight"
        stored = gguf.quants.quantize(array, kind) if is_quantised else array
        writer.add_tensor(name, stored, raw_dtype=kind if is_quantised else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"prepare": prepare, "measure": measure}, config=(tyro.conf.OmitArgPrefixes,)
    )
