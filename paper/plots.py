"""One look for all figures: readable in print, safe for colour-blind readers, the same bytes on every run."""

from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ortho._checks import one_of

__all__ = ["COLOURS", "DASHES", "LABELS", "MARKERS", "figure", "powers_of_two", "style", "use"]

# Okabe & Ito's palette (2008), told apart with any colour vision. A variant has one look everywhere; those that meet in
# a figure differ in colour and in marker, so that it survives a grey printer too.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
COLOURS = {
    "learned": BLACK,
    "frozen": BLUE,
    "stopped": VERMILION,
    "structured": ORANGE,
    "structured-stopped": ORANGE,
    "quarter": SKY,
    "one": GREEN,
    "positional": GREEN,
    "window": PURPLE,
    "source": PURPLE,
    "softmax": BLACK,
    "linear": GREEN,
    "linear-relu": GREEN,
    "linear-exp": GREEN,
    "cosformer": SKY,
    "taylor": PURPLE,
    "efficient": BLUE,
    "trigonometric": VERMILION,
    "favor": ORANGE,
    "hyperbolic": ORANGE,
    "favor++": BLUE,
    "saderf": PURPLE,
    "aderf": GREEN,
    "sderf": SKY,
    "synthesizer": SKY,
    "rotary": SKY,
    "alibi": BLUE,
    "fox": ORANGE,
    "path": GREEN,
    "position-delta": VERMILION,
}
MARKERS = {
    "learned": "o",
    "frozen": "s",
    "stopped": "^",
    "structured": "D",
    "structured-stopped": "D",
    "quarter": "p",
    "one": "v",
    "positional": "v",
    "window": "P",
    "source": "x",
    "softmax": "o",  # the standard layer is learned x softmax: one look for both
    "linear": "D",
    "linear-relu": "d",
    "linear-exp": "<",
    "cosformer": "X",
    "taylor": "*",
    "efficient": "s",
    "trigonometric": "^",
    "favor": "v",
    "hyperbolic": ">",
    "favor++": "s",
    "saderf": "p",
    "aderf": "h",
    "sderf": "X",
    "synthesizer": "P",
    "rotary": "<",
    "alibi": "s",
    "fox": "v",
    "path": "D",
    "position-delta": "^",
}
DASHES = {
    "learned": "-",
    "frozen": "--",
    "stopped": "-.",
    "structured": "--",
    "structured-stopped": "--",
    "quarter": ":",
    "source": ":",
    "linear-relu": "--",
    "linear-exp": ":",
    "hyperbolic": "--",
}
LABELS = {
    "learned": "standard (learned)",
    "frozen": "frozen",
    "stopped": "frozen, gradient stopped",
    "structured": "structured, stopped",
    "structured-stopped": "structured, stopped",
    "quarter": "a quarter learned, others structured, stopped",
    "one": "one learned, others positional",
    "source": "the source's figure",
}

_STYLE: dict[Any, Any] = {
    "figure.figsize": (7.0, 3.8),
    "figure.dpi": 110,
    "figure.facecolor": "white",  # also on a dark page: the palette is made for white
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "ortho",  # element names that do not change from run to run
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.prop_cycle": cycler(color=[BLACK, BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE]),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
}


def use(image: str = "svg") -> None:
    """Set the look; in a notebook, show figures as 'svg' (counts and stored records) or 'png' (computed live).

    SVG outputs are compared to the last digit when the notebooks are tested, PNG outputs are not: a figure of live
    floating-point results is a PNG, and its cell asserts what it shows.
    """
    mpl.rcParams.update(_STYLE)
    try:
        from IPython.core.getipython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    if get_ipython() is not None:
        # No date and no version: the same figure has the same bytes.
        metadata: dict[str, Any] = {"Date": None, "Creator": None} if image == "svg" else {"Software": None}
        set_matplotlib_formats(image, metadata=metadata, bbox_inches=None)


def figure(columns: int = 1, *, height: float = 3.8, share_y: bool = False) -> tuple[Figure, Any]:
    """A figure of full text width with `columns` axes side by side; returns (figure, axes)."""
    use_size = (7.0, height) if columns < 3 else (9.0, height)
    return plt.subplots(1, columns, figsize=use_size, sharey=share_y)


def style(name: str) -> dict[str, Any]:
    """Keyword arguments for `plot` that draw a variant or mechanism as everywhere else in the book.

    Raises ValueError for a name that has no look.
    """
    return {
        "color": COLOURS[one_of("name", name, COLOURS)],
        "marker": MARKERS[name],
        "linestyle": DASHES.get(name, "-"),
        "label": LABELS.get(name, name),
    }


def powers_of_two(axis: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis (base 2) whose ticks are exactly the given sizes, written in full."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(values)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
