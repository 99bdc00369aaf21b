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
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner import Figures, Variant, call, draws

import jgpt
from jgpt.config import ModelConfig
from jgpt.interop.gguf import save_gguf
from jgpt.presets import preset

TEMPERATURE = 0.8
PROMPT = 1000
MODELS = {
    "10.7M": replace(preset("nanogpt-char").model, dropout=0.0, dtype="float32"),
    "124M": replace(preset("gpt2").model, dropout=0.0, dtype="float32"),
}
TOKENS = {"10.7M": 128, "124M": 48}
ENGINES = (
    *("jgpt float32", "jgpt bfloat16", "jgpt int8"),
    *(f"CTranslate2 {dtype} {threads}" for dtype in ("float32", "int8") for threads in (1, 2)),
    *(f"OpenVINO {dtype} {way}" for dtype in ("float32", "int8") for way in ("PA", "SDPA")),
    *("llama.cpp F16", "llama.cpp Q8_0", "transformers", "nanoGPT"),
)
"""The number after CTranslate2's dtype is that of its threads; OpenVINO GenAI has a cache in pages
(PA) or one as long as the text. llama.cpp and OpenVINO have two threads."""
PACKAGES = {"CTranslate2": "ctranslate2", "llama.cpp": "xllamacpp", "OpenVINO": "openvino_genai"}
"""What an engine needs, to be measured."""
Draw = Callable[[int, int, int], None]
"""Continues a prompt: (batch, its tokens, new tokens); back when all of them are there."""


def variants(
    folder: str,
    tokens: Mapping[str, int],
    *,
    nanogpt: Path | None,
    batches: Sequence[int] = (1, 16),
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
        needed = PACKAGES.get(engine.split()[0], "numpy")
        if not importlib.util.find_spec(needed):
            print(f"{engine} is left out: it needs pip install {needed}")
        elif engine != "nanoGPT" or (nanogpt and model == "10.7M"):
            which = {"engine": engine, "model": model, "nanogpt": nanogpt}
            how = {"folder": folder, "tokens": tokens[model], "batches": batches}
            command = call("sampling", "measure", **which, **how)
            found.append(Variant(f"{model} {engine}", command, environment=environment))
    return found


def measure(
    engine: str, model: str, nanogpt: str | None, folder: str, tokens: int, batches: list[int]
) -> Figures:
    """Tokens a second of texts side by side, and the seconds for a long prompt; means of two.

    The folder is where `prepare` wrote the models.
    """
    kind, *how = engine.split()
    shape = MODELS[model]
    path = f"{folder}/{model}"
    match kind:
        case "jgpt":
            draw = draw_of_jgpt(path, *how)
        case "nanoGPT":
            draw = draw_of_nanogpt(str(nanogpt), shape)
        case "transformers":
            draw = draw_of_transformers(path)
        case "CTranslate2":
            draw = draw_of_ctranslate2(path, *how)
        case "OpenVINO":
            draw = draw_of_openvino(path, *how)
        case _:
            draw = draw_of_llamacpp(path, how[0], max(batches), shape.block_size)
    figures: Figures = {}
    for batch in batches:
        # the first draw is as long as the measured ones: CTranslate2, too, prepares each length
        taken = draws(lambda _, batch=batch: draw(batch, 1, tokens), 2)
        figures[f"batch {batch}"] = batch * tokens / statistics.mean(taken)
    if shape.block_size > PROMPT:
        taken = draws(lambda _: draw(1, PROMPT, 1), 2)
        figures["prompt_seconds"] = statistics.mean(taken)
    return figures


def draw_of_jgpt(path: str, dtype: str) -> Draw:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jgpt
    from jgpt.nn.int8 import with_int8_weights

    model = jgpt.load_hf(path)
    if dtype == "int8":
        model = with_int8_weights(model)
    else:
        graph = nnx.graphdef(jgpt.GPT(replace(model.config, dtype=dtype), rngs=nnx.Rngs(0)))
        model = nnx.merge(graph, nnx.state(model))

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = jnp.ones((batch, prompt), jnp.int32)
        key = jax.random.key(0)
        jgpt.generate(model, tokens, new, key=key, temperature=TEMPERATURE).block_until_ready()

    return draw


def draw_of_nanogpt(checkout: str, shape: ModelConfig) -> Draw:
    import torch
    from nanogpt import nanogpt_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nanogpt_model(Path(checkout), shape).to(device).eval()

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = torch.ones((batch, prompt), dtype=torch.long, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # as its sample.py
            model.generate(tokens, new, temperature=TEMPERATURE)[0, -1].item()

    return draw


def draw_of_transformers(path: str) -> Draw:
    import torch
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(path).eval()
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = torch.ones((batch, prompt), dtype=torch.long)
        length = {"max_new_tokens": new, "min_new_tokens": new}
        drawn = model.generate(tokens, attention_mask=torch.ones_like(tokens), **length, **how)
        assert drawn.shape == (batch, prompt + new)

    return draw


def draw_of_ctranslate2(path: str, dtype: str, threads: str) -> Draw:
    import ctranslate2

    folder = f"{path}-{dtype}"
    generator = ctranslate2.Generator(folder, compute_type=dtype, intra_threads=int(threads))

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


def draw_of_openvino(path: str, dtype: str, way: str) -> Draw:
    import numpy as np
    import openvino
    import openvino_genai

    options: dict[str, Any] = {"ATTENTION_BACKEND": way}
    if way == "PA":  # or it would read a prompt once, and not again for the next draw
        options["scheduler_config"] = openvino_genai.SchedulerConfig()
        options["scheduler_config"].enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(f"{path}-openvino-{dtype}", "CPU", **options)
    how = {"do_sample": True, "temperature": TEMPERATURE, "ignore_eos": True}

    def draw(batch: int, prompt: int, new: int) -> None:
        tokens = openvino.Tensor(np.ones((batch, prompt), np.int64))
        given = openvino_genai.TokenizedInputs(tokens, tokens)  # and a mask of ones
        drawn = pipeline.generate(given, max_new_tokens=new, min_new_tokens=new, **how)
        assert [len(each) for each in drawn.tokens] == [new] * batch

    return draw


def draw_of_llamacpp(path: str, dtype: str, slots: int, block_size: int) -> Draw:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = f"{path}-{dtype}.gguf"
    parameters.n_parallel = slots
    parameters.n_ctx = slots * block_size
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


def prepare(folder: str, models: list[str]) -> None:
    """Each model as a Hugging Face directory, and in the formats of the engines that are there."""
    import tokenizers
    import torch
    import transformers

    for name in models:
        shape = MODELS[name]
        path = f"{folder}/{name}"
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.block_size,
            n_embd=shape.embed_dim,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
        words = {f"t{index}": index for index in range(shape.vocab_size)}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "t0")),
            **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "t0"),
        )
        tokenizer.save_pretrained(path)
        if importlib.util.find_spec("ctranslate2"):
            import ctranslate2

            converter = ctranslate2.converters.TransformersConverter(path)
            for dtype in ("float32", "int8"):
                converter.convert(f"{path}-{dtype}", quantization=dtype)
        if importlib.util.find_spec("openvino_genai"):
            from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

            for dtype, bits in (("float32", None), ("int8", 8)):
                quantised = OVWeightQuantizationConfig(bits=bits) if bits else None
                made = OVModelForCausalLM.from_pretrained(
                    path, export=True, load_in_8bit=False, quantization_config=quantised
                )
                made.save_pretrained(f"{path}-openvino-{dtype}")
        if importlib.util.find_spec("xllamacpp"):
            for dtype in ("F16", "Q8_0"):
                write_gguf(path, dtype)


def write_gguf(path: str, dtype: str) -> None:
    """A GPT-2 of transformers as llama.cpp reads it, beside its folder."""
    model = jgpt.load_hf(path)
    if model.vocab_size < 256:  # prompts are tokens, so that any text for them will do
        tokenizer = jgpt.CharTokenizer("".join(map(chr, range(32, 32 + model.vocab_size))))
    else:
        tokenizer = jgpt.BPETokenizer.train(["a text"], 257).padded_to(model.vocab_size)
    save_gguf(model, f"{path}-{dtype}.gguf", tokenizer=tokenizer, weights=dtype.lower())
