"""Linear attention: the two orders of one product, and where random features come in."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.plots import BLUE, GREEN, ORANGE, PURPLE, VERMILION, WIDTH
from paper.schematics.drawing import arrow, box, canvas, cells, label

__all__ = ["orders"]

TOKENS, FEATURES, VALUES = 6, 2, 3  # N, m and V of the drawn matrices
SIDE = 0.6  # of a cell
TINTS = {BLUE: "#9CC3DF", ORANGE: "#F5D28A", GREEN: "#8FD0BC", VERMILION: "#EFB48A", PURPLE: "#E5BFD5"}


def orders() -> Figure:
    """Both orders of the product: first the N x N weights, or first the m x V state. Below, the rows Omega."""
    drawn, axes = canvas(23.6, 15.2, inches=WIDTH)
    label(axes, (0.1, 14.6), "weights first: $(\\phi(Q)\\, \\phi(K)^T)\\, V$", align="left", size=10)
    _operands(axes, 11.2, (2.5, 9.3))
    _products(axes, 11.2, (TOKENS, TOKENS), "weights, $N \\times N$", "grows with $N^2$", "times $V$")
    label(axes, (0.1, 8.2), "state first: $\\phi(Q)\\, (\\phi(K)^T V)$", align="left", size=10)
    _operands(axes, 4.9, (4.9, 12.0))
    _products(axes, 4.9, (FEATURES, VALUES), "state $S$, $m \\times V$", "does not grow", "times $\\phi(Q)$")

    text = "random features: $m$ random rows $\\Omega$, drawn once, make $\\phi$"
    box(axes, (9.1, 1.0), text, width=17.8, height=1.4, colour=PURPLE, dashed=True)
    for x, gap in ((3.4, 1.9), (7.1, 0.7)):
        arrow(axes, (x, 1.75), (x, 4.9 - gap), colour=PURPLE, dashed=True)
    return drawn


def _products(axes: Axes, y: float, stored: tuple[int, int], name: str, growth: str, then: str) -> None:
    """What the first product stores, how it grows with N, and the last factor, at a height."""
    _matrix(axes, (15.6, y), *stored, VERMILION, name)
    label(axes, (15.6, y - stored[0] * SIDE / 2 - 0.5), growth)
    _matrix(axes, (21.8, y), TOKENS, VALUES, GREEN, "$O$, $N \\times V$")
    label(axes, (19.1, y + 0.6), then)


def _operands(axes: Axes, y: float, first: tuple[float, float]) -> None:
    """Features and values at a height, with brackets at `first` around the factors that are multiplied first."""
    _matrix(axes, (3.4, y), TOKENS, FEATURES, BLUE, "$\\phi(Q)$")
    _matrix(axes, (7.1, y), FEATURES, TOKENS, ORANGE, "$\\phi(K)^T$")
    _matrix(axes, (10.8, y), TOKENS, VALUES, PURPLE, "$V$")
    for x, sign in zip(first, "()", strict=True):
        label(axes, (x, y), sign, size=28)
    arrow(axes, (12.4, y), (13.5, y))
    arrow(axes, (17.8, y), (20.5, y))


def _matrix(axes: Axes, centre: tuple[float, float], rows: int, columns: int, colour: str, name: str) -> None:
    x, y = centre
    cells(axes, (x - columns * SIDE / 2, y + rows * SIDE / 2), [[TINTS[colour]] * columns] * rows, side=SIDE)
    label(axes, (x, y + rows * SIDE / 2 + 0.5), name)
