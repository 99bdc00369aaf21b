"""Measure what the shape contract may slow down, in this process."""

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tyro
from runner import draws

STEPS = 10


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


def main(preset: str = "nanogpt-cpu", traced_presets: tuple[str, ...] | None = None) -> None:
    """Print times in milliseconds; of traces of presets in processor time, not to depend on load.

    Args:
        preset: The preset that is compiled and run.
        traced_presets: The presets that are traced; by default all.
    """
    start = time.perf_counter()
    import jgpt

    jgpt.fit  # noqa: B018  # names are imported when they are first used
    times = {"import": 1e3 * (time.perf_counter() - start)}

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jgpt.presets import PRESETS
    from jgpt.training.step import dropout_stream, init_state

    config = jgpt.preset(preset)
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
    for name in traced_presets or PRESETS:
        _, config = PRESETS[name]
        vocabulary = max(config.model.vocab_size, 65)  # data decides it in a run
        config = replace(config, model=replace(config.model, vocab_size=vocabulary))
        jax.clear_caches()
        times[f"trace {name}"], _ = milliseconds(lambda its=config: traced(its), time.process_time)
    print(json.dumps(times))


if __name__ == "__main__":
    tyro.cli(main)
