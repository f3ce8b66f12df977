"""The rules: the verdict, the severity and the sentence of each finding, and what they refuse."""

import re
from math import inf, nan

import pytest
import sympy
from refusals import refusals

from paper.claims import PRECEDENCE, RULES, Severity, Verdict, all_of, loses_nothing, outperforms
from paper.claims.figures import outward, read
from paper.claims.rules import (
    agrees,
    bound,
    contradiction,
    counted,
    effect,
    growth,
    growth_where,
    holds,
    improves,
    mended,
    printed,
    region,
    untestable,
)
from paper.claims.severity import apart

CONFIRMED, CORRECTED, REFUTED = Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED
INCONSISTENT, CONDITIONAL, UNTESTABLE = Verdict.INCONSISTENT, Verdict.CONDITIONAL, Verdict.UNTESTABLE
WORDING, CONSTANT, SUBSTANCE = Severity.WORDING, Severity.CONSTANT, Severity.SUBSTANCE


def on(*values):
    return dict(zip("abcdefgh", values, strict=False))


def compared(*outcomes):
    """Differences of trained models with these outcomes, each with an interval of its own."""
    return on(*(((i, i + 1), outcome) for i, outcome in enumerate(outcomes)))


# ------------------------------------------------------------------------------------------- verdicts and severities


@pytest.mark.parametrize(
    ("finding", "verdict", "severity", "why"),
    [
        # half a unit of the last digit on either side; up to a whole unit if all figures are cut off there
        (printed(on("15.30"), on(15.305)), CONFIRMED, None, "rounded"),
        (printed(on("15.30"), on(15.3051)), CONFIRMED, None, "cut off"),
        (printed(on("15.30"), on(15.31)), CORRECTED, CONSTANT, "off by at most"),
        (printed(on("-15.30"), on(-15.3099)), CONFIRMED, None, "cut off"),
        (printed(on("33.5", "134", "536"), on(33.554, 134.2, 536.9)), CONFIRMED, None, "cut off"),
        # one figure is rounded, the others are cut off
        (printed(on("33.6", "134", "536"), on(33.554, 134.2, 536.9)), CORRECTED, CONSTANT, "off by at most"),
        (printed(on("2,359,296"), on(2359296)), CONFIRMED, None, "rounded"),
        (printed(on("2,359,296"), on(2359297)), CORRECTED, CONSTANT, "off by at most"),
        (printed(on("80"), on(81.0)), CORRECTED, CONSTANT, "off by at most"),  # a plain 80 is exact to the unit
        (printed(on("~80"), on(84.9)), CONFIRMED, None, "rounded"),  # an approximate 80 to the ten
        (printed(on("~80"), on(89.9)), CONFIRMED, None, "cut off"),
        (printed(on("~80"), on(90.1)), REFUTED, CONSTANT, "worst"),
        (printed(on("4.50"), on(4.718592), unit=" MB"), CORRECTED, CONSTANT, "MiB, not MB"),
        (printed(on("4.50"), on(4.718592), unit=" GB"), CORRECTED, CONSTANT, "off by at most"),  # no known slip
        (printed(on("1.0"), on(2.0), unit=" FLOPs"), CORRECTED, CONSTANT, "multiply-adds"),
        (printed(on("1.0"), on(2.0)), REFUTED, CONSTANT, "1 of 1 figures"),  # one figure shows no common factor
        (printed(on("1.0", "1.0"), on(2.0, 2.0)), REFUTED, CONSTANT, "2 of 2 figures"),  # nor do equal ones
        (printed(on("1.0", "3.0"), on(2.0, 6.0)), CORRECTED, CONSTANT, "2 times the source's throughout"),
        # With half a unit of the last digit on either side, the factor is from 2 / 1.05 = 1.905 to 2 / 0.95 for the
        # first figure, and up to 5.63 / 2.95 = 1.908 or 5.61 / 2.95 = 1.902 for the second.
        (printed(on("1.0", "3.0"), on(2.0, 5.63)), CORRECTED, CONSTANT, "times the source's throughout"),
        (printed(on("1.0", "3.0"), on(2.0, 5.61)), REFUTED, CONSTANT, "2 of 2"),
        (printed(on("1.0", "3.0"), on(2.0, 6.5)), REFUTED, SUBSTANCE, "2 of 2"),
        (printed(on("100", "200"), on(100.2, 209.9)), CORRECTED, CONSTANT, "off by at most 4.7 %, at b"),
        (printed(on("100", "200"), on(100.2, 210.6)), REFUTED, CONSTANT, "1 of 2 figures differ; worst b: 200 printed"),
        (printed(on("0.0"), on(0.0)), CONFIRMED, None, "rounded"),
        (printed(on("0.5"), on(0.0)), REFUTED, SUBSTANCE, "worst a"),
        (printed(on("1.0", "3.0"), on(20.0, 60.0)), CORRECTED, CONSTANT, ""),  # one factor, however large
        (printed(on("1.0"), on(-1.0)), REFUTED, SUBSTANCE, ""),
        (counted(on(7), on(7)), CONFIRMED, None, ""),
        (counted(on(7), on(8)), REFUTED, CONSTANT, ""),
        (counted(on(7), on(14)), REFUTED, CONSTANT, ""),  # one count shows no factor
        (counted(on(7), on(14), unit=" FLOPs"), CORRECTED, CONSTANT, ""),
        (counted(on(7, 9), on(14, 18)), CORRECTED, CONSTANT, ""),
        (counted(on(7, 7), on(14, 14)), REFUTED, CONSTANT, ""),
        (counted(on(7, 9), on(14, 19)), REFUTED, SUBSTANCE, ""),
        (counted(on(7, 0), on(14, 0)), REFUTED, CONSTANT, ""),
        (counted(on("4*d^2"), on("(2*d)^2")), CONFIRMED, None, ""),
        (counted(on("4*d^2"), on("2*d^2")), CORRECTED, CONSTANT, ""),
        (counted(on("4*d^2"), on("2*d^2 + H*N^2")), REFUTED, SUBSTANCE, ""),
        (counted(on("4*d^2", 36), on("4*d^2", 37)), REFUTED, CONSTANT, ""),
        (counted(on(7), on(15)), REFUTED, SUBSTANCE, ""),
        (counted(on("4*d^2", "d"), on("2*d^2", "d")), REFUTED, CONSTANT, ""),  # only one differs, by a constant
        (counted(on("4*d^2"), on("4*d^2 + d")), REFUTED, CONSTANT, ""),
        (counted(on("4*d^2"), on("4*d^2 + N*d")), REFUTED, SUBSTANCE, ""),
        (counted(on("N^2"), on("H*N^2 + N")), REFUTED, CONSTANT, ""),  # a constant of the configuration
        (counted(on("1/(1 + d/N)"), on("2*N/(3*N + d)")), REFUTED, CONSTANT, ""),
        (counted(on("1/(1 + d/N)"), on("d/(N + 2*d)")), REFUTED, SUBSTANCE, ""),
        (counted(on("N^2 + N"), on("N^2 - N^3")), REFUTED, SUBSTANCE, ""),  # their orders cannot be compared
        (growth("N^2*d + N*d^2", "8*N*d^2 + 4*N^2*d"), CONFIRMED, None, ""),
        (growth("N^2*d + N*d^2", "4*N^2*d + 5*H*N^2"), CORRECTED, WORDING, "no term grows like $N d^2$"),
        (growth("L*N^2", "H*L*N^2"), CORRECTED, CONSTANT, "leaves out $H$ in $H L N^2$"),
        (growth("N*d^2", "12*N*d^2 + 8*N^2*d"), REFUTED, SUBSTANCE, "drops $N^2 d$"),
        (growth("N^2*d", "12*N*d^2 + 8*N^2*d"), REFUTED, SUBSTANCE, "drops $N d^2$"),
        (growth("N^2*d", "12*N*d^2 + 8*N^2*d", held=("d",)), CONFIRMED, None, "for constant $d$"),
        (growth("N^2", "12*N*d^2 + 8*N^2*d", held=("d",)), CONFIRMED, None, ""),
        (growth("N^3", "N^2*d", held=("d",)), CORRECTED, WORDING, "no term grows like $N^3$"),
        (growth("N^2 + N*d", "H*N^2 + 5*N*d"), CORRECTED, CONSTANT, "leaves out $H$ in $H N^2$"),
        (growth("N^2*d", "N^2*d + 5*H*N^2"), CONFIRMED, None, ""),  # heads divide the width
        (growth("N^2", "B*L*N^2 + N"), CORRECTED, CONSTANT, "leaves out $B, L$"),
        (growth("n^2 + d^2", "n^2 + 4*n*d + 4*d^2"), CONFIRMED, None, ""),  # the mean of two terms is within their sum
        (growth("n^2 + d", "n^2 + n*d"), REFUTED, SUBSTANCE, "drops $d n$"),
        (growth("N*d^2 + N*d*log(d)", "N*d^2"), CONFIRMED, None, ""),  # a logarithm is within any power
        (growth("N*d", "N*d*log(d)"), REFUTED, SUBSTANCE, r"drops $N d \log"),
        (growth("N*d*log(d)", "N*d"), CORRECTED, WORDING, "no term grows like"),
        (growth("N*sqrt(N)", "3*N^(3/2) - N"), CONFIRMED, None, ""),
        (growth("N*d", "7*m*N*d"), REFUTED, SUBSTANCE, "drops"),  # another size is not a constant
        (growth("1", "7"), CONFIRMED, None, ""),
        (growth("1", "N"), REFUTED, SUBSTANCE, "drops $N$"),
        (growth("N", "0"), CORRECTED, WORDING, "no term grows like $N$"),
        (growth("N^2 + N*d^2", "H*N^2 + N*d"), CORRECTED, CONSTANT, ""),  # not tight, and a constant left out
        (growth_where("N*d^2", on("6*N*d^2", "N*d^2")), CONFIRMED, None, "a: $6 N d^2$"),
        (growth_where("N*d^2", on("6*N*d^2", "H*N*d^2")), CORRECTED, CONSTANT, "leaves out $H$"),
        (growth_where("N*d^2", on("6*N*d^2", "N*d")), CORRECTED, WORDING, "no term grows like $N d^2$"),
        (growth_where("N*d", on("N", "H*N*d")), CORRECTED, CONSTANT, ""),  # the heavier severity counts
        (growth_where("N*d^2", on("N^2*d", "6*H*N*d^2")), CONDITIONAL, SUBSTANCE, "holds at b; not at a"),
        (growth_where("N*d^2", on("N^2*d", "N^3")), REFUTED, SUBSTANCE, "nowhere"),
        (mended("p", 0.0, {"with x": 0.5}, 0.1), CONFIRMED, None, "holds to"),
        (mended("p", 0.5, {"with x": 0.5, "with y": 0.0}, 0.1), CORRECTED, WORDING, "tolerance 0.1; it holds with y"),
        (mended("p", 0.5, {"with x": 0.4}, 0.1), REFUTED, SUBSTANCE, "off by 0.4 with x"),
        (mended("p", 0.5, {}, 0.1), REFUTED, SUBSTANCE, "off by 0.5"),
        # a claim that contains 0 can be confirmed
        (agrees((0, 5), on((-1, 1), (4, 9)), unit=" %"), CONFIRMED, None, "a: -1 to 1 %, b: 4 to 9 %"),
        (agrees((0, 5), on((-3, -0.1), (0, 0))), CONDITIONAL, SUBSTANCE, "holds at b; not at a: -3 to -0.1"),
        (agrees((0, 5), on((-3, -1), (5.1, 6)), unit=" %"), REFUTED, SUBSTANCE, "nowhere"),
        (agrees((2, 5), on((3, 4), (1, 1.5))), CONDITIONAL, CONSTANT, ""),
        (agrees((2, 5), on((6, 9))), REFUTED, CONSTANT, ""),
        (bound(on(0.1, 0.2), on(0.1, 0.2), unit=" %"), CONFIRMED, None, ""),
        (bound(on(0.1, 0.2000001), on(0.1, 0.2), unit=" %"), CONDITIONAL, CONSTANT, "allowed at a"),
        (bound(on(0.1000001, 0.2000001), on(0.1, 0.2), unit=" %"), REFUTED, CONSTANT, ""),
        (bound(on(inf, 9), on(0.1, 0.2), unit=" %"), REFUTED, SUBSTANCE, ""),
        (bound(on(0.1, 0.5), on(0.2, 0.2)), CONDITIONAL, SUBSTANCE, ""),
        (bound({"": 0.1 + 0.2}, {"": 0.3}), CONFIRMED, None, ""),  # rounding in float64
        (holds("p", 1e-6, 1e-6, at="$N = 3$"), CONFIRMED, None, "holds to $1\\times 10^{-6}$ at $N = 3$"),
        (holds("p", 1.01e-6, 1e-6, at="$N = 3$"), REFUTED, SUBSTANCE, "counter-example at $N = 3$"),
        (holds("p", inf, 1e-6, at="$N = 3$"), REFUTED, SUBSTANCE, "counter-example at $N = 3$"),
        (contradiction(("x", 0.5), ("y", 0.5), unit=" %"), CONFIRMED, None, ""),
        (contradiction(("x", 0.5), ("y", 1.0), unit=" %"), INCONSISTENT, CONSTANT, ""),
        (contradiction(("x", (25, 30)), ("y", (30, 40)), unit=" %"), CONFIRMED, None, ""),
        (contradiction(("x", (25, 30)), ("y", (30.1, 40)), unit=" %"), INCONSISTENT, CONSTANT, ""),
        (contradiction(("x", (25, 30)), ("y", 35.7), unit=" %"), INCONSISTENT, CONSTANT, ""),
        (contradiction(("x", 61), ("y", (25, 30))), INCONSISTENT, SUBSTANCE, ""),
        (contradiction(("x", 0), ("y", (25, 30))), INCONSISTENT, SUBSTANCE, ""),
        (region((20, 35), on(20, 35), unit=" %"), CONFIRMED, None, ""),
        (region((20, 35), on(19.9, 35), unit=" %"), CONDITIONAL, CONSTANT, ""),
        (region((20, 35), on(20, 35.1), unit=" %"), CONDITIONAL, CONSTANT, "holds at a; not at b"),
        (region((20, 35), on(19.9, 35.1), unit=" %"), REFUTED, CONSTANT, ""),
        (region((1, 2), on(1, 4)), CONDITIONAL, CONSTANT, ""),
        (region((1, 2), on(1, 0.4)), CONDITIONAL, SUBSTANCE, ""),
        (region((1, 2), on(-1)), REFUTED, SUBSTANCE, ""),
        (region(on((1, 2), (10, 20)), on(1, 9)), CONDITIONAL, CONSTANT, ""),
        (effect((0, 5), on((1, 3)), on((-1, 0.9)), unit=" %"), CONFIRMED, None, "1 to 3 % (control -1 to 0.9 %)"),
        (effect((0, 5), on((1, 3), (2, 4)), on((-1, 1), (0, 1))), CONDITIONAL, WORDING, "shows at b; not at a: 1 to 3"),
        (effect((0, 5), on((-1, 2.4), (0, 1)), on((-1, 1), (0, 1))), REFUTED, SUBSTANCE, "no such gain shows anywhere"),
        (effect((0, 5), on((-1, 2.4), (0, 2.5)), on((-1, 1), (0, 1))), UNTESTABLE, None, "noise at b could hide it"),
        (effect((0, 5), on((-4, -2)), on((-1, 1))), REFUTED, SUBSTANCE, "no such gain"),  # it is slower
        # more than was claimed is another claim
        (effect((0, 5), on((5.1, 6), (7, 9)), on((-1, 1), (0, 1))), REFUTED, CONSTANT, "no such gain"),
        (effect((0, 5), on((4.9, 6), (7, 9)), on((-1, 1), (0, 1))), CONDITIONAL, CONSTANT, "shows at a; not at b"),
        (effect((0, 5), on((1, 3), (0, 1)), on((-1, 0.9), (-1, 1))), CONDITIONAL, SUBSTANCE, ""),
        (effect((0, 5), on((11, 18)), on((-1, 1))), REFUTED, SUBSTANCE, ""),
        (effect((4, 5), on((2, 3)), on((-1, 1))), REFUTED, CONSTANT, ""),  # less than claimed
        (effect((0, 5), on((6, 8), (0, 1)), on((-1, 1), (-1, 1))), REFUTED, SUBSTANCE, ""),
        (improves("better", on((0.1, 0.2), (30, 99)), unit=" %"), CONFIRMED, None, "b: 30 to 99 %"),  # however small
        (improves("better", on((0, 9), (1, 2)), unit=" %"), CONDITIONAL, WORDING, "not at a: 0 to 9 %"),
        (improves("better", on((1, 2), (-3, -1))), CONDITIONAL, SUBSTANCE, "shows at a; not at b: -3 to -1"),
        (improves("better", on((-3, -1), (-2, 0))), REFUTED, SUBSTANCE, "a: -3 to -1, b: -2 to 0: no gain anywhere"),
        (improves("better", on((0, 0)), unit=" %"), REFUTED, SUBSTANCE, "no gain anywhere"),
        (improves("better", on((-3, -1), (-2, 0.1)), unit=" %"), UNTESTABLE, None, "undecided at b"),
        (improves("better", on((-inf, inf)), unit=" %"), UNTESTABLE, None, "undecided at a"),
        (outperforms("p", compared("better", "better")), CONFIRMED, None, "(better)"),
        (outperforms("p", compared("better", "equivalent")), CONDITIONAL, SUBSTANCE, "not shown at"),
        (outperforms("p", compared("better", "undecided")), CONDITIONAL, WORDING, "not shown at"),
        (outperforms("p", compared("equivalent", "worse", "not better")), REFUTED, SUBSTANCE, "(not better)"),
        (outperforms("p", compared("equivalent", "undecided")), UNTESTABLE, None, "(equivalent)"),
        (outperforms("p", compared("not worse")), UNTESTABLE, None, "(not worse)"),
        (loses_nothing("p", compared("equivalent", "better", "not worse")), CONFIRMED, None, "(not worse)"),
        (loses_nothing("p", compared("not worse", "worse")), CONDITIONAL, SUBSTANCE, "not shown at"),
        (loses_nothing("p", compared("better", "not better")), CONDITIONAL, WORDING, "not shown at"),
        (loses_nothing("p", compared("worse", "undecided")), REFUTED, SUBSTANCE, "a loss in one of two settings"),
        (loses_nothing("p", compared("not better")), UNTESTABLE, None, "(not better)"),
        (untestable("p", {"x": "any", "y": None}), UNTESTABLE, None, "the source does not define y"),
        (untestable("p", {"x": None, "y": 1}, lack="there are no"), UNTESTABLE, None, "there are no x"),
    ],
)  # fmt: skip
def test_a_rule_gives_a_verdict_its_severity_and_the_reason(finding, verdict, severity, why):
    assert (finding.verdict, finding.severity) == (verdict, severity), finding
    assert why in finding.ours
    assert finding.rule in RULES
    assert (severity is None) == (verdict in (CONFIRMED, UNTESTABLE))


@pytest.mark.parametrize("text", ["", "fifteen", "1,23", "1.", "15 %", "1e3"])
def test_printed_figures_must_be_figures(text):
    with pytest.raises(ValueError, match=f"expected a printed figure .* got {re.escape(repr(text))}"):
        read(text)


@pytest.mark.parametrize(("rule", "value"), [(printed, "1"), (counted, 1), (bound, 1), (region, (0, 1))])
@pytest.mark.parametrize(("source", "ours"), [("a", "b"), ("", ""), ("a", "ab"), ("ab", "a")])
def test_labels_must_be_the_same(rule, value, source, ours):
    with pytest.raises(ValueError, match="^(ours|limit|measured): expected (the labels of|at least one label)"):
        rule(dict.fromkeys(source, value), dict.fromkeys(ours, 1))


def test_growth_with_settings_of_the_method():
    exact = "8*N*d^2 + 8*N*d*m"
    assert growth("N*d^2", exact).verdict == REFUTED
    finding = growth("N*d^2", exact, settings=("m",))
    assert (finding.verdict, finding.ours.partition(": ")[2]) == (CORRECTED, "the claim leaves out $m$ in $N d m$")
    assert growth("N*d", exact, settings=("m",)).verdict == REFUTED
    assert growth("N*d^2", "H*N*d^2", settings=("m",)).verdict == REFUTED  # they replace the usual ones


def test_growth_needs_sums_of_products_and_tells_symbols_apart_by_name():
    N, d = sympy.symbols("N d", integer=True)
    assert growth("N*d", 3 * N * d).verdict == CONFIRMED
    for formula in ("exp(N)", "N(N + 1)", "N^d", "N^2 - N^3", "1/(N + d)", sympy.floor(sympy.Symbol("N"))):
        with pytest.raises(ValueError, match=r"formula: expected .* got"):
            growth("N", formula)


@pytest.mark.parametrize(
    ("ends", "wider"),
    [((0.04, 0.16), (0.0, 0.2)), ((-0.16, -0.04), (-0.2, 0.0)), ((1, 2.5), (1, 2.5)), ((-inf, inf), (-inf, inf)),
     ((-1e-14, 1e-14), (0, 0)), ((100 * (0.3 - 0.1), 20), (20, 20))],
)  # fmt: skip
def test_intervals_are_rounded_outward(ends, wider):
    assert outward(ends) == wider


@refusals(
    [
        (lambda: printed(on("1"), on(nan)), "ours: expected a number at a"),
        (lambda: printed(on("1"), on(inf)), "ours: expected a finite figure at a"),
        (lambda: holds("agree", nan, 1.0), "error: expected a residual"),
        (lambda: holds("agree", 0.0, 0.0), "tolerance: expected a positive number"),
        (lambda: contradiction(("one", (2, 1)), ("other", 1)), r"first: expected \(low, high\) with low <= high"),
        (lambda: contradiction(("one", 1), ("other", (2, 1))), "second: expected"),
        (lambda: region((2, 1), on(1)), "claimed: expected"),
        (lambda: region((20, 35), on(nan)), "measured: expected a number at a, got nan"),
        (lambda: effect((0, 5), on((0, 1)), {"b": (0, 1)}), r"control: expected the labels of measured, \['a'\], got"),
        # without an upper end there is no middle that noise could reach
        (lambda: effect((2, inf), on((-5, 100)), on((-1, 1))), r"claimed: expected finite ends, got \(2, inf\)"),
        (lambda: effect((-inf, 2), on((-5, 100)), on((-1, 1))), "claimed: expected finite ends"),
        (lambda: effect((2, 1), on((0, 1)), on((0, 1))), "claimed: expected"),
        (lambda: effect((0, 5), on((2, 1)), on((0, 1))), "measured: expected"),
        (lambda: effect((0, 5), on((0, 1)), on((2, 1))), "control: expected"),
        (lambda: improves("better", {}), "gains: expected at least one setting"),
        (lambda: improves("better", on((2, 1))), "gains: expected"),
        (lambda: untestable("works", on("any")), "expected a quantity that the source does not define"),
        (lambda: growth_where("N", {}), "exact: expected at least one setting"),
        (lambda: agrees((0, 5), {}), "measured: expected at least one setting"),
        (lambda: agrees((0, 5), on((2, 1))), "measured: expected"),
        (lambda: all_of({}), "expected at least one finding"),
        (lambda: outperforms("p", {}), "found: expected at least one setting, got none"),
        (lambda: outperforms("p", compared("beter")), "outcome: expected one of 'equivalent', .*, got 'beter'"),
        (lambda: loses_nothing("p", compared(None)), "outcome: expected one of"),
    ]
)
def test_what_rules_refuse(refused):
    refused()


# --------------------------------------------------------------------------------------------------- several parts

FOUND = {
    CONFIRMED: holds("p", 0, 1),
    CORRECTED: growth("N^2", "N"),
    REFUTED: holds("p", 2, 1),
    INCONSISTENT: contradiction(("a", 1), ("b", 2)),
    CONDITIONAL: region((0, 1), {"a": 0, "b": 2}),
    UNTESTABLE: untestable("p", {"x": None}),
}


@pytest.mark.parametrize("first", Verdict)
@pytest.mark.parametrize("second", Verdict)
def test_all_of_takes_the_first_in_precedence(first, second):
    whole = all_of({"one": FOUND[first], "two": FOUND[second]})
    assert whole.verdict == min(first, second, key=PRECEDENCE.index)
    assert whole.source == f"one: {FOUND[first].source}; two: {FOUND[second].source}"
    assert (f"({first})" in whole.ours) == (first != second)
    assert set(whole.rule.split(", ")) == {FOUND[first].rule, FOUND[second].rule}


@pytest.mark.parametrize(
    ("pair", "severity"),
    [((1, 2), CONSTANT), ((2, 1), CONSTANT), ((0.1 * 3, 0.6), CONSTANT), ((1, 2.001), SUBSTANCE),
     ((-1, -2), CONSTANT), ((-1, 1), SUBSTANCE), ((0, 0.001), SUBSTANCE), ((1, inf), SUBSTANCE)],
)  # fmt: skip
def test_figures_within_a_factor_of_two_differ_by_a_constant(pair, severity):
    assert apart([pair]) == severity
    assert apart([(1, 1.5), pair]) == severity, "the heaviest pair counts"


TIGHT, LOOSE = growth("N^2", "3*N^2"), growth("N^3", "N^2")
HEADS, DROPS = growth("N^2", "H*N^2"), growth("N", "N^2")
OPEN, PART = untestable("p", {"a task": None}), region((0, 1), on(1, 3))


@pytest.mark.parametrize(
    ("parts", "severity"),
    [([TIGHT, TIGHT], None), ([TIGHT, LOOSE], WORDING), ([LOOSE, HEADS], CONSTANT), ([HEADS, DROPS, TIGHT], SUBSTANCE),
     ([PART, HEADS], SUBSTANCE), ([OPEN, HEADS], None), ([OPEN, DROPS], SUBSTANCE)],
)  # fmt: skip
def test_the_heaviest_part_counts_unless_the_whole_is_untestable(parts, severity):
    assert all_of(on(*parts)).severity == severity
