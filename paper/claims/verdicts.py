"""The verdicts, what a finding is, and how a function becomes a rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


class Verdict(StrEnum):
    CONFIRMED = "confirmed"
    CORRECTED = "corrected"
    CONDITIONAL = "conditional"
    UNTESTABLE = "untestable"
    INCONSISTENT = "inconsistent"
    REFUTED = "refuted"


MEANINGS = {
    Verdict.CONFIRMED: "the claim holds as stated",
    Verdict.CORRECTED: "right up to a constant, a unit or a missing term; the right one is given",
    Verdict.CONDITIONAL: "holds in a region, which is given",
    Verdict.UNTESTABLE: "nothing that was computed here decides it; the reason is given",
    Verdict.INCONSISTENT: "the source contradicts itself; both sides are quoted",
    Verdict.REFUTED: "a counter-example or a bound contradicts it",
}

# A claim of several parts takes the first of these that one of its parts has. A false part makes the whole false, and
# a contradiction leaves it without a meaning; what cannot be decided leaves the whole undecided; then come the
# verdicts which say that the claim holds, the weakest first.
PRECEDENCE = tuple(reversed(MEANINGS))

RULES: dict[str, str] = {}


@dataclass(frozen=True)
class Finding:
    """What a rule found: its verdict, the source's figure, ours, and the rule's name."""

    verdict: Verdict
    source: str
    ours: str
    rule: str

    def noting(self, remark: str) -> "Finding":
        """The same finding with a remark behind our figure."""
        return replace(self, ours=f"{self.ours}. {remark}")


Parts = Mapping[str, Finding]  # of a claim, by label


def rule(judge: Callable[P, tuple[Verdict, str, str]]) -> Callable[P, Finding]:
    """Enter a function that returns (verdict, source, ours) into `RULES`, with its docstring's first line."""
    RULES[judge.__name__] = (judge.__doc__ or "").partition("\n")[0]

    @wraps(judge)
    def found(*args: P.args, **kwargs: P.kwargs) -> Finding:
        return Finding(*judge(*args, **kwargs), rule=judge.__name__)

    return found
