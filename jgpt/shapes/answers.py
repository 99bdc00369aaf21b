"""What a symbolic size answers during a proof: as JAX does, with an open question, or with a note.

JAX answers an open `t == 1` with False and an open `if t % 4` with True, which would silently drop
a branch. It gives a size a hash and a text, which are those of no number. So methods of JAX's class
of sizes are replaced while a case is traced, for the sizes of the case alone. Libraries still get
JAX's answers: they ask for speed, or to print.
"""

import contextlib
import dis
import functools
import numbers
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import numpy as np
from jax.errors import InconclusiveDimensionOperation

from jgpt.shapes.matching import AnyFloat
from jgpt.shapes.sizes import Size, is_open

LIBRARIES = frozenset(
    {
        "_pytest",  # it formats what an `assert` compares
        "beartype",
        "chex",
        "einops",
        "equinox",
        "flax",
        "jax",
        "jaxlib",
        "jaxtyping",
        "opt_einsum",
        "optax",
    }
)
"""Packages that branch on a size for speed and not to compute something else."""
_FOR_THEIR_CALLER = frozenset({"__hash__", "__str__", "__repr__", "__format__", "__eq__", "__ne__"})
"""Methods that answer for an object by asking its parts."""
_NO_QUESTIONS = frozenset({"__bool__", "__getnewargs__"})
"""Methods of an integer that have an answer of their own here, or that only copying calls."""
_NO_INTEGER = object()
"""A fraction, or another number that no size equals."""


class OpenQuestion(BaseException):
    """An open equality that JAX would decide. Handlers of `Exception` don't catch it."""


class Note(NamedTuple):
    """What the program asked a size, and got an answer that no number gives."""

    text: str
    calls: tuple[tuple[types.CodeType, int], ...]
    """The code of each function that was running, from the innermost, and where in it."""

    def is_in_message(self, error: BaseException) -> bool:
        """Return whether the statement that raised an error asked, as for a text in its message."""
        trace = error.__traceback__
        assert trace is not None
        while trace.tb_next is not None:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        for function, place in self.calls:
            if function is code:
                return not _jumps_between(code, place, trace.tb_lasti)
        return False


def _jumps_between(code: types.CodeType, start: int, end: int) -> bool:
    """Return whether what lies between two places depends on a condition or a handler."""
    for instruction in dis.get_instructions(code):
        if start <= instruction.offset < end:
            is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
            if is_jump or instruction.opname == "PUSH_EXC_INFO":
                return True
    return start > end  # a loop jumped back


class Asked:
    """What the program has asked the sizes of a case, also where it caught what they raised."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.questions: list[OpenQuestion | Note] = []

    def raise_open(self, question: str) -> NoReturn:
        """Raise an open question. It is stored, since a program can catch even this."""
        error = OpenQuestion(question)
        self.questions.append(error)
        raise error

    def note(self, what: str) -> None:
        """Note a question that has no answer, if the program asks it."""
        asking = asking_frame()
        if asking is None:
            return
        calls = []
        frame: types.FrameType | None = asking
        while frame is not None:
            calls.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        file = Path(asking.f_code.co_filename).name
        text = f"line {asking.f_lineno} of {file} asks for {what}"
        self.questions.append(Note(text, tuple(calls)))


def text_of(size: Any) -> str:
    """Return the text of a size or a number, without a note."""
    if isinstance(size, Size):
        return _JAX_TEXT(size)
    return str(size)


_JAX_TEXT = Size.__str__


# --- who asks ------------------------------------------------------------------------------------


def asking_frame() -> types.FrameType | None:
    """Return the frame of the program that asks, or None if a library asks for itself."""
    frame: Any = sys._getframe(1)
    last = frame
    # The function of a library that the program called, where there is one.
    entry = None
    while frame is not None:
        name = frame.f_code.co_name
        match _role_of(frame):
            case "library":
                entry = name
            # A dataclass's methods, for example, ask for whoever calls them.
            case "program" if name not in _FOR_THEIR_CALLER:
                break
        last = frame
        frame = frame.f_back
    if entry is not None and entry not in _FOR_THEIR_CALLER:
        return None
    return frame or last


def _role_of(frame: types.FrameType) -> str:
    if frame.f_code.co_filename == __file__:
        return "passes on"
    # Not its file, since `<string>` is that of all code that is generated.
    module = frame.f_globals.get("__name__")
    if module is not None:
        return _role_of_module(module)
    # An expression that is evaluated without globals, such as the braces of an annotation.
    return "passes on" if frame.f_code.co_name == "<module>" else "program"


@functools.cache
def _role_of_module(module: str) -> str:
    package = module.partition(".")[0]
    if package in LIBRARIES or module.startswith("jgpt.shapes"):
        return "library"
    is_standard = package in sys.stdlib_module_names and package != "__main__"
    if package == "numpy" or is_standard:
        return "passes on"
    return "program"


def is_program(frame: types.FrameType) -> bool:
    """Return whether a frame is of the program that is proven, and not of a library."""
    return _role_of(frame) == "program"


# --- answers -------------------------------------------------------------------------------------


class _Scale(AnyFloat):
    """A power or a quotient of open sizes: it scales arrays, and comparisons with it are open.

    As a float it is 1, which means nothing, since values are not computed in a proof. It is no
    subclass of float, whose value `math` and NumPy would read without asking.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def _decides(self, *_: Any) -> Any:
        self._asked.raise_open("a power or a quotient of a size decides a shape or a branch")

    def _scales(self, other: Any = 0, mod: Any = None) -> Any:
        if isinstance(other, (int, float, Size, AnyFloat)):
            return self
        return NotImplemented  # an array computes with it as with any float

    def __jax_array__(self) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(1.0)

    def __float__(self) -> float:
        self._asked.note("the value of a power or a quotient of a size")
        return 1.0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(float(self), dtype)

    def __eq__(self, other: object) -> bool:
        if asking_frame() is None:
            return other == 1.0
        return self._decides()

    def __ne__(self, other: object) -> bool:
        # As in JAX's initialisers, which test whether a mean of sizes is 0.
        return not self == other

    def __hash__(self) -> int:
        self._asked.note("the hash of a power or a quotient of a size")
        return 1

    def __str__(self) -> str:
        self._asked.note("the text of a power or a quotient of a size")
        return "a power or a quotient of a size"

    __repr__ = __str__
    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = __bool__ = _decides
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = _decides
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __abs__ = _scales
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _scales


_Answers = dict[str, Callable[..., Any]]
"""Methods by their names."""


@contextlib.contextmanager
def answering(asked: Asked) -> Iterator[None]:
    """Replace methods of JAX's class of sizes in the block, for the sizes of a case."""
    scope = asked.scope
    answers = {
        **_comparisons(asked),
        **_arithmetic(asked),
        **_texts(asked),
        **_of_integers(asked),
        "__copy__": lambda self: self,
        "__deepcopy__": lambda self, _: self,
    }

    def attribute(self: Any, name: str) -> Any:
        """Note what an integer has and a size lacks; NumPy looks for `sqrt` and the like."""
        is_function = isinstance(getattr(np, name, None), np.ufunc)
        if (hasattr(int, name) or is_function) and self.scope is scope:
            asked.note(f"`{name}` of a size")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            chosen = _of_the_case(scope, answer, getattr(Size, name, None), name)
            stack.enter_context(mock.patch.object(Size, name, chosen, create=True))
        stack.enter_context(mock.patch.object(Size, "__getattr__", attribute, create=True))
        yield


_ANSWERING = threading.local()
"""Whether a size of this thread is answering: what JAX asks of other sizes meanwhile is no question
of the program."""


def _of_the_case(
    scope: Any, ours: Callable[..., Any], theirs: Callable[..., Any] | None, name: str
) -> Callable[..., Any]:
    """Return a method that is `ours` for sizes of a scope, and JAX's for others."""

    def chosen(self: Any, *args: Any) -> Any:
        if self._scope is scope and not getattr(_ANSWERING, "is_on", False):
            return ours(self, *args)
        if theirs is not None:
            return theirs(self, *args)
        if name == "__bool__":
            return True  # as Python says of a class without this method
        if name == "__copy__":
            return self
        raise TypeError(f"{type(self).__name__!r} object has no {name}")

    return chosen


def _ask_jax(method: Callable[..., Any], *args: Any) -> Any:
    """Return JAX's own answer."""
    was_on = getattr(_ANSWERING, "is_on", False)
    _ANSWERING.is_on = True
    try:
        return method(*args)
    finally:
        _ANSWERING.is_on = was_on


def _comparisons(asked: Asked) -> _Answers:
    """Raise where JAX would decide an open equality or truth, and store an open order."""
    equal = Size.__eq__

    def equals(self: Any, other: Any) -> Any:
        if isinstance(other, Size) and other.scope is not self.scope:
            return False  # a size of another case, in one of JAX's caches
        same = _ask_jax(equal, self, other)
        if same is True or asking_frame() is None:
            return same
        number = _whole(other)
        if isinstance(other, np.ndarray):  # which leaves the answer to a size, not to an integer
            asked.raise_open("a size is compared with a NumPy array")
        if number is None:
            return NotImplemented  # as an integer answers, so that the other is asked
        if number is _NO_INTEGER:
            return False
        if isinstance(number, AnyFloat):
            return number == self
        if _ask_jax(is_open, self - number):
            asked.raise_open(f"'{text_of(self)}' == '{text_of(number)}'")
        return _ask_jax(equal, self, number)

    def differs(self: Any, other: Any) -> Any:
        is_equal = equals(self, other)
        return is_equal if is_equal is NotImplemented else not is_equal

    def truth(self: Any) -> bool:
        if _ask_jax(is_open, self) and asking_frame() is not None:
            asked.raise_open(f"'{text_of(self)}' == '0'")
        return True

    def order(name: str) -> Callable[..., Any]:
        theirs = getattr(Size, name)

        def compare(self: Any, other: Any) -> Any:
            number = _whole(other)
            if not isinstance(number, (int, Size)):
                if number is _NO_INTEGER or isinstance(other, np.ndarray):
                    asked.note(f"the order of a size and a {type(other).__name__}")
                return NotImplemented
            try:
                return _ask_jax(theirs, self, number)
            except InconclusiveDimensionOperation as error:
                # This error is an `Exception`, which programs catch.
                if asking_frame() is not None:
                    asked.raise_open(str(error))
                raise

        return compare

    answers: _Answers = {"__eq__": equals, "__ne__": differs, "__bool__": truth}
    for name in ("__ge__", "__gt__", "__le__", "__lt__"):
        answers[name] = order(name)
    return answers


def _whole(other: Any) -> Any:
    """Return the integer that a number equals, or `_NO_INTEGER`; None for what is no number.

    Sizes and quotients of sizes are returned as they are.
    """
    if isinstance(other, (int, Size, AnyFloat)):
        return other
    if not isinstance(other, numbers.Number):
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        real: Any = getattr(other, "real", other)  # a Decimal has no such part
        whole = int(real)
        if whole == other:
            return whole
    return _NO_INTEGER


def _arithmetic(asked: Asked) -> _Answers:
    """Replace powers and quotients of sizes, and products with them, by `_Scale`."""

    # `head_dim ** -0.5` scales scores, and `t ** 2` is a size.
    def to_power(self: Any, exponent: Any, modulo: Any = None) -> Any:
        if isinstance(exponent, (float, AnyFloat)):
            return _Scale(asked)
        return _ask_jax(power, self, exponent, modulo)

    # A quotient is a float for all sizes; JAX makes it an array, which decides nothing either.
    def quotient(self: Any, divisor: Any) -> Any:
        if isinstance(divisor, (int, float, Size, AnyFloat)):
            return _Scale(asked)
        return _ask_jax(divide, self, divisor)

    def quotient_of(self: Any, dividend: Any) -> Any:  # `dividend / self`
        if isinstance(dividend, (int, float)):
            return _Scale(asked)
        return _ask_jax(divide_into, self, dividend)

    # A size times a quotient or a float is no longer a size, so its comparisons stay open.
    def with_floats(name: str) -> Callable[..., Any]:
        theirs = getattr(Size, name)

        def computed(self: Any, other: Any) -> Any:
            if isinstance(other, (float, AnyFloat)):
                return _Scale(asked)
            return _ask_jax(theirs, self, other)

        return computed

    power = Size.__pow__
    divide = Size.__truediv__
    divide_into = Size.__rtruediv__
    answers: _Answers = {
        "__pow__": to_power,
        "__truediv__": quotient,
        "__rtruediv__": quotient_of,
    }
    for name in ("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__"):
        answers[name] = with_floats(name)
    return answers


def _texts(asked: Asked) -> _Answers:
    """Note where the program asks for the hash or the text of a size, which are those of no number;
    JAX gives them."""
    hash_of = Size.__hash__

    def hashed(self: Any) -> int:
        asked.note("the hash of a size")
        return _ask_jax(hash_of, self)

    def printed(self: Any) -> str:
        asked.note("the text of a size")
        return _JAX_TEXT(self)

    def formatted(self: Any, form: str) -> str:
        asked.note("the text of a size")
        return _JAX_TEXT(self)  # a form such as `5d` is for numbers

    return {
        "__hash__": hashed,
        "__str__": printed,
        "__repr__": printed,
        "__format__": formatted,
    }


def _of_integers(asked: Asked) -> _Answers:
    """Note where the program uses a size as a number that it isn't, as `math.sqrt` and `&` do."""

    def missing(name: str) -> Callable[..., Any]:
        theirs = getattr(Size, name, None)

        def refuse(self: Any, *args: Any) -> Any:
            asked.note(f"`{name}` of a size")
            if theirs is not None:
                return _ask_jax(theirs, self, *args)
            raise TypeError(f"{type(self).__name__!r} object has no {name}")

        return refuse

    lacking = set(dir(int)) - set(dir(Size)) - _NO_QUESTIONS
    names = {name for name in lacking if name.startswith("__")}
    return {
        name: missing(name) for name in sorted(names | {"__int__", "__index__", "__reduce_ex__"})
    }
