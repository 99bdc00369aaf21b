"""A matrix as a picture, and text that can be seen: all that the lessons share."""

from collections.abc import Sequence

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
