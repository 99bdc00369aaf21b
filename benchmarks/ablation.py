"""What each field of the default preset, and each choice of its optimizer, is worth.

    JGPT_DATA_DIR=DIR python benchmarks/ablation.py --steps 200

Each variant changes one thing and trains tiny Shakespeare for as many steps from the same seeds;
the schedule ends with them. The table goes to `benchmarks/ablation.md` too, above the others there.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import tyro

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
class Options:
    steps: int = 400
    """Steps of each run."""
    seeds: int = 2
    """Seeds of each variant."""
    only: tuple[str, ...] = ()
    """These variants alone."""


def main(options: Options) -> None:
    from jgpt.presets import DEFAULT_PRESET, preset

    config = dataclasses.replace(preset(DEFAULT_PRESET), steps=options.steps)
    variants: dict[str, Any] = {"the preset": config}
    for name, fields in MODEL.items():
        model = dataclasses.replace(config.model, **fields)
        variants[name] = dataclasses.replace(config, model=model)
    for name, fields in OPTIMIZER.items():
        optimizer = dataclasses.replace(config.optimizer, **fields)
        variants[name] = dataclasses.replace(config, optimizer=optimizer)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(1337, 1337 + options.seeds):
        for name, variant in variants.items():
            if not options.only or name in options.only:
                results.setdefault(name, []).append(run(dataclasses.replace(variant, seed=seed)))
                print(f"seed {seed} {name:<32} {results[name][-1]}", flush=True)
    table = describe(results, options)
    print(f"\n{table}")
    if not options.only:
        _, below, rest = TABLE.read_text().partition("\n## ")  # other tables
        TABLE.write_text(table + below + rest)
        print(record.write("ablation", {"steps": options.steps, "variants": results}))


def run(config: Any) -> dict[str, float]:
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
    return {
        "validation_loss": float(loss) / int(counts.sum()),
        "milliseconds": 1000 * seconds / timed,
    }


def describe(results: dict[str, list[dict[str, float]]], options: Options) -> str:
    """The table, the worst variant last."""

    def mean(name: str, what: str) -> float:
        return statistics.mean(run[what] for run in results[name])

    lines = [
        "# What each choice of the default preset is worth",
        "",
        f"Tiny Shakespeare, {options.steps} steps, {options.seeds} seeds; exact validation loss in "
        "nats per character. A positive difference says that the preset does better. "
        f"`python benchmarks/ablation.py --steps {options.steps}` writes this table.",
        "",
        "| one change | loss | each seed | difference | a step's time, of the preset's |",
        "|---|---|---|---|---|",
    ]
    known = "the preset" in results
    base = mean("the preset", "validation_loss") if known else float("nan")
    preset_step = mean("the preset", "milliseconds") if known else float("nan")
    for name in sorted(results, key=lambda name: mean(name, "validation_loss")):
        loss = mean(name, "validation_loss")
        seeds = ", ".join(f"{run['validation_loss']:.3f}" for run in results[name])
        step = mean(name, "milliseconds") / preset_step
        lines.append(f"| {name} | {loss:.3f} | {seeds} | {loss - base:+.3f} | {step:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
