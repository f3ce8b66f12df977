"""The boxes, arrows and cells that the schematics are made of. Lengths are in the units of the axes."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from paper.plots import BLACK

__all__ = ["arrow", "box", "canvas", "cells", "label"]

Point = tuple[float, float]
Tint = str | tuple[str, float]  # a colour, or a colour and how opaque it is, from 0 to 1


def canvas(width: float, height: float, *, inches: float = 7.0) -> tuple[Figure, Axes]:
    """A figure so many inches wide with invisible axes, from (0, 0) to (width, height)."""
    drawn, axes = plt.subplots(figsize=(inches, inches * height / width))
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return drawn, axes


def box(
    axes: Axes,
    centre: Point,
    text: str,
    *,
    width: float,
    height: float,
    colour: str,
    dashed: bool = False,
    size: float = 9.0,
) -> None:
    """A rounded box around a text, with a tint of its colour inside. Its line is dashed if `dashed`."""
    (x, y), rounding = centre, min(width, height) / 6
    corner = x - width / 2 + rounding, y - height / 2 + rounding
    style = f"round,pad={rounding},rounding_size={rounding}"
    inside = width - 2 * rounding, height - 2 * rounding
    look: dict[str, Any] = {"facecolor": (colour, 0.15), "edgecolor": colour, "linestyle": "--" if dashed else "-"}
    axes.add_patch(FancyBboxPatch(corner, *inside, boxstyle=style, linewidth=1.4, **look))
    label(axes, centre, text, size=size)


def label(axes: Axes, at: Point, text: str, *, colour: str = BLACK, size: float = 9.0, align: str = "center") -> None:
    """A text at a point, centred by default; `align` is "left" or "right" for one that starts or ends there."""
    axes.text(*at, text, ha=align, va="center", color=colour, fontsize=size)


def arrow(
    axes: Axes, start: Point, end: Point, *, colour: str = BLACK, dashed: bool = False, bend: float = 0.0
) -> None:
    """An arrow from a point to another, straight or bent to the left (`bend` < 0: to the right)."""
    line = {"arrowstyle": "-|>", "color": colour, "linestyle": "--" if dashed else "-", "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops={**line, "connectionstyle": f"arc3,rad={bend}", "linewidth": 1.3})


def cells(axes: Axes, corner: Point, colours: Sequence[Sequence[Tint | None]], *, side: float = 1.0) -> None:
    """A matrix of square cells, its first row on top; `corner` is its upper left one. None leaves a cell white."""
    x, y = corner
    for row, line in enumerate(colours):
        for column, colour in enumerate(line):
            at = x + column * side, y - (row + 1) * side
            look: dict[str, Any] = {"facecolor": colour or "white", "edgecolor": "#BBBBBB", "linewidth": 0.5}
            axes.add_patch(Rectangle(at, side, side, **look))
