"""nanoGPT's own model and its training command, from a checkout of it."""

import contextlib
import io
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner import Figures, Variant, losses_of

CPU_SETTING = (
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=100"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
    *("--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"),
)


def require(checkout: Path) -> None:
    """End with a line and exit code 2 if there is no checkout."""
    if not (checkout / "train.py").is_file():
        print(f"{checkout} is no checkout of nanoGPT: --nanogpt PATH", file=sys.stderr)
        sys.exit(2)


def check_out(nanogpt: Path, directory: str) -> Path:
    """A copy of nanoGPT's checkout that has prepared tiny Shakespeare, and takes a seed."""
    from jgpt.data.sources import shakespeare_file

    require(nanogpt)
    checkout = Path(directory, "nanoGPT")
    shutil.copytree(nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
    folder = checkout / "data" / "shakespeare_char"
    shutil.copy(shakespeare_file(), folder / "input.txt")  # so that it downloads nothing
    (folder / "requests.py").write_text("")  # it imports what only its download needs
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, capture_output=True)
    script = (checkout / "train.py").read_text()
    seeded = script.replace("torch.manual_seed(1337", "torch.manual_seed(seed")
    (checkout / "train.py").write_text("seed = 1337\n" + seeded)  # which is now an option
    return checkout


def trained_by_nanogpt(
    name: str, checkout: Path, *options: str, target: float = 0.0, rounds: int | None = None
) -> Variant:
    def read(printed: str, out: Path) -> Figures:
        found = re.findall(r"step (\d+):.*val loss ([\d.]+)", printed)
        return losses_of([(int(step), float(loss)) for step, loss in found], target)

    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *options]
    return Variant(name, [*command, "--seed={seed}"], read, cwd=checkout, rounds=rounds)


def nanogpt_model(checkout: Path, shape: Any) -> Any:
    """nanoGPT's own model, of a ModelConfig's sizes."""
    require(checkout)
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    vocab_size = shape.vocab_size
    if vocab_size > 1024:
        vocab_size = math.ceil(vocab_size / 64) * 64  # its own padding of GPT-2's vocabulary
    sizes = GPTConfig(
        block_size=shape.block_size,
        vocab_size=vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.embed_dim,
        dropout=shape.dropout,
        bias=shape.use_bias,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return GPT(sizes)
