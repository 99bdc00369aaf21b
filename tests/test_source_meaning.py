"""What a line's shapes mean inside a transformation, as docs/shapes.md says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jgpt.shapes.source import AnnotatedSource, annotated_source
from tests.commands import worked


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


def test_vmap_has_the_shapes_of_one_example():
    def mapped(x: Any) -> Any:
        def body(row):
            y = row[None]
            return y

        return jax.vmap(body)(x)

    assert body_of(annotated_source(mapped, "float32[b 3]")) == (
        1,
        ["y: float32[1 3]", "return: float32[1 3]"],
    )


def test_a_scan_has_the_shapes_of_one_step():
    def scanned(x: Any) -> Any:
        def body(carry, row):
            total = carry + row.sum()
            return total, row

        return jax.lax.scan(body, 0.0, x)

    calls, values = body_of(annotated_source(scanned, "float32[b 3]"))
    assert values[0] == "total: float32[]"
    assert values[-1] == "return: (float32[], float32[3])"
    assert calls == 1


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


def test_a_kv_cache_has_one_token_and_all_positions():
    said = worked("shapes", "tiny", "--decode", "--source", "--of", "attention_weights")
    line = " ".join(said.splitlines()[1].split())
    assert "query: float32[query=1 head_dim=16]; key: float32[key=t head_dim=16]" in line


# --- code of any kind ----------------------------------------------------------------------------


def test_a_function_that_prints_does_so_once_for_each_trace(capsys):
    def talks(x: Any) -> Any:
        print("hello")
        y = x + 1
        return y

    annotated_source(talks, jnp.ones(3))
    assert capsys.readouterr().out == "hello\n"


def test_a_function_that_can_t_be_traced_ends_at_its_line():
    def decides(x: Any) -> Any:
        y = x.sum()
        if y > 0:
            return y
        return -y

    source = annotated_source(decides, "float32[b]")
    assert source.error is not None
    assert source.error.startswith("TracerBoolConversionError: ")
    assert source.functions[-1].lines[-1].text.strip() == "if y > 0:"


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


def test_variables_of_a_comprehension_are_none_of_the_function():
    def lists(x: Any) -> Any:
        x = x + 1
        return [row * 2 for row in x], {row.shape for row in x}, tuple(row for row in x)

    names = set()
    for line in annotated_source(lists, "float32[2 3]").functions[0].lines:
        names |= {value.name for value in line.values}
    assert names == {"x", "return"}
