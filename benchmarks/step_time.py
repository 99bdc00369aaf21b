"""One train step beside nanoGPT's, eager and compiled, at its CPU setting.

    python benchmarks/step_time.py --nanogpt PATH

PATH is a checkout of nanoGPT. Four layers of 128 features, block 64, batch 12; its batch, forward,
backward, clipping and AdamW. jgpt's steps are in float32, and with bfloat16 operands.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from runner import Rounds, compare
from stepping import variant

from jgpt.presets import preset


@dataclass(frozen=True)
class Options(Rounds):
    nanogpt: Path = Path("nanoGPT")
    """A checkout of nanoGPT."""


def main(options: Options) -> None:
    wide = preset("nanogpt-cpu")
    narrow = replace(wide, model=replace(wide.model, dtype="bfloat16"))
    theirs = "--nanogpt", options.nanogpt
    variants = [
        variant("nanoGPT eager", wide, *theirs),
        variant("nanoGPT compiled", wide, *theirs, "--compile"),
        variant("jgpt float32", wide),
        variant("jgpt bfloat16", narrow),
    ]
    compare("step_time", variants, options)


if __name__ == "__main__":
    main(tyro.cli(Options))
