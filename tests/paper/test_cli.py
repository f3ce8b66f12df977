"""`python -m ortho` and `python -m paper`, in this process and from a bare source tree."""

import json
from pathlib import Path

import pytest

from ortho import HEADS, PROJECTIONS
from ortho.__main__ import main as library
from ortho.attention import MECHANISMS
from ortho.attention.positional.patterns import PATTERNS
from ortho.layers.synthesizer import SOURCES
from paper.__main__ import main
from paper.claims import ledger

ROOT = Path(__file__).parents[2]


def test_mechanisms(capsys):
    """Every name that a layer takes is listed."""
    assert library(["mechanisms"]) == 0
    listed = capsys.readouterr().out
    assert all(f" {name}" in listed for names in (MECHANISMS, PROJECTIONS, HEADS, PATTERNS, SOURCES) for name in names)


def test_claims(capsys):
    few = {name: ledger()[name] for name in ("S3.1b", "S0.1.1a")}
    assert main(["claims", "--json", *few]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["verdict"], row["chapter"], row["ours"]) for row in rows] == [
        (entry.id, entry.verdict, entry.chapter, entry.ours) for entry in few.values()
    ]
    assert main(["claims", "--document", "S3"]) == 0
    out = capsys.readouterr().out
    assert "S3.3f (property)" in out
    assert "S0.1.1a" not in out
    assert out.splitlines()[-1].startswith(f"{len(ledger('S3'))} claims: ")
    assert main(["claims", *few]) == 0
    out = capsys.readouterr().out
    assert out == f"{few['S3.1b']!r}\n\n{few['S0.1.1a']!r}\n\n2 claims: 2 confirmed\n"
    assert f"judged: notebooks/{few['S0.1.1a'].chapter}.ipynb, cell judge-orders" in out


@pytest.mark.nightly
def test_a_claim_is_judged_anew_by_its_chapter(capsys):
    assert main(["claims", "--run", "S0.1.1a"]) == 0
    assert capsys.readouterr().out == f"{ledger()['S0.1.1a']!r}\n\n1 claim: 1 confirmed\n"


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (main, ["claims", "--document", "S9"], "--document: expected one of S0, S1, S2, S3, S4, got 'S9'"),
        (library, ["claims"], "invalid choice: 'claims'"),
    ],
)
def test_bad_usage_exits_with_2(command, argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
