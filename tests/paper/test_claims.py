"""The ledger: each claim has one verdict, derived in its chapter; damaged ledgers are refused; how readers see it."""

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
    RULES,
    SEVERITIES,
    Entry,
    Finding,
    LedgerError,
    Verdict,
    all_of,
    catalogue,
    judge,
    ledger,
)
from paper.claims.catalogue import load
from paper.claims.figures import show, some, words
from paper.claims.report import counts_table, counts_text, entry_markdown, escape, ledger_table, rules_table, table
from paper.claims.rules import growth, holds

ROOT = Path(__file__).parents[2]
FOUND = {"confirmed": holds("p", 0, 1), "corrected": growth("N^2", "N"), "refuted": holds("p", 2, 1)}


# ------------------------------------------------------------------------------------------------------- the ledger


@cache
def all_entries() -> list[Entry]:
    """The whole ledger, as the stored chapters have it; running these against their outputs judges anew."""
    return list(ledger().values())


MOST_WORDS = 50  # in a sentence, a formula counting as one; a longer sentence is not one to be read first


def test_every_claim_has_a_verdict_and_a_sentence():
    entries = all_entries()
    assert [entry.id for entry in entries] == list(catalogue().claims)
    for entry in entries:
        assert entry.verdict in list(Verdict)
        assert all((entry.chapter, entry.code, entry.source, entry.ours))
        assert set(entry.rule.split(", ")) <= RULES.keys()
        assert (entry.severity == "") == (entry.verdict in ("confirmed", "untestable"))
        assert entry.severity in {"", *SEVERITIES}
        assert re.match(rf"{entry.verdict.capitalize()}\b[^:]*: .*[^.]\.$", entry.sentence), entry
        assert words(entry.sentence) <= MOST_WORDS, entry


@cache
def _cells(path: Path) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]


@pytest.mark.parametrize("claim_id", catalogue().claims)
def test_each_verdict_is_derived_in_its_chapter(claim_id):
    """The chapter has the claim's anchor once, and below it a cell that judges it; no other chapter has it."""
    (entry,) = (entry for entry in all_entries() if entry.id == claim_id)
    anchor = re.compile(rf"^\({re.escape(entry.id)}\)=$", re.MULTILINE)
    anchored = [
        (path.relative_to(ROOT / "notebooks").with_suffix("").as_posix(), number)
        for path in sorted((ROOT / "notebooks").rglob("*.ipynb"))
        for number, (kind, text) in enumerate(_cells(path))
        if kind == "markdown"
        for _ in anchor.findall(text)
    ]
    assert [chapter for chapter, _ in anchored] == [entry.chapter]
    path = ROOT / "notebooks" / f"{entry.chapter}.ipynb"
    ids = [cell["id"] for cell in json.loads(path.read_text("utf-8"))["cells"]]
    assert ids.index(entry.code) > anchored[0][1]


@pytest.mark.parametrize("claim_id", catalogue().claims)
def test_cells_leave_the_verdict_to_rules(claim_id):
    """No cell that judges builds or edits a Finding."""
    entry = {one.id: one for one in all_entries()}[claim_id]
    cells = json.loads((ROOT / "notebooks" / f"{entry.chapter}.ipynb").read_text("utf-8"))["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["id"] == entry.code)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in {"Finding", "_replace"}


def test_unknown_documents_raise():
    with pytest.raises(LedgerError, match="expected .* got 'S9'"):
        ledger("S9")


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
    entry = ledger()["S0.4.2d"]
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


def _entry_of(finding: Finding, **changed: str) -> Entry:
    (entry,) = judge("S0.1.1a", finding).entries
    return replace(entry, **{"id": "S0.1a", "kind": "open", "note": "", **changed})


def test_a_box_of_several_parts_has_them_line_by_line():
    parts = {"one": FOUND["confirmed"], "two": FOUND["corrected"]}
    entry = _entry_of(all_of(parts).noting("Seen twice").noting("And again"))
    assert entry.parts == tuple((label, str(p.verdict), p.source, p.ours) for label, p in parts.items())
    assert (entry.severity, entry.sentence) == ("wording", all_of(parts).sentence)
    two = f"corrected; source: {FOUND['corrected'].source}; ours: {FOUND['corrected'].ours}"
    evidence = entry_markdown(entry).partition("</summary>")[2].strip().splitlines()
    assert evidence[1] == f"- *two:* {two}"
    assert evidence[2:4] == ["- *remark:* Seen twice. And again", "- *rule:* holds, growth"]
    assert "| S0.1a | corrected, wording |" in entry_markdown(entry)
    assert "S0.1a (open): corrected, wording" in repr(entry)
    assert "[S0.1a](#S0.1a)<br>**corrected**<br>*wording* |" in ledger_table([entry]).markdown
    assert f"<br>*two:* {two}<br>" in ledger_table([entry]).markdown


def test_marks_of_bold_type_are_dropped_from_quotations():
    entry = _entry_of(FOUND["confirmed"], quote="**bold** and 2*3")
    assert r'<q lang="zh">bold and 2\*3</q>' in entry_markdown(entry)
    assert "bold and 2*3" in repr(entry)


def test_a_note_stands_with_what_is_told():
    entry = _entry_of(FOUND["confirmed"], note="It can be read as $x$.")
    assert r"| note | It can be read as \$x\$. |" in entry_markdown(entry).partition("<details")[0]
    assert "note    It can be read as $x$." in repr(entry)


def test_an_open_question_is_answered_and_not_refuted():
    entry = ledger()["S2.5.3c"]
    assert (entry.kind, entry.verdict) == ("open", "refuted")
    for shown in (repr(entry), entry._repr_markdown_()):
        assert "answered: no" in shown
        assert "Answered with no: " in shown
        assert "efuted" not in shown.partition("rule:")[0]


def test_words_are_escaped():
    assert escape("N^2 * |x|_i <b> [1](u) $d$") == r"N² \* |x|\_i \<b\> \[1\](u) \$d\$"


def test_tables_of_the_ledger_are_whole():
    text = ledger_table(all_entries()).markdown
    for entry in all_entries():
        verdict = "answered: no" if entry.kind == "open" and entry.verdict == "refuted" else entry.verdict
        assert f'| <span id="ledger-{entry.id}"></span>[{entry.id}](#{entry.id})<br>**{verdict}**' in text
    assert all(rule in repr(rules_table()) for rule in RULES)
    line = "**Claims judged here:** [S0.1.1a](#S0.1.1a), [S0.1.2a](#S0.1.2a)."
    assert claims.judged_here("S0.1.1a", "S0.1.2a").markdown == line


def test_claims_are_counted_by_verdict_and_by_severity():
    found = [FOUND[verdict] for verdict in ("confirmed", "corrected", "corrected", "refuted")]
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
