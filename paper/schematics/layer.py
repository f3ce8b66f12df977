"""The attention layer: what it computes, what may be frozen, and where the gradient flows."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.claims.shared.frozen_layer import backward_products
from paper.plots import BLUE, GREEN, ORANGE, VERMILION, WIDTH
from paper.schematics.drawing import Point, arrow, box, canvas, label

__all__ = ["GRADIENTS", "attention_layer"]

VARIANTS = ("learned", "frozen", "stopped")
FORWARD = "#888888"
# How an arrow of the backward pass is drawn and explained, by the variants that compute its product.
GRADIENTS = {
    ("learned", "frozen", "stopped"): (VERMILION, "gradient, always"),
    ("learned", "frozen"): (BLUE, "gradient, unless it is stopped"),
    ("learned",): (ORANGE, "gradient, only if $W_Q$ and $W_K$ are learned"),
}

# Boxes: centre, text, width. Those of the matrices that may be frozen are dashed.
ROWS = {"Q": 5.6, "K": 3.6, "V": 1.0}
BOXES: dict[str, tuple[Point, str, float]] = {
    "X": ((0.8, 3.6), "$X$", 0.9),
    **{f"W_{a}": ((3.0, y), f"$W_{a}$", 1.1) for a, y in ROWS.items()},
    **{a: ((5.0, y), f"${a}$", 0.9) for a, y in ROWS.items()},
    "S": ((8.0, 4.6), "scores $S$\n$Q K^T / \\sqrt{d/H}$", 2.9),
    "P": ((11.4, 4.6), "weights $P$\nsoftmax", 2.3),
    "O": ((11.4, 1.0), "$O = P V$", 2.0),
    "W_O": ((13.9, 1.0), "$W_O$", 1.1),
    "Y": ((15.6, 1.0), "$Y$", 0.9),
}
FROZEN = ("W_Q", "W_K")
HEIGHT = 1.3
# Arrows of the forward pass, and the product of the backward pass that carries the gradient the other way.
EDGES = {
    ("X", "W_Q"): "dX_Q", ("X", "W_K"): "dX_K", ("X", "W_V"): "dX_V",
    ("W_Q", "Q"): "dX_Q", ("W_K", "K"): "dX_K", ("W_V", "V"): "dX_V",
    ("Q", "S"): "dQ", ("K", "S"): "dK", ("S", "P"): "dP", ("P", "O"): "dP", ("V", "O"): "dV",
    ("O", "W_O"): "dO", ("W_O", "Y"): "dO",
}  # fmt: skip


def attention_layer() -> Figure:
    """The layer with its forward arrows, and beside each the gradient, coloured by the variants that compute it.

    Which variants compute it is read off autograd's graph (`backward_products`). A gradient that ends in a matrix is
    the gradient of that matrix.
    """
    drawn, axes = canvas(16.2, 8.7, inches=WIDTH)
    for (start, end), product in EDGES.items():
        _both_ways(axes, start, end, _colour(product))
    for name, (centre, text, width) in BOXES.items():
        matrix = name.startswith("W")
        colour = (GREEN if name not in FROZEN else BLUE) if matrix else FORWARD
        box(axes, centre, text, width=width, height=HEIGHT, colour=colour, dashed=name in FROZEN)
        if matrix:
            x, y = centre
            arrow(axes, (x + 0.75, y + 1.1), (x + 0.3, y + HEIGHT / 2), colour=_colour(f"d{name}"))
            label(axes, (x + 0.8, y + 1.25), f"$\\mathrm{{d}}{name}$", colour=_colour(f"d{name}"), align="left")
    _legend(axes)
    return drawn


def _colour(product: str) -> str:
    """The colour of the variants that compute a product."""
    return GRADIENTS[tuple(name for name in VARIANTS if backward_products(name)[product] == "used")][0]


def _both_ways(axes: Axes, start: str, end: str, colour: str) -> None:
    """An arrow forward and, beside it, one back."""
    (x0, y0), (x1, y1) = _border(start, end), _border(end, start)
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    aside = -0.16 * (y1 - y0) / length, 0.16 * (x1 - x0) / length
    arrow(axes, (x0 + aside[0], y0 + aside[1]), (x1 + aside[0], y1 + aside[1]), colour=FORWARD)
    arrow(axes, (x1 - aside[0], y1 - aside[1]), (x0 - aside[0], y0 - aside[1]), colour=colour)


def _border(name: str, towards: str) -> Point:
    """Where the line from a box's middle to that of another leaves the first box."""
    (x, y), _, width = BOXES[name]
    dx, dy = BOXES[towards][0][0] - x, BOXES[towards][0][1] - y
    share = min(width / 2 / abs(dx) if dx else 9.0, HEIGHT / 2 / abs(dy) if dy else 9.0)
    return x + share * dx, y + share * dy


def _legend(axes: Axes) -> None:
    places = ((0.3, -0.5), (7.4, -0.5), (0.3, -1.15), (7.4, -1.15))
    for (colour, text), (x, y) in zip([(FORWARD, "forward"), *GRADIENTS.values()], places, strict=True):
        arrow(axes, (x, y), (x + 0.6, y), colour=colour)
        label(axes, (x + 0.8, y), text, align="left")
    axes.set_ylim(-1.5, 7.2)
