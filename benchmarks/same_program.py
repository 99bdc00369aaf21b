"""Prints the SHA-256 of each preset's StableHLO (train steps, evaluation), to compare two trees.

python benchmarks/same_program.py > before.txt
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp

from jgpt.presets import PRESETS
from jgpt.training.step import abstract_state, dropout_stream, make_eval_step, make_train_steps


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    for name, (_, config) in PRESETS.items():
        for dtype in dict.fromkeys((config.model.dtype, "bfloat16")):
            model = dataclasses.replace(config.model, dtype=dtype)
            run = dataclasses.replace(config, model=model)
            windows = jax.ShapeDtypeStruct(
                (run.steps_per_call, run.batch_size, model.block_size + 1), jnp.int32
            )
            counts = jax.ShapeDtypeStruct((3, run.batch_size, model.block_size), jnp.bool)
            held_out = jax.ShapeDtypeStruct((3, run.batch_size, model.block_size + 1), jnp.int32)
            state = abstract_state(run)
            steps = make_train_steps(run).lower(state, windows, dropout_stream(1), 2, 0).as_text()
            evaluate = make_eval_step(model).lower(state.weights, held_out, counts).as_text()  # type: ignore[attr-defined]
            print(f"{name:<14} {dtype:<9} {digest(steps)} {digest(evaluate)}")


if __name__ == "__main__":
    main()
