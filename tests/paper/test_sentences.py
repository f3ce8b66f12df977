"""How verdicts are told: the sentence that each rule writes, and how severe what it found is."""

from math import inf

import pytest

from paper.claims import SEVERITIES, Severity, Verdict, all_of, loses_nothing, outperforms
from paper.claims.figures import few, furthest, in_words, share, words
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
from paper.claims.severity import apart, heaviest

WORDING, CONSTANT, SUBSTANCE = Severity.WORDING, Severity.CONSTANT, Severity.SUBSTANCE


def on(*values):
    return dict(zip("abcdefgh", values, strict=False))


# --------------------------------------------------------------------------------------------------------- severity


def test_each_severity_has_a_meaning():
    assert list(SEVERITIES) == list(Severity) == [WORDING, CONSTANT, SUBSTANCE]


@pytest.mark.parametrize(
    ("severities", "found"),
    [([], None), ([None, None], None), ([None, WORDING], WORDING), ([SUBSTANCE, CONSTANT, WORDING], SUBSTANCE),
     ([WORDING, CONSTANT, None], CONSTANT)],
)  # fmt: skip
def test_the_heaviest_counts(severities, found):
    assert heaviest(severities) == found


@pytest.mark.parametrize(
    ("pair", "severity"),
    [((1, 2), CONSTANT), ((2, 1), CONSTANT), ((0.1 * 3, 0.6), CONSTANT), ((1, 2.001), SUBSTANCE),
     ((-1, -2), CONSTANT), ((-1, 1), SUBSTANCE), ((0, 0.001), SUBSTANCE), ((1, inf), SUBSTANCE)],
)  # fmt: skip
def test_figures_within_a_factor_of_two_differ_by_a_constant(pair, severity):
    assert apart([pair]) == severity
    assert apart([(1, 1.5), pair]) == severity, "the heaviest pair counts"


@pytest.mark.parametrize(
    ("finding", "severity"),
    [
        (printed(on("15.30"), on(15.304)), None),
        (printed(on("4.50"), on(4.718592), unit=" MB"), CONSTANT),  # a unit
        (printed(on("100"), on(103)), CONSTANT),  # within the margin
        (printed(on("1.0", "3.0"), on(20.0, 60.0)), CONSTANT),  # one factor throughout, however large
        (printed(on("1.0", "3.0"), on(2.0, 5.0)), CONSTANT),  # two factors, both within two
        (printed(on("1.0", "3.0"), on(1.0, 9.0)), SUBSTANCE),
        (printed(on("1.0"), on(-1.0)), SUBSTANCE),
        (counted(on(7), on(7)), None),
        (counted(on(7, 9), on(70, 90)), CONSTANT),
        (counted(on(7), on(14)), CONSTANT),
        (counted(on(7), on(15)), SUBSTANCE),
        (counted(on("4*d^2"), on("2*d^2")), CONSTANT),
        (counted(on("4*d^2", "d"), on("2*d^2", "d")), CONSTANT),  # differs in one alone, by a constant
        (counted(on("4*d^2"), on("4*d^2 + d")), CONSTANT),
        (counted(on("4*d^2"), on("4*d^2 + N*d")), SUBSTANCE),
        (counted(on("N^2"), on("H*N^2 + N")), CONSTANT),  # a constant of the configuration
        (counted(on("1/(1 + d/N)"), on("2*N/(3*N + d)")), CONSTANT),
        (counted(on("1/(1 + d/N)"), on("d/(N + 2*d)")), SUBSTANCE),
        (counted(on("N^2 + N"), on("N^2 - N^3")), SUBSTANCE),  # of no order that can be compared
        (growth("N^2*d", "4*N^2*d"), None),
        (growth("N^3", "N^2"), WORDING),
        (growth("N^2", "H*N^2"), CONSTANT),
        (growth("N^2 + N*d^2", "H*N^2 + N*d"), CONSTANT),  # not tight, and a constant left out
        (growth("N*d^2", "N^2*d + N*d^2"), SUBSTANCE),
        (growth_where("N*d", on("N*d", "2*N*d")), None),
        (growth_where("N*d", on("N*d", "N")), WORDING),
        (growth_where("N*d", on("N", "H*N*d")), CONSTANT),
        (growth_where("N*d", on("N", "N^2")), SUBSTANCE),
        (bound(on(0.1), on(0.2)), None),
        (bound(on(0.3), on(0.2)), CONSTANT),
        (bound(on(0.1, 0.3), on(0.2, 0.2)), CONSTANT),
        (bound(on(0.5), on(0.2)), SUBSTANCE),
        (bound(on(0.1, 0.5), on(0.2, 0.2)), SUBSTANCE),
        (holds("p", 0.0, 1e-6), None),
        (holds("p", 1.0, 1e-6), SUBSTANCE),
        (mended("p", 0.0, on(0.0), 1e-6), None),
        (mended("p", 1.0, on(1.0, 0.0), 1e-6), WORDING),
        (mended("p", 1.0, on(1.0), 1e-6), SUBSTANCE),
        (contradiction(("x", 1), ("y", (1, 2))), None),
        (contradiction(("x", (25, 30)), ("y", 35.7)), CONSTANT),
        (contradiction(("x", 61), ("y", (25, 30))), SUBSTANCE),
        (contradiction(("x", 0), ("y", (25, 30))), SUBSTANCE),
        (region((1, 2), on(1, 2)), None),
        (region((1, 2), on(1, 4)), CONSTANT),
        (region((1, 2), on(4, 4)), CONSTANT),
        (region((1, 2), on(1, 0.4)), SUBSTANCE),
        (region((1, 2), on(-1)), SUBSTANCE),
        (region(on((1, 2), (10, 20)), on(1, 9)), CONSTANT),
        (agrees((0, 5), on((-1, 0.1))), None),
        (agrees((2, 5), on((3, 4), (1, 1.5))), CONSTANT),
        (agrees((2, 5), on((6, 9))), CONSTANT),
        (agrees((2, 5), on((3, 4), (-1, 0.5))), SUBSTANCE),
        (effect((0, 5), on((1, 3)), on((-1, 0.9))), None),
        (effect((0, 5), on((1, 3), (0, 1)), on((-1, 0.9), (-1, 1))), SUBSTANCE),
        (effect((0, 5), on((1, 3), (0, 9)), on((-1, 0.9), (-1, 1))), WORDING),  # the noise could hide it
        (effect((0, 5), on((6, 8)), on((-1, 1))), CONSTANT),  # more than claimed
        (effect((0, 5), on((11, 18)), on((-1, 1))), SUBSTANCE),
        (effect((4, 5), on((2, 3)), on((-1, 1))), CONSTANT),  # less than claimed
        (effect((0, 5), on((6, 8), (0, 1)), on((-1, 1), (-1, 1))), SUBSTANCE),
        (effect((0, 5), on((0, 3)), on((-1, 1))), None),  # untestable
        (improves("better", on((1, 2))), None),
        (improves("better", on((1, 2), (-1, 1))), WORDING),
        (improves("better", on((1, 2), (-1, 0))), SUBSTANCE),
        (improves("better", on((-2, 0))), SUBSTANCE),
        (improves("better", on((-2, 1))), None),
        (outperforms("better", on(((1, 2), "better"), ((-1, 1), "undecided"))), WORDING),
        (outperforms("better", on(((1, 2), "better"), ((-1, 1), "equivalent"))), SUBSTANCE),
        (loses_nothing("as good", on(((1, 2), "better"), ((-1, 1), "not better"))), WORDING),
        (loses_nothing("as good", on(((1, 2), "better"), ((-2, -1), "worse"))), SUBSTANCE),
        (loses_nothing("as good", on(((-2, -1), "worse"))), SUBSTANCE),
        (untestable("p", {"a task": None}), None),
    ],
)  # fmt: skip
def test_a_rule_says_how_severe_it_is(finding, severity):
    assert finding.severity == severity, finding
    assert (finding.severity is None) == (finding.verdict in (Verdict.CONFIRMED, Verdict.UNTESTABLE))


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


# --------------------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("finding", "sentence"),
    [
        (
            printed({"d": "15.30"}, {"d": 15.304}),
            "Confirmed: 15.30 printed, 15.3 computed (d), rounded to the last printed digit.",
        ),
        (
            printed(on("33.5", "134"), on(33.554, 134.2)),
            "Confirmed: both printed figures are those computed, cut off at the last printed digit.",
        ),
        (
            printed(on("4.50"), on(4.718592), unit=" MB"),
            "Corrected: the source's are MiB, not MB: 4.50 MB printed, 4.719 MB computed.",
        ),
        (
            printed(on("100", "200"), on(100.2, 209.9)),
            "Corrected: off by at most 4.7 %, at b: 200 printed, 209.9 computed.",
        ),
        (
            printed(on("1.0", "3.0"), on(2.0, 6.0)),
            "Corrected: ours are 2 times the source's throughout: 1.0 printed, 2 computed.",
        ),
        (
            printed(on("1.0", "3.0", "4"), on(1.0, 9.0, 8)),
            "Refuted: two of three figures differ; the worst: 3.0 printed, 9 computed (b).",
        ),
        (printed({"": "1"}, {"": 9}), "Refuted: 1 printed, 9 computed."),
        (counted(on(4, 2), on(4, 2)), "Confirmed: the counts are as claimed, 4 (a), 2 (b)."),
        (counted({"": 4}, {"": 4}), "Confirmed: the count is as claimed, 4."),
        (
            counted({"": "4*d^2"}, {"": "2*d^2"}),
            "Corrected: ours are 0.5 times the source's: $4 d^2$ claimed, $2 d^2$ counted.",
        ),
        (counted(on(4, 2, 1), on(4, 3, 1)), "Refuted: one of three counts differs: 2 claimed, 3 counted (b)."),
        (growth("N*d^2", "6*N*d^2"), "Confirmed: $O(N d^2)$ is the order of the exact form, $6 N d^2$."),
        (growth("N^2", "6*H*N^2"), "Corrected: $O(N^2)$ leaves out $H$ in $H N^2$; the exact form is $6 H N^2$."),
        (
            growth("N^3", "N^2*d", held=("d",)),
            "Corrected: $O(N^3)$ is not tight; nothing grows like $N^3$; the exact form is $N^2 d$ for constant $d$.",
        ),
        (growth("N", "N^2"), "Refuted: $O(N)$ drops $N^2$; the exact form is $N^2$."),
        (bound({"": 10}, {"": 20}, unit=" %"), "Confirmed: the limit allows it, 10 % claimed, at most 20 % possible."),
        (
            bound(on(30, 10, 50), on(20, 20, 20)),
            "Conditional: two of three gains exceed the limit; the worst: 50 claimed, at most 20 possible (c).",
        ),
        (holds("outputs agree", 0.0, 0.5, at="$N = 3$"), "Confirmed: outputs agree, to within 0.5 at $N = 3$."),
        (
            holds("outputs agree", 2.0, 0.5, at="$N = 3$"),
            "Refuted: a counter-example is off by 2 at $N = 3$; 0.5 is allowed.",
        ),
        (contradiction(("half", 50), ("all", 100)), 'Inconsistent: "half" and "all" exclude each other.'),
        (contradiction(("half", 50), ("some", (1, 100))), 'Confirmed: "half" and "some" agree.'),
        (region((1, inf), {"": 4.68}), "Confirmed: what was found is in the claimed range, at least 1: 4.68."),
        (
            region((1, 2), on(1, 5, 7)),
            "Conditional: two of three figures are off; the furthest: 7 found, 1 to 2 claimed (c).",
        ),
        (region((1, 2), {"": 7}), "Refuted: 7 found, 1 to 2 claimed."),
        (
            effect((0, 5), on((1, 3), (2, 3)), on((-1, 0.9), (0, 1))),
            "Confirmed: a gain of 0 to 5 shows in both settings, even at a: 1 to 3 (control -1 to 0.9).",
        ),
        (
            improves("p", on((1, 3), (-2, -1), (-3, 0))),
            "Conditional: the gain shows in one of three settings, not at c: -3 to 0, and one more.",
        ),
        (improves("p", on((-1, 0), (-3, 0))), "Refuted: no gain anywhere, in two settings, as at b: -3 to 0."),
        (improves("p", on((-1, 1), (-3, 0))), "Untestable: one of two settings leaves it open, at a: -1 to 1."),
        (improves("p", {"": (-1, 1)}), "Untestable: -1 to 1 leaves it open."),
        (
            loses_nothing("p", on(((-1, 1), "equivalent"), ((-3, -2), "worse"))),
            "Conditional: nothing is lost in one of two settings, not at b: -3 to -2 (worse).",
        ),
        (loses_nothing("p", on(((-3, -2), "worse"))), "Refuted: a loss everywhere, a: -3 to -2 (worse)."),
        (outperforms("p", on(((2, 3), "better"))), "Confirmed: a gain shows in the one setting, a: 2 to 3 (better)."),
        (
            growth_where("N*d", on("N*d", "2*N*d")),
            "Confirmed: $O(N d)$ is the order in both settings, as at a: $N d$.",
        ),
        (
            growth_where("N*d", on("N*d", "H*N*d")),
            "Corrected: $O(N d)$ leaves out $H$ in $H N d$; the exact form is $H N d$ (b).",
        ),
        (
            growth_where("N*d", on("N*d", "N^2")),
            "Conditional: $O(N d)$ is an upper bound in one of two settings, not at b: $N^2$: the claim drops $N^2$.",
        ),
        (mended("p", 0.5, {"with x": 0.0}, 0.1), "Corrected: it holds with x; as printed it is off by 0.5."),
        (mended("p", 1391.2, {"with x": 0.0}, 0.1), "Corrected: it holds with x; as printed it is off by 1,400."),
        (
            mended("p", 0.5, {"with x": 0.4}, 0.1, at="y"),
            "Refuted: a counter-example is off by 0.5 at y; 0.1 is allowed; off by 0.4 with x.",
        ),
        (
            agrees((0, 5), on((-1, 1), (-3, -2), (7, 8))),
            "Conditional: the claimed 0 to 5 is within the error in one of three settings, "
            "not at b: -3 to -2, and one more.",
        ),
        (untestable("p", {"a task": None}), "Untestable: the source does not define a task."),
    ],
)
def test_a_rule_writes_a_sentence(finding, sentence):
    assert finding.sentence == sentence


COUNTED = counted({"": 4}, {"": 4})
DROPPED = "$O(N)$ drops $N^2$; the exact form is $N^2$"
EXACT = "$O(N^2)$ is the order of the exact form, $3 N^2$"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([TIGHT], f"Confirmed (a): {EXACT}."),
        ([TIGHT, COUNTED], f"Confirmed in both parts (a and one more): {EXACT}."),
        ([COUNTED, TIGHT, TIGHT], "Confirmed in all three parts (a and two more): the count is as claimed, 4."),
        (
            [TIGHT, DROPS],
            f"Refuted in one of two parts (b): {DROPPED}; the other holds.",
        ),
        (
            [TIGHT, COUNTED, OPEN],
            "Untestable in one of three parts (c): the source does not define a task; the other two hold.",
        ),
        (
            [LOOSE, HEADS, TIGHT],  # the heavier one
            "Corrected in two of three parts (b and one more): $O(N^2)$ leaves out $H$ in $H N^2$; "
            "the exact form is $H N^2$; the other holds.",
        ),
        (
            [PART, DROPS, TIGHT, COUNTED, OPEN, HEADS],
            f"Refuted in one of six parts (b): {DROPPED}; "
            "of the others two hold, one is corrected, one holds in part and one is untestable.",
        ),
    ],
)
def test_a_sentence_begins_with_the_heaviest_part(parts, sentence):
    assert all_of(on(*parts)).sentence == sentence


def test_a_long_sentence_is_silent_on_the_other_parts():
    label = " ".join(["word"] * 25)
    told = all_of({label: DROPS, "b": TIGHT}).sentence
    assert told == f"Refuted in one of two parts ({label}): {DROPPED}."
    assert words("$a + b$ is a formula") == 4


@pytest.mark.parametrize(
    ("shared", "text"),
    [((1, 3), "one of three parts holds"), ((2, 3), "two of three parts hold"), ((0, 2), "none of two parts hold"),
     ((2, 2), "both parts hold"), ((14, 14), "all 14 parts hold")],
)  # fmt: skip
def test_shares_are_told_in_words(shared, text):
    assert share(*shared, "parts", "holds", "hold") == text


def test_a_sentence_names_few_figures_and_counts_the_others():
    assert in_words(12) == "twelve" and in_words(1300) == "1,300"
    assert few({"a": "1", "(2, 3)": "2", "c": "3"}) == "1 (a); 2 (2, 3) and 1 more"
    assert furthest({"a": 1.0, "b": 1.0 + 1e-12, "c": 0.5}) == "a", "rounding decides nothing"
