"""What the shape contract costs: import, trace, compile, step and eager time, on against off.

    python benchmarks/contract_overhead.py [--preset nanogpt-cpu] [--rounds 9]

What happens once in a process (import, the first trace of the train step, its compilation, and the
steps of that program) is measured in a process of its own, one with the checks and one without in
turn. Tracing again and an eager forward pass are measured in one process, with the checks switched
on and off in turn, three times as many rounds: `trace` after clearing JAX's caches, as in a new
process, `retrace` with what they hold. What a compilation takes longer is said for every preset, as
the median difference between two traces. Garbage is collected before each. A ratio is the median of
the rounds' ratios: what else the machine does slows both halves of a round. The presets' tracing is
in processor time, which what else the machine does hardly changes.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import spread, write

SWITCH = "JAXTYPING_DISABLE"
STEPS = 10
Times = dict[str, list[float]]  # milliseconds, "on" and "off"


def traced(config: Any) -> Any:
    """The train step as JAX traces it, for several steps in a call."""
    import jax
    import jax.numpy as jnp

    from jgpt.training.step import abstract_state, dropout_stream, make_train_steps

    shape = STEPS, config.batch_size, config.model.block_size + 1
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    given = abstract_state(config), windows, dropout_stream(config.seed)
    return make_train_steps(config).trace(*given, STEPS)  # type: ignore[attr-defined]


def milliseconds(
    function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    import jax

    gc.collect()
    start = clock()
    result = jax.block_until_ready(function())
    return 1e3 * (clock() - start), result


def once(preset: str) -> dict[str, float]:
    """What one process measures."""
    start = time.perf_counter()
    import jgpt

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": 1e3 * (time.perf_counter() - start)}

    import jax.numpy as jnp

    from jgpt.training.step import dropout_stream, init_state

    config = jgpt.preset(preset)
    times["first trace"], tracing = milliseconds(lambda: traced(config))
    lowered = tracing.lower()
    times["compile"], compiled = milliseconds(lowered.compile)
    state = init_state(config)
    windows = jnp.zeros((STEPS, config.batch_size, config.model.block_size + 1), jnp.int32)
    key, taken = dropout_stream(config.seed), []
    for _ in range(7):
        call, (state, _) = milliseconds(lambda state=state: compiled(state, windows, key, STEPS))
        taken.append(call / STEPS)
    return times | {"step": statistics.median(taken)}


def in_processes(preset: str, rounds: int) -> dict[str, Times]:
    """What one process measures, in some with the checks and in some without."""
    times: dict[str, Times] = {}
    for _ in range(rounds):
        for name, disable in (("on", "0"), ("off", "1")):
            run = subprocess.run(
                [sys.executable, __file__, "--preset", preset, "--once"],
                env={**os.environ, SWITCH: disable},
                capture_output=True,
                text=True,
                check=True,
            )
            for what, taken in json.loads(run.stdout.splitlines()[-1]).items():
                times.setdefault(what, {"on": [], "off": []})[name].append(taken)
    return times


def in_turn(
    function: Callable[[], Any],
    rounds: int,
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """What a function takes with the checks switched on and off."""
    from jaxtyping import config

    times: Times = {"on": [], "off": []}
    for i in range(rounds + 1):
        for name, taken in times.items():
            config.update("jaxtyping_disable", name == "off")
            before()
            call, _ = milliseconds(function, clock)
            if i:  # the first round warms up
                taken.append(call)
    config.update("jaxtyping_disable", False)
    return times


def in_this_process(preset: str, rounds: int) -> dict[str, Times]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jgpt

    config = jgpt.preset(preset)
    model = jgpt.create_model(config.model, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((config.batch_size, config.model.block_size), jnp.int32)

    def trace() -> None:
        traced(config)

    return {
        "eager forward": in_turn(lambda: model(tokens), 3 * rounds),
        "retrace": in_turn(trace, 3 * rounds),
        "trace": in_turn(trace, 3 * rounds, before=jax.clear_caches),
    }


def of_presets(rounds: int) -> dict[str, Times]:
    """What tracing each preset's train step takes, which the checks lengthen once a compilation."""
    import jax

    from jgpt.presets import PRESETS

    times = {}
    for name, (_, config) in PRESETS.items():
        vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
        model = dataclasses.replace(config.model, vocab_size=vocabulary)
        config = dataclasses.replace(config, model=model)
        times[name] = in_turn(
            lambda config=config: traced(config) and None,
            rounds,
            before=jax.clear_caches,
            clock=time.process_time,
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="nanogpt-cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.preset)))
        return
    times = in_processes(options.preset, options.rounds)
    times |= in_this_process(options.preset, options.rounds)
    results = {}
    print(f"{'milliseconds':<16}{'checks on':<32}{'off':<32}on/off")
    for what, measured in times.items():
        on, off = measured["on"], measured["off"]
        ratio = statistics.median(a / b for a, b in zip(on, off, strict=True))
        results[what] = {"on": on, "off": off, "ratio": ratio}
        print(f"{what:<16}{spread(on):<32}{spread(off):<32}{ratio:.2f}")
    presets = {}
    for name, measured in of_presets(options.rounds).items():
        added = [on - off for on, off in zip(measured["on"], measured["off"], strict=True)]
        presets[name] = {**measured, "added": statistics.median(added)}
        print(f"{name:<16}{statistics.median(added):.0f} ms longer to trace")
    path = write("contract_overhead", {"milliseconds": results, "presets": presets})
    print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
