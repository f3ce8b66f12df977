"""What a memory is: a matrix, written with a key and a value, and read with a query."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.plots import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, WIDTH
from paper.schematics.drawing import arrow, canvas, cells, label

__all__ = ["writes"]

K, V = 4, 3  # rows and columns of the memories drawn
OPAQUE = 1 / 3
LEFT = 6  # where the memories begin


def writes() -> Figure:
    """Above, the linear memory adds the outer product of key and value; below, the delta rule adds the error.

    Keys stand to the left of a memory and queries to its right, one number a row; what is written stands above it and
    what is read below, one number a column.
    """
    drawn, axes = canvas(22, 27.6, inches=WIDTH)
    _linear(axes, LEFT, 13.8)
    _delta(axes, LEFT, 0)
    return drawn


def _memory(axes: Axes, x: float, y: float, title: str) -> None:
    """The matrix S with its upper left corner at (x, y + 9), the key k beside it, and the title of the picture."""
    label(axes, (x + V / 2, y + 13.4), title, size=10)
    cells(axes, (x, y + 9), [[(SKY, OPAQUE)] * V] * K)
    label(axes, (x + V / 2, y + 9 - K / 2), "$S$", size=12)
    cells(axes, (x - 2.5, y + 9), [[(BLUE, OPAQUE)]] * K)
    label(axes, (x - 3.3, y + 9 - K / 2), "$k$", size=11)
    arrow(axes, (x - 1.3, y + 9 - K / 2), (x - 0.2, y + 9 - K / 2), colour=BLUE)


def _row(axes: Axes, x: float, y: float, colour: str) -> None:
    """A vector of V numbers, its left upper corner at (x, y)."""
    cells(axes, (x, y), [[(colour, OPAQUE)] * V])


def _linear(axes: Axes, x: float, y: float) -> None:
    _memory(axes, x, y, "Linear memory: adds")
    _row(axes, x, y + 12, ORANGE)
    label(axes, (x - 0.3, y + 11.5), "value $v$", align="right")
    arrow(axes, (x + V / 2, y + 10.8), (x + V / 2, y + 9.2), colour=ORANGE)
    label(axes, (x + V / 2 + 0.5, y + 10), r"write $k\,v^\top$", align="left")
    cells(axes, (x + V + 1.5, y + 9), [[(GREEN, OPAQUE)]] * K)
    label(axes, (x + V + 3.2, y + 9 - K / 2), "$q$", size=11)
    arrow(axes, (x + V + 1.3, y + 9 - K / 2), (x + V + 0.2, y + 9 - K / 2), colour=GREEN)
    arrow(axes, (x + V / 2, y + 4.8), (x + V / 2, y + 3.2), colour=PURPLE)
    label(axes, (x + V / 2 + 0.5, y + 4), "read", align="left")
    _row(axes, x, y + 3, PURPLE)
    label(axes, (x + V / 2, y + 1.1), r"answer $o = S^\top q$")


def _delta(axes: Axes, x: float, y: float) -> None:
    _memory(axes, x, y, "Delta rule: reads first, writes the error")
    arrow(axes, (x + V / 2, y + 4.8), (x + V / 2, y + 3.2), colour=PURPLE)
    label(axes, (x + V / 2 + 0.5, y + 4), "1. read at $k$", align="left")
    _row(axes, x, y + 3, PURPLE)
    label(axes, (x + V / 2, y + 1.1), r"answer so far $S^\top k$")
    side = x + 8.2  # of the value, and of the difference from it
    arrow(axes, (x + V + 0.2, y + 2.5), (side + 0.5, y + 6.7), colour=PURPLE, bend=0.3)
    _row(axes, side - 1, y + 8, ORANGE)
    label(axes, (side + V + 0.4 - 1, y + 7.5), "value $v$", align="left")
    label(axes, (side + 1.4, y + 6.3), "$-$", size=13)
    arrow(axes, (side + 0.5, y + 8.2), (x + V + 0.2, y + 11.5), colour=VERMILION, bend=0.3)
    label(axes, (side + 0.6, y + 10.6), "2. subtract", align="left")
    _row(axes, x, y + 12, VERMILION)
    label(axes, (x - 0.3, y + 11.5), "error $e$", align="right")
    arrow(axes, (x + V / 2, y + 10.8), (x + V / 2, y + 9.2), colour=VERMILION)
    label(axes, (x + V / 2 + 0.5, y + 10), r"3. write $\beta\,k\,e^\top$", align="left")
