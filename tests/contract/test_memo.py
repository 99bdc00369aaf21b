"""A call like an earlier one isn't checked twice, and no wrong call passes because of that."""

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
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


def call(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[[], Any]:
    return lambda: function(*args, **named)


INTS = jnp.ones(3, int)
CASES = {
    "size": (call(pair, ONES, jnp.ones(2)), call(pair, ONES, jnp.ones(3))),
    "rank": (call(pair, ONES), call(pair, ONES[0])),
    "dtype": (call(pair, ONES), call(pair, ONES.astype(int))),
    "library": (call(pair, ONES), call(pair, np.ones((2, 3), np.float32))),
    "other library": (call(kind, np.ones((2, 3))), call(kind, jnp.ones((2, 3)))),
    "none": (call(pair, ONES, None), call(pair, None, None)),
    "owner": (call(Owner(3).take, ONES), call(Owner(4).take, ONES)),
    "owner, a float": (call(Owner(3).take, ONES), call(Owner(3.5).take, ONES)),
    "owner, a path": (call(Owner(3).second, ONES), call(Owner(3).second, ONES[:, :2])),
    "owner, changed inside": (call(Owner(3).give, ONES, 0), call(Owner(3).give, ONES, 1)),
    "int": (call(sized, ONES, 3), call(sized, ONES, 4)),
    "int, another type": (call(sized, ONES, 3), call(sized, ONES, 3.0)),
    "tuple": (call(both, (ONES, INTS)), call(both, (ONES, INTS[:2]))),
    "tuple, longer": (call(both, (ONES, INTS)), call(both, (ONES, INTS, 1))),
    "tuple, a list": (call(both, (ONES, INTS)), call(both, [ONES, INTS])),
    "float": (call(scaled, ONES, 1.0), call(scaled, ONES, "1")),
    "literal": (call(scaled, ONES, 1.0), call(scaled, ONES, 1.0, "left")),
    "tree": (call(tree, {"a": INTS + 1.0}, {"a": INTS + 1.0}), call(tree, {"a": INTS + 1.0}, {})),
    "tree, a size": (
        call(tree, {"a": INTS + 1.0}, {"a": INTS + 1.0}),
        call(tree, {"a": INTS + 1.0}, {"a": jnp.ones(4)}),
    ),
    "function": (call(apply, ONES, len), call(apply, ONES, 3)),
    "more": (call(apply, ONES, len, 1), call(apply, ONES, len, "a")),
    "result": (call(computed, ONES, [ONES]), call(computed, ONES, [ONES.T])),
    "result, a dtype": (call(computed, ONES, [ONES]), call(computed, ONES, [ONES > 0])),
    "result, none": (call(computed, ONES, [ONES]), call(computed, ONES, [None])),
}


def error_of(wrong: Callable[[], Any]) -> str:
    with pytest.raises(TypeCheckError) as caught:
        wrong()
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_call_after_good_ones_is_rejected_with_the_same_message(name: str, monkeypatch):
    good, wrong = CASES[name]
    for _ in range(3):
        good()
    remembered = error_of(wrong)

    monkeypatch.setattr(memo.Memo, "key", lambda *_: memo.NO_KEY)
    assert remembered == error_of(wrong)


def test_a_call_like_an_earlier_one_is_not_checked_twice(monkeypatch):
    # so that what other tests have called doesn't fill the memo in between
    monkeypatch.setattr(memo, "MOST_CALLS", 10_000)
    model = jgpt.Head(6, 4, rngs=nnx.Rngs(0))
    arrays = [jnp.ones((2, time, 6)) for time in (3, 5, 3, 5)]
    model(arrays[0])
    model(arrays[1])

    def fail(*_: Any) -> str:
        raise AssertionError("checked twice")

    monkeypatch.setattr(contract, "mismatch", fail)
    model(arrays[2])
    jax.vmap(model)(arrays[3][None])
    with pytest.raises(AssertionError, match="checked twice"):
        model(jnp.ones((2, 7, 6)))


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
    for _ in range(2):
        outer(x, y, good)
    assert found == [True, False] * 2
    assert error_of(lambda: outer(x, y, jnp.ones(5))).endswith(
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
    gone = [weakref.ref(module), weakref.ref(x), weakref.ref(module(x, [x]))]
    run = Local.__call__
    del module, x
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
    assert run(Local(), ONES, None).shape == (2, 3)


def memo_of(function: Callable[..., Any]) -> memo.Memo:
    written = inspect.unwrap(function)
    return memo.Memo(inspect.signature(written), get_type_hints(written, include_extras=True))


def test_it_is_bounded():
    calls = memo_of(computed)
    for size in range(1, 500):
        arguments = {"x": np.ones((size, 2)), "result": []}
        key = size
        calls.remember(key, arguments).remember_result(key)
    assert 1 <= len(calls._calls) <= memo.MOST_CALLS
    call = calls.remember("key", {"x": ONES, "result": []})
    for size in range(500):
        call.remember_result(size)
    assert 1 <= len(call.results) <= memo.MOST_CALLS


def test_threads_share_it():
    wrong = 0

    def work() -> None:
        nonlocal wrong
        for size in range(1, 150):
            x = np.ones((2, size % 70 + 1))
            kind(x)
            assert pair(jnp.ones((2, 3)), jnp.ones(2)) is None
            try:
                pair(jnp.ones((2, 3)), jnp.ones(size % 7 + 3))
            except TypeCheckError:
                continue
            wrong += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == 0


def test_a_watcher_hears_each_call_and_its_results_are_checked():
    paths = []

    def watch(call: Any) -> None:
        paths.append(call.path)

    model = jgpt.Head(6, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, 6))
    model(x)
    with jgpt.watching(watch):
        model(x)
        once = list(paths)
        model(x)
    assert paths == 2 * once
    assert len(once) > 2
    for _ in range(2):
        with (
            jgpt.watching(lambda call: lambda result: result[:1]),
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
        symbols = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t"), "float32")
        jax.export.export(jax.jit(doubled))(symbols)
        with pytest.raises(TypeCheckError):
            jax.export.export(jax.jit(wrong))(symbols)
