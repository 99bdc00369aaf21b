"""What the shape contract costs: trace, compile, step, eager and import time, on against off.

    python benchmarks/contract_overhead.py [--rounds 5]

Each measurement is a process of its own, alternately with the checks and without them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from record import spread, write

SWITCH = "JAXTYPING_DISABLE"
REPEATS = 7


def measure() -> dict[str, float]:
    """In this process, in milliseconds: the median of a few, but for what happens only once."""
    began = time.perf_counter()
    import jgpt
    from jgpt.step import init_state, make_train_steps

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": time.perf_counter() - began}

    import jax
    import jax.numpy as jnp
    from flax import nnx

    config = jgpt.TrainConfig(model=jgpt.ModelConfig(num_layers=6, num_heads=4, embed_dim=64))
    state = init_state(config)
    windows = jnp.zeros((10, 4, config.model.block_size + 1), jnp.int32)

    def traced(_):
        return make_train_steps(config).trace(state, windows, 10)  # type: ignore[attr-defined]

    def median(function, count=REPEATS):
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            jax.block_until_ready(function(None))
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    times["trace"] = median(lambda _: bool(traced(None)))
    lowered = traced(None).lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    times["compile"] = time.perf_counter() - start

    def step(_):
        nonlocal state
        state, metrics = compiled(state, windows, jnp.int32(10))
        return metrics

    step(None)
    times["step"] = median(step) / 10
    model = jgpt.create_model(config.model, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((4, config.model.block_size), jnp.int32)
    model(tokens)
    times["eager forward"] = median(lambda _: model(tokens))
    return {name: 1e3 * seconds for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    rounds: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for _ in range(options.rounds):
        for name, disable in (("on", "0"), ("off", "1")):
            run = subprocess.run(
                [sys.executable, __file__, "--measure"],
                env={**os.environ, SWITCH: disable},
                capture_output=True,
                text=True,
                check=True,
            )
            rounds[name].append(json.loads(run.stdout.splitlines()[-1]))
    results = {}
    print(f"{'milliseconds':<16}{'checks on':<32}{'off':<32}on/off")
    for what in rounds["on"][0]:
        on, off = ([each[what] for each in rounds[name]] for name in ("on", "off"))
        ratio = statistics.median(on) / statistics.median(off)
        results[what] = {"on": on, "off": off, "ratio": ratio}
        print(f"{what:<16}{spread(on):<32}{spread(off):<32}{ratio:.2f}")
    path = write("contract_overhead", {"milliseconds": results})
    print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
