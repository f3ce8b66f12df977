"""The attention layer: what it computes, what may be frozen, and where the gradient flows."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper.claims.shared.frozen_layer import backward_products
from paper.plots import BLUE, GREEN, ORANGE, WIDTH, ink
from paper.schematics.drawing import Point, arrow, box, canvas, label

__all__ = ["GRADIENTS", "attention_layer"]

VARIANTS = ("learned", "frozen", "stopped")
FORWARD = "#888888"
# The colour of an arrow of the backward pass, by the variants that compute its product. What freezing removes has the
# colour of the frozen layer, what stopping removes that of the stopped one.
GRADIENTS = {
    ("learned", "frozen", "stopped"): GREEN,
    ("learned", "frozen"): ORANGE,
    ("learned",): BLUE,  # dashed
}
# What is written beside the arrows of a colour: where it starts, and the text.
WORDS: dict[str, tuple[Point, str]] = {
    BLUE: ((4.9, 7.2), "dashed: ORA drops these two"),
    ORANGE: ((6.3, 6.2), "gradient through the scores:\nORA keeps it"),
    GREEN: ((3.8, -0.15), "gradient through the values"),
    FORWARD: ((5.6, 1.5), "forward"),
}

# Boxes: centre, text, width. Those of the matrices that may be frozen are dashed.
ROWS = {"Q": 6.0, "K": 3.8, "V": 1.0}
BOXES: dict[str, tuple[Point, str, float]] = {
    "X": ((0.6, 3.8), "$X$", 0.9),
    **{f"W_{a}": ((2.5, y), f"$W_{a}$", 1.1) for a, y in ROWS.items()},
    **{a: ((4.3, y), f"${a}$", 0.9) for a, y in ROWS.items()},
    "S": ((6.6, 4.6), "scores\n$S$", 1.8),
    "P": ((9.2, 4.6), "weights\n$P$", 1.9),
    "O": ((9.2, 1.0), "$O = P V$", 1.9),
    "W_O": ((11.3, 1.0), "$W_O$", 1.1),
    "Y": ((12.9, 1.0), "$Y$", 0.9),
}
FROZEN = ("W_Q", "W_K")
HEIGHT = 1.3
LETTERS = 11.0  # points
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
    drawn, axes = canvas(13.5, 8.1, inches=WIDTH)
    for (start, end), product in EDGES.items():
        _both_ways(axes, start, end, _colour(product))
    for name, (centre, text, width) in BOXES.items():
        matrix = name.startswith("W")
        colour = (GREEN if name not in FROZEN else BLUE) if matrix else FORWARD
        frozen = name in FROZEN
        box(axes, centre, text, width=width, height=HEIGHT, colour=colour, dashed=frozen, size=LETTERS)
        if matrix:
            (x, y), ends = centre, _colour(f"d{name}")
            tail = x + 0.85, y + 1.15
            arrow(axes, tail, (x + 0.3, y + HEIGHT / 2), colour=ends, dashed=ends == BLUE)
            label(
                axes,
                (x + 0.9, y + 1.2),
                f"$\\mathrm{{d}}{name}$",
                colour=ink(ends),
                size=LETTERS,
                align="left",
            )
    for colour, (at, text) in WORDS.items():
        label(axes, at, text, colour=ink(colour), size=LETTERS, align="left")
    axes.set_ylim(-0.5, 7.6)
    return drawn


def _colour(product: str) -> str:
    """The colour of the variants that compute a product."""
    return GRADIENTS[tuple(name for name in VARIANTS if backward_products(name)[product] == "used")]


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
