"""Rules for differences of trained models, which a decision that was fixed before the runs has judged.

An outcome is what `paper.experiments.statistics.decide` says of an interval. Mappings go from a setting to the interval
of what the arm in question has more than the other, and its outcome.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ortho._checks import one_of
from paper.claims import figures
from paper.claims.figures import Interval
from paper.claims.rules import by_setting
from paper.claims.verdicts import Verdict, rule
from paper.experiments.statistics import OUTCOMES

Told = tuple[Interval, str]


class Unit(NamedTuple):
    """In what a measure is told: a name, how many of it the stored number 1 is, and the digits behind the point."""

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


BITS_A_BYTE = Unit("bits a byte")

# What each outcome says of a gain that matters, and of a loss that does: it shows, it is excluded, or neither.
_GAIN = {"better": True, "equivalent": False, "worse": False, "not better": False}
_LOSS = {"worse": True, "equivalent": False, "better": False, "not worse": False}


@rule
def outperforms(statement: str, found: Mapping[str, Told], *, unit: str = "") -> tuple[Verdict, str, str]:
    """A gain by another way to learn, by what a decision fixed before the runs says of measured differences.

    confirmed: 'better' in every setting. conditional: in some, which are named. refuted: in none, and in each a gain as
    large as the decision's margin is excluded ('equivalent', 'worse', 'not better'). untestable: in none, and somewhere
    the runs do not decide.
    """
    return _judge(statement, found, unit, _GAIN, wanted=True)


@rule
def loses_nothing(statement: str, found: Mapping[str, Told], *, unit: str = "") -> tuple[Verdict, str, str]:
    """That nothing is lost by another way to learn, by what a decision fixed before the runs says of differences.

    confirmed: in every setting a loss as large as the decision's margin is excluded ('equivalent', 'better', 'not
    worse'). conditional: in some, which are named. refuted: in none, and it is 'worse' in each. untestable: in none,
    and somewhere the runs do not decide.
    """
    return _judge(statement, found, unit, _LOSS, wanted=False)


def _judge(
    statement: str, found: Mapping[str, Told], unit: str, says: Mapping[str, bool], *, wanted: bool
) -> tuple[Verdict, str, str]:
    if not found:
        raise ValueError("found: expected at least one setting, got none")
    have = {label: f"{figures.span(interval, unit)} ({outcome})" for label, (interval, outcome) in found.items()}
    answers = {label: says.get(one_of("outcome", outcome, OUTCOMES)) for label, (_, outcome) in found.items()}
    shown = [label for label, answer in answers.items() if answer is wanted]
    undecided = [label for label, answer in answers.items() if answer is None]
    return by_setting(statement, have, shown, undecided, how=("holds", "not shown"), nowhere="nowhere")
