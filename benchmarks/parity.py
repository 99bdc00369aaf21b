"""The largest error of every rung of parity, for every family and precision.

    python benchmarks/parity.py --nanogpt PATH --checkpoints out/ckpt.pt ...

Checkpoints written by nanoGPT are compared with nanoGPT's own model, in the checkout PATH. Relative
errors are in units of the largest entry of an array.

    python benchmarks/parity.py --open-models

does the same for Llama and Qwen3: the ladder of a family with Qwen3's fields, and small random
models of transformers, read from its directories and written back.
"""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import runner
import torch
import tyro
from nanogpt import nanogpt_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ladder is the tests'

import jgpt
from jgpt.interop.nanogpt import load_nanogpt
from jgpt.nn.loss import cross_entropy
from tests.parity.ladder import FAMILIES, TOLERANCE, errors, ours, theirs
from tests.parity.test_transformers import MODELS, compared, random_model, transformers


def ladder(family: str, dtype: str) -> list[dict]:
    found = ours(family, dtype)
    expected = theirs(family, dtype)
    return [row(family, dtype, rung, errors(found[rung], expected[rung])) for rung in found]


def checkpoint(nanogpt: Path, file: str) -> list[dict]:
    """Logits and loss of a checkpoint, in nanoGPT's model and in jgpt."""
    model = load_nanogpt(file)
    reference = nanogpt_model(nanogpt, model.config).eval()
    reference.load_state_dict(torch.load(file, weights_only=True)["model"])
    size = (2, model.block_size + 1)
    window = np.random.default_rng(0).integers(model.vocab_size, size=size)
    inputs = window[:, :-1]
    targets = window[:, 1:]
    with torch.no_grad():
        expected_logits, expected_loss = reference(torch.tensor(inputs), torch.tensor(targets))
    logits = model(jnp.asarray(inputs))
    loss = cross_entropy(logits, jnp.asarray(targets))
    compared_arrays = {
        "logits": (np.asarray(logits), expected_logits.numpy()),
        "loss": (np.asarray(loss), expected_loss.numpy()),
    }
    name = f"ckpt.pt, bias={model.config.use_bias}"
    rows = []
    for rung, (found, expected) in compared_arrays.items():
        rows.append(row(name, "float32", rung, errors({"": found}, {"": expected})))
    return rows


def directory(name: str) -> list[dict]:
    """Logits, loss and gradients of a transformers model in jgpt, and the weights written back."""
    reference = random_model(name)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = jgpt.load_hf(folder)
        jgpt.save_hf(model, f"{folder}/again")
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/again")
    pairs = {**compared(reference, model), "written back": (arrays_of(again), arrays_of(reference))}
    rows = []
    for rung, (found, expected) in pairs.items():
        rows.append(row(f"{name} of transformers", "float32", rung, errors(found, expected)))
    return rows


def arrays_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {path: leaf.detach().numpy() for path, leaf in model.named_parameters()}


def row(family: str, dtype: str, rung: str, errors: tuple[float, float]) -> dict:
    absolute, relative = errors
    # Adam turns gradients that are all rounding error into full steps
    tested = (dtype, rung) != ("float32", "weights after ten")
    return {
        "family": family,
        "dtype": dtype,
        "rung": rung,
        "absolute": absolute,
        "relative": relative,
        "tested": tested,
    }


def main(
    nanogpt: Path | None = None, checkpoints: tuple[str, ...] = (), open_models: bool = False
) -> None:
    """Compare, print a table and write a record.

    Args:
        nanogpt: A checkout of nanoGPT.
        checkpoints: Checkpoints that nanoGPT wrote.
        open_models: Llama and Qwen3 alone.
    """
    families = FAMILIES
    record = "parity"
    if open_models:
        families = ["qwen3"]
        record = "parity_open_models"
    rows = []
    for dtype in TOLERANCE:
        for family in families:
            rows += ladder(family, dtype)
    if open_models:
        for name in MODELS:
            if "gpt2" not in name:
                rows += directory(name)
    if nanogpt is not None:
        for file in checkpoints:
            rows += checkpoint(nanogpt, file)
    for found in rows:
        name = f"{found['family']}, {found['dtype']}, {found['rung']}"
        line = f"{name}: {found['relative']:.1e}, below {TOLERANCE[found['dtype']]}"
        if not found["tested"]:
            line += ", not tested"
        print(line)
    print(runner.write(record, {"tolerance": TOLERANCE, "rows": rows}))
    worst = max(row["relative"] / TOLERANCE[row["dtype"]] for row in rows if row["tested"])
    if worst > 1:
        sys.exit(f"the largest error is {worst:.1f} times the tolerance")


if __name__ == "__main__":
    tyro.cli(main)
