"""Plots and tables of trained models' runs: each run is a point, each difference has its interval."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from paper import plots
from paper.experiments.learning.analysis import Judged
from paper.experiments.statistics import Decision

__all__ = ["curves", "differences", "frontier", "points", "undominated"]

# The outcomes that a rule gives a difference, each with its colour and marker.
OUTCOMES = {
    "better": (plots.GREEN, "o"),
    "worse": (plots.VERMILION, "s"),
    "equivalent": (plots.BLUE, "D"),
    "not better": (plots.ORANGE, "<"),
    "not worse": (plots.SKY, ">"),
    "undecided": (plots.BLACK, "x"),
}

# The looks, in turn, of the arms that a figure of many names.
_NAMED = (
    (plots.VERMILION, "o"),
    (plots.BLUE, "s"),
    (plots.GREEN, "D"),
    (plots.ORANGE, "^"),
    (plots.PURPLE, "v"),
    (plots.BLACK, "P"),
    (plots.SKY, "X"),
)
_JOINED: dict[str, Any] = {"color": plots.BLACK, "linewidth": 0.8, "linestyle": ":"}


def points(ax: Axes, arms: Mapping[str, Sequence[float]], *, beside: str | None = None) -> None:
    """Draw a row for each arm, the first on top: each run is a point, the mean a bar. With `beside`, a line goes
    through the mean of that arm."""
    for place, values in enumerate(arms.values()):
        ax.plot(values, [place] * len(values), "o", color=plots.BLUE, markersize=3.5, alpha=0.6, markeredgewidth=0)
        ax.plot([fmean(values)], [place], "|", color=plots.BLACK, markersize=11, markeredgewidth=1.6)
    if beside is not None:
        ax.axvline(fmean(arms[beside]), color=plots.BLACK, linewidth=0.8, linestyle=":")
    _rows(ax, list(arms))


def differences(ax: Axes, found: Mapping[str, Judged], rule: Decision, *, arms: Sequence[str] = ()) -> None:
    """Draw a row for each arm, the first on top: the mean difference and its interval, marked by the rule's outcome.
    The band shows the differences that the rule holds too small to matter. `arms` are the rows, if a figure beside this
    one has more of them."""
    arms = arms or list(found)
    ax.axvspan(-rule.margin, rule.margin, color="#DDDDDD", linewidth=0)
    ax.axvline(0, color=plots.BLACK, linewidth=0.8)
    for outcome, (colour, marker) in OUTCOMES.items():
        rows = [(arms.index(arm), one.difference) for arm, one in found.items() if one.outcome == outcome]
        if rows:
            places = [place for place, _ in rows]
            spreads = [(low, mean, high) for _, (mean, (low, high)) in rows]
            look: dict[str, Any] = {"color": colour, "markersize": 4.5, "elinewidth": 1.2, "capsize": 2}
            plots.error_bars(ax, places, spreads, sideways=True, fmt=marker, label=outcome, **look)
    _rows(ax, arms)


def curves(ax: Axes, name: str, x: Sequence[float], values: Sequence[Sequence[float]], *, label: str = "") -> None:
    """Draw one arm over budgets, in the look of the variant `name`: each run is a point, a line joins the means.

    Raises ValueError for a name that has no look.
    """
    look = plots.style(name)
    ax.plot(x, [fmean(some) for some in values], **{**look, "label": label or look["label"]})
    for at, some in zip(x, values, strict=True):
        ax.plot([at] * len(some), some, look["marker"], color=look["color"], markersize=3, alpha=0.5)


def undominated(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The Pareto front, by the first number: the names of the points that no other beats. One beats another if it is
    lower in one number and not higher in the other."""

    def beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())

    return sorted((name for name, point in points.items() if not beaten(*point)), key=points.__getitem__)


def frontier(ax: Axes, arms: Mapping[str, tuple[float, Sequence[float]]], *, named: Sequence[str] = ()) -> list[str]:
    """Plot each arm at its cost and the mean of its runs; less is better for both. Returns the names of the arms that
    no other arm dominates. Those are joined, named in the legend, and shown with every run. The others are grey; those
    in `named` have their names beside them."""
    places = {name: (cost, fmean(values)) for name, (cost, values) in arms.items()}
    best = undominated(places)
    for name in best:
        cost, values = arms[name]
        ax.plot([cost] * len(values), values, ".", color=plots.SKY, markersize=4, alpha=0.7, markeredgewidth=0)
    others = [place for name, place in places.items() if name not in best]
    if others:
        look: dict[str, Any] = {"color": "#999999", "markersize": 4, "markeredgewidth": 0, "label": "other arms"}
        ax.plot(*zip(*others, strict=True), "o", **look)
    ax.plot(*zip(*(places[name] for name in best), strict=True), drawstyle="steps-post", **_JOINED)
    for name, (colour, marker) in zip(best, cycle(_NAMED), strict=False):
        ax.plot(*places[name], marker, color=colour, markersize=7, label=name)
    for name in named:
        if name in places and name not in best:
            ax.plot(*places[name], "o", color=plots.BLACK, markersize=4)
            ax.annotate(name, places[name], (4, 3), textcoords="offset points", fontsize=8)
    return best


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
