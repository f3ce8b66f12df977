"""The verdicts, what a finding is, and how a function becomes a rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import ParamSpec

from paper.claims.severity import Severity

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
    """What a rule found: its verdict, the source's figure, ours, a short clause, and the rule's name.

    `clause` is what a reader sees first, after the verdict: one clause, without a full stop. `scope` says how many
    parts of the claim have the verdict. `severity` is None for a claim that is confirmed or untestable. `parts` are the
    findings that it is made of, by label; `remark` stands after our figure.
    """

    verdict: Verdict
    source: str
    ours: str
    clause: str
    severity: Severity | None = None
    scope: str = ""
    rule: str = ""
    parts: "tuple[tuple[str, Finding], ...]" = ()
    remark: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one sentence, the verdict first."""
        opening = " ".join(filter(None, (self.verdict.capitalize(), self.scope)))
        return f"{opening}: {self.clause}."

    def noting(self, remark: str) -> "Finding":
        """The same finding with a remark after our figure."""
        return replace(self, ours=f"{self.ours}. {remark}", remark=f"{self.remark}. {remark}".removeprefix(". "))


Parts = Mapping[str, Finding]  # of a claim, by label


def rule(judge: Callable[P, Finding]) -> Callable[P, Finding]:
    """Decorator: enters a rule into `RULES` with the first line of its docstring, and gives its findings its name."""
    RULES[judge.__name__] = (judge.__doc__ or "").partition("\n")[0]

    @wraps(judge)
    def found(*args: P.args, **kwargs: P.kwargs) -> Finding:
        return replace(judge(*args, **kwargs), rule=judge.__name__)

    return found
