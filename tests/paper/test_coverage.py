"""Each line of a source stands in one section of `coverage.toml`, each claim in the sections that have its lines."""

import re

import pytest

from paper.claims import catalogue
from paper.claims.catalogue import Catalogue, Claim, LedgerError
from paper.claims.coverage import coverage_table, left_table, lines_of, load_coverage


def test_every_statement_is_counted():
    """`load_coverage` raises if anything is not in order."""
    sections = load_coverage(catalogue())
    assert {section.document for section in sections} == catalogue().documents.keys()
    assert str(coverage_table(catalogue(), sections)).count("\n") == len(catalogue().documents) + 1
    assert str(left_table(sections)).count("\n") == sum(len(section.left) for section in sections)


def test_lines_are_read():
    assert lines_of("1 A heading (in brackets) (lines 3, 5-7)") == [3, 5, 6, 7]
    assert lines_of("1 A heading (line 12)") == [12]
    for where in ("1 A heading", "1 A heading (lines 7, 3)", "1 A heading (lines 3-5, 4)"):
        with pytest.raises(LedgerError, match=re.escape(repr(where))):
            lines_of(where)


# --------------------------------------------------------------------------------------------------- damaged files

CLAIMS = {"S0.1a": "1 One (line 2)", "S0.1b": "1 One (lines 3, 8)"}  # the second belongs to both sections
SOUND = """
[[sections]]
document = "S0"
where = "1 One (lines 1-5)"
checkable = 3
claims = ["S0.1a", "S0.1b"]
left = ["A title: it names the document"]
[[sections]]
document = "S0"
where = "2 Two (lines 6-9)"
checkable = 1
claims = ["S0.1b"]
"""


@pytest.fixture
def small():
    claims = {name: Claim(name, "open", "I", "words", where, "its own words") for name, where in CLAIMS.items()}
    return Catalogue({"S0": "A document", "S1": "Another"}, {"I": "A part"}, claims)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "coverage.toml"
        path.write_text(text, "utf-8")
        return path

    return write


def test_statements_are_counted(small, written):
    sections = load_coverage(small, written(SOUND))
    assert [(section.checkable, section.covered, [*section.lines][::3]) for section in sections] == [
        (3, 2, [1, 4]),
        (1, 1, [6, 9]),
    ]
    rows = str(coverage_table(small, sections)).splitlines()[1:]
    assert [row.split() for row in rows] == [["S0", "4", "3", "1"], ["S1", "0", "0", "0"], ["all", "4", "3", "1"]]
    assert "A title: it names the document" in str(left_table(sections))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[sections]]", "[[section]]", r"top level: expected \[\[sections\]\], got 'section' besides"),
        ("checkable = 1\n", "", r"section 2: checkable: expected int, got None"),
        ("checkable = 1\n", "checkable = 1\ncovered = 1\n", r"section 2: expected the fields .* got 'covered' besides"),
        ('document = "S0"\nwhere = "2', 'document = "S7"\nwhere = "2', r"section 2 .*document: expected one of S0, S1"),
        ('["S0.1b"]', '["S0.1c"]', r"section 2 .*claims: expected one of S0\.1a, S0\.1b, got 'S0\.1c'"),
        ('["A title', '[" ", "A title', r"section 1 .*left: expected a statement with the reason, got ' '"),
        ("checkable = 3", "checkable = 2", r"section 1 .*to be the statements left, 1, and .* 2 claims, got 2"),
        ('claims = ["S0.1b"]', "claims = []", r"section 2 .* 0 claims, got 1"),
        ("(lines 6-9)", "(lines 7-9)", r"S0, 2 Two \(lines 7-9\): expected to begin with line 6"),
        ("(lines 6-9)", "(lines 5-9)", r"S0, 2 Two \(lines 5-9\): expected to begin with line 6"),
        ("(lines 1-5)", "(lines 2-5)", r"S0, 1 One \(lines 2-5\): expected to begin with line 1"),
        ("(lines 6-9)", "(page 2)", r"where: expected a heading and its lines"),
        ('["S0.1b"]', '["S0.1a"]', r"S0, 2 Two .*: S0\.1a does not stand here: 1 One \(line 2\)"),
        ('["S0.1a", "S0.1b"]', '["S0.1b"]', r"S0: S0\.1a: expected a section that names it, with line 2"),
        ('["S0.1a", "S0.1b"]', '["S0.1a"]', r"S0: S0\.1b: expected a section that names it, with line 3"),
    ],
)
def test_damage_is_named(small, written, old, new, message):
    assert old in SOUND
    path = written(SOUND.replace(old, new))
    with pytest.raises(LedgerError, match=f"^{re.escape(str(path))}: {message}"):
        load_coverage(small, path)
