"""The ledger: each claim has one verdict, derived in its chapter; damaged ledgers are refused; how readers see it."""

import ast
import json
import re
from dataclasses import replace
from functools import cache
from math import inf, nan
from pathlib import Path

import pytest

from paper.claims import (
    RULES,
    SEVERITIES,
    Entry,
    LedgerError,
    Verdict,
    catalogue,
    judge,
    ledger,
)
from paper.claims.catalogue import load
from paper.claims.figures import show, words
from paper.claims.report import counts_table, counts_text, table
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
        ('"words"', '"words"\nverdict = "confirmed"', r"claim 1 \(S0\.1a\): expected the fields .* got 'verdict'"),
    ],
)
def test_damage_is_named(tmp_path, old, new, message):
    path = tmp_path / "damaged.toml"
    assert old in SOUND
    path.write_text(SOUND.replace(old, new), "utf-8")
    with pytest.raises(LedgerError, match=rf"^{re.escape(str(path))}: {message}"):
        load(path)


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
    with pytest.raises(ValueError, match="row 0: expected 2 cells like the headers, got 1"):
        table([("a",)], ("x", "y"))
    with pytest.raises(ValueError, match="value: expected a number, got nan"):
        table([(nan,)], ("x",))


def test_claims_are_counted_by_verdict_and_by_severity():
    found = [FOUND[verdict] for verdict in ("confirmed", "corrected", "corrected", "refuted")]
    entries = [
        replace(judge("S0.1.1a", finding).entries[0], document=name)
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
