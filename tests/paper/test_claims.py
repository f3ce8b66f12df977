"""The ledger: each claim has one verdict, derived in its chapter by a rule; like statements have like verdicts; what
cannot be gathered is refused; the commands that show it."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from ortho import HEADS, PROJECTIONS
from ortho.__main__ import main as library
from ortho.attention import MECHANISMS
from ortho.attention.positional.patterns import PATTERNS
from ortho.layers.synthesizer import SOURCES
from paper.__main__ import main
from paper.claims import RULES, SEVERITIES, LedgerError, Verdict, judge, ledger
from paper.claims.catalogue import load
from paper.claims.figures import words
from paper.claims.gathered import MIME, verdicts
from paper.claims.rules import counted, holds

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MOST_WORDS = 50  # in a sentence, a formula counting as one; a longer sentence is not one to be read first


@cache
def cells(path):
    """(id, kind, text) of each cell of a notebook."""
    found = json.loads(path.read_text("utf-8"))["cells"]
    return [(cell["id"], cell["cell_type"], "".join(cell["source"])) for cell in found]


@pytest.mark.parametrize("entry", ledger().values(), ids=lambda entry: entry.id)
def test_each_verdict_is_derived_in_its_chapter_by_a_rule(entry):
    """The chapter alone has the claim's anchor, once, and below it the cell that judges, which makes no finding of its
    own; a sentence says what was found."""
    anchor = re.compile(rf"^\({re.escape(entry.id)}\)=$", re.MULTILINE)
    chapter = NOTEBOOKS / f"{entry.chapter}.ipynb"
    texts = [(path, place, text) for path in NOTEBOOKS.rglob("*.ipynb") for place, (*_, text) in enumerate(cells(path))]
    ((path, anchored, _),) = [found for found in texts if anchor.search(found[2])]
    ((judges, source),) = [(i, text) for i, (name, _, text) in enumerate(cells(chapter)) if name == entry.code]
    assert path == chapter and judges > anchored
    named = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(source))}
    assert not named & {"Finding", "_replace"}
    assert entry.verdict in list(Verdict) and set(entry.rule.split(", ")) <= RULES.keys()
    assert entry.severity in ({""} if entry.verdict in ("confirmed", "untestable") else SEVERITIES)
    assert re.match(rf"{entry.verdict.capitalize()}\b[^:]*: .*[^.]\.$", entry.sentence)
    assert words(entry.sentence) <= MOST_WORDS


# ----------------------------------------------------------------------------------------- like statements

# Statements that several claims, or parts of them, make: (claim, label of the part).
SAME = {
    "the softmax of the scores takes O(N^2)": (
        ("S0.1.1b", "softmax"),
        ("S1.1.1a", "softmax"),
        ("S2.3.1a", "softmax, time"),
        ("S3.1d", "softmax"),
    ),
    "the products with N x N weights take O(N^2 d)": (
        ("S0.1.1b", "times $V$"),
        ("S1.1.1a", "$A V$"),
        ("S2.2.1a", "from the left"),
        ("S3.1d", "both products"),
        ("S4.2a", "with softmax"),
    ),
    "Q (K^T V) takes O(N d^2)": (
        ("S1.2.2a", "time"),
        ("S2.2.1a", "from the right"),
        ("S4.2a", "without"),
    ),
    "O(N d^2) is less than O(N^2 d), for long sequences alone": (
        ("S3.2c", "for all tokens, $d = 64$"),
        ("S4.2a", "lower, $d = 64$"),
    ),
    "linear attention keeps O(N d)": (("S0.3.1d", "space"), ("S1.2.2a", "space")),
    "scores take N^2": (("S1.1.1b", "scores"), ("S2.3.1a", "similarity, space")),
    "a window needs space for its pairs": (
        ("S1.2.3a", "space of the sparse matrix"),
        ("S1.2.4a", "space of the weights"),
        ("S1.4.2a", "space of the weights"),
    ),
    "sums over the past are products with a state": (
        ("S3.2a", "outputs that differ, in fractions"),
        ("S3.2b", "outputs that differ from the sums, in fractions"),
    ),
    "a window of w takes O(N w d)": (
        ("S1.2.3a", "time, local, $N = k + m$"),
        ("S1.4.2a", "time, $N = w + m$"),
        ("S2.2.3d", "local"),
    ),
    "pairs can be chosen by content": (
        ("S1.2.3b", "kept pairs that differ between two inputs"),
        ("S4.4a", "kept pairs that differ between two inputs"),
    ),
    "a pattern in tiles takes fewer products": (("S4.1b", "in parts"), ("S4.1c", "fewer products")),
    "Huber's loss errs less where there are outliers": (("S3.3g", "with outliers"), ("S3.3l", "others may be better")),
}


@pytest.mark.parametrize("statement", SAME)
def test_like_statements_have_like_verdicts(statement):
    found = [{name: verdict for name, verdict, *_ in ledger()[claim].parts}[part] for claim, part in SAME[statement]]
    assert len(found) > 1 == len(set(found)), found


# ------------------------------------------------------------------------------------------------- what is refused


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
        ('kind = "open"', 'kind = "formulae"', "kind: expected one of formula, .* got 'formulae'"),
        ('"words"', '"words"\nverdict = "confirmed"', "expected the fields .* besides is 'verdict'"),
    ],
)
def test_a_damaged_catalogue_is_refused(tmp_path, old, new, message):
    path = tmp_path / "damaged.toml"
    path.write_text(SOUND.replace(old, new), "utf-8")
    with pytest.raises(LedgerError, match=rf"^{re.escape(str(path))}: claim 1 \(S0\.1a\): {message}"):
        load(path)


PARTS = {"one": holds("a property", 0, 1), "other": counted({"": 3}, {"": 4})}


def test_a_cell_leaves_a_row_in_its_output():
    (row,) = judge("S0.1.1a", PARTS, records=["bytes"])._repr_mimebundle_()[MIME]
    found = [row[name] for name in ("id", "verdict", "severity", "rule", "records")]
    assert found == ["S0.1.1a", "refuted", "constant", "holds, counted", ["bytes"]]
    assert [verdict for _, verdict, *_ in row["parts"]] == ["confirmed", "refuted"]


@pytest.mark.bad_input
def test_only_findings_of_rules_judge_known_claims_once(tmp_path):
    with pytest.raises(LedgerError, match="expected an id of the catalogue, .* got 'S9.9z'"):
        judge("S9.9z", PARTS)
    for finding in ("confirmed", {"part": "confirmed"}):
        with pytest.raises((TypeError, AttributeError)):
            judge("S0.1.1a", finding)
    (tmp_path / "_toc.yml").write_text("  - file: notebooks/one\n  - file: notebooks/two\n")
    (tmp_path / "notebooks").mkdir()
    for name in ("one", "two"):
        judged = {"cells": [{"id": "a", "outputs": [{"data": {MIME: [{"id": "S0.1a"}]}}]}]}
        (tmp_path / f"notebooks/{name}.ipynb").write_text(json.dumps(judged))
    with pytest.raises(LedgerError, match=r"S0\.1a: expected one cell that judges it, got one \(a\) and two \(a\)"):
        verdicts(tmp_path)
    (tmp_path / "notebooks/two.ipynb").write_text("{}")
    with pytest.raises(LedgerError, match="two.ipynb: expected an executed notebook"):
        verdicts(tmp_path)


# ---------------------------------------------------------------------------------------------------- the commands


def test_all_names_that_a_layer_takes_are_listed(capsys):
    assert library(["mechanisms"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name}" in listed for names in (MECHANISMS, PROJECTIONS, HEADS, PATTERNS, SOURCES) for name in names)


@pytest.mark.parametrize("run", [(), pytest.param(("--run",), marks=pytest.mark.nightly)])
def test_claims_are_shown_as_the_ledger_has_them(run, capsys):
    """Also when their chapter judges them anew."""
    entry = ledger()["S0.1.1a"]
    assert main(["claims", *run, entry.id]) == 0
    assert capsys.readouterr().out == f"{entry!r}\n\n1 claim: 1 confirmed\n"
    assert main(["claims", "--json", "--document", "S3"]) == 0
    rows = [(row["id"], row["verdict"], row["ours"]) for row in json.loads(capsys.readouterr().out)]
    assert rows == [(one.id, one.verdict, one.ours) for one in ledger("S3").values()]
    with pytest.raises(SystemExit):
        main(["claims", "--document", "S9"])
    assert "expected one of S0, S1, S2, S3, S4, got 'S9'" in capsys.readouterr().err
