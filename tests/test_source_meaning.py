"""What a line's shapes mean inside a transformation, as docs/shapes.md says."""

import functools
from typing import Any

import jax

from jgpt.shapes.source import AnnotatedSource, annotated_source


def body_of(source: AnnotatedSource) -> tuple[int, list[str]]:
    """The calls of `body`, and what its lines have set."""
    for function in source.functions:
        if function.name.endswith("body"):
            values = []
            for line in function.lines[1:]:
                values += [str(value) for value in line.values]
            return function.calls, values
    raise AssertionError("body was not called")


def test_jit_traces_once_for_calls_with_the_same_shapes():
    def jitted(x: Any, y: Any) -> Any:
        def body(x):
            z = x * 2
            return z

        run = jax.jit(body)
        return run(x), run(x + 1), run(y)

    assert body_of(annotated_source(jitted, "float32[b 3]", "float32[5]")) == (
        2,
        ["z: float32[b 3]", "z: float32[5]", "return: float32[b 3]", "return: float32[5]"],
    )


def test_a_gradient_has_the_lines_of_the_forward_pass():
    def differentiated(x: Any) -> Any:
        def body(x):
            y = x[:, 0]
            return y.sum()

        slope = jax.grad(body)(x)
        return slope

    source = annotated_source(differentiated, "float32[b 3]")
    assert body_of(source) == (1, ["y: float32[b]", "return: float32[]"])
    assert (
        str(source.of("differentiated").functions[0].lines[-2].values[0]) == "slope: float32[b 3]"
    )


def test_rematerialisation_has_the_shapes_of_the_call():
    def rematerialised(x: Any) -> Any:
        @jax.checkpoint
        def body(x):
            y = x * 2
            return y.sum()

        return jax.grad(body)(x)

    # The second computation is made of the first one's program, so it has no lines.
    assert body_of(annotated_source(rematerialised, "float32[b 3]")) == (
        1,
        ["y: float32[b 3]", "return: float32[]"],
    )


# --- code of any kind ----------------------------------------------------------------------------


def test_a_decorated_function_has_the_lines_of_both():
    def doubled(function):
        @functools.wraps(function)
        def wrapper(x):
            twice = x * 2
            return function(twice)

        return wrapper

    @doubled
    def decorated(x: Any) -> Any:
        y = x[0]
        return y

    names = {
        function.name.rpartition(".")[2]
        for function in annotated_source(decorated, "float32[b 3]").functions
    }
    assert names == {"wrapper", "decorated"}
