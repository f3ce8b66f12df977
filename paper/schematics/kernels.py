"""Linear attention: the two orders of one product."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.plots import BLUE, GREEN, ORANGE, SKY, WIDTH
from paper.schematics.drawing import arrow, canvas, cells, label

__all__ = ["orders"]

TOKENS, FEATURES, VALUES = 6, 2, 3  # N, m and d_v of the drawn matrices
SIDE = 0.6  # of a cell
# Keys, queries and values in the colours of `memories`.
TINTS = {BLUE: "#9CC3DF", GREEN: "#A6DCCB", ORANGE: "#F5D28A", SKY: "#C6E3F7"}


def orders() -> Figure:
    """Both orders of the product: first the N x N weights, or first the m x d_v state."""
    drawn, axes = canvas(15.6, 12.0, inches=WIDTH)
    label(axes, (0.1, 11.6), "weights first: $(\\phi(Q)\\, \\phi(K)^T)\\, V$", align="left", size=11)
    _factors(axes, 8.6, (0.4, 6.5))
    _stored(axes, 8.6, (TOKENS, TOKENS), "$N \\times N$ weights", "grows like $N^2$")
    label(axes, (0.1, 5.2), "state first: $\\phi(Q)\\, (\\phi(K)^T V)$", align="left", size=11)
    _factors(axes, 2.2, (2.3, 8.9))
    _stored(axes, 2.2, (FEATURES, VALUES), "$m \\times d_v$ state $S$", "does not grow")
    return drawn


def _factors(axes: Axes, y: float, brackets: tuple[float, float]) -> None:
    """Features and values at a height, with brackets around the two factors that are multiplied first."""
    _matrix(axes, (1.3, y), TOKENS, FEATURES, GREEN, "$\\phi(Q)$")
    _matrix(axes, (4.3, y), FEATURES, TOKENS, BLUE, "$\\phi(K)^T$")
    _matrix(axes, (7.7, y), TOKENS, VALUES, ORANGE, "$V$")
    for x, sign in zip(brackets, "()", strict=True):
        label(axes, (x, y), sign, size=30)


def _stored(axes: Axes, y: float, shape: tuple[int, int], name: str, growth: str) -> None:
    """What the first product stores, and how it grows with N, at a height."""
    label(axes, (10.3, y + 0.5), "stores", size=10)
    arrow(axes, (9.4, y), (11.0, y))
    _matrix(axes, (13.1, y), *shape, SKY, name)
    label(axes, (13.1, y - shape[0] * SIDE / 2 - 0.5), growth, size=10)


def _matrix(axes: Axes, centre: tuple[float, float], rows: int, columns: int, colour: str, name: str) -> None:
    x, y = centre
    cells(axes, (x - columns * SIDE / 2, y + rows * SIDE / 2), [[TINTS[colour]] * columns] * rows, side=SIDE)
    label(axes, (x, y + rows * SIDE / 2 + 0.5), name, size=10)
