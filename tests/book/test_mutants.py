"""Mutants are stored, found again and tested; shown on a small package made here."""

import json

import pytest

from tools import mutants

WINDOW = '''"""Which keys a query sees."""

class Window:
    def allowed(self, i, j: "1 + 1"):  # à gauche
        """Not i - j <= 4."""
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
    "by": "",
}
UNSEEN = MUTANT | {"id": "toy-2", "function": "size", "kind": "factor", "original": "2 * n", "replacement": "3 * n"}
GONE = MUTANT | {"id": "toy-3", "original": "i - j <= 5"}
TESTS = """from ortho.window import Window, size

def test_a_pair_at_the_edge():
    assert Window().allowed(5, 1) and not Window().allowed(6, 1)

def test_size():
    assert size(0) == 0
"""
SIZE = "tests/test_window.py::test_size"
HOW = {"limit": 60, "jobs": 1, "extra": []}


@pytest.fixture
def tree(tmp_path):
    """A project of one module and one file of tests."""
    for folder in ("ortho", "paper", "tests", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ortho" / "__init__.py").touch()
    (tmp_path / "ortho" / "window.py").write_text(WINDOW)
    (tmp_path / "tests" / "test_window.py").write_text(TESTS)
    return tmp_path


def ending(monkeypatch, end):
    """Run no tests: a run ends as `end(arguments)` says. Return the list that collects the arguments."""
    runs = []

    def executed(tree, arguments, limit):
        runs.append(arguments)
        return end(arguments)

    monkeypatch.setattr(mutants, "executed", executed)
    return runs


def test_a_mutant_changes_its_place_alone():
    assert mutants.mutated(WINDOW, MUTANT) == WINDOW.replace("(i - j <= 4", "((i - j < 4)")


def test_a_constant_verdict_changes_every_verdict():
    rule = "def rule(x):\n    if x:\n        return Verdict.CONFIRMED, x\n    return Verdict.REFUTED, x\n"
    mutant = MUTANT | {"function": "rule", "kind": "constant verdict", "replacement": "Verdict.REFUTED"}
    assert mutants.mutated(rule, mutant).count("(Verdict.REFUTED)") == 2


def test_what_says_something_or_is_another_function_s_is_left_alone():
    for expression, function in (("1 + 1", "Window.allowed"), ("i - j <= 4", "Window"), ("2 * n", "outer")):
        mutant = MUTANT | {"function": function, "original": expression}
        source = WINDOW + "\ndef outer(n):\n    assert 2 * n\n    def inner(n):\n        return 2 * n\n"
        assert mutants.mutated(source, mutant) == source


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
    assert mutants.find(tree, MUTANT) == tree / "ortho" / "window.py"  # the file that the mutant names comes first
    assert mutants.find(tree, MUTANT | {"file": "ortho/a.py"}) is None  # of two other files that fit, neither is taken


def test_what_tests_notice_and_what_they_do_not(tree, tmp_path, capsys):
    out = tmp_path / "results.json"
    mutants.run(tree, [MUTANT, UNSEEN, GONE], out, **HOW)
    results = json.loads(out.read_text())
    assert [results[mutant["id"]]["result"] for mutant in (MUTANT, UNSEEN, GONE)] == ["caught", "survived", "gone"]
    assert results["toy-1"]["by"] == "tests/test_window.py::test_a_pair_at_the_edge"
    assert (tree / "ortho" / "window.py").read_text() == WINDOW
    mutants.show([MUTANT, UNSEEN, GONE], out)
    assert "noticed: 1 of 2, 50%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "first"), [(f"{SIZE}[3]", SIZE), ("tests/test_gone.py::test", "tests/test_window.py")]
)
def test_what_noticed_a_mutant_before_runs_first(tree, monkeypatch, before, first):
    """With other parameters of that test, too; a test that no longer exists is skipped."""
    runs = ending(monkeypatch, lambda arguments: ("survived", ""))
    mutants.tested(tree, MUTANT | {"by": before}, 60, [])
    assert runs[0] == ["-x", first]
    assert runs[-1] == ["-x", "tests/test_window.py"]


def test_a_test_that_fails_without_the_mutant_is_named(tree, tmp_path, monkeypatch, capsys):
    ending(monkeypatch, lambda arguments: ("caught", SIZE))
    mutants.run(tree, [UNSEEN], tmp_path / "results.json", **HOW)
    assert f"Not by the mutant: {SIZE}" in capsys.readouterr().out


@pytest.mark.parametrize(("without", "result"), [("survived", "time"), ("time", "survived")])
def test_a_limit_counts_where_the_tests_end_without_the_mutant(tree, monkeypatch, without, result):
    ending(monkeypatch, lambda arguments: ("time" if "-x" in arguments else without, ""))
    assert mutants.tested(tree, MUTANT, 60, [])["result"] == result


def test_the_kept_list_is_well_formed():
    kept = json.loads(mutants.LIST.read_text())
    assert len({mutant["id"] for mutant in kept}) == len(kept) == 80
    assert all(mutant.keys() - {"select"} == MUTANT.keys() for mutant in kept)
