"""The code behind a record is identified by its meaning: edits that cannot change a run leave it the same; edits that
could do not."""

import dataclasses
from functools import partial

import pytest
from experiment_fakes import fake, go, stored

from paper.experiments import EXPERIMENTS
from paper.experiments.engine import code, provenance

BEFORE = {
    "ortho.a": b'''"""Says something."""

import math
from typing import TYPE_CHECKING

from ortho import c
from ortho.b import LIMIT, Shape, helper as helps

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {"one": helps, "two": Shape}


def run(case: int) -> float:
    """Runs."""
    if case > LIMIT:
        raise ValueError(f"case: expected at most {LIMIT}, got {case}")
    return KINDS["one"](case) + c.scale(math.exp(case))


def unused(x):
    return x + 1
''',
    "ortho.b": b"""LIMIT: int = 3


def helper(x, y: int = 2):
    total: float = x * y
    return total


class Shape:
    side: int = 1
    kind: str


def alone(x):
    return x - 1
""",
    "ortho.c": b"""def scale(x):
    return 2 * x
""",
}


def start(module="ortho.a", name="run"):
    def function():
        pass

    function.__module__, function.__qualname__ = module, name
    return function


def reached(contents=BEFORE, begin=None):
    return code.Tree(contents).reached(begin or start())


def edited(module, old, new, contents=BEFORE):
    text = contents[module].decode()
    assert text.count(old) == 1
    return contents | {module: text.replace(old, new).encode()}


def test_what_a_function_reaches_and_no_more():
    names = {"a:run", "a:KINDS['one']", "a:KINDS['two']", "b:LIMIT", "b:helper", "b:Shape", "c:scale"}
    assert set(reached()) == {f"ortho.{name}" for name in names}


SAME = {
    "a docstring": ("ortho.a", '"""Runs."""', '"""Runs, and more."""'),
    "a docstring less": ("ortho.a", '    """Runs."""\n', ""),
    "a comment": ("ortho.c", "2 * x", "2 * x  # twice"),
    "layout": ("ortho.c", "return 2 * x", "return (\n        2\n        * x\n    )"),
    "an annotation": ("ortho.a", "case: int) -> float", "case: float)"),
    "a check of arguments": ("ortho.a", "def run(", "@checked(shapes=False)\ndef run("),
    "a local annotation": ("ortho.b", "total: float = x", "total = x"),
    "the text of an error": ("ortho.a", "expected at most", "wanted no more than"),
    "an import": ("ortho.a", "import math\n", "import math\nimport os\n"),
    "the form of an import": ("ortho.a", "from ortho import c\n", "import ortho.c as c\n"),
    "what is not reached": ("ortho.a", "x + 1", "x - 1"),
    "a further definition": ("ortho.c", "def scale", "def other(x):\n    return x\n\n\ndef scale"),
    "a further entry of a table": ("ortho.a", '"two": Shape', '"two": Shape, "three": c.scale'),
}


@pytest.mark.parametrize("change", SAME)
def test_what_means_the_same_changes_nothing(change):
    now = reached(edited(*SAME[change]))
    assert code.changes(reached(), now) == []


OTHER = {
    "an operator": ("ortho.c", "2 * x", "2 + x", ["c:scale", "a:run"]),
    "a comparison": ("ortho.a", "case > LIMIT", "case >= LIMIT", ["a:run"]),
    "a default": ("ortho.b", "y: int = 2", "y: int = 3", ["b:helper", "a:KINDS['one']"]),
    "a constant": ("ortho.b", "LIMIT: int = 3", "LIMIT: int = 4", ["b:LIMIT", "a:run"]),
    "a field": ("ortho.b", "    kind: str\n", "", ["b:Shape", "a:KINDS['two']"]),
    "the kind of an error": ("ortho.a", "ValueError", "TypeError", ["a:run"]),
    "an entry of a table": ("ortho.a", '"one": helps', '"one": c.scale', ["a:KINDS['one']"]),
    "another function of that name": ("ortho.a", "helper as helps", "alone as helps", ["b:helper", "a:KINDS['one']"]),
    "another module of that name": ("ortho.a", "import math", "import cmath as math", ["a:run"]),
    "a switch": ("ortho.c", "def scale", "import torch\n\ntorch.set_num_threads(1)\n\n\ndef scale", ["c:<module>"]),
}


@pytest.mark.parametrize("change", OTHER)
def test_what_could_change_a_result_is_named(change):
    *edit, named = OTHER[change]
    assert set(code.changes(reached(), reached(edited(*edit)))) >= {f"ortho.{name}" for name in named}


def test_moving_and_joining_modules_changes_nothing():
    joined = BEFORE["ortho.b"] + BEFORE["ortho.c"] + BEFORE["ortho.a"]
    joined = joined.replace(b"from ortho import c\nfrom ortho.b import LIMIT, Shape, helper as helps\n", b"")
    moved = {"ortho.new.place": joined.replace(b"helps", b"helper").replace(b"c.scale", b"scale")}
    renamed = edited("ortho.a", "helper as helps", "helper")
    renamed = {name: text.replace(b"helps", b"helper").replace(b"c.scale", b"scale") for name, text in renamed.items()}
    renamed["ortho.a"] = renamed["ortho.a"].replace(b"from ortho import c", b"from ortho.c import scale")
    assert code.changes(reached(renamed), reached(moved, start("ortho.new.place"))) == []


def test_a_module_of_this_package_can_move_and_an_operator_in_it_cannot_change():
    run, module = EXPERIMENTS["training-step"].run, "paper.experiments.engine.benchmark"
    before = code.files()
    forms = {
        module: "ortho.clocks.step",
        "paper.experiments.engine import benchmark": "ortho.clocks import step as benchmark",
    }
    moved = dict(before)
    for here, there in forms.items():
        moved = {name: text.replace(here.encode(), there.encode()) for name, text in moved.items()}
    moved["ortho.clocks.step"] = moved.pop(module).replace(b'"""', b'"""Elsewhere. ', 1)
    reached_before = code.Tree(before).reached(run)
    assert any("benchmark" in name for name in reached_before)
    assert code.changes(reached_before, code.Tree(moved).reached(run)) == []
    changed = before | {module: before[module].replace(b" - ", b" + ")}
    assert changed != before
    assert f"{module}:timed_step" in code.changes(reached_before, code.Tree(changed).reached(run))


def test_what_is_bound_to_a_function_counts():
    @dataclasses.dataclass
    class Study:
        steps: int
        arms: dict

    def study(**changes):
        own = {"steps": 3, "arms": {"x": start("ortho.b", "alone")}} | changes
        return partial(start("ortho.c", "scale"), Study(**own))

    one = reached(begin=study())
    assert {"ortho.c:scale", "ortho.b:alone"} < set(one)
    assert code.changes(one, reached(begin=study(arms={"x": start("ortho.b", "alone"), "y": 1}))) == []
    assert code.changes(one, reached(begin=study(steps=4))) == ["run.args[0].steps"]
    assert code.changes(one, reached(begin=study(arms={"x": None})))


def test_a_function_of_ones_own_is_told_by_its_bytecode():
    namespace = {"__name__": "__main__", "scale": start("ortho.c", "scale")}
    exec("def one(x): return scale(x) + 1\ndef other(x): return scale(x) + 2", namespace)
    one, other = (reached(begin=namespace[name]) for name in ("one", "other"))
    assert "ortho.c:scale" in one
    assert code.changes(one, other) == ["run"]


def test_a_run_whose_code_changes_on_disk_stores_nothing(tmp_path, monkeypatch):
    run, name = EXPERIMENTS["recall"].run, "paper.training.trainer"
    later = code.files()
    monkeypatch.setattr(code, "files", lambda: later)
    assert provenance.edited(run) == []
    later[name] += b"\n# a comment\n"
    later["paper.claims.rules"] += b"\nLIMIT = 3\n"
    assert provenance.edited(run) == [], "neither a comment nor what a run does not reach"
    later[name] = later[name].replace(b"def run(self", b"def run(self, _=0", 1)
    assert f"{name}:Trainer" in provenance.edited(run)

    monkeypatch.setattr("paper.experiments.engine.runner.edited", lambda _: ["ortho.layers.multihead:FeedForward"])
    report = go(fake(), tmp_path)
    assert report.done == [] and not stored(tmp_path).exists()
    assert "nothing is stored, as ortho.layers.multihead:FeedForward changed on disk" in report.errors[0]
