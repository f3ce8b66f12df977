"""A chapter's cell judges claims: what it shows, what it leaves in its output, and how the ledger gathers that."""

import json

import pytest

from paper.claims import LedgerError, judge, ledger
from paper.claims.gathered import MIME, chapters, verdicts
from paper.claims.ledger import judged_anew
from paper.claims.rules import counted, holds
from tools.notebooks import ROOT

PARTS = {"one": holds("a property", 0, 1), "other": counted({"": 3}, {"": 4})}


def test_a_cell_shows_a_line_and_leaves_a_row():
    shown = judge("S0.1.1a", PARTS, records=["bytes"])._repr_mimebundle_()
    (row,) = shown[MIME]
    assert (row["id"], row["verdict"], row["severity"], row["rule"]) == (
        "S0.1.1a",
        "refuted",
        "constant",
        "holds, counted",
    )
    assert row["records"] == ["bytes"] and [verdict for _, verdict, *_ in row["parts"]] == ["confirmed", "refuted"]
    assert json.loads(json.dumps(row)) == row


@pytest.mark.bad_input
def test_only_findings_of_rules_judge_known_claims():
    with pytest.raises(LedgerError, match="expected an id of the catalogue, .* got 'S9.9z'"):
        judge("S9.9z", PARTS)
    for finding in ("confirmed", {"part": "confirmed"}):
        with pytest.raises((TypeError, AttributeError)):
            judge("S0.1.1a", finding)


@pytest.fixture
def book(tmp_path):
    """A made-up book of two chapters, written by a function from chapter -> cells."""

    def write(**cells):
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        listed = "".join(f"      - file: notebooks/{name}\n" for name in cells)
        (tmp_path / "_toc.yml").write_text(f"parts:\n  - chapters:\n{listed}")
        for name, judged in cells.items():
            made = [
                {"id": cell, "outputs": [{"data": {MIME: [{"id": claim} for claim in claims]}}, {"data": {}}]}
                for cell, claims in judged.items()
            ]
            (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"cells": made}))
        return tmp_path

    return write


def test_verdicts_are_gathered_in_the_order_of_the_book(book):
    root = book(second={"a": ["S0.2a"], "b": ["S0.1a", "S0.1b"]}, first={"c": ["S0.3a"]})
    found = verdicts(root)
    places = [(claim, row["chapter"], row["code"]) for claim, row in found.items()]
    assert places == [
        ("S0.2a", "second", "a"),
        ("S0.1a", "second", "b"),
        ("S0.1b", "second", "b"),
        ("S0.3a", "first", "c"),
    ]


def test_what_cannot_be_gathered_is_refused(book):
    with pytest.raises(LedgerError, match=r"S0\.1a: expected one cell that judges it, got one \(a\) and two \(b\)"):
        verdicts(book(one={"a": ["S0.1a"]}, two={"b": ["S0.1a"]}))
    root = book(one={})
    (root / "notebooks" / "one.ipynb").write_text("{}")
    with pytest.raises(LedgerError, match="one.ipynb: expected an executed notebook"):
        verdicts(root)
    with pytest.raises(LedgerError, match="S0.1.1a: expected a cell of 01-a that judges it, found none"):
        judged_anew("S0.1.1a", [], "01-a")


def test_the_chapters_are_those_of_the_book():
    assert sorted(chapters()) == sorted((ROOT / "notebooks").rglob("*.ipynb"))


def test_an_executed_cell_is_judged_as_the_ledger_has_it():
    name, row = next(iter(verdicts().items()))
    path = ROOT / "notebooks" / f"{row['chapter']}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert judged_anew(name, cells, row["chapter"]) == ledger()[name]
