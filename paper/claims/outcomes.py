"""Rules for differences between trained models, judged by a decision that was fixed before the runs.

An outcome is what `paper.experiments.statistics.decide` says of an interval. Mappings go from a setting to the interval
of the difference, first arm minus second, and its outcome.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ortho.checks import one_of
from paper.claims import figures
from paper.claims.figures import Interval
from paper.claims.settings import by_setting
from paper.claims.verdicts import Finding, rule
from paper.experiments.statistics import OUTCOMES

Told = tuple[Interval, str]


class Unit(NamedTuple):
    """The unit a measure is reported in: its name, the factor from stored numbers, and the digits after the point."""

    name: str
    scale: int = 1
    digits: int = 3

    def told(self, stored: float) -> float:
        """A stored number in this unit, rounded; infinite ones stay."""
        return round(self.scale * stored, self.digits) + 0.0  # no negative zero

    def interval(self, stored: tuple[float, float]) -> tuple[float, float]:
        """Both ends of an interval in this unit."""
        low, high = stored
        return self.told(low), self.told(high)

    def signed(self, stored: float) -> str:
        """A difference in this unit with its sign, as text."""
        return f"{self.told(stored):+.{self.digits}f}"

    def spelt(self, mean: float, interval: tuple[float, float]) -> str:
        """A mean difference with its interval in this unit, as text: 'mean (low to high)', with signs."""
        low, high = map(self.signed, interval)
        return f"{self.signed(mean)} ({low} to {high})"


BITS_A_BYTE = Unit("bits a byte")

# What each outcome says of a gain (or loss) that matters: it shows (True), is excluded (False), or neither (missing).
_GAIN = {"better": True, "equivalent": False, "worse": False, "not better": False}
_LOSS = {"worse": True, "equivalent": False, "better": False, "not worse": False}


@rule
def outperforms(statement: str, found: Mapping[str, Told], *, unit: str = "") -> Finding:
    """A gain by another way to learn, by what a decision fixed before the runs says of measured differences.

    confirmed: 'better' in every setting. conditional: in some, which are named. refuted: in none, and in each a gain as
    large as the decision's margin is excluded ('equivalent', 'worse', 'not better'). untestable: in none, and somewhere
    the runs do not decide. The severity is that of `by_setting`.
    """
    return _judge(statement, found, unit, _GAIN, wanted=True, what="a gain shows", nowhere="no gain anywhere")


@rule
def loses_nothing(statement: str, found: Mapping[str, Told], *, unit: str = "") -> Finding:
    """That nothing is lost by another way to learn, by what a decision fixed before the runs says of differences.

    confirmed: in every setting a loss as large as the decision's margin is excluded ('equivalent', 'better', 'not
    worse'). conditional: in some, which are named. refuted: in none, and it is 'worse' in at least one, which suffices
    against "nothing". untestable: in none, and the runs decide nowhere. The severity is that of `by_setting`.
    """
    what, nowhere = "nothing is lost", "a loss everywhere"
    return _judge(statement, found, unit, _LOSS, wanted=False, what=what, nowhere=nowhere, somewhere="a loss")


def _judge(
    statement: str,
    found: Mapping[str, Told],
    unit: str,
    says: Mapping[str, bool],
    *,
    wanted: bool,
    what: str,
    nowhere: str,
    somewhere: str = "",
) -> Finding:
    if not found:
        raise ValueError("found: expected at least one setting, got none")
    have = {label: f"{figures.span(interval, unit)} ({outcome})" for label, (interval, outcome) in found.items()}
    answers = {label: says.get(one_of("outcome", outcome, OUTCOMES)) for label, (_, outcome) in found.items()}
    shown = [label for label, answer in answers.items() if answer is wanted]
    undecided = [label for label, answer in answers.items() if answer is None]
    how = "holds", "not shown"
    return by_setting(statement, have, shown, undecided, what=what, nowhere=nowhere, somewhere=somewhere, how=how)
