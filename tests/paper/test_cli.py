"""`python -m ortho` and `python -m paper`, in this process and from a bare source tree."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

import ortho
from ortho import HEADS, PROJECTIONS
from ortho.__main__ import main as library
from ortho.attention import MECHANISMS, Mechanism
from ortho.attention.positional.patterns import PATTERNS
from ortho.layers.synthesizer import SOURCES
from paper import claims, experiments
from paper.__main__ import main
from paper.claims import LedgerError, judge

ROOT = Path(__file__).parents[2]
PLACES = ("reference", "fast", "cost")


def test_mechanisms(capsys):
    """The JSON says where each function is and what it is bound to, and no two are alike; the table has the rest."""
    assert library(["mechanisms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["mechanisms"]
    assert [row["name"] for row in rows] == list(MECHANISMS)
    plain, places = {f.name for f in fields(Mechanism)} - {*PLACES, "gates", "query_gates"}, set()
    for row in rows:
        mechanism = MECHANISMS[row["name"]]
        assert {name: row.pop(name) for name in plain} == {name: getattr(mechanism, name) for name in plain}
        gates = row.pop("gates")
        assert row.pop("query_gates") == sorted(mechanism.query_gates)
        assert gates == {name: f"{gate.__module__}.{gate.__name__}" for name, gate in mechanism.gates.items()}
        assert set(row) == set(PLACES)
        for name, said in row.items():
            place, _, bound = said.partition("(")
            expected = getattr(mechanism, name)
            assert place.startswith(f"{getattr(expected, 'func', expected).__module__}.")
            if isinstance(expected, partial):
                assert bound == ", ".join(f"{name}={value!r}" for name, value in expected.keywords.items()) + ")"
        places.add((*row.values(), *gates.values()))
    assert len(places) == len(rows)
    assert library(["mechanisms"]) == 0
    title, header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert title == "Mechanisms: MultiheadAttention(attention=NAME)"
    assert header.split() == ["name", "family", "causal", "exact", "positional", "signed", "source"]
    for line, m in zip(lines, MECHANISMS.values(), strict=True):
        flags = ["yes" if flag else "no" for flag in (m.causal, m.exact, m.positional, m.signed)]
        assert line.split() == [m.name, m.family, *flags, *m.source.split()]


LISTS = {
    "projections": ("Projections: MultiheadAttention(projection=NAME)", PROJECTIONS),
    "heads": ("Kinds of heads: HybridAttention(heads={NAME: COUNT})", HEADS),
    "patterns": ("Positional patterns: PositionalHeads(patterns=[NAME, ...])", PATTERNS),
    "synthesizers": ("Synthesizers: SynthesizerAttention(source=NAME)", SOURCES),
}


def test_what_is_listed_beside_the_mechanisms(capsys):
    """Each name has an existing class, bound to the arguments that distinguish it; both outputs say the same."""
    assert library(["mechanisms", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert library(["mechanisms"]) == 0
    _, *tables = capsys.readouterr().out.split("\n\n")
    assert list(listed) == ["mechanisms", *LISTS]
    for (key, (title, entries)), table in zip(LISTS.items(), tables, strict=True):
        rows = [(row["name"], row["made_by"]) for row in listed[key]]
        first, header, *lines = table.splitlines()
        assert (first, header.split()) == (title, ["name", "made", "by"])
        assert [line.split() for line in lines] == [[*n.split(), *m.split()] for n, m in rows]
        assert [name for name, _ in rows] == list(entries)
        assert len({place for _, place in rows}) == len(rows)
        for name, said in rows:
            module, _, made = said.partition("(")[0].rpartition(".")
            entry = entries[name]
            cls = entry if isinstance(entry, type) else getattr(entry, "func", type(entry))
            assert getattr(sys.modules[module], made) is cls
    assert {row["name"]: row["made_by"] for row in listed["patterns"]}["previous"].endswith(".Shift(offset=-1)")
    assert {row["name"]: row["made_by"] for row in listed["projections"]}["stopped"].endswith("(stop_gradient=True)")


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        library(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"ortho {ortho.__version__}\n"


def test_claims(capsys, monkeypatch):
    few = [judge(name) for name in ("S0.1.1a", "S3.1b", "S3.3f")]  # all evidence takes a minute
    monkeypatch.setattr(claims, "ledger", lambda document: [one for one in few if document in (None, one.document)])
    assert main(["claims", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["verdict"], row["chapter"], row["ours"]) for row in rows] == [
        (entry.id, entry.verdict, entry.chapter, entry.ours) for entry in few
    ]
    assert main(["claims", "--document", "S3"]) == 0
    out = capsys.readouterr().out
    assert "S3.3f (property)" in out
    assert "S0.1.1a" not in out
    assert out.splitlines()[-1].startswith("2 claims: ")
    assert main(["claims", "S3.1b", "S0.1.1a"]) == 0
    out = capsys.readouterr().out
    assert out == f"{judge('S3.1b')!r}\n\n{judge('S0.1.1a')!r}\n\n2 claims: 2 confirmed\n"


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (main, ["claims", "--document", "S9"], "--document: expected one of S0, S1, S2, S3, S4, got 'S9'"),
        (main, ["claims", "S0.1.1a", "S0.1"], "ID: expected ids of the ledger, such as S0.1.1a, got 'S0.1'"),
        (main, ["claims", "S0.1.1a", "--document", "S0"], "not allowed with argument"),
        (main, ["claim"], "invalid choice: 'claim'"),
        (main, ["claims", "--yaml"], "unrecognized arguments: --yaml"),
        (main, [], "required"),
        (library, ["mechanisms", "--yaml"], "unrecognized arguments: --yaml"),
        (
            library,
            ["claims", "S0.1.1a"],
            "expected a command of the library; in the source tree: python -m paper claims",
        ),
        (library, [], "required"),
    ],
)
def test_bad_usage_exits_with_2(command, argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_damaged_ledger_exits_with_1(monkeypatch, capsys):
    def damaged():
        raise LedgerError("claims.toml: claim 3 (S0.1.1c): kind: expected one of ..., got 'x'")

    monkeypatch.setattr(claims, "catalogue", damaged)
    assert main(["claims"]) == 1
    assert capsys.readouterr().err == (
        "python -m paper: error: claims.toml: claim 3 (S0.1.1c): kind: expected one of ..., got 'x'\n"
    )


def test_a_damaged_file_of_records_exits_with_1(tmp_path, monkeypatch, capsys):
    file = tmp_path / "inference" / "cpu.json"
    file.parent.mkdir()
    file.write_text('[\n{"schema": 1, "exp')
    monkeypatch.setattr(claims, "ledger", lambda _: experiments.load("inference", tmp_path))  # as evidence does
    assert main(["claims"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"python -m paper: error: {file}: damaged")
    assert said.err.count("\n") == 1


def test_experiments_get_their_own_arguments(monkeypatch):
    given = []
    monkeypatch.setattr(experiments, "main", lambda argv: given.append(argv) or 7)
    assert main(["experiments", "--list", "-h", "name"]) == 7
    assert given == [["--list", "-h", "name"]]


def test_from_a_bare_source_tree(tmp_path):
    """A copy of the package alone runs with its own files, and to list mechanisms it imports only torch and numpy."""
    shutil.copytree(ROOT / "ortho", tmp_path / "ortho")
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import ortho.__main__\n"
        "print(ortho.__file__); ortho.__main__.main(['mechanisms'])\n"
        "others = {'sympy', 'scipy', 'matplotlib', 'yaml', 'IPython', 'transformers'}\n"
        "print(sorted(others & (set(sys.modules) - before)))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[0] == str(tmp_path / "ortho" / "__init__.py")
    assert out.splitlines()[-1] == "[]"


def test_a_reader_may_stop_early():
    """`python -m paper claims | head -1` ends quietly, even with more to write than the 64 KiB that a pipe holds."""
    many = "S0.1.3a " * 120  # some 700 bytes each
    command = f'"{sys.executable}" -m paper claims --json {many} | head -1'
    ended = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "[\n"
    assert "BrokenPipe" not in ended.stderr
