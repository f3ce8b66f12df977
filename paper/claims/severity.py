"""How severe it is that a claim does not hold as stated: which of its words have to change."""

from collections.abc import Iterable
from enum import StrEnum

from paper.claims.figures import Number, above


class Severity(StrEnum):
    """The severities, the lightest first."""

    WORDING = "wording"
    CONSTANT = "constant"
    SUBSTANCE = "substance"


FACTOR = 2  # figures of one sign within this factor of each other differ by a constant

SEVERITIES = {
    Severity.WORDING: "what is meant is not wrong: a term of a printed formula to be put right, a bound that is not "
    "tight, or a condition left out where no setting contradicts the claim",
    Severity.CONSTANT: "a unit, a rounding, one factor throughout, a constant of the configuration left out, or "
    f"figures within a factor of {FACTOR}",
    Severity.SUBSTANCE: "an order of growth, a sign, a property or an effect that is not there, or figures further "
    f"apart than a factor of {FACTOR}",
}


def heaviest(severities: Iterable[Severity | None]) -> Severity | None:
    """The heaviest of them; None if there are none."""
    return max(filter(None, severities), key=list(Severity).index, default=None)


def apart(pairs: Iterable[tuple[Number, Number]]) -> Severity:
    """How severe it is that the figures of each pair differ: `constant` if they have one sign, and the larger is at
    most `FACTOR` times the smaller; else `substance`."""

    def near(one: Number, other: Number) -> bool:
        return one * other > 0 and not above(max(one / other, other / one), FACTOR)

    return Severity.CONSTANT if all(near(*pair) for pair in pairs) else Severity.SUBSTANCE
