"""A call like an earlier one isn't checked twice, and no wrong call passes because of that."""

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, Shaped, TypeCheckError

import jgpt
from jgpt.shapes import contract, memo
from jgpt.shapes.contract import check, typed

ONES = jnp.ones((2, 3))
TREE = PyTree[Float[Array, "?size"], "Tree"]
ROWS: Any = Shaped[Array, "*batch"]
OTHERS: Any = Shaped[Array, "*others"]


class Owner:
    """An object whose sizes are in annotations."""

    def __init__(self, width: Any) -> None:
        self.width = width
        self.sizes = (4, 3)

    @typed
    def take(self, x: Float[Array, "batch {self.width}"]) -> Float[Array, "batch"]:
        return x[:, 0]

    @typed
    def give(
        self, x: Float[Array, "batch width"], extra: int
    ) -> Float[Array, "batch {self.width}"]:
        self.width = 3 + extra
        return x

    @typed
    def second(self, x: Float[Array, "batch {self.sizes[1]+1-1}"]) -> None: ...


@typed
def pair(x: Float[Array, "batch time"], y: Float[Array, "batch"] | None = None) -> None: ...


@typed
def sized(x: Float[Array, "batch {width}"], width: int) -> None: ...


@typed
def both(x: tuple[Float[Array, "batch time"], Int[Array, "time"]]) -> None: ...


@typed
def scaled(
    x: Float[Array, "batch time"], by: float, mode: Literal["up", "down"] = "up"
) -> None: ...


@typed
def kind(x: Float[np.ndarray, "batch time"] | int) -> None: ...


@typed
def tree(x: TREE, y: TREE) -> None: ...


@typed
def apply(x: Float[Array, "batch time"], function: Callable[..., Any], *more: int) -> None: ...


@typed
def computed(x: Float[Array, "batch time"], result: list[Any]) -> Float[Array, "batch time"]:
    return result[0]


INTS = jnp.ones(3, int)


@dataclass(frozen=True)
class Case:
    """A function with arguments that it takes, and with others that are wrong."""

    function: Callable[..., Any]
    good: tuple[Any, ...]
    wrong: tuple[Any, ...]


def take(width: Any, x: Any) -> None:
    Owner(width).take(x)


def second(width: Any, x: Any) -> None:
    Owner(width).second(x)


def give(width: Any, x: Any, extra: int) -> None:
    Owner(width).give(x, extra)


NAMED = {"a": INTS + 1.0}


CASES = {
    "size": Case(pair, good=(ONES, jnp.ones(2)), wrong=(ONES, jnp.ones(3))),
    "rank": Case(pair, good=(ONES,), wrong=(ONES[0],)),
    "dtype": Case(pair, good=(ONES,), wrong=(ONES.astype(int),)),
    "library": Case(pair, good=(ONES,), wrong=(np.ones((2, 3), np.float32),)),
    "other library": Case(kind, good=(np.ones((2, 3)),), wrong=(jnp.ones((2, 3)),)),
    "none": Case(pair, good=(ONES, None), wrong=(None, None)),
    "owner": Case(take, good=(3, ONES), wrong=(4, ONES)),
    "owner, a float": Case(take, good=(3, ONES), wrong=(3.5, ONES)),
    "owner, a path": Case(second, good=(3, ONES), wrong=(3, ONES[:, :2])),
    "owner, changed inside": Case(give, good=(3, ONES, 0), wrong=(3, ONES, 1)),
    "int": Case(sized, good=(ONES, 3), wrong=(ONES, 4)),
    "int, another type": Case(sized, good=(ONES, 3), wrong=(ONES, 3.0)),
    "tuple": Case(both, good=((ONES, INTS),), wrong=((ONES, INTS[:2]),)),
    "tuple, longer": Case(both, good=((ONES, INTS),), wrong=((ONES, INTS, 1),)),
    "tuple, a list": Case(both, good=((ONES, INTS),), wrong=([ONES, INTS],)),
    "float": Case(scaled, good=(ONES, 1.0), wrong=(ONES, "1")),
    "literal": Case(scaled, good=(ONES, 1.0), wrong=(ONES, 1.0, "left")),
    "tree": Case(tree, good=(NAMED, NAMED), wrong=(NAMED, {})),
    "tree, a size": Case(tree, good=(NAMED, NAMED), wrong=(NAMED, {"a": jnp.ones(4)})),
    "function": Case(apply, good=(ONES, len), wrong=(ONES, 3)),
    "more": Case(apply, good=(ONES, len, 1), wrong=(ONES, len, "a")),
    "result": Case(computed, good=(ONES, [ONES]), wrong=(ONES, [ONES.T])),
    "result, a dtype": Case(computed, good=(ONES, [ONES]), wrong=(ONES, [ONES > 0])),
    "result, none": Case(computed, good=(ONES, [ONES]), wrong=(ONES, [None])),
}


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(TypeCheckError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_after_good_ones_is_rejected_with_the_same_message(name: str, monkeypatch):
    case = CASES[name]
    for _ in range(3):
        case.function(*case.good)

    remembered = error_of(case.function, *case.wrong)
    monkeypatch.setattr(memo.Memo, "key", lambda *_: memo.NO_KEY)
    forgotten = error_of(case.function, *case.wrong)

    assert remembered == forgotten


def test_a_call_like_an_earlier_one_is_not_checked_twice(monkeypatch):
    # so that what other tests have called doesn't fill the memo in between
    monkeypatch.setattr(memo, "MOST_CALLS", 10_000)
    model = jgpt.Head(6, 4, rngs=nnx.Rngs(0))
    three = jnp.ones((2, 3, 6))
    five = jnp.ones((2, 5, 6))
    seven = jnp.ones((2, 7, 6))
    model(three)
    model(five)

    def fail(*_: Any) -> str:
        raise AssertionError("checked twice")

    monkeypatch.setattr(contract, "mismatch", fail)

    model(jnp.copy(three))
    jax.vmap(model)(five[None])
    with pytest.raises(AssertionError, match="checked twice"):
        model(seven)


def test_sizes_are_bound_for_what_is_inside():
    found = []

    @typed
    def outer(x: Float[Array, "*batch time"], y: Float[Array, "time *others"], inner: Any) -> None:
        def unchecked() -> None:
            found.append(isinstance(inner, ROWS))
            found.append(isinstance(inner, OTHERS))
            check(inner, Float[Array, "*batch"])

        unchecked()

    x = jnp.ones((2, 4, 3))
    y = jnp.ones((3, 5))
    good = jnp.ones((2, 4))
    wrong = jnp.ones(5)

    outer(x, y, good)
    outer(x, y, good)

    assert found == [True, False, True, False]
    message = error_of(outer, x, y, wrong)
    assert message.endswith(
        "the shape of its variadic dimensions '*batch' is (5,), which does not equal the existing "
        "value of (2, 4)."
    )


def test_it_keeps_no_array_and_no_module_alive():
    class Local(nnx.Module):
        def __init__(self) -> None:
            self.width = 3

        @typed
        def __call__(
            self, x: Float[Array, "batch {self.width}"], other: Any
        ) -> Float[Array, "..."]:
            return x + 1

    module = Local()
    x = jnp.ones((2, 3))
    reference_to_module = weakref.ref(module)
    reference_to_x = weakref.ref(x)
    reference_to_result = weakref.ref(module(x, [x]))

    del module, x
    gc.collect()

    assert reference_to_module() is None
    assert reference_to_x() is None
    assert reference_to_result() is None
    assert Local()(ONES, None).shape == (2, 3)


def memo_of(function: Callable[..., Any]) -> memo.Memo:
    written = inspect.unwrap(function)
    return memo.Memo(inspect.signature(written), get_type_hints(written, include_extras=True))


def test_it_is_bounded():
    calls = memo_of(computed)
    for size in range(1, 500):
        arguments = {"x": np.ones((size, 2)), "result": []}
        remembered = calls.remember(size, arguments)
        remembered.remember_result(size)
    assert 1 <= len(calls._calls) <= memo.MOST_CALLS

    remembered = calls.remember("key", {"x": ONES, "result": []})
    for size in range(500):
        remembered.remember_result(size)
    assert 1 <= len(remembered.results) <= memo.MOST_CALLS


def test_threads_share_it():
    passed = []

    def work() -> None:
        right = jnp.ones(2)
        for size in range(1, 150):
            width = size % 70 + 1
            too_long = jnp.ones(size % 7 + 3)
            kind(np.ones((2, width)))
            pair(ONES, right)
            try:
                pair(ONES, too_long)
            except TypeCheckError:
                continue
            passed.append(size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert passed == []


def test_a_watcher_hears_each_call():
    model = jgpt.Head(6, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, 6))
    paths = []

    def watch(call: Any) -> None:
        paths.append(call.path)

    model(x)
    with jgpt.watching(watch):
        model(x)
        of_one_call = list(paths)
        model(x)

    assert len(of_one_call) > 2
    assert paths == of_one_call + of_one_call


def test_what_a_watcher_returns_is_checked_each_time():
    model = jgpt.Head(6, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, 6))
    model(x)

    def cut(result: Any) -> Any:
        return result[:1]

    for _ in range(2):
        with (
            jgpt.watching(lambda call: cut),
            pytest.raises(TypeCheckError, match="returned a wrong result"),
        ):
            model(x)


def test_open_sizes_are_checked_each_time():
    @typed
    def doubled(x: Float[Array, "batch time"]) -> Float[Array, "{x.shape[0]} {x.shape[1]}"]:
        return 2 * x

    @typed
    def wrong(x: Float[Array, "batch time"]) -> Float[Array, "batch 3"]:
        return x

    assert doubled(jnp.ones((2, 6))).shape == (2, 6)
    assert wrong(jnp.ones((2, 3))).shape == (2, 3)
    for _ in range(2):
        assert jgpt.prove(doubled, "float32[b 2*t]")
        assert not jgpt.prove(wrong, "float32[b t]")
        open_shape = jax.export.symbolic_shape("b, t")
        x = jax.ShapeDtypeStruct(open_shape, "float32")
        jax.export.export(jax.jit(doubled))(x)
        with pytest.raises(TypeCheckError):
            jax.export.export(jax.jit(wrong))(x)
