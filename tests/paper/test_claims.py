"""The ledger: each claim has one verdict or awaits a named part, and each rule gives each verdict where it must."""

import ast
import json
import re
from dataclasses import replace
from functools import cache
from math import inf, nan
from pathlib import Path

import pytest

from paper import claims
from paper.claims import (
    PRECEDENCE,
    RULES,
    SEVERITIES,
    Entry,
    Finding,
    Ledger,
    LedgerError,
    Verdict,
    all_of,
    catalogue,
    judge,
    ledger,
    stored,
)
from paper.claims.catalogue import Catalogue, Claim, load
from paper.claims.figures import outward, read, show, some, words
from paper.claims.ledger import AWAITING
from paper.claims.report import counts_table, counts_text, entry_markdown, escape, ledger_table, rules_table, table
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
from tools.notebooks import VERDICTS

ROOT = Path(__file__).parents[2]
CONFIRMED, CORRECTED, REFUTED = Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED
INCONSISTENT, CONDITIONAL, UNTESTABLE = Verdict.INCONSISTENT, Verdict.CONDITIONAL, Verdict.UNTESTABLE


# ------------------------------------------------------------------------------------------------------- the ledger


@cache
def all_entries() -> list[Entry]:
    """The whole ledger; `tests/book/test_verdicts.py` holds it to the evidence."""
    return [entry for entry, _ in stored(VERDICTS).values()]


def test_every_claim_has_a_verdict_or_awaits():
    entries = all_entries()
    assert [entry.id for entry in entries] == list(catalogue().claims)
    for entry in entries:
        if entry.verdict == AWAITING:
            assert entry.awaits in catalogue().parts
            assert not (entry.chapter or entry.cell or entry.source or entry.ours or entry.rule)
        else:
            assert entry.verdict in list(Verdict)
            assert not entry.awaits
            assert all((entry.chapter, entry.cell, entry.source, entry.ours))
            assert set(entry.rule.split(", ")) <= RULES.keys()
            assert (entry.severity == "") == (entry.verdict in (CONFIRMED, UNTESTABLE))
            assert entry.severity in {"", *SEVERITIES}


MOST_WORDS = 50  # a formula counts as one; what is longer is no sentence that one reads first


def test_every_claim_is_told_in_a_sentence():
    for entry in all_entries():
        assert re.match(rf"{entry.verdict.capitalize()}\b[^:]*: .*[^.]\.$", entry.sentence), entry
        assert words(entry.sentence) <= MOST_WORDS, entry


def test_no_claim_waits():
    assert [entry.id for entry in all_entries() if entry.verdict == AWAITING] == []


@cache
def _cells(path: Path) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]


@pytest.mark.parametrize("claim_id", catalogue().claims)
def test_each_verdict_is_derived_in_its_chapter(claim_id):
    """The chapter has the claim's anchor once, and below it a cell that shows the verdict; no other chapter has it."""
    (entry,) = (entry for entry in all_entries() if entry.id == claim_id)
    anchor = re.compile(rf"^\({re.escape(entry.cell)}\)=$", re.MULTILINE)
    anchored = [
        (path.stem, number)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for number, (kind, text) in enumerate(_cells(path))
        if kind == "markdown"
        for _ in anchor.findall(text)
    ]
    assert [chapter for chapter, _ in anchored] == [entry.chapter]
    below = _cells(ROOT / "notebooks" / f"{entry.chapter}.ipynb")[anchored[0][1] :]
    shown = re.compile(rf"""\b(judge|show)\([^)]*["']{re.escape(claim_id)}["']""")
    assert any(kind == "code" and shown.search(text) for kind, text in below)


@pytest.mark.parametrize(
    "path", sorted(path for path in (ROOT / "paper" / "claims" / "evidence").glob("*.py")), ids=lambda path: path.stem
)
def test_evidence_leaves_the_verdict_to_rules(path):
    """No evidence module builds a Finding, names a verdict, or edits one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in {"Finding", "Verdict", "replace", "_replace"}
        if isinstance(node, ast.Name | ast.Attribute):
            assert (node.id if isinstance(node, ast.Name) else node.attr) != "Verdict"
        if isinstance(node, ast.Constant):
            assert node.value not in list(Verdict)


def _small_ledger(package: str = "") -> Ledger:
    claim = Claim("S0.1a", "open", "I", "words", "1 A heading (line 7)", "its own words")
    return Ledger(Catalogue({"S0": "A document"}, {"I": "A part"}, {claim.id: claim}), package)


def _finding() -> Finding:
    return holds("a property", 0.0, 1.0)


def test_judge_runs_the_evidence_once():
    runs = []
    small = _small_ledger()
    assert (small.judge("S0.1a").verdict, small.judge("S0.1a").awaits) == (AWAITING, "I")

    @small.evidence("S0.1a", chapter="01-a-chapter")
    def function():
        runs.append(1)
        return _finding()

    entries = [small.judge("S0.1a"), *small.entries(), *small.entries("S0")]
    assert [entry.verdict for entry in entries] == ["confirmed"] * 3
    assert (entries[0].chapter, entries[0].cell, len(runs)) == ("01-a-chapter", "S0.1a", 1)


def test_evidence_is_entered_once_for_known_claims():
    small = _small_ledger()
    small.evidence("S0.1a", chapter="01-a-chapter")(_finding)
    with pytest.raises(LedgerError, match=r"S0\.1a: expected one evidence function, got .*_finding beside .*_finding"):
        small.evidence("S0.1a", chapter="01-a-chapter")(_finding)
    with pytest.raises(LedgerError, match=r"expected an id .* got 'S9\.9z'"):
        small.evidence("S9.9z", chapter="01-a-chapter")
    with pytest.raises(LedgerError, match=r"chapter: expected .* got 'The Layer\.ipynb'"):
        small.evidence("S0.1a", chapter="The Layer.ipynb")


@pytest.mark.parametrize("ask", [lambda: judge("S9.9z"), lambda: ledger("S9")])
def test_unknown_names_raise(ask):
    with pytest.raises(LedgerError, match="expected .* got 'S9"):
        ask()


@pytest.mark.bad_input
def test_evidence_must_return_a_finding():
    small = _small_ledger()
    small.evidence("S0.1a", chapter="01-a-chapter")(lambda: "confirmed")
    with pytest.raises(TypeError, match="expected to return a Finding of a rule, got 'confirmed'"):
        small.judge("S0.1a")


def test_a_failing_evidence_module_fails_alike_twice(tmp_path, monkeypatch):
    """Evidence entered before the failure is taken back, so that the second attempt shows the same error."""
    folder = tmp_path / "failing_evidence"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "s0.py").write_text(
        "from failing_evidence import small\nsmall.evidence('S0.1a', chapter='01-a')(print)\nraise OSError('gone')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import failing_evidence

    failing_evidence.small = small = _small_ledger("failing_evidence")
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            small.judge("S0.1a")


# -------------------------------------------------------------------------------------------------- damaged ledgers

SOUND = """
[documents]
S0 = "A document"
[parts]
I = "A part"
[[claims]]
id = "S0.1a"
kind = "open"
part = "I"
claim = "words"
where = "1 A heading (line 7)"
quote = "its own words"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "open"', 'kind = "formulae"', r"claim 1 \(S0\.1a\): kind: expected one of formula, .* got 'formulae'"),
        ('kind = "open"\n', "", r"claim 1 \(S0\.1a\): kind: expected a string, but the field is missing"),
        ('id = "S0.1a"\n', "", r"claim 1: id: expected a string, but the field is missing"),
        ('"words"', '" "', r"claim 1 \(S0\.1a\): claim: expected a string with text, got ' '"),
        ('"words"', "7", r"claim 1 \(S0\.1a\): claim: expected a string with text, got 7"),
        ('"words"', '"words"\nverdict = "confirmed"', r"claim 1 \(S0\.1a\): expected the fields .* got 'verdict'"),
        ('"words"', '"words"\nnote = ""', r"claim 1 \(S0\.1a\): note: expected a string with text, got ''"),
        ('part = "I"', 'part = "X"', r"claim 1 \(S0\.1a\): part: expected one of I, got 'X'"),
        ('"S0.1a"', '"S7.1a"', r"claim 1 \(S7\.1a\): id: the document: expected one of S0, got 'S7'"),
        ('"S0.1a"', '"0.1"', r"claim 1 \(0\.1\): id: expected a key like 'S0\.1\.1a', got '0\.1'"),
        (
            "[[claims]]",
            SOUND[SOUND.index("[[claims]]") :] + "[[claims]]",
            r"claim 2 .* expected each once, got 'S0\.1a'",
        ),
        (SOUND[SOUND.index("[[claims]]") :], "", r"claims: expected at least one \[\[claims\]\] entry, got none"),
        ('[parts]\nI = "A part"', "", r"\[parts\]: expected a table of names and titles, got None"),
        ("[parts]", "[extra]\n[parts]", r"top level: expected .* got 'extra' besides"),
        ('kind = "open"', 'kind = "open', r"expected TOML in UTF-8: .* line \d+"),
    ],
)
def test_damage_is_named(tmp_path, old, new, message):
    path = tmp_path / "damaged.toml"
    assert old in SOUND
    path.write_text(SOUND.replace(old, new), "utf-8")
    with pytest.raises(LedgerError, match=rf"^{re.escape(str(path))}: {message}"):
        load(path)


def test_files_that_are_no_ledger(tmp_path):
    path = tmp_path / "ledger.toml"
    with pytest.raises(LedgerError, match="cannot be read: No such file"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LedgerError, match="expected TOML in UTF-8"):
        load(path)
    path.write_text(SOUND, "utf-8")
    assert list(load(path).claims) == ["S0.1a"]


# -------------------------------------------------------------------------------------------------------- the rules


def test_rules_are_described():
    assert set(RULES) == {
        "printed", "counted", "growth", "bound", "holds", "contradiction", "region", "effect", "improves", "untestable",
        "outperforms", "loses_nothing", "growth_where", "mended", "agrees",
    }  # fmt: skip
    assert all(line.endswith(".") for line in RULES.values())


@pytest.mark.parametrize(
    ("source", "ours", "unit", "verdict", "why"),
    [
        (["15.30"], [15.304999], "", CONFIRMED, "rounded"),  # half a unit of the last digit, from both sides
        (["15.30"], [15.305], "", CONFIRMED, "rounded"),
        (["15.30"], [15.3051], "", CONFIRMED, "cut off"),  # up to a whole one if all are cut off there
        (["15.30"], [15.3099], "", CONFIRMED, "cut off"),
        (["15.30"], [15.31], "", CORRECTED, "off by at most"),
        (["-15.30"], [-15.3099], "", CONFIRMED, "cut off"),
        (["33.5", "134", "536"], [33.554, 134.2, 536.9], "", CONFIRMED, "cut off"),
        (["33.6", "134", "536"], [33.554, 134.2, 536.9], "", CORRECTED, "off by at most"),  # one rounded, one cut
        (["2,359,296"], [2359296], "", CONFIRMED, "rounded"),
        (["2,359,296"], [2359297], "", CORRECTED, "off by at most"),
        (["80"], [81.0], "", CORRECTED, "off by at most"),  # a plain 80 is exact to the unit
        (["~80"], [81.0], "", CONFIRMED, "rounded"),  # an approximate one to the ten
        (["~80"], [84.9], "", CONFIRMED, "rounded"),
        (["~80"], [89.9], "", CONFIRMED, "cut off"),
        (["~80"], [90.1], "", REFUTED, "worst"),
        (["4.50"], [4.718592], " MB", CORRECTED, "MiB, not MB"),
        (["4.50"], [4.718592], " GB", CORRECTED, "off by at most"),  # no known slip of that size
        (["1.0"], [2.0], " FLOPs", CORRECTED, "multiply-adds"),
        (["1.0"], [2.0], "", REFUTED, "1 of 1 figures"),  # one figure shows no common factor
        (["1.0", "1.0"], [2.0, 2.0], "", REFUTED, "2 of 2 figures"),  # nor do equal ones
        (["1.0", "3.0"], [2.0, 6.0], "", CORRECTED, "2 times the source's throughout"),
        (["1.0", "3.0"], [2.0, 6.2], "", CORRECTED, "times the source's throughout"),  # to the printed digits
        # A factor from 2 / 1.05 = 1.905 to 2 / 0.95 for the first, up to 5.63 / 2.95 = 1.908 or 5.61 / 2.95 = 1.902 for
        # the second: half a unit of the last digit on either side.
        (["1.0", "3.0"], [2.0, 5.63], "", CORRECTED, "times the source's throughout"),
        (["1.0", "3.0"], [2.0, 5.61], "", REFUTED, "2 of 2"),
        (["1.0", "3.0"], [2.0, 6.5], "", REFUTED, "2 of 2"),
        (["100", "200"], [100.2, 209.9], "", CORRECTED, "off by at most 4.7 %, at b"),
        (["100", "200"], [100.2, 210.6], "", REFUTED, "1 of 2 figures differ; worst b: 200 printed, 210.6 computed"),
        (["0.0"], [0.0], "", CONFIRMED, "rounded"),
        (["0.5"], [0.0], "", REFUTED, "worst a"),
    ],
)
def test_printed(source, ours, unit, verdict, why):
    labels = "abc"[: len(source)]
    finding = printed(dict(zip(labels, source, strict=True)), dict(zip(labels, ours, strict=True)), unit=unit)
    assert (finding.verdict, finding.rule) == (verdict, "printed")
    assert why in finding.ours


def test_printed_margin_is_stated():
    assert printed({"": "100"}, {"": 109}, margin=0.1).verdict == CORRECTED
    assert printed({"": "100"}, {"": 112}, margin=0.1).verdict == REFUTED


@pytest.mark.parametrize("text", ["", "fifteen", "1,23", "1.", "15 %", "1e3"])
def test_printed_figures_must_be_figures(text):
    with pytest.raises(ValueError, match=f"expected a printed figure .* got {re.escape(repr(text))}"):
        read(text)


@pytest.mark.parametrize(("rule", "value"), [(printed, "1"), (counted, 1), (bound, 1), (region, (0, 1))])
@pytest.mark.parametrize(("source", "ours"), [("a", "b"), ("", ""), ("a", "ab"), ("ab", "a")])
def test_labels_must_be_the_same(rule, value, source, ours):
    with pytest.raises(ValueError, match="^(ours|limit|measured): expected (the labels of|at least one label)"):
        rule(dict.fromkeys(source, value), dict.fromkeys(ours, 1))


@pytest.mark.parametrize(
    ("source", "ours", "unit", "verdict"),
    [
        ([7], [7], "", CONFIRMED),
        ([7], [8], "", REFUTED),
        ([7], [14], "", REFUTED),  # one count shows no factor
        ([7], [14], " FLOPs", CORRECTED),
        ([7, 9], [14, 18], "", CORRECTED),
        ([7, 7], [14, 14], "", REFUTED),
        ([7, 9], [14, 19], "", REFUTED),
        ([7, 0], [14, 0], "", REFUTED),
        (["4*d^2"], ["(2*d)^2"], "", CONFIRMED),
        (["4*d^2"], ["2*d^2"], "", CORRECTED),
        (["4*d^2"], ["2*d^2 + H*N^2"], "", REFUTED),
        (["4*d^2", 36], ["4*d^2", 36], "", CONFIRMED),
        (["4*d^2", 36], ["4*d^2", 37], "", REFUTED),
    ],
)
def test_counted(source, ours, unit, verdict):
    labels = "abc"[: len(source)]
    finding = counted(dict(zip(labels, source, strict=True)), dict(zip(labels, ours, strict=True)), unit=unit)
    assert (finding.verdict, finding.rule) == (verdict, "counted")


@pytest.mark.parametrize(
    ("claimed", "exact", "held", "verdict", "why"),
    [
        ("N^2*d + N*d^2", "8*N*d^2 + 4*N^2*d", (), CONFIRMED, ""),
        ("N^2*d + N*d^2", "4*N^2*d + 5*H*N^2", (), CORRECTED, "nothing grows like $N d^2$"),
        ("N*d^2", "12*N*d^2 + 8*N^2*d", (), REFUTED, "drops $N^2 d$"),
        ("N^2*d", "12*N*d^2 + 8*N^2*d", (), REFUTED, "drops $N d^2$"),
        ("N^2*d", "12*N*d^2 + 8*N^2*d", ("d",), CONFIRMED, "for constant $d$"),
        ("N^2", "12*N*d^2 + 8*N^2*d", ("d",), CONFIRMED, ""),
        ("N^3", "N^2*d", ("d",), CORRECTED, "nothing grows like $N^3$"),
        ("N^2 + N*d", "H*N^2 + 5*N*d", (), CORRECTED, "leaves out $H$ in $H N^2$"),
        ("N^2*d", "N^2*d + 5*H*N^2", (), CONFIRMED, ""),  # heads divide the width
        ("N^2*d", "N^2*d*H", (), CORRECTED, "leaves out $H$"),
        ("N^2", "B*L*N^2 + N", (), CORRECTED, "leaves out $B, L$"),
        ("N + H", "N", (), CORRECTED, "nothing grows like $H$"),
        ("n^2 + d^2", "n^2 + 4*n*d + 4*d^2", (), CONFIRMED, ""),  # the mean of two terms is within their sum
        ("n^2 + d", "n^2 + n*d", (), REFUTED, "drops $d n$"),
        ("N*d^2 + N*d*log(d)", "N*d^2", (), CONFIRMED, ""),  # a logarithm is within any power
        ("N*d", "N*d*log(d)", (), REFUTED, r"drops $N d \log"),
        ("N*d*log(d)", "N*d", (), CORRECTED, "nothing grows like"),
        ("N*sqrt(N)", "3*N^(3/2) - N", (), CONFIRMED, ""),
        ("N*d", "7*m*N*d", (), REFUTED, "drops"),  # another size is not a constant
        ("1", "7", (), CONFIRMED, ""),
        ("1", "N", (), REFUTED, "drops $N$"),
        ("N", "0", (), CORRECTED, "nothing grows like $N$"),
    ],
)
def test_growth(claimed, exact, held, verdict, why):
    finding = growth(claimed, exact, held=held)
    assert (finding.verdict, finding.rule) == (verdict, "growth"), finding
    assert why in finding.ours


@pytest.mark.parametrize(
    ("exact", "verdict", "why"),
    [
        (["6*N*d^2", "N*d^2"], CONFIRMED, "a: $6 N d^2$"),
        (["6*N*d^2", "H*N*d^2"], CORRECTED, "leaves out $H$"),
        (["6*N*d^2", "N*d"], CORRECTED, "nothing grows like $N d^2$"),
        (["N^2*d", "6*H*N*d^2"], CONDITIONAL, "holds at b; not at a"),
        (["N^2*d", "N^3"], REFUTED, "nowhere"),
    ],
)
def test_growth_where(exact, verdict, why):
    finding = growth_where("N*d^2", dict(zip("ab", exact, strict=True)))
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "growth_where", "$O(N d^2)$")
    assert why in finding.ours


@pytest.mark.parametrize(
    ("printed_error", "right", "verdict", "why"),
    [
        (0.0, {"with x": 0.5}, CONFIRMED, "holds to"),
        (0.5, {"with x": 0.5, "with y": 0.0}, CORRECTED, "off by 0.5, tolerance 0.1; it holds with y"),
        (0.5, {"with x": 0.4}, REFUTED, "off by 0.4 with x"),
        (0.5, {}, REFUTED, "off by 0.5"),
    ],
)
def test_mended(printed_error, right, verdict, why):
    finding = mended("a formula", printed_error, right, 0.1)
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "mended", "a formula")
    assert why in finding.ours


@pytest.mark.parametrize(
    ("measured", "verdict", "why"),
    [
        ([(-1, 1), (4, 9)], CONFIRMED, "a: -1 to 1 %, b: 4 to 9 %"),  # a claim that contains 0 can be confirmed
        ([(-3, -0.1), (0, 0)], CONDITIONAL, "holds at b; not at a: -3 to -0.1 %"),
        ([(-3, -1), (5.1, 6)], REFUTED, "nowhere"),
    ],
)
def test_agrees(measured, verdict, why):
    finding = agrees((0, 5), dict(zip("ab", measured, strict=True)), unit=" %")
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "agrees", "0 to 5 %")
    assert why in finding.ours


def test_growth_with_settings_of_the_method():
    exact = "8*N*d^2 + 8*N*d*m"
    assert growth("N*d^2", exact).verdict == REFUTED
    finding = growth("N*d^2", exact, settings=("m",))
    assert (finding.verdict, finding.ours.partition(": ")[2]) == (CORRECTED, "the claim leaves out $m$ in $N d m$")
    assert growth("N*d", exact, settings=("m",)).verdict == REFUTED
    assert growth("N*d^2", "H*N*d^2", settings=("m",)).verdict == REFUTED  # they stand in place of the usual ones


def test_growth_tells_symbols_apart_by_name():
    import sympy

    N, d = sympy.symbols("N d", integer=True)
    assert growth("N*d", 3 * N * d).verdict == CONFIRMED


@pytest.mark.parametrize("formula", ["exp(N)", "N(N + 1)", "N^d", "N^2 - N^3", "1/(N + d)"])
def test_growth_needs_sums_of_products(formula):
    with pytest.raises(ValueError, match=r"formula: expected .* got"):
        growth("N", formula)


def test_growth_takes_no_other_functions():
    import sympy

    with pytest.raises(ValueError, match=r"formula: expected products of powers .* got the factor floor\(N\)"):
        growth("N", sympy.floor(sympy.Symbol("N")))


@pytest.mark.parametrize(
    ("claimed", "verdict"),
    [([0.1, 0.2], CONFIRMED), ([0.1, 0.2000001], CONDITIONAL), ([0.1000001, 0.2000001], REFUTED), ([inf, 9], REFUTED)],
)
def test_bound(claimed, verdict):
    finding = bound(dict(zip("ab", claimed, strict=True)), {"a": 0.1, "b": 0.2}, unit=" %")
    assert (finding.verdict, finding.rule) == (verdict, "bound")
    assert ("allowed at a" in finding.ours) == (verdict == CONDITIONAL)


def test_bound_allows_for_rounding_in_float64():
    assert bound({"": 0.1 + 0.2}, {"": 0.3}).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.0, CONFIRMED), (1e-6, CONFIRMED), (1.01e-6, REFUTED), (inf, REFUTED)]
)
def test_holds(error, verdict):
    finding = holds("outputs agree", error, 1e-6, at="$N = 3$")
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "holds", "outputs agree")
    assert "$N = 3$" in finding.ours
    assert ("counter-example" in finding.ours) == (verdict == REFUTED)


def test_holds_shows_no_rounding_noise():
    assert holds("outputs agree", 1e-17, 1e-12) == holds("outputs agree", 3e-17, 1e-12)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (0.5, 0.5, CONFIRMED),
        (0.5, 1.0, INCONSISTENT),
        ((25, 30), (30, 40), CONFIRMED),
        ((25, 30), (30.1, 40), INCONSISTENT),
        ((25, 30), 35.7, INCONSISTENT),
        ((25, 30), 25, CONFIRMED),
    ],
)
def test_contradiction(first, second, verdict):
    finding = contradiction(("one side", first), ("the other", second), unit=" %")
    assert (finding.verdict, finding.rule) == (verdict, "contradiction")
    assert finding == contradiction(("one side", first), ("the other", second), unit=" %")
    assert finding.source == '"one side" and "the other"'


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [([20, 35], CONFIRMED), ([19.9, 35], CONDITIONAL), ([20, 35.1], CONDITIONAL), ([19.9, 35.1], REFUTED)],
)
def test_region(measured, verdict):
    grid = dict(zip("ab", measured, strict=True))
    same, each = region((20, 35), grid, unit=" %"), region(dict.fromkeys("ab", (20, 35)), grid, unit=" %")
    assert same.verdict == each.verdict == verdict
    assert same.source == "20 to 35 %"
    assert ("holds at" in same.ours) == (verdict == CONDITIONAL)


@pytest.mark.parametrize(
    ("measured", "control", "verdict", "why"),
    [
        ([(1, 3), (2, 4)], [(-1, 0.9), (0, 1)], CONFIRMED, "1 to 3 % (control -1 to 0.9 %)"),
        ([(1, 3), (2, 4)], [(-1, 1), (0, 1)], CONDITIONAL, "shows at b; not at a: 1 to 3 % (control -1 to 1 %)"),
        ([(-1, 2.4), (0, 1)], [(-1, 1), (0, 1)], REFUTED, "no such gain shows anywhere"),
        ([(-1, 2.4), (0, 2.5)], [(-1, 1), (0, 1)], UNTESTABLE, "the noise at b could hide it"),
        ([(-4, -2), (-4, -2)], [(-1, 1), (0, 1)], REFUTED, "no such gain"),  # it is slower
        ([(5.1, 6), (7, 9)], [(-1, 1), (0, 1)], REFUTED, "no such gain"),  # more than was claimed is another claim
        ([(4.9, 6), (7, 9)], [(-1, 1), (0, 1)], CONDITIONAL, "shows at a; not at b"),
    ],
)
def test_effect(measured, control, verdict, why):
    sides = (dict(zip("ab", intervals, strict=True)) for intervals in (measured, control))
    finding = effect((0, 5), *sides, unit=" %")
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "effect", "0 to 5 %")
    assert why in finding.ours


def test_settings_that_decide_are_listed_before_others():
    many = dict.fromkeys("abcdefg", (-2, -1))
    finding = improves("better", many | {"h": (-1, 3)})
    assert finding.verdict == UNTESTABLE
    assert finding.ours.startswith("h: -1 to 3, a: ") and finding.ours.endswith("and 2 more: undecided at h")
    finding = effect((0, 5), many | {"h": (-1, 3)}, dict.fromkeys("abcdefgh", (0, 1)))
    assert finding.verdict == UNTESTABLE
    assert finding.ours.startswith("h: -1 to 3 (control 0 to 1), a: ")


@pytest.mark.parametrize(
    ("gains", "verdict", "why"),
    [
        ([(0.1, 0.2), (30, 99)], CONFIRMED, "a: 0.1 to 0.2 %, b: 30 to 99 %"),  # however small
        ([(0.1, 0.2)], CONFIRMED, "a: 0.1 to 0.2 %"),
        ([(0, 9), (1, 2)], CONDITIONAL, "shows at b; not at a: 0 to 9 %"),
        ([(1, 2), (-3, -1)], CONDITIONAL, "shows at a; not at b: -3 to -1 %"),
        ([(-3, -1), (-2, 0)], REFUTED, "a: -3 to -1 %, b: -2 to 0 %: no gain anywhere"),
        ([(0, 0)], REFUTED, "no gain anywhere"),
        ([(-3, -1), (-2, 0.1)], UNTESTABLE, "undecided at b"),
        ([(-20, 90), (0, 9)], UNTESTABLE, "undecided at a, b"),
        ([(-inf, inf)], UNTESTABLE, "undecided at a"),
    ],
)
def test_improves(gains, verdict, why):
    finding = improves("better", dict(zip("ab", gains, strict=False)), unit=" %")
    assert (finding.verdict, finding.rule, finding.source) == (verdict, "improves", "better")
    assert why in finding.ours


@pytest.mark.parametrize(
    ("ends", "wider"),
    [((0.04, 0.16), (0.0, 0.2)), ((-0.16, -0.04), (-0.2, 0.0)), ((1, 2.5), (1, 2.5)), ((-inf, inf), (-inf, inf)),
     ((-1e-14, 1e-14), (0, 0)), ((100 * (0.3 - 0.1), 20), (20, 20))],
)  # fmt: skip
def test_intervals_are_rounded_outward(ends, wider):
    assert outward(ends) == wider


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: printed({"a": "1"}, {"a": nan}), "ours: expected a number at a"),
        (lambda: printed({"a": "1"}, {"a": inf}), "ours: expected a finite figure at a"),
        (lambda: holds("agree", nan, 1.0), "error: expected a residual"),
        (lambda: holds("agree", -1.0, 1e-3), "error: expected a residual"),
        (lambda: holds("agree", 0.0, 0.0), "tolerance: expected a positive number"),
        (lambda: holds("agree", 0.0, nan), "tolerance: expected a positive number"),
        (
            lambda: contradiction(("one", (2, 1)), ("other", 1)),
            r"first: expected \(low, high\) with low <= high, got \(2, 1\)",
        ),
        (lambda: contradiction(("one", 1), ("other", (2, 1))), "second: expected"),
        (lambda: region((2, 1), {"a": 1}), "claimed: expected"),
        (lambda: region((20, 35), {"a": nan}), "measured: expected a number at a, got nan"),
        (
            lambda: effect((0, 5), {"a": (0, 1)}, {"b": (0, 1)}),
            r"control: expected the labels of measured, \['a'\], got \['b'\]",
        ),
        # without an upper end there is no middle that noise could reach
        (
            lambda: effect((2, inf), {"a": (-5, 100)}, {"a": (-1, 1)}),
            r"claimed: expected finite ends, got \(2, inf\)",
        ),
        (lambda: effect((-inf, 2), {"a": (-5, 100)}, {"a": (-1, 1)}), "claimed: expected finite ends"),
        (lambda: effect((2, 1), {"a": (0, 1)}, {"a": (0, 1)}), "claimed: expected"),
        (lambda: effect((0, 5), {"a": (2, 1)}, {"a": (0, 1)}), "measured: expected"),
        (lambda: effect((0, 5), {"a": (0, 1)}, {"a": (2, 1)}), "control: expected"),
        (lambda: improves("better", {}), "gains: expected at least one setting"),
        (lambda: improves("better", {"a": (2, 1)}), "gains: expected"),
        (lambda: improves("better", {"a": (nan, 1)}), "gains: expected"),
        (lambda: untestable("works", {"a task": "any"}), "expected a quantity that the source does not define"),
        (lambda: growth_where("N", {}), "exact: expected at least one setting"),
        (lambda: agrees((0, 5), {}), "measured: expected at least one setting"),
        (lambda: agrees((0, 5), {"a": (2, 1)}), "measured: expected"),
        (lambda: all_of({}), "expected at least one finding"),
    ],
)
def test_what_rules_refuse(rule, message):
    with pytest.raises(ValueError, match=message):
        rule()


def test_untestable_needs_something_undefined():
    finding = untestable("works better", {"the task": "any", "the measure of better": None})
    assert (finding.verdict, finding.ours) == (UNTESTABLE, "the source does not define the measure of better")
    assert untestable("works", {"runs": None, "task": 1}, lack="there are no").ours == "there are no runs"


FOUND = {
    CONFIRMED: holds("p", 0, 1),
    CORRECTED: growth("N^2", "N"),
    REFUTED: holds("p", 2, 1),
    INCONSISTENT: contradiction(("a", 1), ("b", 2)),
    CONDITIONAL: region((0, 1), {"a": 0, "b": 2}),
    UNTESTABLE: untestable("p", {"x": None}),
}


def test_each_verdict_can_be_reached():
    assert {verdict: finding.verdict for verdict, finding in FOUND.items()} == {v: v for v in Verdict}
    assert sorted(PRECEDENCE) == sorted(Verdict)


@pytest.mark.parametrize("first", Verdict)
@pytest.mark.parametrize("second", Verdict)
def test_all_of_takes_the_first_in_precedence(first, second):
    whole = all_of({"one": FOUND[first], "two": FOUND[second]})
    assert whole.verdict == min(first, second, key=PRECEDENCE.index)
    assert whole.source == f"one: {FOUND[first].source}; two: {FOUND[second].source}"
    assert (f"({first})" in whole.ours) == (first != second)
    assert set(whole.rule.split(", ")) == {FOUND[first].rule, FOUND[second].rule}


def test_a_remark_leaves_the_verdict():
    finding = FOUND[REFUTED].noting("Seen twice")
    assert (finding.verdict, finding.ours) == (REFUTED, f"{FOUND[REFUTED].ours}. Seen twice")


# ------------------------------------------------------------------------------------------------ what readers see


@pytest.mark.parametrize(
    ("value", "text"),
    [(2359296, "2,359,296"), (0.75, "0.75"), (33.554432, "33.55"), (2.0, "2"), (1.26e-12, r"$1\times 10^{-12}$"),
     ("8*N*d^2", "$8 N d^2$"), ("1/4", "0.25"), (inf, "∞"), (-inf, "-∞")],
)  # fmt: skip
def test_figures_are_shown(value, text):
    assert show(value) == text


def test_a_table():
    shown = table([("a|b", 1234, "4*d^2"), ("c", None, 0.5)], ("x", "n", "cost"))
    assert shown._repr_markdown_() == (
        "| x | n | cost |\n| --- | ---: | --- |\n| a\\|b | 1,234 | 4*d^2 |\n| c | \u2013 | 0.5 |"
    )
    assert repr(shown) == "x        n  cost\na|b  1,234  4*d^2\nc        \u2013  0.5"
    for shared in (None, "y"):
        with pytest.raises(ValueError, match="row 0: expected 2 cells like the headers, got 1"):
            table([("a",)], ("x", "y"), shared=shared)
        with pytest.raises(ValueError, match="row 1: expected 2 cells like the headers, got 3"):
            table([("a", "b"), ("a", "b", "c")], ("x", "y"), shared=shared)
    with pytest.raises(ValueError, match="value: expected a number, got nan"):
        table([(nan,)], ("x",))


@pytest.mark.parametrize(
    ("cells", "line"),
    [(("1,024", "", "-0.25", "+3.1 %"), "---:"), (("1.0 (0.9 to 1.1)", "2"), "---"), (("64", "learned"), "---"),
     (("1.", "2"), "---")],
)  # fmt: skip
def test_columns_of_numbers_alone_are_flush_right(cells, line):
    assert table([(cell,) for cell in cells], ("x",)).markdown.splitlines()[1] == f"| {line} |"


def test_a_column_that_is_the_same_in_all_rows_is_named_once():
    headers = ("device", "n", "time")
    one, other = ("`a`", 1, "x"), ("`b`", 2, "y")
    assert table([one, one], headers, shared="device") == table([(1, "x")] * 2, ("n, `a`", "time"))
    assert table([one, other], headers, shared="device") == table([one, other], headers)
    assert table([("x", "`a`")], ("", "device"), shared="device") == table([("x",)], ("`a`",))
    assert table([("x", 4096)] * 2, ("n", "N"), shared="N") == table([("x",)] * 2, ("n, 4,096",))
    assert table([("x", None)] * 2, ("n", "N"), shared="N") == table([("x",)] * 2, ("n",))
    assert table([], headers, shared="device") == table([], headers)
    with pytest.raises(ValueError, match=r"shared: expected one of the headers \['device', 'n', 'time'\], got 'kind'"):
        table([one], headers, shared="kind")


@pytest.mark.parametrize(
    ("cell", "shown"),
    [("$N = 4,096$", "$N = 4{,}096$"), ("$1,234,567$ or 4,096", "$1{,}234{,}567$ or 4,096"),
     (r"\$1,000 and \$2,000", r"\$1,000 and \$2,000"), ("$0,1$", "$0,1$")],
)  # fmt: skip
def test_thousands_are_set_in_formulas(cell, shown):
    assert table([(cell,)], ("x",)).markdown.splitlines()[2] == f"| {shown} |"


def test_labels_with_commas_are_parted_by_semicolons():
    assert some(["a", "b"]) == "a, b"
    assert some(["a, small", "b"]) == "a, small; b"


def test_a_box_shows_the_claim_and_what_was_found():
    entry = judge("S0.4.2d")
    box, _, folded = entry_markdown(entry).partition('<details class="evidence">')
    assert entry._repr_markdown_() == entry_markdown(entry)
    first = entry.quote.splitlines()[0]
    quoted = "<br>".join(re.sub(r"([$^_*{}\\])", r"\\\1", line) for line in entry.quote.splitlines())
    assert f'| said | {entry.where}:<br><q lang="zh">{quoted}</q> |' in box
    evidence = (f"*source:* {entry.source}", f"*ours:* {entry.ours}", f"*rule:* {entry.rule}")
    assert all(line in folded and line not in box for line in evidence)
    assert all(part in box for part in ("S0.4.2d", entry.verdict, entry.where, first, entry.sentence))
    for part in ("S0.4.2d", entry.verdict, entry.where, first, entry.sentence, entry.source, entry.ours, entry.rule):
        assert part.split()[0] in repr(entry)
    waiting = _small_ledger().judge("S0.1a")
    assert f"awaiting part {waiting.awaits}, {catalogue().parts[waiting.awaits]}" in entry_markdown(waiting)
    assert "<details" not in entry_markdown(waiting) and "found" not in repr(waiting)


def _entry_of(finding: Finding, **changed: str) -> Entry:
    small = _small_ledger()
    small.evidence("S0.1a", chapter="01-a-chapter")(lambda: finding)
    return replace(small.judge("S0.1a"), **changed)


def test_a_box_of_several_parts_has_them_line_by_line():
    parts = {"one": FOUND[CONFIRMED], "two": FOUND[CORRECTED]}
    entry = _entry_of(all_of(parts).noting("Seen twice").noting("And again"))
    assert entry.parts == tuple((label, str(p.verdict), p.source, p.ours) for label, p in parts.items())
    assert (entry.severity, entry.sentence) == ("wording", all_of(parts).sentence)
    two = f"corrected; source: {FOUND[CORRECTED].source}; ours: {FOUND[CORRECTED].ours}"
    evidence = entry_markdown(entry).partition("</summary>")[2].strip().splitlines()
    assert evidence[1] == f"- *two:* {two}"
    assert evidence[2:4] == ["- *remark:* Seen twice. And again", "- *rule:* holds, growth"]
    assert "| S0.1a | corrected, wording |" in entry_markdown(entry)
    assert "S0.1a (open): corrected, wording" in repr(entry)
    assert "[S0.1a](#S0.1a)<br>**corrected**<br>*wording* |" in ledger_table([entry]).markdown
    assert f"<br>*two:* {two}<br>" in ledger_table([entry]).markdown


def test_marks_of_bold_type_are_dropped_from_quotations():
    entry = _entry_of(_finding(), quote="**bold** and 2*3")
    assert r'<q lang="zh">bold and 2\*3</q>' in entry_markdown(entry)
    assert "bold and 2*3" in repr(entry)


def test_a_note_stands_with_what_is_told():
    entry = _entry_of(_finding(), note="It can be read as $x$.")
    assert r"| note | It can be read as \$x\$. |" in entry_markdown(entry).partition("<details")[0]
    assert "note    It can be read as $x$." in repr(entry)


def test_words_are_escaped():
    assert escape("N^2 * |x|_i <b> [1](u) $d$") == r"N² \* |x|\_i \<b\> \[1\](u) \$d\$"


def test_tables_of_the_ledger_are_whole():
    text = ledger_table(all_entries()).markdown
    for entry in all_entries():
        assert (f"| [{entry.id}](#{entry.id})<br>**{entry.verdict}**" in text) == (entry.verdict != AWAITING)
        assert (f"| {entry.id}<br>**awaiting" in text) == (entry.verdict == AWAITING)
    assert all(rule in repr(rules_table()) for rule in RULES)
    assert claims.show("S0.1.1a", "S0.1.1b").markdown.count("| claim |") == 2
    line = "**Claims judged here:** [S0.1.1a](#S0.1.1a) confirmed, [S0.1.2a](#S0.1.2a) corrected."
    assert claims.judged_here("S0.1.1a", "S0.1.2a").markdown == line


def test_claims_are_counted_by_verdict_and_by_severity():
    found = [FOUND[verdict] for verdict in (CONFIRMED, CORRECTED, CORRECTED, REFUTED)]
    entries = [
        replace(_entry_of(finding), document=name)
        for finding, name in zip(found, ("S0", "S0", "S1", "S1"), strict=True)
    ]
    rows = {line.split()[0]: line.split()[1:] for line in repr(counts_table(entries)).splitlines()}
    assert list(rows) == ["S0", *Verdict, "claims", *(f"*{name}*" for name in SEVERITIES)]
    assert rows["S0"] == ["S1", "S2", "S3", "S4", "all"]
    assert rows["corrected"] == ["1", "1", "0", "0", "0", "2"]
    assert rows["claims"] == ["2", "2", "0", "0", "0", "4"]
    assert rows["*wording*"] == ["1", "1", "0", "0", "0", "2"]
    assert rows["*substance*"] == ["0", "1", "0", "0", "0", "1"]
    assert counts_text(entries) == "1 confirmed, 2 corrected, 1 refuted; severity: 2 wording, 1 substance"
    assert counts_text(entries[:1]) == "1 confirmed"
    assert f"\n{AWAITING} " in repr(counts_table([*entries, _small_ledger().judge("S0.1a")]))
