"""Mutants are drawn, kept, found again and tested, in a small package of their own."""

import ast
import json

import pytest

from tools import faults, mutants

WINDOW = '''"""Which keys a query sees."""

def check(width):
    if width < 1:
        raise ValueError("width: expected at least 1")

class Window:
    def allowed(self, i, j: "1 + 1"):  # à gauche
        """Not 1 < 2."""
        return (i - j <= 4 and
                j <= i)

def size(n):
    return 2 * n
'''
MUTANT = {
    "id": "toy-1",
    "file": "ortho/window.py",
    "function": "Window.allowed",
    "kind": "comparison",
    "original": "i - j <= 4",
    "replacement": "i - j < 4",
}
UNSEEN = MUTANT | {"id": "toy-2", "function": "size", "kind": "factor", "original": "2 * n", "replacement": "3 * n"}
GONE = MUTANT | {"id": "toy-3", "original": "i - j <= 5"}
TESTS = """from ortho.window import Window, size

def test_a_pair_at_the_edge():
    assert Window().allowed(5, 1) and not Window().allowed(6, 1)

def test_size():
    assert size(0) == 0
"""


@pytest.fixture
def tree(tmp_path):
    """A project of one module and one file of tests."""
    for folder in ("ortho", "paper", "tests", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ortho" / "__init__.py").touch()
    (tmp_path / "ortho" / "window.py").write_text(WINDOW)
    (tmp_path / "tests" / "test_window.py").write_text(TESTS)
    return tmp_path


def test_a_mutant_changes_its_place_alone():
    assert mutants.mutated(WINDOW, MUTANT) == WINDOW.replace("i - j <= 4", "(i - j < 4)")


def test_a_constant_verdict_changes_every_verdict():
    rule = "def rule(x):\n    if x:\n        return Verdict.CONFIRMED, x\n    return Verdict.REFUTED, x\n"
    mutant = MUTANT | {"function": "rule", "kind": "constant verdict", "replacement": "Verdict.REFUTED"}
    assert mutants.mutated(rule, mutant).count("(Verdict.REFUTED)") == 2
    found = faults.possible("rule", ast.parse(rule).body[0], rules=True)
    assert [new for kind, _, new in found if kind == "constant verdict"] == ["Verdict.CONFIRMED", "Verdict.REFUTED"]


def test_a_mutant_is_found_after_a_move(tree):
    assert mutants.find(tree, MUTANT) == tree / "ortho" / "window.py"
    moved = tree / "ortho" / "patterns" / "sliding.py"
    moved.parent.mkdir()
    (tree / "ortho" / "window.py").rename(moved)
    moved.write_text("import math\n\n" + WINDOW.replace("i - j <= 4", "i-j  <=  4"))
    assert mutants.find(tree, MUTANT) == moved
    assert "(i - j < 4)" in mutants.mutated(moved.read_text(), MUTANT)


def test_what_no_longer_applies_is_not_found(tree):
    assert mutants.find(tree, GONE) is None
    (tree / "ortho" / "other.py").write_text(WINDOW)
    assert mutants.find(tree, MUTANT) == tree / "ortho" / "window.py"  # the file it names comes first
    assert mutants.find(tree, MUTANT | {"file": "ortho/a.py"}) is None  # and of two others, neither


def test_faults_are_in_what_runs():
    """None in annotations, texts, messages or inner functions; each at a place the function has once."""
    found = {name: list(faults.possible(name, f, rules=False)) for name, f in faults.functions(ast.parse(WINDOW))}
    assert found == {
        "check": [("raise", "width < 1", "False"), ("comparison", "width < 1", "width <= 1")],
        "Window.allowed": [
            ("condition", "i - j <= 4 and j <= i", "i - j <= 4 or j <= i"),
            ("comparison", "i - j <= 4", "i - j < 4"),
            ("sign", "i - j", "i + j"),
            ("comparison", "j <= i", "j < i"),
        ],
        "size": [("factor", "2 * n", "2"), ("factor", "2 * n", "3 * n")],
    }


def test_the_draw_passes_over_rejected_mutants_and_keeps_the_others(tree, monkeypatch):
    monkeypatch.setattr(faults, "ROOMS", {"toy": ("ortho/*.py", 3)})
    drawn = faults.draw(tree, {})
    assert len({mutant["function"] for mutant in drawn}) == 3
    assert all(mutants.find(tree, mutant) for mutant in drawn)
    (tree / "ortho" / "window.py").write_text(WINDOW + "\n\ndef more():\n    return 0\n")
    assert faults.draw(tree, {}) == drawn
    assert drawn[0] not in faults.draw(tree, {drawn[0]["id"]: "a reason"})


def test_what_tests_notice_and_what_they_do_not(tree, tmp_path, capsys):
    out = tmp_path / "results.json"
    mutants.run(tree, [MUTANT, UNSEEN, GONE], out, limit=60, jobs=1, extra=[], before={})
    results = json.loads(out.read_text())
    assert [results[mutant["id"]]["result"] for mutant in (MUTANT, UNSEEN, GONE)] == ["caught", "survived", "gone"]
    assert results["toy-1"]["by"] == "tests/test_window.py::test_a_pair_at_the_edge"
    assert (tree / "ortho" / "window.py").read_text() == WINDOW
    mutants.show([MUTANT, UNSEEN, GONE], out)
    assert "noticed: 1 of 2, 50%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "runs"), [("tests/test_window.py::test_size[3]", 2), ("tests/test_gone.py::test", 1)]
)
def test_what_noticed_a_mutant_before_runs_first(tree, monkeypatch, before, runs):
    """With other parameters, too; and what has gone is passed over."""
    asked = []
    monkeypatch.setattr(
        mutants, "executed", lambda tree, arguments, limit: (asked.append(arguments), ("survived", ""))[1]
    )
    mutants.tested(tree, MUTANT, 60, [], before)
    assert len(asked) == runs
    assert (asked[0] == ["-x", "tests/test_window.py::test_size"]) is (runs == 2)


def test_a_test_that_fails_without_the_mutant_is_named(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        mutants, "executed", lambda tree, arguments, limit: ("caught", "tests/test_window.py::test_size")
    )
    mutants.run(tree, [UNSEEN], tmp_path / "results.json", limit=60, jobs=1, extra=[], before={})
    assert "Not by the mutant: tests/test_window.py::test_size" in capsys.readouterr().out


@pytest.mark.parametrize(("without", "result"), [("survived", "time"), ("time", "survived")])
def test_a_limit_counts_where_the_tests_end_without_the_mutant(tree, monkeypatch, without, result):
    monkeypatch.setattr(
        mutants, "executed", lambda tree, arguments, limit: ("time" if "-x" in arguments else without, "")
    )
    assert mutants.tested(tree, MUTANT, 60, [], "")["result"] == result


def test_the_kept_list_is_well_formed():
    kept = json.loads(mutants.LIST.read_text())
    assert len({mutant["id"] for mutant in kept["mutants"]}) == sum(count for _, count in faults.ROOMS.values())
    assert not kept["rejected"].keys() & {mutant["id"] for mutant in kept["mutants"]}
    assert all(mutant.keys() - {"select"} == MUTANT.keys() for mutant in kept["mutants"])
    assert all(reason for reason in kept["rejected"].values())
