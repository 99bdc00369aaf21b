"""Train the model of lesson 22 on the docstrings of Python packages, from nothing to its weights.

    python benchmarks/docstrings.py

pip downloads the packages. Their docstrings become a text of plain sentences. A tokenizer of byte
pairs and a small model of Qwen3's format are trained on it. The weights are saved in 16 bits.
"""

import ast
import dataclasses
import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import runner
import safetensors.numpy
import tyro
from flax import nnx

import jgpt
from jgpt.data.sources import read_text
from jgpt.interop.huggingface import HF_WEIGHTS

PACKAGES = {
    "numpy": "2.4.6",
    "scipy": "1.17.1",
    "pandas": "3.1.1",
    "scikit-learn": "1.9.1",
    "scikit-image": "0.26.0",
    "statsmodels": "0.15.0",
    "networkx": "3.6.1",
    "xarray": "2026.9.0",
    "jax": "0.10.2",
}
"""Their licences are BSD's with three clauses, or Apache's (xarray, jax)."""
FREQUENT_WORDS = 4000
"""A sentence is kept if all of its words are among the most frequent ones."""
HELD_OUT = 0.03
"""The fraction of the text that isn't trained on, at its end."""
FOLDER = runner.ROOT / "notebooks" / "docstrings_model"
PROMPTS = ("The", "If", "Return the", "This function", "The king")
"""The beginnings of the samples in the record."""

CONFIG = jgpt.TrainConfig(
    name="docstrings",
    model=jgpt.ModelConfig(
        block_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=128,
        hidden_dim=352,
        activation="silu",
        gated=True,
        positions="rotary",
        norm="rms",
        qk_norm=True,
        qk_norm_scale=True,
        norm_epsilon=1e-6,  # that of Qwen3's format, which has one for all norms
        zero_init=True,
    ),
    optimizer=jgpt.OptimizerConfig(
        optimizer="muon",
        muon_learning_rate=0.012,
        muon_weight_decay=0.1,
        learning_rate=4e-3,
        min_learning_rate=0.0,
        schedule="wsd",
        decay_fraction=0.5,
        warmup_steps=20,
        beta1=0.8,
        beta2=0.95,
    ),
    steps=2000,
    batch_size=16,
    eval_interval=250,
    eval_tokens=1 << 15,
    sample_tokens=0,
)


# --- the text -----------------------------------------------------------------


def download(folder: Path) -> list[Path]:
    """Return the wheels of the packages. None of them is installed or run."""
    target = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64")
    target += ("--python-version", "3.13", "--only-binary", ":all:", "--no-deps")
    for name, version in PACKAGES.items():
        if list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            continue
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder))
        subprocess.run([*pip, *target, f"{name}=={version}"], check=True)
    return sorted(folder.glob("*.whl"))


def docstrings(wheel: Path) -> Iterator[str]:
    """Yield the docstrings in a wheel, and other strings that have paragraphs."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".py") or "/tests/" in name:
                continue
            for node in ast.walk(ast.parse(archive.read(name))):
                match node:
                    # numpy and pandas also have docstrings that are arguments of calls
                    case ast.Constant(value=str(text)) if "\n\n" in text.strip():
                        yield inspect.cleandoc(text)
                    case ast.FunctionDef(body=[ast.Expr(ast.Constant(str(text))), *_]):
                        if "\n\n" not in text.strip():
                            yield inspect.cleandoc(text)


def paragraphs(docstring: str) -> Iterator[str]:
    """Yield the blocks of lines with the same indentation, each as one line."""
    block: list[str] = []
    block_indent = 0
    for line in [*docstring.splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        if block and (not line.strip() or indent != block_indent):
            yield " ".join(block)
            block = []
        if line.strip():
            block.append(line.strip())
            block_indent = indent


def without_markup(paragraph: str) -> str:
    """Return a paragraph without the markup of reStructuredText."""
    text = re.sub(r":[a-z:]+:`~?([^`<]+)(<[^`]*>)?`", r"\1", paragraph)
    text = re.sub(r"`([^`<]+) <[^`]*>`_+", r"\1", text)
    text = re.sub(r" ?\[[\w.]+\]_", "", text)
    return re.sub(r"\s+", " ", re.sub(r"[`*]+", "", text)).strip()


PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;:.'\"()/-]*\.")
"""A sentence: letters, figures and common signs, without formulas and code."""


def plain_sentences(paragraph: str) -> list[str | None]:
    """Return the sentences of a paragraph, with None for each that isn't plain."""
    found: list[str | None] = []
    for sentence in re.split(r"(?<=\.) +(?=[A-Z])", without_markup(paragraph)):
        words = sentence.split()
        is_plain = PLAIN.fullmatch(sentence) and 4 <= len(words) <= 50 and "--" not in sentence
        if is_plain:
            found.append(sentence)
        else:
            found.append(None)
    return found


def words_of(sentence: str) -> list[str]:
    return re.findall(r"[a-z0-9]+(?:[.'-][a-z0-9]+)*", sentence.lower())


def make_text(wheels: list[Path]) -> str:
    """Return paragraphs of plain sentences, one a line, with an empty line after each docstring.

    The order of the docstrings is that of their SHA-256, so that the end of the text is like the
    rest. Of equal paragraphs, the first is kept.
    """
    documents: dict[str, list[list[str | None]]] = {}
    for wheel in wheels:
        for text in docstrings(wheel):
            digest = hashlib.sha256(text.encode()).hexdigest()
            documents[digest] = [plain_sentences(each) for each in paragraphs(text)]
    counts: Counter[str] = Counter()
    for document in documents.values():
        for paragraph in document:
            for sentence in paragraph:
                if sentence is not None:
                    counts.update(words_of(sentence))
    frequent = {word for word, _ in counts.most_common(FREQUENT_WORDS)}
    seen: set[str] = set()
    parts = []
    for digest in sorted(documents):
        lines = []
        for paragraph in documents[digest]:
            for line in runs_of_frequent(paragraph, frequent):
                if line not in seen:
                    seen.add(line)
                    lines.append(f"{line}\n")
        if lines:
            parts.append("".join([*lines, "\n"]))
    return "".join(parts)


def runs_of_frequent(paragraph: list[str | None], frequent: set[str]) -> Iterator[str]:
    """Yield the sentences that follow each other and have frequent words alone."""
    run: list[str] = []
    for sentence in [*paragraph, None]:
        if sentence is not None and frequent.issuperset(words_of(sentence)):
            run.append(sentence)
            continue
        if run:
            yield " ".join(run)
        run = []


# --- the weights --------------------------------------------------------------


def main(
    work: Path = Path("runs/docstrings"),
    steps: int = CONFIG.steps,
    vocab_size: int = 2048,
    out: Path = FOLDER,
) -> None:
    """Make the text, the byte pairs and the weights, and write the record `docstrings`.

    Args:
        work: The folder of the packages, the text and the run. What is there already is used.
        steps: Steps of training.
        vocab_size: The number of tokens.
        out: The folder of the model.
    """
    work.mkdir(parents=True, exist_ok=True)
    path = work / "text.txt"
    if not path.exists():
        path.write_text(make_text(download(work)), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    end = text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    # The words of Shakespeare, to which lesson 22 adapts the model, become whole tokens, too.
    tokenizer = jgpt.BPETokenizer.train([text[:end], read_text(["shakespeare"])], vocab_size)
    dataset = jgpt.Dataset.from_tokens(
        tokenizer.encode(text[:end]),
        validation=tokenizer.encode(text[end:]),
        tokenizer=tokenizer,
    )
    print(f"{len(text):,} characters, {len(dataset.train):,} tokens to train on", flush=True)
    model = dataclasses.replace(CONFIG.model, vocab_size=tokenizer.vocab_size)
    # Seven minutes before it is trained, so that a config that has no such format fails now.
    export(jgpt.GPT(model, rngs=nnx.Rngs(0)), tokenizer, work / "model")
    config = dataclasses.replace(CONFIG, model=model, steps=steps, out=str(work / "run"))
    run = jgpt.fit(config, dataset=dataset, resume=True)
    save(run.model, tokenizer, work / "model", out)
    record = {
        "packages": PACKAGES,
        "characters": len(text),
        "training_tokens": len(dataset.train),
        "text_sha256": digest_of(path),
        "vocab_size": tokenizer.vocab_size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights_of(out))),
        "steps": steps,
        "tokens_per_step": config.batch_size * model.block_size,
        "validation_loss": run.validation_loss,
        "files_sha256": {each.name: digest_of(each) for each in files_of(work / "model", out)},
        "samples": samples(out),
    }
    print(json.dumps(record, indent=2))
    print(runner.write("docstrings", record))


def export(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder in place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    jgpt.save_hf(model, folder, tokenizer=tokenizer)


def save(model: Any, tokenizer: Any, work: Path, out: Path) -> None:
    """Save a Hugging Face folder with weights in 16 bits."""
    export(model, tokenizer, work)
    halves = {name: array.astype(np.float16) for name, array in weights_of(work).items()}
    safetensors.numpy.save_file(halves, work / HF_WEIGHTS, metadata={"format": "pt"})
    out.mkdir(exist_ok=True)
    for path in work.iterdir():
        shutil.copyfile(path, out / path.name)


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / HF_WEIGHTS)


def files_of(made: Path, out: Path) -> list[Path]:
    """Return the files of the model, without those that are written by hand."""
    return [out / path.name for path in sorted(made.iterdir())]


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def samples(folder: Path) -> dict[str, str]:
    """Return what the saved model writes after each prompt."""
    model, tokenizer, _ = jgpt.load_pretrained(str(folder))
    how = {"temperature": 0.6, "top_p": 0.9, "key": jax.random.key(0)}
    written = jgpt.generate_text(model, tokenizer, PROMPTS, 60, **how)
    return {prompt: prompt + text for prompt, text in zip(PROMPTS, written, strict=True)}


if __name__ == "__main__":
    tyro.cli(main)
