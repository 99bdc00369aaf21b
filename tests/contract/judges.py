"""Two judges of a changed annotation: calls with numbers for sizes, and the same calls proven.

    python -m tests.contract.judges

Each edit of an annotation, a `check` or a `@typed` is made in place, and each call that the
programs make of its function is made again: as it was, with each argument wrong in one way, and
with each result wrong in one way. An edit is killed where an answer is another than before. The
judge by numbers gives the arrays their sizes; the proof gives a name to each size that the call
owns, so that it says the same of all sizes. A report that exists is continued.
"""

import ast
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp

from jgpt.contracts import typed
from jgpt.proofs import prove
from tests.contract.calls import Call
from tests.contract.edits import Edit, module_name
from tests.contract.equivalent import reason_why_equivalent
from tests.contract.mutants import ROOT, kind_of, mutants
from tests.contract.programs import PROGRAMS, heard

REPORT = ROOT / "benchmarks" / "results" / "mutants_judged.json"
Array = tuple[str, ...]
"""A dtype and sizes: a name or a number each."""
Lie = tuple[int, str]
"""Of which of a result's arrays, and what is wrong with it."""
OTHER = {True: "other", False: "41"}


class Judge:
    """A call with numbers or with names for sizes, and what is said of it when it is right."""

    def __init__(self, call: Call, proof: bool):
        self.call, self.proof = call, proof
        self.traced = [
            i
            for i, leaf in enumerate(call.leaves)
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and "key" not in str(leaf.dtype)
        ]
        bound = call.sizes() if proof else {}
        named = [sizes for name, sizes in bound.items() if name.lstrip("*").isidentifier()]
        sizes = {size for its in named for size in its if size > 1}
        self.open = sizes
        if not self.accepts():  # some size must be a number
            several = [sizes - {size} for size in sorted(sizes)] + [set()]
            self.open = next((each for each in several if self._opens(each)), set())
        self.probes = [probe for probe in self._probes() if self._answer(*probe)]

    def _opens(self, sizes: set[int]) -> bool:
        self.open = sizes
        return self.accepts()

    def arrays(self) -> list[Array]:
        leaves = [self.call.leaves[i] for i in self.traced]
        return [
            (leaf.dtype.name, *(f"n{n}" if n in self.open else str(n) for n in leaf.shape))
            for leaf in leaves
        ]

    def accepts(self) -> bool:
        return bool(self._prove(self.arrays()))

    def kills(self) -> str:
        """The first answer that is another than for the function as it is written."""
        if not self.accepts():
            return "a right call"
        for arrays, lie in self.probes:
            if not self._answer(arrays, lie):
                return "a wrong argument" if lie is None else "a wrong result"
        return ""

    def _prove(self, arrays: list[Array], lie: Lie | None = None) -> Any:
        def run(*given: Any) -> None:
            leaves = [
                jax.random.key(0) if "key" in str(getattr(leaf, "dtype", "")) else leaf
                for leaf in self.call.leaves
            ]
            for i, array in zip(self.traced, given, strict=True):
                leaves[i] = array
            bound = self.call.arguments(leaves)
            function = self.call.function if lie is None else lying(self.call, lie)
            function(*bound.args, **bound.kwargs)

        return prove(run, *(f"{dtype}[{' '.join(sizes)}]" for dtype, *sizes in arrays))

    def _answer(self, arrays: list[Array], lie: Lie | None) -> bool:
        """Whether what is wrong is said of this very callable."""
        wrong = "returned a wrong result" if lie else "got a wrong argument"
        blame = f"{self.call.name}() {wrong}"
        cases = self._prove(arrays, lie).cases
        said = {case.detail.startswith(blame) for case in cases if case.verdict == "violated"}
        return said == {True} and {case.verdict for case in cases} <= {"violated", "refused"}

    def _probes(self) -> Iterator[tuple[list[Array], Lie | None]]:
        right, other = self.arrays(), OTHER[self.proof]
        for name in self.call.arrays:
            at = self.call.span[name].start
            if at in self.traced:
                at = self.traced.index(at)
                dtype, *sizes = right[at]
                for wrong in wrongs(dtype, sizes, other):
                    yield [*right[:at], wrong, *right[at + 1 :]], None
        for i in range(4):
            for change in CHANGES:
                yield right, (i, change)


def wrongs(dtype: str, sizes: list[str], other: str) -> Iterator[Array]:
    for i, size in enumerate(sizes):
        yield (dtype, *sizes[:i], other, *sizes[i + 1 :])
        yield (dtype, *sizes[:i], *sizes[i + 1 :])
        if i and sizes[i - 1] != size:
            yield (dtype, *sizes[: i - 1], size, sizes[i - 1], *sizes[i + 1 :])
    yield (dtype, other, *sizes)
    yield ("int32" if "float" in dtype else "float32", *sizes)


CHANGES: dict[str, Callable[[Any], Any]] = {
    **{
        f"axis {i} twice as long": lambda x, i=i: jnp.concatenate([x, x], i) if i < x.ndim else None
        for i in range(4)
    },
    "an axis more": lambda x: x[None],
    "last axes swapped": lambda x: x.mT if x.ndim > 1 else None,
    "another dtype": lambda x: x.astype("int32" if "float" in x.dtype.name else "float32"),
}


def lying(call: Call, lie: Lie) -> Callable[..., Any]:
    """The function with a wrong result."""
    at, change = lie

    @functools.wraps(call.written)
    def fake(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(call.written(*args, **kwargs))
        leaves[at] = CHANGES[change](leaves[at])
        return jax.tree.unflatten(tree, leaves)

    return fake if call.function is call.written else typed(fake)


@contextlib.contextmanager
def edited(call: Call, edit: Edit) -> Iterator[None]:
    """The function of a call with the annotations and the code that an edit gives it."""
    written: Any = call.written
    function: Any = call.function
    inner: Any = inspect.unwrap(written)  # of a decorator that isn't `typed`
    before = inner.__code__, written.__annotations__
    source = edit.apply((ROOT / "jgpt" / edit.file).read_bytes())
    node: Any = ast.parse(source)
    for name in edit.where.removeprefix(f"{module_name(edit.file)}.").split("."):
        if name != "<locals>":
            kinds = ast.FunctionDef, ast.ClassDef
            node = next(it for it in ast.walk(node) if isinstance(it, kinds) and it.name == name)
    if isinstance(node, ast.ClassDef):
        fields = [it for it in node.body if isinstance(it, ast.AnnAssign)]
        hints: Any = {ast.unparse(it.target): it.annotation for it in fields}
        code = inner.__code__
    else:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        given += filter(None, (node.args.vararg, node.args.kwarg))
        hints = {it.arg: it.annotation for it in given} | {"return": node.returns}
        code = code_of(compile(source, inner.__code__.co_filename, "exec"), inner.__qualname__)
    scope = inner.__globals__
    changed = {
        name: eval(compile(ast.Expression(hints[name]), "", "eval"), scope)
        for name in written.__annotations__.keys() & hints.keys()
    }
    inner.__code__ = code
    inner.__annotations__ = written.__annotations__ = before[1] | changed
    kept = typed(written) if "drop @" not in edit.kind else written
    made = isinstance(function, type)
    init: Any = function.__init__ if made else None
    if made:
        function.__init__ = kept
    else:
        call.function = kept
    try:
        yield
    finally:
        inner.__code__, inner.__annotations__ = before
        written.__annotations__ = before[1]
        call.function = function
        if made:
            function.__init__ = init


def code_of(code: CodeType, name: str) -> CodeType:
    inside = [each for each in code.co_consts if isinstance(each, CodeType)]
    found = next((each for each in inside if each.co_qualname == name), None)
    return found or next(
        each
        for it in inside
        if name.startswith(f"{it.co_qualname}.")
        for each in [code_of(it, name)]
    )


def main() -> None:
    report: dict[str, Any] = {"command": "python -m tests.contract.judges", "outcomes": {}}
    if REPORT.exists():
        report = json.loads(REPORT.read_text())
    outcomes = report["outcomes"]
    chosen = [
        edit
        for edit in mutants([])
        if kind_of(edit.kind) == "contract" and not reason_why_equivalent(edit)
    ]
    by_function: dict[str, list[Edit]] = {}
    for edit in chosen:
        by_function.setdefault(edit.where, []).append(edit)
    calls: dict[str, list[Call]] = {}
    for program in PROGRAMS:
        for name, its in heard(program).items():
            calls.setdefault(name, its)
    for where, edits in by_function.items():
        if all(str(edit) in outcomes for edit in edits):
            continue
        its = calls.get(where) or calls.get(f"{where}.__init__", [])
        judges = [(Judge(call, False), Judge(call, True)) for call in its]
        judges = [(numbers, proof) for numbers, proof in judges if numbers.accepts()]
        for edit in edits:
            said = ["", ""]
            for pair in judges:
                for i, judge in enumerate(pair):
                    if not said[i]:
                        try:
                            with edited(judge.call, edit):
                                said[i] = judge.kills()
                        except Exception as error:
                            said[i] = f"not judged: {error!r}"
            outcomes[str(edit)] = said if judges else ["not traced", "not traced"]
            print(edit, outcomes[str(edit)], flush=True)
        REPORT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
