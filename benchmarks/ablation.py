"""What each field of the default preset, and each choice of its optimizer, is worth.

    JGPT_DATA_DIR=DIR python benchmarks/ablation.py --rounds 2

Each variant changes one thing and trains tiny Shakespeare for as many steps from the same seeds, of
which each round has one; the schedule ends with them. The table goes to `benchmarks/ablation.md`
too, above the others there.

    JGPT_DATA_DIR=DIR python benchmarks/ablation.py --narrow --steps 1000

trains nanoGPT's CPU setting in float32 and in bfloat16 instead. A seed decides parameters and
batches, so that its two runs differ by rounding alone: `narrow_loss` has how far they come apart,
and how far apart seeds are.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from runner import Measured, Rounds, Variant, compare, python

TABLE = Path(__file__).parent / "ablation.md"
MODEL = {
    "learned positions": {"positions": "learned"},
    "layer norm": {"norm": "layer"},
    "norms with a scale": {"norm_scale": True},
    "no QK-norm, scale by head size": {"qk_norm": False, "attention_scale": None},
    "scale by head size": {"attention_scale": None},
    "GELU": {"activation": "gelu"},
    "no zero initialisation": {"zero_init": False},
    "no embedding shortcut": {"embedding_shortcut": False},
    "no logit softcap": {"logit_softcap": None},
    "tied head": {"tie_embeddings": True},
    "one head of keys and values": {"num_kv_heads": 1},
    "window of 128": {"attention_window": 128},
    "no window": {"attention_window": None},
    "no n-grams": {"ngram_sizes": ()},
    "no dropout of n-grams": {"ngram_dropout": 0.0},
    "dropout of n-grams 0.35": {"ngram_dropout": 0.35},
}
OPTIMIZER = {
    "AdamW for matrices too (0.008)": {"optimizer": "adamw"},
    "head learns at 0.004": {"learning_rate": 4e-3},
    "cosine": {"schedule": "cosine"},
    "constant learning rate": {"schedule": "constant"},
    "embeddings learn at 0.008": {"embedding_learning_rate": None},
    "no decay": {"weight_decay": 0.0, "muon_weight_decay": 0.0},
    "beta 0.9 and 0.99": {"beta1": 0.9, "beta2": 0.99},
    "gradients clipped at 1": {"gradient_clip": 1.0},
}


@dataclass(frozen=True)
class Options(Rounds):
    steps: int = 400
    """Steps of each run."""
    narrow: bool = False
    """Compare bfloat16 with float32 instead."""
    config: str | None = None
    """Only train this, a TrainConfig as JSON, and print its figures."""
    seed: int = 0
    """Its seed."""


def main(options: Options) -> None:
    from jgpt.config import TrainConfig, from_json
    from jgpt.presets import DEFAULT_PRESET, preset

    if options.config:
        config = from_json(TrainConfig, options.config)
        print(json.dumps(train(replace(config, seed=options.seed))))
    elif options.narrow:
        base = replace(preset("nanogpt-cpu"), steps=options.steps)
        configs = {
            dtype: replace(base, model=replace(base.model, dtype=dtype))
            for dtype in ("float32", "bfloat16")
        }
        compare("narrow_loss", variants(configs), options, differences)
    else:
        base = replace(preset(DEFAULT_PRESET), steps=options.steps)
        configs = {"the preset": base}
        for name, fields in MODEL.items():
            configs[name] = replace(base, model=replace(base.model, **fields))
        for name, fields in OPTIMIZER.items():
            configs[name] = replace(base, optimizer=replace(base.optimizer, **fields))
        facts = {"steps": options.steps}
        measured = compare("ablation", variants(configs), options, lambda _: facts)
        if not options.only:
            _, below, rest = TABLE.read_text().partition("\n## ")  # other tables
            TABLE.write_text(describe(measured, options) + below + rest)


def variants(configs: dict[str, Any]) -> list[Variant]:
    from jgpt.config import to_json

    seed = "--seed", "{seed}"
    return [
        Variant(name, python("ablation.py", "--config", to_json(config), *seed))
        for name, config in configs.items()
    ]


def differences(measured: Measured) -> dict[str, Any]:
    """Of bfloat16's losses from float32's of the same seeds."""
    wide, narrow = (measured.get(it, {}).get("validation_loss") for it in ("float32", "bfloat16"))
    if not wide or not narrow:
        return {}
    apart = [after - before for before, after in zip(wide, narrow, strict=False)]
    return {
        "deviation_over_seeds": statistics.stdev(wide) if len(wide) > 1 else 0.0,
        "mean_difference": statistics.mean(apart),
        "largest_difference": max(map(abs, apart)),
    }


def train(config: Any) -> dict[str, float]:
    """The exact loss at the end, and what a step takes after the first call."""
    import jax

    from jgpt.config import DataConfig
    from jgpt.data.batches import batches, evaluation_windows, resident
    from jgpt.data.dataset import load_dataset
    from jgpt.training.step import dropout_stream, init_state, make_eval_step, make_train_steps

    dataset = load_dataset(DataConfig(data=("shakespeare",)), config.model.block_size)
    tokens, size = resident(dataset.train), config.model.block_size
    state, train_steps = init_state(config), make_train_steps(config)
    key, began, timed, step = dropout_stream(config.seed), 0.0, 0, 0
    while step < config.steps:
        count = min(config.steps_per_call, config.steps - step)
        windows = batches(tokens, config.seed, step, config.steps_per_call, config.batch_size, size)
        state, _ = train_steps(state, windows, key, count, step)
        if step == 0:
            jax.block_until_ready(state)
            began = time.perf_counter()
        else:
            timed += count
        step += count
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    windows, counts = evaluation_windows(dataset.validation, size, config.batch_size)
    loss = make_eval_step(config.model)(state.weights, windows, counts)
    step = {"milliseconds": 1000 * seconds / timed} if timed else {}  # the first call compiles
    return {"validation_loss": float(loss) / int(counts.sum())} | step


def describe(measured: Measured, options: Options) -> str:
    """The table, the worst variant last."""
    from runner import PROCESSOR

    results = {name: its for name, its in measured.items() if name != PROCESSOR}
    mean = {
        name: {figure: statistics.mean(values) for figure, values in its.items()}
        for name, its in results.items()
    }
    base = mean["the preset"]
    lines = [
        "# What each choice of the default preset is worth",
        "",
        f"Tiny Shakespeare, {options.steps} steps, {options.rounds} seeds; exact validation loss "
        "in nats per character. A positive difference says that the preset does better. `python "
        f"benchmarks/ablation.py --steps {options.steps} --rounds {options.rounds}` writes this "
        "table.",
        "",
        "| one change | loss | each seed | difference | a step's time, of the preset's |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(results, key=lambda name: mean[name]["validation_loss"]):
        loss = mean[name]["validation_loss"]
        seeds = ", ".join(f"{each:.3f}" for each in results[name]["validation_loss"])
        step = mean[name]["milliseconds"] / base["milliseconds"]
        change = loss - base["validation_loss"]
        lines.append(f"| {name} | {loss:.3f} | {seeds} | {change:+.3f} | {step:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
