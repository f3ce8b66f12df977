"""The language models of bytes: what is equal in their cases, which cases there are, and what runs share."""

from collections import Counter
from math import log2
from types import SimpleNamespace

import pytest
import torch
from experiment_fakes import small_library

from paper.experiments.learning import language
from paper.experiments.learning.arms import arms
from paper.tasks import text
from paper.tasks.task import Batch
from paper.tasks.text import VOCAB_SIZE

TINY = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 4, "L": 1, "tested": 4}
every_device = pytest.mark.parametrize("device", ["cpu", "cuda"])


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library in place of Python's own."""
    parts = small_library(tmp_path)
    monkeypatch.setattr(text, "python_parts", lambda: parts)
    return parts


@every_device
def test_all_arms_have_the_training_flop_of_the_baseline(device):
    sizes = language.SIZES[device]
    cases = language.of_equal_flop(device)
    assert {case["arm"] for case in cases} == set(arms(sizes["H"], sizes["N"]))
    baseline = next(case for case in cases if case["arm"] == "learned")
    assert baseline["steps"] == sizes["steps"]
    want = baseline["steps"] * language.step_flop(baseline)
    for case in cases:
        assert case["d_ff"] == 4 * case["d"]
        own = language.step_flop(case)
        assert abs(case["steps"] * own - want) <= own / 2, case["arm"]  # the nearest integer


@every_device
def test_arms_of_equal_parameters_differ_by_less_than_a_hidden_unit(device):
    sizes = language.SIZES[device]
    cases = {case["arm"]: case for case in language.of_equal_parameters(device)}
    H, d, L = (sizes[name] for name in "HdL")
    assert {"learned", "positional", f"1 learned + {H - 1} positional", "1 learned, wider"} <= set(cases)
    assert cases["learned"]["d_ff"] == 4 * d

    def parameters(case):
        arm = arms(H, case["N"])[case["arm"]]
        with torch.device("meta"):
            model = arm.build(VOCAB_SIZE, d, L, d_ff=case["d_ff"])
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    for case in cases.values():
        assert case["steps"] == sizes["steps"]
        # A unit has a row of d and a column of d in each of L layers; the nearest integer is at most half a unit off.
        assert abs(parameters(case) - parameters(cases["learned"])) <= d * L, case["arm"]


@every_device
def test_budgets_and_limits(device, monkeypatch):
    monkeypatch.setattr(language.rates, "chosen", lambda *_: None)
    sizes = language.SIZES[device]
    few = set(language.few(sizes["H"]))
    assert few <= set(arms(sizes["H"], sizes["N"]))
    budgets, little = language.of_budgets(device), language.of_little_text(device)
    steps = sizes["steps"]
    base = {(case["steps"], case["d"]) for case in budgets if case["arm"] == "learned"}
    assert base == {(steps // 4, sizes["d"]), (4 * steps, sizes["d"]), (steps, 2 * sizes["d"])}
    limits = {(case["limit"], case["dropout"]) for case in little}
    assert limits == {(50_000, 0.0), (200_000, 0.0), (1_000_000, 0.0), (50_000, 0.1), (50_000, 0.3)}
    for cases, groups in ((budgets, len(base)), (little, len(language.LIMITS))):
        told = Counter(case["arm"] for case in cases if not case["dropout"])
        assert told == dict.fromkeys(few, groups * len(language.TRIED))
    tried = {d: {case["rate"] for case in budgets if case["d"] == d} for _, d in base}
    scale = 64 / sizes["d"]
    assert tried == {sizes["d"] * n: {5e-3 * scale / n, 1e-2 * scale / n} for n in (1, 2)}, "an n-th as high"


def test_the_arms_of_other_numbers_of_heads():
    assert language.few(4) == language.FEW
    assert set(language.few(8)) <= set(arms(8, 16)) and "1 learned + 7 positional" in language.few(8)


def test_budgets_are_the_multiples_of_the_steps_at_equal_flop():
    for arm in language.few(4):
        for steps, multiple in ((150, 0.25), (600, 1.0), (2400, 4.0)):
            for d in (16, 32):
                assert language.budget(language.case(arm, 1, **{**TINY, "steps": steps, "d": d})) == multiple
    with pytest.raises(ValueError, match="steps: expected those of a budget .* for 'learned', got 151"):
        language.budget(language.case("learned", 1, **{**TINY, "steps": 151}))


def test_dropout_is_for_training_alone_and_fewer_bytes_are_the_first(library):
    """Otherwise the two forms of the model would differ, as each would leave out other numbers."""
    run = language.run(language.case("learned", 1, dropout=0.5, limit=300, **TINY))
    plain = language.run(language.case("learned", 1, limit=300, **TINY))
    assert run["facts"]["loss"] != plain["facts"]["loss"]
    assert run["facts"]["text"] == library.limited(300).facts() and run["facts"]["text"]["train"]["bytes"] == 300
    assert run["facts"]["kinds"] == arms(4, 16)["learned"].describe()
    assert language.same_text([{"facts": {"text": library.facts()}}]) and not language.same_text([plain])


def test_tables_see_as_much_as_the_models(monkeypatch):
    """They count as many windows as a model sees in its steps, and have the models' own tests."""
    counted = []
    monkeypatch.setattr(language.counting, "task_bits", lambda _, *sizes: counted.append(sizes) or (2.0, 1.0))
    language.table_bits.cache_clear()
    assert language.best(3) == (2, 1.0)
    assert counted == [(3 * language.SIZES["cpu"]["B"], language.SIZES["cpu"]["tested"], language.LONGEST)]
    language.table_bits.cache_clear()


def test_least_bits_of_pairs(monkeypatch):
    """After 'a' comes 'b' twice in three, else 'c'; after 'b' always 'a'. Tolerance: some ten float64 operations."""
    rows = torch.tensor([list(row) for row in (b"aba", b"aca", b"aba")])
    task = SimpleNamespace(tests={"test": lambda *_: Batch((rows[:, :-1],), rows[:, 1:])})
    monkeypatch.setattr(language, "_task", lambda _: task)
    share = (-2 * log2(2 / 3) - log2(1 / 3)) / 6
    assert language.least_bits_of_pairs() == pytest.approx(share, rel=1e-14)
