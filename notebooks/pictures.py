"""What the lessons share: matrices and tables as pictures, the map of a GPT.

Pictures are SVG with a transparent background, for light and dark pages.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib_inline.backend_inline import set_matplotlib_formats
from numpy.typing import ArrayLike

INK = "#767676"
"""A grey that can be read on white and on black."""
BOX = "black"
"""Text on the light boxes of the map."""

set_matplotlib_formats("svg", metadata={"Date": None})
plt.rcParams.update(
    dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK)
    | dict.fromkeys(("xtick.color", "ytick.color"), INK)
    | dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
    | {"legend.facecolor": "none"}
    | {"figure.dpi": 72, "figure.constrained_layout.use": True, "font.size": 10}
    | {"axes.titlesize": 10, "font.sans-serif": ["DejaVu Sans"]}
    | {"font.monospace": ["DejaVu Sans Mono"]}
    | {"svg.fonttype": "none", "svg.hashsalt": "jgpt"}
)


def heat_map(
    matrix: ArrayLike,
    title: str = "",
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    names: tuple[str, str] = ("", ""),
    digits: int | None = 2,
    texts: Sequence[Sequence[str]] = (),
    largest: float | None = None,
    axes: Axes | None = None,
) -> None:
    """Draw a matrix with values, or texts, in it; not with `digits=None`.

    Rows and columns are labels, a string being one for each character. Names
    are those of the axes.
    `largest` is the value of the darkest colour, to compare matrices.
    """
    matrix = np.asarray(matrix, np.float64)
    height, width = matrix.shape
    if axes is None:
        cell = 0.55 if digits is not None else 0.2
        size = (cell * width + 1.3, cell * height + 1.1)
        axes = plt.subplots(figsize=size)[1]
    finite = matrix[np.isfinite(matrix)]
    largest = largest or np.abs(finite).max() or 1.0
    signed = finite.min() < 0
    colours = plt.get_cmap("RdBu_r" if signed else "Blues")
    shown = axes.imshow(
        np.ma.masked_invalid(matrix),
        cmap=colours.with_extremes(bad="0.85"),
        vmin=-largest if signed else 0,
        vmax=largest,
        interpolation="none",
    )
    if digits is not None:
        shades = shown.to_rgba(shown.get_array())
        for (row, column), value in np.ndenumerate(matrix):
            number = f"{value:.{digits}f}" if np.isfinite(value) else "-∞"
            text = texts[row][column] if texts else number
            colour = text_on(shades[row, column, :3])
            axes.text(column, row, text, ha="center", va="center", color=colour)
    _label(axes, title, rows, columns, names)


def grid(
    cells: Sequence[Sequence[object]],
    title: str = "",
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    names: tuple[str, str] = ("", ""),
    axes: Axes | None = None,
) -> None:
    """Draw a table without shading, for letters and the numbers of tokens."""
    height, width = len(cells), len(cells[0])
    if axes is None:
        axes = plt.subplots(figsize=(0.4 * width + 1.3, 0.4 * height + 1.1))[1]
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            axes.text(column, row, str(cell), ha="center", va="center")
    axes.set(
        xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), aspect="equal"
    )
    _label(axes, title, rows, columns, names)
    axes.set_xticks(np.arange(width - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(height - 1) + 0.5, minor=True)
    axes.grid(which="minor", color=INK, linewidth=0.5)
    axes.tick_params(which="minor", length=0)


def _label(
    axes: Axes,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    names: tuple[str, str],
) -> None:
    axes.set_title(title)
    axes.set_yticks(range(len(rows)), visible(rows))
    axes.set_xticks(range(len(columns)), visible(columns))
    axes.set(ylabel=names[0], xlabel=names[1])


def text_on(colour: ArrayLike) -> str:
    """Black or white, whichever has more contrast with a colour (WCAG 2.2)."""
    shares = np.asarray(colour)
    curve = ((shares + 0.055) / 1.055) ** 2.4
    linear = np.where(shares <= 0.04045, shares / 12.92, curve)
    luminance = linear @ (0.2126, 0.7152, 0.0722)
    with_white, with_black = (
        1.05 / (luminance + 0.05),
        (luminance + 0.05) / 0.05,
    )
    return "white" if with_white > with_black else "black"


def visible(characters: Sequence[str]) -> list[str]:
    """The characters, with signs for the two that can't be seen."""
    return [
        {" ": "␣", "\n": "↵"}.get(character, character)
        for character in characters
    ]


COURSE = ("JAX", "bigram", "averages", "head")
COURSE += ("heads", "block", "shapes", "training")
"""The first lessons, from 0 on."""
# name: the lesson that explains it, its label, its place: x, y, width, height
PARTS = {
    "tokenizer": (1, "tokenizer", 4.2, 1.6, 5.6, 1.0),
    "token_embedding": (1, "token embedding", 4.2, 3.4, 5.6, 1.0),
    "position_embedding": (3, "position embedding", 9.5, 5.2, 3.8, 1.6),
    "blocks": (5, "block\n⋮\nblock", 4.2, 8.3, 5.6, 2.8),
    "final_norm": (5, "norm", 4.2, 10.8, 5.6, 1.0),
    "head": (5, "language-model head", 4.2, 12.8, 5.6, 1.6),
    "sampling": (1, "softmax, sampling", 2.2, 15.5, 3.6, 1.6),
    "loss": (1, "cross entropy", 6.6, 15.5, 3.6, 1.6),
    "train_step": (7, "gradient, optimizer", 6.6, 17.9, 3.6, 1.6),
    "attention_norm": (5, "norm", 17.2, 3.3, 4.8, 1.0),
    "attention": (4, "multi-head attention", 17.2, 5.5, 4.8, 1.6),
    "feed_forward_norm": (5, "norm", 17.2, 10.6, 4.8, 1.0),
    "feed_forward": (5, "feed-forward network", 17.2, 12.8, 4.8, 1.6),
    "query": (3, "query", 24.2, 2.8, 2.4, 1.0),
    "key": (3, "key", 26.9, 2.8, 2.4, 1.0),
    "value": (3, "value", 29.6, 2.8, 2.4, 1.0),
    "split": (4, "split into heads", 26.9, 4.4, 7.8, 1.0),
    "cache": (10, "cache", 28.4, 6.0, 4.8, 1.0),
    "scores": (3, "scores:\nq·k / √head_dim", 25.4, 7.9, 5.6, 1.6),
    "mask": (2, "causal mask", 25.4, 9.7, 5.6, 1.0),
    "softmax": (2, "softmax", 25.4, 11.3, 5.6, 1.0),
    "mean": (2, "weighted mean of values", 26.9, 13.6, 7.8, 1.6),
    "merge": (4, "merge the heads", 26.9, 16.0, 7.8, 1.0),
    "projection": (4, "projection", 26.9, 17.6, 7.8, 1.0),
}
POSITION_LINE = [(7.6, 5.2), (4.6, 5.2)]
LINES = [  # corners; the last has an arrowhead
    [(4.2, 0.7), (4.2, 1.1)],
    [(4.2, 2.1), (4.2, 2.9)],
    [(4.2, 3.9), (4.2, 4.9)],
    POSITION_LINE,
    [(4.2, 5.5), (4.2, 6.9)],
    [(4.2, 9.7), (4.2, 10.3)],
    [(4.2, 11.3), (4.2, 12.0)],
    [(4.2, 13.6), (4.2, 14.2), (2.2, 14.2), (2.2, 14.7)],
    [(4.2, 13.6), (4.2, 14.2), (6.6, 14.2), (6.6, 14.7)],
    [(6.6, 16.3), (6.6, 17.1)],
    [(2.2, 16.3), (2.2, 16.9), (0.1, 16.9), (0.1, 0.2), (2.2, 0.2)],
    [(13.6, 0.9), (13.6, 7.4)],
    [(13.6, 8.0), (13.6, 14.9)],
    [(13.6, 15.5), (13.6, 18.2)],
    [(13.6, 2.1), (17.2, 2.1), (17.2, 2.8)],
    [(17.2, 3.8), (17.2, 4.7)],
    [(17.2, 6.3), (17.2, 7.7), (14.0, 7.7)],
    [(13.6, 9.4), (17.2, 9.4), (17.2, 10.1)],
    [(17.2, 11.1), (17.2, 12.0)],
    [(17.2, 13.6), (17.2, 15.2), (14.0, 15.2)],
    *(
        [(26.9, 0.8), (26.9, 1.7), (x, 1.7), (x, 2.3)]
        for x in (24.2, 26.9, 29.6)
    ),
    *([(x, 3.3), (x, 3.9)] for x in (24.2, 26.9, 29.6)),
    *([(x, 4.9), (x, 5.5)] for x in (26.9, 29.6)),
    [(24.2, 4.9), (24.2, 7.1)],
    [(26.9, 6.5), (26.9, 7.1)],
    [(29.6, 6.5), (29.6, 12.8)],
    [(25.4, 8.7), (25.4, 9.2)],
    [(25.4, 10.2), (25.4, 10.8)],
    [(25.4, 11.8), (25.4, 12.8)],
    [(26.9, 14.4), (26.9, 15.5)],
    [(26.9, 16.5), (26.9, 17.1)],
    [(26.9, 18.1), (26.9, 18.7)],
]
SHAPES = [  # of lesson 6: text, where it begins, and where its middle is
    ("batch time", 4.5, 2.5),
    ("batch time\nembed_dim", 0.4, 5.9),
    ("batch time\nvocab_size", 6.9, 14.15),
    ("batch time\nembed_dim", 13.9, 1.3),
    ("batch time\nembed_dim", 13.9, 8.6),
    ("batch time\nembed_dim", 13.9, 16.3),
    ("batch time\nembed_dim", 22.6, 1.1),
    ("batch\nheads key\nhead_dim", 29.8, 8.9),
    ("batch heads\nquery key", 25.6, 12.3),
    ("batch heads\nquery head_dim", 27.1, 14.95),
]


def draw_transformer(
    lesson: int,
    *,
    new: Collection[str] = (),
    labels: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> None:
    """Draw the course, a GPT, a block and attention, filled in up to a lesson.

    Parts of that lesson are orange, and so are those named in `new`; parts of
    later ones are empty and have its number. `labels` replaces labels, and
    `without` leaves out what a model lacks. All name parts as PARTS does.
    """
    has_positions = "position_embedding" not in without
    axes = plt.subplots(figsize=(7.5, 7.9))[1]
    for at, name in enumerate((*COURSE, "and on")):
        number = f"{at}" if name in COURSE else f"{at}-"
        current = at == min(lesson, len(COURSE))
        place = (1.8 + 3.7 * at, 21.8, 3.4, 1.7)
        _box(axes, f"{number}\n{name}", place, at > lesson, current)
    frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.7}
    frames = ((12.2, 20.8, "one block"), (22.2, 33.2, "its attention"))
    for left, right, title in frames:
        size = right - left, 18.5
        axes.add_patch(plt.Rectangle((left, 0.4), *size, zorder=0, **frame))
        axes.text((left + right) / 2, 19.5, title, ha="center", va="center")
    axes.text(4.2, 19.5, "GPT", ha="center", va="center")
    thin = {"color": INK, "linewidth": 0.5, "zorder": 0}
    zooms = ((7.0, 12.2, 6.9, 9.7), (19.6, 22.2, 4.7, 6.3))
    for inner, outer, low, high in zooms:
        for near, far in ((low, 0.4), (high, 18.9)):
            axes.plot((inner, outer), (near, far), **thin)
    for corners in LINES:
        if corners == POSITION_LINE and not has_positions:
            continue
        axes.plot(*zip(*corners, strict=True), color=INK, linewidth=1, zorder=1)
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[-1], corners[-2], arrowprops=arrow)
    sums = [(13.6, 7.7, 5), (13.6, 15.2, 5)]
    if has_positions:
        sums.append((4.2, 5.2, 3))
    for x, y, taught_in in sums:
        style = {"ha": "center", "va": "center", "color": BOX, "zorder": 3}
        axes.text(x, y, "+" if lesson >= taught_in else "", **style)
        axes.scatter(x, y, s=150, facecolor="white", edgecolor=INK, zorder=2)
    axes.text(2.5, 0.2, "“First Citi”", va="center")
    for name, (taught_in, label, *place) in PARTS.items():
        if name in without:
            continue
        later, current = taught_in > lesson, taught_in == lesson or name in new
        known = (labels or {}).get(name, label)
        text = f"lesson {taught_in}" if later else known
        _box(axes, text, place, later, current)
    style = {"va": "center", "color": "#b36000" if lesson == 6 else INK}
    for shape, x, y in SHAPES if lesson >= 6 else ():
        axes.text(x, y, shape, zorder=4, **style)
    axes.set(xlim=(-0.2, 33.4), ylim=(-0.4, 22.8))
    axes.axis("off")


def _box(
    axes: Axes, text: str, place: Sequence[float], later: bool, current: bool
) -> None:
    x, y, width, height = place
    fill = (
        {"facecolor": "none"}
        if later
        else {"facecolor": "#f5b971" if current else "#9fc5e8"}
    )
    line = {"edgecolor": INK, "linestyle": ":" if later else "-", "zorder": 2}
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(plt.Rectangle(corner, width, height, **fill, **line))
    if "\n" not in text:
        letters = int(2.75 * width)  # at 10 points
        text = "\n".join(textwrap.wrap(text, letters, break_long_words=False))
    style = {"color": INK if later else BOX, "zorder": 3}
    axes.text(x, y, text, ha="center", va="center", **style)
