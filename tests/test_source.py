"""Source with shapes: each line shows what it sets, and a failing call ends at its line."""

import importlib
import json
import linecache
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import jgpt
from jgpt.shapes.source import AnnotatedSource, annotated_source
from tests.commands import jgpt as command
from tests.commands import refused, worked


def shown(source: AnnotatedSource) -> dict[str, list[str]]:
    """The lines with values of each function: the code, and the margin."""
    found: dict[str, list[str]] = {}
    for function in source.functions:
        lines = []
        for line in function.lines:
            if line.values:
                lines.append(f"{line.text.strip()} | {'; '.join(map(str, line.values))}")
        found[function.name.rpartition(".<locals>.")[2]] = lines
    return found


def mixed(x: Any, w: Any) -> Any:
    scores = jnp.einsum(
        "btd,de->bte",
        x,
        w,
    )
    for _ in range(3):
        scores = scores + 1
    if x.ndim == 9:
        scores = scores[0]
    first, pair = scores.max(-1), [each for each in (scores, x)]
    same = x
    return first, pair, same


def test_each_line_shows_what_it_sets():
    source = annotated_source(mixed, "float32[b t 8]", "bfloat16[8 5]")

    assert shown(source)["mixed"] == [
        "def mixed(x: Any, w: Any) -> Any: | x: float32[b t 8]; w: bfloat16[8 5]",
        "scores = jnp.einsum( | scores: float32[b t 5]",
        "scores = scores + 1 | scores: float32[b t 5]",
        "first, pair = scores.max(-1), [each for each in (scores, x)] | "
        "first: float32[b t]; pair: (float32[b t 5], float32[b t 8])",
        "same = x | same: float32[b t 8]",
        "return first, pair, same | return: "
        "(float32[b t], float32[b t 5], float32[b t 8], float32[b t 8])",
    ]
    lines = str(source).splitlines()
    assert any(line.endswith("| scores: float32[b t 5] x 3") for line in lines)
    (branch,) = [line for line in source.functions[0].lines if line.text.endswith("scores[0]")]
    assert not branch.is_reached
    assert f'opacity:0.5">{branch.text}</span>' in source._repr_html_()


def test_a_branch_that_depends_on_a_size_leaves_numbers_and_says_so():
    def halves(x):
        y = x
        if x.shape[0] > 102:
            y = y + 1
        return y

    source = annotated_source(halves, "float32[b]")
    assert shown(source)["halves"][-1] == "return y | return: float32[101]"
    assert source.note == "The lines depend on the sizes; these are the shapes for b=101."
    assert str(source).endswith(source.note)
    assert annotated_source(mixed, "float32[b t 8]", "float32[8 5]").note is None


class Scaled:
    def __init__(self, w: Any) -> None:
        self.w = w + 1
        self.name = "scaled"

    def __call__(self, x: Any) -> Any:
        with jax.named_scope("scaled"):
            return x @ self.w


def transformed(x: Any) -> Any:
    scaled = Scaled(x.T)
    try:
        y = x @ x
    except TypeError:
        y = x

    def double(row):
        return row * 2

    def body(carry, row):
        carry = carry + row
        return carry, row

    rows = jax.vmap(double)(y)
    last, rows = jax.lax.scan(body, x[0], rows)
    slope = jax.grad(lambda x: jax.checkpoint(jnp.sum)(x**2))(x)
    return jax.jit(scaled)(slope), last


def test_attributes_blocks_and_transformations():
    source = annotated_source(transformed, "float32[b t]")
    found = shown(source)

    assert source.error is None  # one that is handled is no failure
    assert found["transformed"] == [
        "def transformed(x: Any) -> Any: | x: float32[b t]",
        "y = x | y: float32[b t]",
        "rows = jax.vmap(double)(y) | rows: float32[b t]",
        "last, rows = jax.lax.scan(body, x[0], rows) | last: float32[t]; rows: float32[b t]",
        "slope = jax.grad(lambda x: jax.checkpoint(jnp.sum)(x**2))(x) | slope: float32[b t]",
        "return jax.jit(scaled)(slope), last | return: (float32[b b], float32[t])",
    ]
    assert found["Scaled.__init__"][-1] == "self.w = w + 1 | self.w: float32[t b]"
    assert found["Scaled.__call__"][-1] == "return x @ self.w | return: float32[b b]"
    assert found["double"][1] == "return row * 2 | return: float32[t]"
    assert found["body"][1] == "carry = carry + row | carry: float32[t]"


def test_a_file_that_was_changed_is_read_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "changed_while_imported.py"
    file.write_text("def f(x):\n    y = x + 1\n    return y\n")
    module = importlib.import_module(file.stem)
    assert shown(annotated_source(module.f, "float32[b]"))["f"][1].startswith("y = x + 1 ")
    file.write_text("def f(x):\n    longer = x + 2\n    return longer\n")
    importlib.reload(module)
    assert shown(annotated_source(module.f, "float32[b]"))["f"][1].startswith("longer = x + 2 ")


# --- failures ------------------------------------------------------------------------------------


def wrong(x: Any, kernel: Any) -> Any:
    y = x * 2
    z = y @ kernel
    return z + 1


def test_a_failing_call_ends_at_its_line_with_the_operands():
    source = annotated_source(wrong, "float32[b t 8]", "float32[7 5]")

    last = source.functions[-1].lines[-1]
    assert (last.text.strip(), last.has_failed) == ("z = y @ kernel", True)
    assert list(map(str, last.values)) == ["y: float32[b t 8]", "kernel: float32[7 5]"]
    assert source.error is not None
    assert source.error.startswith("TypeError: dot_general requires contracting dimensions")
    assert str(source).splitlines()[-3].endswith("! y: float32[b t 8]; kernel: float32[7 5]")
    assert str(source).endswith("got (8,) and (7,).")


def test_sizes_in_an_error_have_their_names():
    source = annotated_source(lambda x, bias: x + bias, "float32[b t]", "float32[b]")
    assert source.error is not None
    assert source.error.endswith("shapes=[(b, t), (b,)]")


@jgpt.typed
def first_four(x: Float[Array, "batch time"]) -> Float[Array, "batch 4"]:
    y = x[:, :4]
    return y


def test_a_rejected_argument_and_a_rejected_result_of_a_typed_function():
    def caller(x: Any) -> Any:
        return first_four(x)

    source = annotated_source(caller, "float32[b]")
    assert source.reason == (
        'first_four() got a wrong argument `x`: float32[b], and not Float[Array, "batch time"]'
    )
    assert source.failing().functions[0].lines[-1].text.strip() == "return first_four(x)"

    source = annotated_source(caller, "float32[b 3]")
    assert source.reason is not None
    assert source.reason.startswith("first_four() returned a wrong result: float32[b,3], and not ")
    (failing,) = source.failing().functions
    assert (failing.name, failing.lines[-1].text.strip()) == ("first_four", "return y")
    assert source.functions[-1] == failing


def test_what_traces_the_thread_stays_and_is_named():
    heard = []

    def other(*arguments):
        heard.append(arguments[1])

    before = sys.gettrace()
    sys.settrace(other)
    try:
        with pytest.raises(RuntimeError, match="a debugger or coverage traces this thread"):
            annotated_source(mixed, "float32[b t 8]", "float32[8 5]")
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)
    annotated_source(wrong, "float32[b t 8]", "float32[7 5]")
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    ("function", "array", "message"),
    [
        (len, "float32[b]", "no line sets an array"),
        (mixed, "float32[3-b]", "3-b is -98 for b=101"),
    ],
)
def test_what_can_t_be_shown_is_named(function, array, message):
    with pytest.raises(ValueError, match=message):
        annotated_source(function, array)


def test_code_of_a_notebook_has_lines_and_code_without_source_none():
    names: dict[str, Any] = {}
    text = "def cell(x):\n    y = x + 1\n    return y\n"
    exec(compile(text, "<a cell>", "exec"), names)  # as a notebook does
    with pytest.raises(ValueError, match="no line sets an array"):
        annotated_source(names["cell"], "float32[b]")

    exec(compile(text, "<another cell>", "exec"), names)
    lines = [line + "\n" for line in text.split("\n")]
    linecache.cache["<another cell>"] = (len(text), None, lines, "<another cell>")
    source = annotated_source(names["cell"], "float32[b]")
    assert source.functions[0].file == "<another cell>"
    assert shown(source)["cell"][1] == "y = x + 1 | y: float32[b]"


# --- values --------------------------------------------------------------------------------------


def computed(x: Any) -> Any:
    scores = jnp.where(x > 0, x, -jnp.inf)

    def body(carry, row):
        carry = carry + row
        return carry, row

    last, _ = jax.lax.scan(body, x[0], x)
    y = jnp.log(x - 2)
    for _ in range(3):
        y = y * 2
    pair = (last, y)
    return jax.nn.softmax(scores), pair


def test_values_have_a_mean_a_spread_and_what_is_not_finite():
    source = annotated_source(computed, jnp.array([[0.0, 1.0], [2.0, 6.0]]), values=True)

    lines = shown(source)["computed"]
    assert lines[0].endswith("| x: float32[2 2] mean 2.25, std 2.28")
    assert lines[1].endswith("| scores: float32[2 2] mean 3, std 2.16, 1 of 4 -inf")
    assert lines[3] == (
        "y = jnp.log(x - 2) | y: float32[2 2] mean 1.39, std 0, 2 of 4 NaN, 1 of 4 -inf"
    )
    # One of the four times -inf, two NaN and a finite number that doubles.
    assert lines[4] == (
        "y = y * 2 | y: float32[2 2] mean 2.77 to 11.1, std 0, 6 of 12 NaN, 3 of 12 -inf"
    )
    # A loop of JAX has values, since it runs as one of Python.
    assert shown(source)["body"][1].startswith(
        "carry = carry + row | carry: float32[2] mean 1 to 5"
    )


def test_the_first_line_that_is_not_finite_is_marked():
    source = annotated_source(computed, jnp.array([[0.0, 1.0], [2.0, 6.0]]), values=True)

    marked = [line.text.strip() for line in source.functions[0].lines if line.is_not_finite]
    assert marked == ["y = jnp.log(x - 2)"]  # and not the mask, which is -inf on purpose
    assert source.note == "y in computed is the first array that is not finite"
    printed = next(line for line in str(source).splitlines() if "jnp.log" in line)
    assert " ! y: " in printed
    assert source.error is None

    finite = annotated_source(computed, jnp.full((2, 2), 5.0), values=True)
    assert finite.note is None
    assert not any(line.is_not_finite for line in finite.functions[0].lines)


def test_values_need_arrays_and_a_failing_call_is_explained():
    with pytest.raises(ValueError, match="values=True needs arrays with values, not 'float32"):
        annotated_source(computed, "float32[b t]", values=True)
    source = annotated_source(wrong, jnp.ones((2, 8)), jnp.ones((7, 5)), values=True)
    assert source.error is not None
    assert source.error.startswith("TypeError: dot_general requires contracting dimensions")
    assert source.functions[-1].lines[-1].text.strip() == "z = y @ kernel"


# --- the command ---------------------------------------------------------------------------------


def test_the_command_has_its_source_as_json():
    found = json.loads(worked("shapes", "tiny", "--source", "--json", "--of", "causal_mask"))
    (function,) = found["functions"]
    values = [value for line in function["lines"] for value in line["values"]]
    assert [value["name"] for value in values] == ["mask", "return"]
    assert values[0]["shapes"] == [{"dtype": "bool", "dimensions": [["", "t"], ["", "t"]]}]
    assert found["error"] is None


def test_the_source_of_a_step():
    said = worked("shapes", "tiny", "--decode", "--source", "--of", "Block.__call__")
    margins = [each.partition(" | ") for each in said.splitlines()]
    found = [margin for code, _, margin in margins if code.strip().startswith("x = x + attended")]
    assert found == ["x: float32[b 1 32]"]


def test_a_model_that_fails_ends_with_its_error(tmp_path):
    (tmp_path / "my_gpt.py").write_text(
        "import jgpt\n\n\n"
        "class GPT(jgpt.GPT):\n"
        "    def embed(self, tokens, *, cache=None, rngs=None):\n"
        "        x = super().embed(tokens, cache=cache, rngs=rngs)\n"
        "        y = x[..., :3]\n"
        "        return x + y\n"
    )
    words = ("shapes", "tiny", "--model", "my_gpt.py:GPT", "--source", "--of", "GPT.embed")
    done = command(*words, cwd=tmp_path)
    assert done.code == 2
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "return x + y ! x: float32[b t 32]; y: float32[b t 3]" in lines
    assert done.stderr.startswith("jgpt: TypeError: add got incompatible shapes")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def my_file(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def project(x, kernel):\n    y = x * 2\n    return y @ kernel\n")
    return file


def test_a_function_of_a_file_is_traced_with_arrays_of_text(my_file):
    said = worked("shapes", f"{my_file}:project", "f32[b t 8]", "bf16[8 3]", "--source")
    assert [" ".join(line.split()) for line in said.splitlines()[1:]] == [
        "def project(x, kernel): | x: float32[b t 8]; kernel: bfloat16[8 3]",
        "y = x * 2 | y: float32[b t 8]",
        "return y @ kernel | return: float32[b t 3]",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my.py:project", "f32[b t", "f32[b]"), "'f32[b t' is not an array such as 'float32[b t"),
        (("my.py:project", "f32[b]"), "missing a required argument: 'kernel'"),
        (("my.py:projekt", "f32[b]"), "no function or class 'projekt' (did you mean 'project'?)"),
        (("tiny", "--of", "nothing"), "no function that was called has 'nothing' in its name"),
        (("tiny", "f32[b]"), "only a function gets arrays"),
    ],
)
def test_what_is_wrong_is_one_line(my_file, words, message):
    assert message in refused("shapes", *words, columns=400, cwd=my_file.parent)
