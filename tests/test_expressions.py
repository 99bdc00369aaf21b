"""Sizes are named by the one expression that fits them at all points, or not at all."""

import pytest

from jgpt.shapes.expressions import LEAST_POINTS, fitting_expressions, name_sizes

SYMBOLS = {"b": (3, 4, 5, 9), "t": (1023, 1024, 513, 1022)}


@pytest.mark.parametrize(
    ("expression", "size"),
    [
        ("b", lambda b, t: b),
        ("2*t-1", lambda b, t: 2 * t - 1),
        ("768*b*t", lambda b, t: 768 * b * t),
        ("(t-1)//2", lambda b, t: (t - 1) // 2),
        ("64*((t+63)//64)", lambda b, t: 64 * ((t + 63) // 64)),
        ("b+b*t", lambda b, t: b * t + b),
        ("b+t+5", lambda b, t: b + t + 5),
    ],
)
def test_a_size_has_the_expression_that_made_it(expression, size):
    sizes = []
    for b, t in zip(*SYMBOLS.values(), strict=True):
        sizes.append(size(b, t))
    assert fitting_expressions(sizes, SYMBOLS) == {expression}


def test_a_size_that_several_expressions_fit_is_traced_once_more():
    """With three lengths, of which two are equal, `t*t` is `7*t-12` as well."""
    symbols = {"b": (3, 4, 5, 9), "t": (3, 4, 3, 2)}
    traced = []

    def trees():
        for time in symbols["t"]:
            traced.append(time)
            yield [time * time, time]

    assert name_sizes(trees(), symbols).tree == ["t*t", "t"]
    assert traced == [3, 4, 3, 2]
    assert len(traced) > LEAST_POINTS

    three = {name: numbers[:3] for name, numbers in symbols.items()}
    trees_of_three = ([time * time, time] for time in three["t"])
    assert name_sizes(trees_of_three, three).tree == ["?", "t"]


def test_sizes_in_texts_have_names_and_other_words_are_other_parts():
    symbols = {"t": (101, 103, 50, 91)}
    trees = ([f"{t} arrays of float32, not ({t + 1}, 8)"] for t in symbols["t"])
    assert name_sizes(trees, symbols).tree == ["t arrays of float32, not (t+1, 8)"]

    trees = ([f"{t / 100} of {t}"] for t in symbols["t"])
    assert name_sizes(trees, symbols) == (["1.01 of 101"], [1])
