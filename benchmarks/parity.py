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
    mine, its = ours(family, dtype), theirs(family, dtype)
    return [row(family, dtype, rung, errors(mine[rung], its[rung])) for rung in mine]


def checkpoint(nanogpt: Path, file: str) -> list[dict]:
    """Logits and loss of a checkpoint, in nanoGPT's model and in jgpt."""
    model = load_nanogpt(file)
    reference = nanogpt_model(nanogpt, model.config).eval()
    reference.load_state_dict(torch.load(file, weights_only=True)["model"])
    size = (2, model.block_size + 1)
    window = np.random.default_rng(0).integers(model.vocab_size, size=size)
    with torch.no_grad():
        tokens, targets = torch.tensor(window[:, :-1]), torch.tensor(window[:, 1:])
        its = [array.numpy() for array in reference(tokens, targets)]
    logits = model(jnp.asarray(window[:, :-1]))
    mine = [np.asarray(logits), np.asarray(cross_entropy(logits, jnp.asarray(window[:, 1:])))]
    return [
        row(f"ckpt.pt, bias={model.config.use_bias}", "float32", rung, errors({"": a}, {"": b}))
        for rung, a, b in zip(("logits", "loss"), mine, its, strict=True)
    ]


def directory(name: str) -> list[dict]:
    """Logits, loss and gradients of a transformers model in jgpt, and the weights written back."""
    reference = random_model(name)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = jgpt.load_hf(folder)
        jgpt.save_hf(model, f"{folder}/again")
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/again")
    stored, wanted = (
        {path: leaf.detach().numpy() for path, leaf in each.named_parameters()}
        for each in (again, reference)
    )
    pairs = {**compared(reference, model), "written back": (stored, wanted)}
    return [
        row(f"{name} of transformers", "float32", rung, errors(*its)) for rung, its in pairs.items()
    ]


def row(family: str, dtype: str, rung: str, errors: tuple[float, float]) -> dict:
    absolute, relative = errors
    # Adam turns gradients that are all rounding error into full steps
    tested = (dtype, rung) != ("float32", "weights after ten")
    which = {"family": family, "dtype": dtype, "rung": rung}
    return {**which, "absolute": absolute, "relative": relative, "tested": tested}


def main(
    nanogpt: Path | None = None, checkpoints: tuple[str, ...] = (), open_models: bool = False
) -> None:
    """Compare, print a table and write a record.

    Args:
        nanogpt: A checkout of nanoGPT.
        checkpoints: Checkpoints that nanoGPT wrote.
        open_models: Llama and Qwen3 alone.
    """
    families = ["qwen3"] if open_models else FAMILIES
    rows = [row for dtype in TOLERANCE for family in families for row in ladder(family, dtype)]
    if open_models:
        rows += [row for name in MODELS if "gpt2" not in name for row in directory(name)]
    if nanogpt is not None:
        rows += [row for file in checkpoints for row in checkpoint(nanogpt, file)]
    for its in rows:
        untested = "" if its["tested"] else ", not tested"
        name = f"{its['family']}, {its['dtype']}, {its['rung']}"
        print(f"{name}: {its['relative']:.1e}, below {TOLERANCE[its['dtype']]}{untested}")
    name = "parity_open_models" if open_models else "parity"
    print(runner.write(name, {"tolerance": TOLERANCE, "rows": rows}))
    worst = max(row["relative"] / TOLERANCE[row["dtype"]] for row in rows if row["tested"])
    sys.exit(f"the largest error is {worst:.1f} times the tolerance" if worst > 1 else 0)


if __name__ == "__main__":
    tyro.cli(main)
