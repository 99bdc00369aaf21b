"""Training and sampling on an accelerator, beside nanoGPT on the same one.

    JGPT_DATA_DIR=DIR python benchmarks/gpu.py --nanogpt PATH --parts step

PATH is a checkout of nanoGPT. Each part has a record of its own, `gpu_PART.json`:

- step: a train step and the FLOPs utilisation, for GPT-2 124M at block 1024 and for nanoGPT's
  Shakespeare setting, in bfloat16, nanoGPT's with torch.compile
- train: the whole `jgpt train` command on tiny Shakespeare, its best exact validation loss, and the
  share of the steps that took it to 1.4655, beside nanoGPT's own train.py in the first round, by
  its own estimate over 200 batches. Each round has a seed
- sampling: tokens a second of 1, 16 and 64 texts at once

`--toy` runs to the end anywhere in a minute or two, at sizes that say nothing about speed.
"""

import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import sampling
import tyro
from nanogpt import check_out, trained_by_nanogpt
from runner import Rounds, Variant, compare, python, trained_by_jgpt
from stepping import variant

from jgpt.config import TrainConfig
from jgpt.presets import preset

TARGET = 1.4655
"""The best loss of nanoGPT's Shakespeare setting on a GPU, mean of five seeds."""
TOY_TRAIN = ("--steps=4", "--eval-interval=2", "--steps-per-call=2", "--eval-tokens=100")
TOY_NANOGPT = (
    *("--device=cpu", "--compile=False", "--eval_iters=1", "--max_iters=2", "--eval_interval=1"),
    *("--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=8", "--batch_size=3"),
)


@dataclass(frozen=True)
class Options(Rounds):
    nanogpt: Path | None = None
    """A checkout of nanoGPT; without it jgpt is measured alone."""
    parts: tuple[Literal["step", "train", "sampling"], ...] = ("step", "train", "sampling")
    """The parts to run."""
    train_preset: str = "nanogpt-char"
    """The preset for `jgpt train`."""
    batch_size: int = 32
    """Batch size of the GPT-2 step."""
    toy: bool = False
    """Tiny sizes, in float32."""


def step_config(name: str, options: Options) -> TrainConfig:
    config = preset(name)
    if options.toy:
        sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "block_size": 8}
        model = replace(config.model, **sizes, vocab_size=1100, dtype="float32")
        return replace(config, model=model, batch_size=3, micro_batches=1, steps_per_call=2)
    model = replace(config.model, dtype="bfloat16")
    batch_size = options.batch_size if name == "gpt2" else config.batch_size
    return replace(config, model=model, batch_size=batch_size, micro_batches=1)


def steps(options: Options, folder: Path) -> list[Variant]:
    found = []
    for name in ("gpt2", "nanogpt-char"):
        config, draw = step_config(name, options), ("--steps", 2 if options.toy else 40)
        found.append(variant(f"{name} jgpt", config, *draw))
        if options.nanogpt:
            its = ("--nanogpt", options.nanogpt, *(() if options.toy else ("--compile",)))
            found.append(variant(f"{name} nanoGPT", config, *its, *draw))
    return found


def training(options: Options, folder: Path) -> list[Variant]:
    ours = ("tiny", *TOY_TRAIN) if options.toy else (options.train_preset,)
    found = [trained_by_jgpt("jgpt", *ours, target=TARGET)]
    if options.nanogpt:
        checkout = check_out(options.nanogpt, folder)
        theirs = TOY_NANOGPT if options.toy else ()
        found.append(trained_by_nanogpt("nanoGPT", checkout, *theirs, target=TARGET, rounds=1))
    return found


def draws(options: Options, folder: Path) -> list[Variant]:
    """At most one block of tokens; beyond it, nanoGPT's window would slide."""
    subprocess.run(python("sampling.py", "--prepare", folder), check=True, capture_output=True)
    its = sampling.Options(
        nanogpt=options.nanogpt,
        tokens=2 if options.toy else 255,
        batches=(1, 2) if options.toy else (1, 16, 64),
    )
    dtype = "float32" if options.toy else "bfloat16"
    wanted = f"10.7M jgpt {dtype}", "10.7M nanoGPT"
    return [it for it in sampling.variants(str(folder), its) if it.name in wanted]


PARTS = {"step": steps, "train": training, "sampling": draws}


def main(options: Options) -> None:
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            variants = PARTS[part](options, Path(folder))
            facts = {"toy": options.toy, "target": TARGET}
            compare(f"gpu_{part}", variants, options, lambda _, facts=facts: facts)


if __name__ == "__main__":
    main(tyro.cli(Options))
