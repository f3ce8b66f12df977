"""The rules for differences of trained models: each verdict they can give."""

from math import inf

import pytest

from paper.claims import RULES, Verdict, loses_nothing, outperforms
from paper.claims.outcomes import BITS_A_BYTE, Unit
from paper.experiments.statistics import OUTCOMES

ENDS = {
    "equivalent": (-0.01, 0.01),
    "better": (0.1, 0.2),
    "worse": (-0.2, -0.1),
    "not worse": (-0.01, 0.2),
    "not better": (-0.2, 0.01),
    "undecided": (-0.2, 0.2),
}


def found(*outcomes):
    return {f"setting {i}": (ENDS[outcome], outcome) for i, outcome in enumerate(outcomes)}


@pytest.mark.parametrize(
    ("rule", "outcomes", "verdict"),
    [
        (outperforms, ["better", "better"], Verdict.CONFIRMED),
        (outperforms, ["better", "equivalent"], Verdict.CONDITIONAL),
        (outperforms, ["better", "undecided"], Verdict.CONDITIONAL),
        (outperforms, ["equivalent", "worse", "not better"], Verdict.REFUTED),
        (outperforms, ["equivalent", "undecided"], Verdict.UNTESTABLE),
        (outperforms, ["not worse"], Verdict.UNTESTABLE),
        (loses_nothing, ["equivalent", "better", "not worse"], Verdict.CONFIRMED),
        (loses_nothing, ["not worse", "worse"], Verdict.CONDITIONAL),
        (loses_nothing, ["worse", "worse"], Verdict.REFUTED),
        (loses_nothing, ["worse", "undecided"], Verdict.UNTESTABLE),
        (loses_nothing, ["not better"], Verdict.UNTESTABLE),
    ],
)
def test_verdicts(rule, outcomes, verdict):
    finding = rule("a statement", found(*outcomes))
    assert finding.verdict == verdict and finding.source == "a statement"
    assert all(f"({outcome})" in finding.ours for outcome in outcomes if verdict != Verdict.CONDITIONAL)
    assert finding.rule in RULES


def test_every_outcome_has_a_verdict():
    for outcome in OUTCOMES:
        assert {rule("", found(outcome)).verdict for rule in (outperforms, loses_nothing)} <= set(Verdict)


@pytest.mark.parametrize("rule", [outperforms, loses_nothing])
def test_what_is_undecided_is_listed_before_others(rule):
    excluded = {outperforms: "equivalent", loses_nothing: "worse"}[rule]
    finding = rule("a statement", found(*[excluded] * 7, "undecided"))
    assert finding.verdict == Verdict.UNTESTABLE
    assert finding.ours.startswith("setting 7: -0.2 to 0.2 (undecided), setting 0: ")
    assert finding.ours.endswith("and 2 more: undecided at setting 7")


@pytest.mark.bad_input
def test_an_outcome_is_one_of_those_that_are_known():
    with pytest.raises(ValueError, match="outcome: expected one of 'equivalent', .*, got 'beter'"):
        outperforms("a statement", {"a": ((0.1, 0.2), "beter")})
    with pytest.raises(ValueError, match="outcome: expected one of"):
        loses_nothing("a statement", {"a": ((0.1, 0.2), None)})


@pytest.mark.bad_input
def test_nothing_is_no_evidence():
    with pytest.raises(ValueError, match="found: expected at least one setting, got none"):
        outperforms("a statement", {})


@pytest.mark.parametrize(
    ("unit", "interval", "shown"),
    [
        (BITS_A_BYTE, (-inf, inf), ("-inf", "inf")),
        (BITS_A_BYTE, (-0.00049, 0.0126), ("0.0", "0.013")),  # no negative zero
        (Unit("% right", 100, 1), (-0.00049, 0.0126), ("0.0", "1.3")),
    ],
)
def test_differences_are_reported_in_their_unit(unit, interval, shown):
    assert tuple(map(str, unit.interval(interval))) == shown
    assert (unit.signed(-0.0126), unit.signed(inf)) == (f"{-0.0126 * unit.scale:+.{unit.digits}f}", "+inf")
