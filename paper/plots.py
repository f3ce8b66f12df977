"""One look for all figures: readable in print, safe for colour-blind readers, the same bytes on every run."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ortho.checks import one_of

__all__ = [
    "COLOURS",
    "LABELS",
    "LOOKS",
    "PALETTE",
    "error_bars",
    "figure",
    "grid",
    "ink",
    "powers_of_two",
    "style",
    "use",
]

# Okabe & Ito's palette (2008), distinguishable with any colour vision, and a grey for what learns nothing.
PALETTE = {
    "black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73",
    "yellow": "#F0E442", "blue": "#0072B2", "vermilion": "#D55E00", "purple": "#CC79A7",
}  # fmt: skip
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = PALETTE.values()
GREY = "#777777"
_INKS = {ORANGE: "#9A6700", SKY: "#1F74A8", PURPLE: "#A24C7E", GREY: "#555555"}


class Look(NamedTuple):
    """How a variant is drawn; without a label it is called by its name."""

    colour: str
    marker: str
    dashes: str = "-"
    label: str = ""


# What is drawn in which way in all chapters. Kinds that share a colour never meet in a figure of chapters 1 to 14, nor
# in two chapters in a row, but for one mechanism in two forms: of these one has open markers and another dash. Rivals
# differ in marker and dash too, so that a figure survives a grey printer. Vermilion is kept for what the book finds:
# heads with one untrained matrix for queries and keys, from the first page on. The kinds of chapter 9 are
# `copying_analysis.LOOKS`. A figure with other things in it may use its own looks.
LOOKS = {
    # kinds of heads
    "learned": Look(BLACK, "o", label="standard (learned)"),
    "frozen": Look(BLUE, "s", "--"),  # two untrained matrices
    "stopped": Look(ORANGE, "^", "-.", "frozen, gradient stopped"),
    "one matrix": Look(VERMILION, "o"),  # untrained
    "one Gaussian matrix": Look(VERMILION, "s", "--"),
    "tied": Look(VERMILION, "o"),  # frozen, with one matrix
    "positional": Look(GREEN, "v"),
    "static random": Look(PURPLE, "P", ":"),
    "identity": Look(GREY, "X"),
    "counting table": Look(GREY, "*", ":"),  # no head at all
    "exchanged": Look(SKY, "D", "--", "stopped, exchanged pass"),
    "structured": Look(SKY, "D", "--", "structured, stopped"),
    "structured-stopped": Look(SKY, "D", "--", "structured, stopped"),
    "quarter": Look(PURPLE, "p", ":", "a quarter learned, others structured, stopped"),
    "one": Look(GREEN, "v", label="one learned, others positional"),
    "source": Look(PURPLE, "x", ":", "the source's figure"),
    # mechanisms
    "softmax": Look(BLACK, "o"),  # the standard layer is learned x softmax: one look for both
    "linear": Look(GREEN, "D"),
    "gated linear": Look(GREEN, "D", ":"),
    "favor": Look(ORANGE, "v"),
    "fixed length": Look(SKY, "s", "--"),  # random features of vectors of one length
    "delta": Look(BLUE, "s", "--"),
    "gated delta": Look(BLUE, "s", "-."),
    "window": Look(PURPLE, "P", "-."),
    "synthesizer": Look(SKY, "P"),
    "rotary": Look(SKY, "<"),
    "alibi": Look(BLUE, "s"),
    "fox": Look(ORANGE, "v"),
    "path": Look(GREEN, "D"),
    "position-delta": Look(PURPLE, "^"),
}
COLOURS = {name: look.colour for name, look in LOOKS.items()}
LABELS = {name: look.label or name for name, look in LOOKS.items()}

# Inches. A phone shows a figure 350 pixels wide, two thirds of this: a label of 10 points can still be read there.
WIDTH = 5.4
_BETWEEN = 12.0000002  # points above and below the line where two rows of axes meet, beside the margins below

_STYLE: dict[Any, Any] = {
    "figure.figsize": (WIDTH, 3.6),
    "figure.dpi": 110,
    "figure.facecolor": "white",  # also on a dark page: the palette is made for white
    "figure.constrained_layout.use": True,
    # By default a margin is 3.00024 points and texts are multiples of 1/640 point high, so that the sixth decimal of an
    # SVG may round up on one processor and down on another. With these margins it does not.
    "figure.constrained_layout.h_pad": 3.0000002 / 72,
    "figure.constrained_layout.w_pad": 3.0000002 / 72,
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
        # Twice as many pixels as a page shows, for screens that have them.
        dpi = 2 * mpl.rcParams["figure.dpi"] if image == "png" else mpl.rcParams["figure.dpi"]
        set_matplotlib_formats(image, metadata=metadata, bbox_inches=None, dpi=dpi)


def figure(panels: int = 1, *, height: float = 3.6, **shared: Any) -> tuple[Figure, Any]:
    """A figure with panels below each other, each `height` inches high: side by side, a phone would show none of them.

    Returns (figure, axes). `shared` goes to `subplots`: `sharex`, `sharey`, `height_ratios`.
    """
    return _apart(plt.subplots(panels, 1, figsize=(WIDTH, height * panels), **shared), height)


def grid(rows: int, height: float, *, columns: int = 2, more: float = 0.0, **shared: Any) -> tuple[Figure, Any]:
    """A figure of `rows` rows of axes, each `height` inches high, with `more` inches in all for legends and labels.

    Returns (figure, axes); the axes are an array (rows, columns) even of one row. `shared` says which share an axis.
    """
    return _apart(plt.subplots(rows, columns, figsize=(WIDTH, more + height * rows), squeeze=False, **shared), height)


def _apart(drawn: tuple[Figure, Any], height: float) -> tuple[Figure, Any]:
    """The figure and its axes, with room between rows that are so many inches high."""
    engine = drawn[0].get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):  # set by `use`
        engine.set(hspace=_BETWEEN / 72 / height)
    return drawn


def style(name: str) -> dict[str, Any]:
    """Keyword arguments for `plot` that draw a variant or mechanism as everywhere else in the book.

    Raises ValueError for a name that has no look.
    """
    look = LOOKS[one_of("name", name, LOOKS)]
    return {"color": look.colour, "marker": look.marker, "linestyle": look.dashes, "label": LABELS[name]}


def ink(name: str) -> str:
    """The colour for letters that name a variant, a mechanism or a colour: darker where those of its line would be
    hard to read on white."""
    colour = LOOKS[name].colour if name in LOOKS else PALETTE.get(name, name)
    return _INKS.get(colour, colour)


def error_bars(
    axis: Axes, places: Sequence[float], spreads: Sequence[Sequence[float]], *, sideways: bool = False, **look: Any
) -> None:
    """Draw a point at each place with a bar from the low to the high end of its spread (low, middle, high).

    If `sideways`, the places are on the y axis. `look` goes to `errorbar`.
    """
    middle = [m for _, m, _ in spreads]
    reach = [m - low for low, m, _ in spreads], [high - m for _, m, high in spreads]
    if sideways:
        axis.errorbar(middle, places, xerr=reach, **look)
    else:
        axis.errorbar(places, middle, yerr=reach, **look)


def powers_of_two(axis: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis (base 2) whose ticks are exactly the given sizes; k stands for 1,024."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(list(values)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))


def _size(value: float) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"
