"""A text of any size from a seed, like the source code of a large project.

Words are as frequent as those of a language: few make most of the text, and new ones keep coming.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS = 60_000
SYLLABLES = [first + second for first in "bcdfghjklmnpqrstvwxyz" for second in "aeiou"]
LINES = (
    "def %s(%s, %s):\n",
    "    %s = %s(%s, %s)\n",
    "    %s = %s.%s[%s]\n",
    "    if %s is not None and %s > 0:\n",
    "        return %s\n",
    "        %s += %s * 17\n",
    "    for %s in %s.%s():\n",
    "        yield %s, %s\n",
    "    # the %s of a %s is its %s, unless %s\n",
    '    raise ValueError(f"{%s} is not a %s")\n',
    "    assert %s == [3, 1, 4], %s\n",
    "    # naïve: %s → %s\n",
    "\n",
    "class %s(%s):\n",
    "import %s.%s\n",
)
SLOTS = [line.count("%s") for line in LINES]
RARE = ("    # naïve: %s → %s\n", "class %s(%s):\n", "import %s.%s\n")
LINES_AT_ONCE = 10_000


def words(generator: np.random.Generator) -> list[str]:
    """Names of one to five syllables, the frequent ones short."""
    found = dict.fromkeys(["i", "x", "self", "name", "value", "data", "key", "self.config"])
    syllables = iter(generator.choice(SYLLABLES, 10 * WORDS).tolist())
    lengths = iter(generator.integers(1, 4, 2 * WORDS).tolist())
    while len(found) < WORDS:
        length = next(lengths)
        parts = list(itertools.islice(syllables, length))
        if len(found) > 300:  # when most short ones are taken
            parts.append(next(syllables))
            if length % 2 == 1:
                parts.append("_")
            parts.append(next(syllables))
        found["".join(parts)] = None
    return list(found)


def code_like(size: int, seed: int = 0) -> Iterator[str]:
    """At least `size` characters, in blocks of whole lines."""
    generator = np.random.default_rng(seed)
    names = np.array(words(generator), object)
    # the n-th word is as frequent as n to the power of -1.2: Zipf's law
    up_to_word = np.cumsum(np.arange(1, WORDS + 1) ** -1.2)
    weights = np.array([0.1 if line in RARE else 1.0 for line in LINES])
    up_to_line = np.cumsum(weights)
    written = 0
    while written < size:
        places = generator.random(LINES_AT_ONCE) * up_to_line[-1]
        lines = np.searchsorted(up_to_line, places)
        slots = sum(SLOTS[line] for line in lines)
        places = generator.random(slots) * up_to_word[-1]
        drawn = names[np.searchsorted(up_to_word, places)]
        template = "".join(LINES[line] for line in lines)
        block = template % tuple(drawn)
        written += len(block)
        yield block


def write_code(path: Path, size: int, seed: int = 0) -> None:
    """Write a text of at least `size` characters."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(code_like(size, seed))
