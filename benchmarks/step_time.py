"""One train step beside nanoGPT's, eager and compiled, at its CPU setting, A B A B in one run.

    python benchmarks/step_time.py --nanogpt PATH

PATH is a checkout of nanoGPT. Four layers of 128 features, block 64, batch 12; its batch, forward,
backward, clipping and AdamW. jgpt's steps are in float32, and with bfloat16 operands.
"""

import contextlib
import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import record
import tyro
from stepping import Stepper, alternate

from jgpt.config import TrainConfig, to_json
from jgpt.presets import preset

TARGETS = {"jgpt float32": 0.9, "jgpt bfloat16": 0.65}
"""Of the better of nanoGPT eager and compiled."""


@dataclass(frozen=True)
class Options:
    nanogpt: Path
    """A checkout of nanoGPT."""
    rounds: int = 7
    """How often each is measured."""
    steps: int = 50
    """Steps in a measurement."""
    compile: bool = True
    """Measure torch.compile too, which compiles for half a minute."""


def with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


def main(options: Options) -> None:
    config = preset("nanogpt-cpu")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        files = {}
        for dtype in ("float32", "bfloat16"):
            files[dtype] = Path(directory) / f"{dtype}.json"
            files[dtype].write_text(to_json(with_dtype(config, dtype)))
        how = {
            "nanoGPT eager": (files["float32"], {"nanogpt": options.nanogpt}),
            "nanoGPT compiled": (files["float32"], {"nanogpt": options.nanogpt, "compile": True}),
            "jgpt float32": (files["float32"], {}),
            "jgpt bfloat16": (files["bfloat16"], {}),
        }
        if not options.compile:
            del how["nanoGPT compiled"]
        steppers = {
            name: stack.enter_context(Stepper(file, **rest)) for name, (file, rest) in how.items()
        }
        times = alternate(steppers, options.steps, options.rounds)
    medians = {name: statistics.median(its) for name, its in times.items()}
    better = min(medians[name] for name in medians if name.startswith("nanoGPT"))
    ratios = {name: median / better for name, median in medians.items()}
    print("\n| train step | milliseconds, median (range) | of nanoGPT's better | target |")
    print("|---|---|---|---|")
    for name, its in times.items():
        target = TARGETS.get(name, "")
        print(f"| {name} | {record.spread(its)} | {ratios[name]:.2f} | {target} |")
    compiled = {name: stepper.seconds_to_ready for name, stepper in steppers.items()}
    results = {
        "setting": dataclasses.asdict(config.model) | {"batch_size": config.batch_size},
        "milliseconds": times,
        "ratio": ratios,
        "target": TARGETS,
        "seconds_to_first_step": compiled,
    }
    print(record.write("step_time", results))


if __name__ == "__main__":
    main(tyro.cli(Options))
