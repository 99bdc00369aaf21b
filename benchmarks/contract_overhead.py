"""What the shape contract costs: import, trace, compile, step and eager time, on against off.

    python benchmarks/contract_overhead.py

Processes with and without checks take turns. Each measures the import, the first trace of the train
step, its compilation and steps, an eager forward pass, and tracing the train step of every preset
after clearing JAX's caches. The last is in processor time, which hardly depends on the load.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tyro
from runner import Measured, Rounds, Variant, compare, draws, python

STEPS = 10


@dataclass(frozen=True)
class Options(Rounds):
    preset: str = "nanogpt-cpu"
    """The preset that is compiled and run."""
    traced_presets: tuple[str, ...] | None = None
    """The presets that are traced; by default all."""
    once: bool = False
    """Only measure this process."""


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
    gc.collect()
    start = clock()
    result = function()
    return 1e3 * (clock() - start), result


def once(options: Options) -> dict[str, float]:
    """The measurements of one process, in milliseconds."""
    start = time.perf_counter()
    import jgpt

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": 1e3 * (time.perf_counter() - start)}

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jgpt.presets import PRESETS
    from jgpt.training.step import dropout_stream, init_state

    config = jgpt.preset(options.preset)
    times["first trace"], tracing = milliseconds(lambda: traced(config))
    times["compile"], compiled = milliseconds(tracing.lower().compile)
    state = init_state(config)
    windows = jnp.zeros((STEPS, config.batch_size, config.model.block_size + 1), jnp.int32)
    key, taken = dropout_stream(config.seed), []
    for _ in range(7):

        def steps(state: Any = state) -> Any:
            return jax.block_until_ready(compiled(state, windows, key, STEPS))

        call, (state, _) = milliseconds(steps)
        taken.append(call / STEPS)
    times["step"] = statistics.median(taken)
    model = jgpt.create_model(config.model, rngs=nnx.Rngs(0))
    eager = draws(lambda _: jax.block_until_ready(model(windows[0, :, :-1])), 9)
    times["eager forward"] = 1e3 * statistics.median(eager)
    for name in options.traced_presets or PRESETS:
        _, config = PRESETS[name]
        vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
        config = replace(config, model=replace(config.model, vocab_size=vocabulary))
        jax.clear_caches()
        times[f"trace {name}"], _ = milliseconds(lambda its=config: traced(its), time.process_time)
    return times


def ratios(measured: Measured) -> dict[str, Any]:
    """The median ratio over the rounds, and the time added to the trace of each preset.

    Other load slows both halves of a round alike."""
    on, off = (measured.get(f"checks {name}", {}) for name in ("on", "off"))
    pairs = {name: list(zip(on[name], off[name], strict=False)) for name in on if name in off}
    return {
        "ratio": {name: statistics.median(a / b for a, b in its) for name, its in pairs.items()},
        "added": {
            name.removeprefix("trace "): statistics.median(a - b for a, b in its)
            for name, its in pairs.items()
            if name.startswith("trace ")
        },
    }


def main(options: Options) -> None:
    if options.once:
        print(json.dumps(once(options)))
        return
    command = python("contract_overhead.py", "--once", "--preset", options.preset)
    if options.traced_presets:
        command += ["--traced-presets", *options.traced_presets]
    variants = [
        Variant(f"checks {name}", command, environment={"JAXTYPING_DISABLE": disable})
        for name, disable in (("on", "0"), ("off", "1"))
    ]
    compare("contract_overhead", variants, options, ratios)


if __name__ == "__main__":
    main(tyro.cli(Options))
