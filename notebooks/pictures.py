"""What the lessons share: a matrix as a picture, visible text, and a diagram of the transformer."""

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

plt.rcParams.update({"figure.dpi": 72, "figure.constrained_layout.use": True, "font.size": 10})


def heat_map(
    matrix: ArrayLike,
    title: str = "",
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    names: tuple[str, str] = ("", ""),
    digits: int | None = 2,
    largest: float | None = None,
    axes: Axes | None = None,
) -> None:
    """Draw a matrix with its values in it; `digits=None` leaves them out.

    Rows and columns are labels, a string being one for each character. Names are those of the axes.
    `largest` is the value of the darkest colour, to compare matrices.
    """
    matrix = np.asarray(matrix, np.float64)
    height, width = matrix.shape
    if axes is None:
        cell = 0.62 if digits is not None else 0.2
        axes = plt.subplots(figsize=(cell * width + 1.3, cell * height + 1.1))[1]
    finite = matrix[np.isfinite(matrix)]
    largest = largest or np.abs(finite).max() or 1.0
    signed = finite.min() < 0
    colours = plt.get_cmap("RdBu_r" if signed else "Blues").with_extremes(bad="0.85")
    shown = np.ma.masked_invalid(matrix)
    axes.imshow(shown, cmap=colours, vmin=-largest if signed else 0, vmax=largest, aspect="equal")
    if digits is not None:
        for (row, column), value in np.ndenumerate(matrix):
            # dark cells have white numbers
            colour = "white" if np.isfinite(value) and abs(value) > 0.6 * largest else "black"
            number = f"{value:.{digits}f}" if np.isfinite(value) else "-∞"
            axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(rows)), visible(rows))
    axes.set_xticks(range(len(columns)), visible(columns))
    axes.set(ylabel=names[0], xlabel=names[1])


def visible(characters: Sequence[str]) -> list[str]:
    """The characters, with signs for the two that can't be seen."""
    return [{" ": "␣", "\n": "↵"}.get(character, character) for character in characters]


# name: the lesson that explains the part, its label, its place (x, y) and its width
PARTS = {
    "tokenizer": (1, "tokenizer", 4.2, 1.6, 4.6),
    "token_embedding": (1, "token embedding", 4.2, 3.4, 4.6),
    "position_embedding": (3, "position\nembedding", 9.4, 5.2, 3.4),
    "blocks": (5, "block\n⋮\nblock", 4.2, 7.7, 4.6),
    "final_norm": (5, "norm", 4.2, 10.2, 4.6),
    "head": (5, "language-model head", 4.2, 12.0, 4.6),
    "sampling": (1, "softmax,\nsampling", 2.3, 14.6, 3.2),
    "loss": (1, "cross\nentropy", 6.6, 14.6, 3.2),
    "train_step": (7, "gradient,\noptimizer", 6.6, 16.9, 3.2),
    "attention_norm": (5, "norm", 17.2, 3.2, 4.6),
    "attention": (4, "multi-head\nattention", 17.2, 5.4, 4.6),
    "feed_forward_norm": (5, "norm", 17.2, 10.2, 4.6),
    "feed_forward": (5, "feed-forward\nnetwork", 17.2, 12.4, 4.6),
    "query": (3, "query", 24.4, 2.5, 2.4),
    "key": (3, "key", 27.2, 2.5, 2.4),
    "value": (3, "value", 30.0, 2.5, 2.4),
    "split": (4, "split into heads", 27.2, 4.2, 8.0),
    "cache": (10, "cache", 28.6, 5.9, 5.2),
    "scores": (3, "scores: q·k / √head_dim", 25.7, 7.7, 5.0),
    "mask": (2, "causal mask", 25.7, 9.3, 5.0),
    "softmax": (2, "softmax: weights", 25.7, 10.9, 5.0),
    "mean": (2, "weighted mean of values", 27.2, 12.7, 8.0),
    "merge": (4, "merge the heads", 27.2, 14.4, 8.0),
    "projection": (4, "projection", 27.2, 16.1, 8.0),
}
LINES = [  # corners; the last has an arrowhead
    [(4.2, 0.7), (4.2, 1.1)],
    [(4.2, 2.1), (4.2, 2.9)],
    [(4.2, 3.9), (4.2, 4.9)],
    [(7.7, 5.2), (4.5, 5.2)],
    [(4.2, 5.5), (4.2, 6.2)],
    [(4.2, 9.2), (4.2, 9.7)],
    [(4.2, 10.7), (4.2, 11.5)],
    [(4.2, 12.5), (4.2, 13.2), (2.3, 13.2), (2.3, 13.8)],
    [(4.2, 12.5), (4.2, 13.2), (6.6, 13.2), (6.6, 13.8)],
    [(6.6, 15.4), (6.6, 16.1)],
    [(2.3, 15.4), (2.3, 16.0), (0.2, 16.0), (0.2, 0.2), (2.7, 0.2)],
    [(13.6, 0.9), (13.6, 7.2)],
    [(13.6, 7.8), (13.6, 14.2)],
    [(13.6, 14.8), (13.6, 16.2)],
    [(13.6, 1.9), (17.2, 1.9), (17.2, 2.7)],
    [(17.2, 3.7), (17.2, 4.6)],
    [(17.2, 6.2), (17.2, 7.5), (13.9, 7.5)],
    [(13.6, 8.9), (17.2, 8.9), (17.2, 9.7)],
    [(17.2, 10.7), (17.2, 11.6)],
    [(17.2, 13.2), (17.2, 14.5), (13.9, 14.5)],
    *([(27.2, 0.9), (27.2, 1.4), (x, 1.4), (x, 2.0)] for x in (24.4, 27.2, 30.0)),
    *([(x, 3.0), (x, 3.7)] for x in (24.4, 27.2, 30.0)),
    *([(x, 4.7), (x, 5.4)] for x in (27.2, 30.0)),
    [(24.4, 4.7), (24.4, 7.2)],
    [(27.2, 6.4), (27.2, 7.2)],
    [(30.0, 6.4), (30.0, 12.2)],
    *([(25.7, y), (25.7, y + 0.6)] for y in (8.2, 9.8)),
    [(25.7, 11.4), (25.7, 12.2)],
    *([(27.2, y), (27.2, y + 0.7)] for y in (13.2, 14.9, 16.6)),
]
SHAPES = [  # of lesson 6: text, and where it begins
    ("batch time", 4.4, 2.5),
    ("batch time embed_dim", 4.4, 5.8),
    ("batch time vocab_size", 4.4, 12.9),
    ("batch time embed_dim", 13.8, 1.3),
    ("batch time embed_dim", 13.8, 8.5),
    ("batch time embed_dim", 13.8, 15.4),
    ("batch time embed_dim", 27.4, 1.05),
    ("batch heads\nkey head_dim", 30.1, 7.7),
    ("batch heads\nquery key", 28.3, 10.1),
    ("batch heads query head_dim", 27.4, 13.5),
    ("batch time embed_dim", 27.4, 15.25),
]


def draw_transformer(
    lesson: int, *, new: Collection[str] = (), labels: Mapping[str, str] | None = None
) -> None:
    """Draw a GPT, one of its blocks, and its attention, filled in up to a lesson.

    Parts of that lesson are orange, and so are those named in `new`; parts of later ones are empty
    and have its number. `labels` replaces labels. Both name parts as PARTS does.
    """
    axes = plt.subplots(figsize=(12, 6.6))[1]
    for left, right, title in ((12.3, 20.6, "one block"), (22.4, 32.2, "its attention")):
        frame = {"facecolor": "0.97", "edgecolor": "0.7", "zorder": 0}
        axes.add_patch(plt.Rectangle((left, 0.5), right - left, 17.1, **frame))
        axes.text((left + right) / 2, 18.0, title, ha="center", fontsize=11)
    axes.text(4.2, 18.0, "GPT", ha="center", fontsize=11)
    for inner, outer, low, high in ((6.5, 12.3, 6.2, 9.2), (19.5, 22.4, 4.6, 6.2)):
        for near, far in ((low, 0.5), (high, 17.6)):
            axes.plot((inner, outer), (near, far), color="0.7", linewidth=0.8, zorder=0)
    for corners in LINES:
        axes.plot(*zip(*corners, strict=True), color="0.4", linewidth=1, zorder=1)
        arrow = {"arrowstyle": "-|>", "color": "0.4", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[-1], corners[-2], arrowprops=arrow)
    for x, y, known in (
        (4.2, 5.2, lesson >= 3),
        (13.6, 7.5, lesson >= 5),
        (13.6, 14.5, lesson >= 5),
    ):
        axes.text(x, y, "+" if known else "", ha="center", va="center", zorder=3)
        axes.scatter(x, y, s=150, facecolor="white", edgecolor="0.4", zorder=2)
    axes.text(4.2, 0.2, "“First Citi”", ha="center", va="center")
    for name, (taught_in, label, x, y, width) in PARTS.items():
        later, current = taught_in > lesson, taught_in == lesson or name in new
        label = (labels or {}).get(name, label)
        height = 3.0 if name == "blocks" else 1.6 if "\n" in PARTS[name][1] else 1.0
        colour = "white" if later else "#ffd8a8" if current else "#cfe2f3"
        corner = (x - width / 2, y - height / 2)
        style = {"edgecolor": "0.7" if later else "0.2", "linestyle": ":" if later else "-"}
        axes.add_patch(plt.Rectangle(corner, width, height, facecolor=colour, zorder=2, **style))
        text = f"lesson {taught_in}" if later else label
        shade = "0.6" if later else "black"
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=shade, zorder=3)
    for shape, x, y in SHAPES if lesson >= 6 else ():
        colour = "#b35900" if lesson == 6 else "tab:blue"
        axes.text(x, y, shape, va="center", fontsize=7, color=colour, zorder=4)
    axes.set(xlim=(-0.2, 32.4), ylim=(-0.4, 18.6))
    axes.axis("off")
