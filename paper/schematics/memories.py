"""What a memory is: a matrix, written with a key and a value, and read with a query."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, WIDTH
from paper.schematics.drawing import arrow, box, canvas, cells, label

__all__ = ["writes"]

K, V = 4, 3  # rows and columns of the memories drawn
OPAQUE = 1 / 3
LEFT = 10  # where the memories begin


def writes() -> Figure:
    """Above, the linear memory adds the outer product of key and value; below, the delta rule adds the error.

    Keys stand to the left of a memory and queries to its right, one number a row; what is written stands above it and
    what is read below, one number a column.
    """
    drawn, axes = canvas(22, 27.8, inches=WIDTH)
    _linear(axes, LEFT, 14)
    _delta(axes, LEFT, 0.2)
    return drawn


def _memory(axes: Axes, x: float, y: float, title: str) -> None:
    """The matrix S with its upper left corner at (x, y + 9), the key k and the query q beside it, and the title of the
    picture."""
    label(axes, (11, y + 13.4), title, size=10)
    cells(axes, (x, y + 9), [[(SKY, OPAQUE)] * V] * K)
    label(axes, (x + V / 2, y + 9 - K / 2), "$S$", size=12)
    cells(axes, (x - 2.5, y + 9), [[(BLUE, OPAQUE)]] * K)
    label(axes, (x - 3.3, y + 9 - K / 2), "$k$", size=11)
    arrow(axes, (x - 1.3, y + 9 - K / 2), (x - 0.2, y + 9 - K / 2), colour=BLUE)
    cells(axes, (x + V + 1.5, y + 9), [[(GREEN, OPAQUE)]] * K)
    label(axes, (x + V + 3.2, y + 9 - K / 2), "$q$", size=11)
    arrow(axes, (x + V + 1.3, y + 9 - K / 2), (x + V + 0.2, y + 9 - K / 2), colour=GREEN)


def _row(axes: Axes, x: float, y: float, colour: str) -> None:
    """A vector of V numbers, its left upper corner at (x, y)."""
    cells(axes, (x, y), [[(colour, OPAQUE)] * V])


def _linear(axes: Axes, x: float, y: float) -> None:
    _memory(axes, x, y, "Linear memory: adds")
    _row(axes, x, y + 12, ORANGE)
    label(axes, (x - 0.3, y + 11.5), "value $v$", align="right")
    arrow(axes, (x + V / 2, y + 10.8), (x + V / 2, y + 9.2), colour=ORANGE)
    label(axes, (x + V / 2 + 0.5, y + 10), r"1. write $k\,v^\top$", align="left")
    arrow(axes, (x + V / 2, y + 4.8), (x + V / 2, y + 3.2), colour=GREEN)
    label(axes, (x + V / 2 + 0.5, y + 4), "2. read at $q$", align="left")
    _row(axes, x, y + 3, GREEN)
    label(axes, (x + V / 2, y + 1.1), "answer $o$")


def _delta(axes: Axes, x: float, y: float) -> None:
    _memory(axes, x, y, "Delta rule: reads first, writes the error")
    so_far, after, node = x - 3.2, x + 3.2, x - 5.6  # the rows that are read, and where the difference is taken
    arrow(axes, (x + 0.6, y + 4.8), (so_far + V / 2 + 0.4, y + 3.2), colour=BLUE)
    label(axes, (so_far + V / 2 - 0.3, y + 4.2), "1. read at $k$", align="right")
    _row(axes, so_far, y + 3, BLUE)
    label(axes, (so_far + V / 2, y + 1.1), "answer so far")
    axes.plot([so_far - 0.2, node], [y + 2.5] * 2, color=BLUE, linewidth=1.3, solid_capstyle="round")
    arrow(axes, (node, y + 2.4), (node, y + 10.8), colour=BLUE)
    box(axes, (node, y + 11.5), "$-$", width=1.2, height=1.2, colour=BLACK, size=12)
    _row(axes, node - 4.2, y + 12, ORANGE)
    label(axes, (node - 2.7, y + 10.4), "value $v$")
    arrow(axes, (node - 1.1, y + 11.5), (node - 0.6, y + 11.5), colour=ORANGE)
    arrow(axes, (node + 0.7, y + 11.5), (x - 0.1, y + 11.5), colour=PURPLE)
    label(axes, ((node + x) / 2, y + 12.2), "2. subtract")
    _row(axes, x, y + 12, PURPLE)
    label(axes, (x + V + 0.3, y + 11.5), "error $e$", align="left")
    arrow(axes, (x + V / 2, y + 10.8), (x + V / 2, y + 9.2), colour=PURPLE)
    label(axes, (x + V / 2 + 0.5, y + 10), r"3. write $\beta\,k\,e^\top$", align="left")
    arrow(axes, (x + V - 0.6, y + 4.8), (after + V / 2 - 0.4, y + 3.2), colour=GREEN)
    label(axes, (after + V / 2 + 0.3, y + 4.2), "4. read at $q$", align="left")
    _row(axes, after, y + 3, GREEN)
    label(axes, (after + V / 2, y + 1.1), "answer $o$")
