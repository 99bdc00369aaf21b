"""What the lessons share: matrices and tables as pictures, the map of a GPT.

Pictures are SVG with a transparent background, for light and dark pages.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib_inline.backend_inline import set_matplotlib_formats
from numpy.typing import ArrayLike

INK = "#767676"
"""A grey that can be read on white and on black."""
BOX = "black"
"""Text on the light boxes of the map."""
PIXELS = 8
"""Of a heat map's cell: browsers that enlarge a picture blur between pixels."""

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
    """Draw a matrix with values, or texts, in it.

    With `digits=None` there are no values, but a scale beside the matrix.
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
    shades = _colours(largest, signed).to_rgba(np.ma.masked_invalid(matrix))
    pixels = shades.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)
    edges = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(pixels, extent=edges, interpolation="none")
    if digits is None:
        _draw_scale(axes, largest, signed)
    else:
        for (row, column), value in np.ndenumerate(matrix):
            number = f"{value:.{digits}f}" if np.isfinite(value) else "-∞"
            text = texts[row][column] if texts else number
            colour = text_on(shades[row, column, :3])
            axes.text(column, row, text, ha="center", va="center", color=colour)
    _label(axes, title, rows, columns, names)


def _draw_scale(axes: Axes, largest: float, signed: bool) -> None:
    """Draw what the colours of a heat map stand for."""
    ticks = [0.0, largest]
    if signed:
        ticks.insert(0, -largest)
    bar = axes.figure.colorbar(
        _colours(largest, signed), ax=axes, aspect=12, shrink=0.7, pad=0.03
    )
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(True)  # one image in place of 256 paths


def _colours(largest: float, signed: bool) -> ScalarMappable:
    smallest = -largest if signed else 0.0
    colours = plt.get_cmap("RdBu_r" if signed else "Blues")
    return ScalarMappable(
        Normalize(smallest, largest), colours.with_extremes(bad="0.85")
    )


def grid(
    cells: Sequence[Sequence[object]],
    title: str = "",
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    names: tuple[str, str] = ("", ""),
    groups: ArrayLike = (),
    cell_width: float = 1.0,
    axes: Axes | None = None,
) -> None:
    """Draw a table of letters, the numbers of tokens, or words.

    Cells of the same group have the same colour; without groups there are none.
    """
    height, width = len(cells), len(cells[0])
    group_of = np.asarray(groups)
    if axes is None:
        size = (0.4 * cell_width * width + 1.3, 0.4 * height + 1.1)
        axes = plt.subplots(figsize=size)[1]
    pastels = plt.get_cmap("Pastel1").colors
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            style = {"ha": "center", "va": "center"}
            if group_of.size > 0:
                style["color"] = BOX
                corner = (column - 0.5, row - 0.5)
                colour = pastels[group_of[row, column]]
                box = plt.Rectangle(corner, 1, 1, facecolor=colour, zorder=0)
                axes.add_patch(box)
            axes.text(column, row, str(cell), **style)
    axes.set(
        xlim=(-0.5, width - 0.5),
        ylim=(height - 0.5, -0.5),
        aspect=1 / cell_width,
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
    "tokenizer": (1, "tokenizer", 4.2, 1.6, 6.2, 1.2),
    "token_embedding": (1, "token embedding", 4.2, 3.5, 6.2, 1.2),
    "position_embedding": (3, "position embedding", 9.9, 5.4, 4.2, 2.0),
    "blocks": (5, "block\n⋮\nblock", 4.2, 8.1, 6.2, 2.8),
    "final_norm": (5, "norm", 4.2, 11.0, 6.2, 1.2),
    "head": (5, "language-model head", 4.2, 12.9, 6.2, 1.2),
    "sampling": (1, "softmax, sampling", 3.0, 15.4, 5.2, 1.2),
    "loss": (1, "cross entropy", 8.8, 15.4, 5.2, 1.2),
    "train_step": (7, "gradient, optimizer", 8.8, 17.6, 5.8, 1.2),
    "attention_norm": (5, "norm", 17.3, 3.4, 6.2, 1.2),
    "attention": (4, "multi-head attention", 17.3, 5.5, 6.2, 1.2),
    "feed_forward_norm": (5, "norm", 17.3, 11.0, 6.2, 1.2),
    "feed_forward": (5, "feed-forward network", 17.3, 13.3, 6.2, 2.0),
    "query": (3, "query", 24.0, 2.2, 2.6, 1.2),
    "key": (3, "key", 26.8, 2.2, 2.6, 1.2),
    "value": (3, "value", 29.6, 2.2, 2.6, 1.2),
    "split": (4, "split into heads", 26.8, 4.1, 8.0, 1.2),
    "cache": (10, "cache", 28.2, 6.0, 4.8, 1.2),
    "scores": (3, "scores: q·k / √d", 25.5, 7.9, 6.2, 1.2),
    "mask": (2, "causal mask", 25.5, 9.8, 6.2, 1.2),
    "softmax": (2, "softmax", 25.5, 11.7, 6.2, 1.2),
    "mean": (2, "weighted mean of values", 26.8, 13.6, 8.0, 1.2),
    "merge": (4, "merge the heads", 26.8, 15.5, 8.0, 1.2),
    "projection": (4, "projection", 26.8, 17.4, 8.0, 1.2),
}
POSITION_LINE = [(7.8, 5.4), (4.6, 5.4)]
LINES = [  # corners; the last has an arrowhead
    [(4.2, 0.5), (4.2, 1.0)],
    [(4.2, 2.2), (4.2, 2.9)],
    [(4.2, 4.1), (4.2, 5.1)],
    POSITION_LINE,
    [(4.2, 5.7), (4.2, 6.7)],
    [(4.2, 9.5), (4.2, 10.4)],
    [(4.2, 11.6), (4.2, 12.3)],
    [(4.2, 13.5), (4.2, 14.1), (3.0, 14.1), (3.0, 14.8)],
    [(4.2, 13.5), (4.2, 14.1), (8.8, 14.1), (8.8, 14.8)],
    [(8.8, 16.0), (8.8, 17.0)],
    [(3.0, 16.0), (3.0, 16.7), (0.1, 16.7), (0.1, 0.0), (2.2, 0.0)],
    [(13.2, 0.5), (13.2, 7.4)],
    [(13.2, 8.0), (13.2, 15.1)],
    [(13.2, 15.7), (13.2, 18.4)],
    [(13.2, 1.9), (17.3, 1.9), (17.3, 2.8)],
    [(17.3, 4.0), (17.3, 4.9)],
    [(17.3, 6.1), (17.3, 7.7), (13.6, 7.7)],
    [(13.2, 9.5), (17.3, 9.5), (17.3, 10.4)],
    [(17.3, 11.6), (17.3, 12.3)],
    [(17.3, 14.3), (17.3, 15.4), (13.6, 15.4)],
    *(
        [(26.8, 0.4), (26.8, 1.0), (x, 1.0), (x, 1.6)]
        for x in (24.0, 26.8, 29.6)
    ),
    *([(x, 2.8), (x, 3.5)] for x in (24.0, 26.8, 29.6)),
    *([(x, 4.7), (x, 5.4)] for x in (26.8, 29.6)),
    [(24.0, 4.7), (24.0, 7.3)],
    [(26.8, 6.6), (26.8, 7.3)],
    [(29.6, 6.6), (29.6, 13.0)],
    [(25.5, 8.5), (25.5, 9.2)],
    [(25.5, 10.4), (25.5, 11.1)],
    [(25.5, 12.3), (25.5, 13.0)],
    [(26.8, 14.2), (26.8, 14.9)],
    [(26.8, 16.1), (26.8, 16.8)],
    [(26.8, 18.0), (26.8, 18.6)],
]
_STREAM = "batch time embed_dim"
_PAIRS = "batch heads query key"
SHAPES = {  # of what a part returns
    "tokenizer": "batch time",
    "token_embedding": _STREAM,
    "position_embedding": "time embed_dim",
    "final_norm": _STREAM,
    "head": "batch time vocab_size",
    "sampling": "batch",
    "attention_norm": _STREAM,
    "attention": _STREAM,
    "feed_forward_norm": _STREAM,
    "feed_forward": _STREAM,
    "split": "batch heads time head_dim",
    "scores": _PAIRS,
    "mask": "query key",
    "softmax": _PAIRS,
    "mean": "batch heads query head_dim",
    "merge": _STREAM,
    "projection": _STREAM,
}


def draw_transformer(
    lesson: int,
    *,
    new: Collection[str] = (),
    labels: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    shapes: bool = False,
) -> None:
    """Draw the course, a GPT, a block and attention, filled in up to a lesson.

    Parts of that lesson are orange, and so are those named in `new`; parts of
    later ones are empty and have its number. `labels` replaces labels, and
    `without` leaves out what a model lacks. All name parts as PARTS does. With
    `shapes`, each part has the shape of its result below its label.
    """
    has_positions = "position_embedding" not in without
    height = 7.2 if shapes else 4.6
    axes = plt.subplots(figsize=(9.5, height))[1]
    for at, name in enumerate((*COURSE, "and on")):
        number = f"{at}" if name in COURSE else f"{at}-"
        current = at == min(lesson, len(COURSE))
        place = (1.8 + 3.7 * at, 21.2, 3.5, 1.3)
        _box(axes, f"{number} {name}", place, at > lesson, current)
    frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.7}
    frames = ((12.2, 20.9, "one block"), (22.1, 33.2, "its attention"))
    for left, right, title in frames:
        size = right - left, 18.6
        axes.add_patch(plt.Rectangle((left, 0.2), *size, zorder=0, **frame))
        axes.text((left + right) / 2, 19.5, title, ha="center", va="center")
    axes.text(4.2, 19.5, "GPT", ha="center", va="center")
    thin = {"color": INK, "linewidth": 0.5, "zorder": 0}
    zooms = ((7.3, 12.2, 6.7, 9.5), (20.4, 22.1, 4.9, 6.1))
    for inner, outer, low, high in zooms:
        for near, far in ((low, 0.2), (high, 18.8)):
            axes.plot((inner, outer), (near, far), **thin)
    for corners in LINES:
        if corners == POSITION_LINE and not has_positions:
            continue
        axes.plot(*zip(*corners, strict=True), color=INK, linewidth=1, zorder=1)
        arrow = {"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[-1], corners[-2], arrowprops=arrow)
    sums = [(13.2, 7.7, 5), (13.2, 15.4, 5)]
    if has_positions:
        sums.append((4.2, 5.4, 3))
    for x, y, taught_in in sums:
        style = {"ha": "center", "va": "center", "color": BOX, "zorder": 3}
        axes.text(x, y, "+" if lesson >= taught_in else "", **style)
        axes.scatter(x, y, s=110, facecolor="white", edgecolor=INK, zorder=2)
    axes.text(2.5, 0.0, "“First Citi”", va="center")
    for name, (taught_in, label, *place) in PARTS.items():
        if name in without:
            continue
        later, current = taught_in > lesson, taught_in == lesson or name in new
        known = (labels or {}).get(name, label)
        text = f"lesson {taught_in}" if later else known
        if shapes and name in SHAPES:
            text = f"{text}\n{SHAPES[name]}"
        _box(axes, text, place, later, current)
    axes.set(xlim=(-0.2, 33.4), ylim=(-0.6, 22.0))
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
    edge = {"edgecolor": INK, "linestyle": ":" if later else "-", "zorder": 2}
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(plt.Rectangle(corner, width, height, **fill, **edge))
    letters = int(3.4 * width)  # at 10 points
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, letters, break_long_words=False)
    text = "\n".join(lines)
    style = {"color": INK if later else BOX, "zorder": 3}
    axes.text(x, y, text, ha="center", va="center", **style)
