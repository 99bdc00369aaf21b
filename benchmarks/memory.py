"""Peak memory: of a training run beside nanoGPT's, and of preparing a large text.

    JGPT_DATA_DIR=DIR python benchmarks/memory.py --nanogpt PATH

PATH is a checkout of nanoGPT. Both train on tiny Shakespeare in nanoGPT's CPU setting. jgpt's first
run compiles; later ones take the programs from the compilation cache. The text to prepare is
generated, and takes a minute or two.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from runner import Rounds, Variant, compare, jgpt
from time_to_loss import NANOGPT_CPU, check_out, trained_by_nanogpt


@dataclass(frozen=True)
class Options(Rounds):
    nanogpt: Path = Path("nanoGPT")
    """A checkout of nanoGPT."""
    steps: int = 200
    """Steps of each training."""
    gigabytes: float = 1.0
    """The size of the text to prepare; 0 leaves it out."""


def write_text(path: Path, size: int) -> None:
    """Lines of random words out of a vocabulary of some thousands."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(5000)]
    lines = [" ".join(generator.choices(words, k=12)) + "\n" for _ in range(20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            generator.shuffle(lines)
            file.write("".join(lines))


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkout = check_out(options.nanogpt, Path(folder))
        theirs = [*NANOGPT_CPU, f"--max_iters={options.steps}"]
        ours = jgpt("train", "nanogpt-cpu", "--data", "shakespeare", "--steps", options.steps)
        ours += ["--out", "{out}"]
        no_cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"}
        variants = [
            trained_by_nanogpt("nanoGPT", checkout, *theirs),
            Variant("jgpt, first run", ours, nothing, no_cache),
            Variant("jgpt", ours, nothing, cache, warm=True),
        ]
        if options.gigabytes:
            text = Path(folder) / "text.txt"
            write_text(text, round(options.gigabytes * 1e9))
            command = jgpt("prepare", text, "--out", "{out}")
            variants.append(Variant("jgpt prepare", command, nothing, rounds=1))
        facts = {"steps": options.steps, "bytes": round(options.gigabytes * 1e9)}
        compare("memory", variants, options, lambda _: facts)


def nothing(printed: str, out: Path) -> dict[str, float]:
    """No figures but those that every variant has."""
    return {}


if __name__ == "__main__":
    main(tyro.cli(Options))
