"""Draws, distances, intervals, orders of growth, and trained arms."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from ortho.theory.estimates import SIGMAS, estimate
from paper.claims.figures import Interval, Number, outward
from paper.claims.outcomes import Told, Unit
from paper.claims.rules import CONFIGURATION, growth, improves, region, untestable
from paper.claims.verdicts import Finding
from paper.experiments.learning import analysis
from paper.experiments.learning.analysis import Judged, Runs

IDLE = "identity"  # heads that see no other token
SHOWN = ("better", "worse")  # outcomes of a difference that shows
SOME = (1, 100)  # per cent: where a source says that there is a loss or a gain, but not how large it is
# For two float64 computations that sum some 1e3 terms in different orders, magnified by the exponentials of scores.
EXACT = 1e-10
# A hundred float64 steps that enlarge no error, with sums of eight terms each, round to about 1e-14, relatively.
EXACT_STEPS = 1e-12

# One rule says what a claim holds constant: only what its source does ("when N >> d"). A claim that leaves out a
# constant of a layer (H, B, L or m) is `corrected`. So is one that leaves out d, if it is about growth with N alone.
IN_N = (*CONFIGURATION, "m", "d")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of this shape, float64."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def relative_error(found: Any, exact: Any) -> float:
    """The relative error of a tensor in the Frobenius norm."""
    return float((found - exact).norm() / exact.norm())


def mean_interval(samples: Tensor) -> Interval:
    """An interval for the mean of independent draws, to one decimal. It misses the true mean with probability 1e-5 if
    the standard error is known; if that is estimated from 16 normal draws, with 5e-4; from 32, with 1e-4."""
    found = estimate(samples)
    reach = SIGMAS * found.standard_error
    return outward((found.value - reach, found.value + reach))


def orders(rows: Mapping[str, Sequence[Any]], settings: Sequence[str] = CONFIGURATION) -> dict[str, Finding]:
    """One finding for each row: the claimed order, the closed form, and the sizes that are held constant, if any."""
    return {
        label: growth(claimed, sympy.expand(ours), held=held, settings=settings)
        for label, (claimed, ours, *held) in rows.items()
    }


def saves(statement: str, costs: Mapping[str, tuple[Number, Number]]) -> Finding:
    """Whether the first cost is below the second, by setting: the share saved in per cent; equal costs save nothing."""
    shares = {label: 100 * (1 - Fraction(ours) / Fraction(theirs)) for label, (ours, theirs) in costs.items()}
    return improves(statement, shares, unit=" %")


def as_much_as(most: Number, best: Number, *, unit: str = "") -> Finding:
    """A gain of 'up to' `most`, against the best found in any setting: it must be reached, and not exceeded."""
    ranges = {"reached somewhere": (most, inf), "passed nowhere": (-inf, most)}
    return region(ranges, dict.fromkeys(ranges, best), unit=unit)


def reported(judged: Judged, unit: Unit) -> Told:
    """A comparison of two arms as the rules of `outcomes` take it: the interval in the unit, and the outcome."""
    return unit.interval(judged.difference.interval), judged.outcome


class Arms(NamedTuple):
    """The runs of a setting by arm, the measure by which arms are compared, and the unit that it is reported in."""

    runs: Mapping[str, Runs]
    measure: str
    unit: Unit

    def judged(self, arm: str, other: str) -> Judged | None:
        """An arm minus the other, judged by the rule of their records; None without two seeds of both."""
        if arm not in self.runs or other not in self.runs:
            return None
        return analysis.judged(self.runs[arm], self.runs[other], self.measure)

    def reported(self, arm: str, other: str) -> Told | None:
        """The same in the unit, as the rules take it."""
        found = self.judged(arm, other)
        return None if found is None else reported(found, self.unit)


def noting_each(finding: Finding, remarks: Mapping[str, Sequence[str]]) -> Finding:
    """The finding, with a remark for each of these reasons that has settings, which it names."""
    for reason, settings in remarks.items():
        if settings:
            finding = finding.noting(f"{reason}: {'; '.join(settings)}")
    return finding


def without_records(statement: str, what: str) -> Finding:
    """An untestable finding: there are no records of `what`."""
    return untestable(statement, {what: None}, lack="there are no records of")
