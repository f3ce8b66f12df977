"""Which runs the experiments on bytes have: arms, seeds, rates, what is matched, and the rule that judges them."""

from collections import Counter

import pytest
import torch

from paper import experiments
from paper.experiments.engine import records
from paper.experiments.learning import language, rates
from paper.experiments.learning.arms import arms, trained_parameters, training_flop
from paper.experiments.statistics import Decision
from paper.tasks.text import VOCAB_SIZE

DEVICES = ("cpu", "cuda")
every_list = pytest.mark.parametrize(
    ("name", "device"), [(one.name, device) for one in language.EXPERIMENTS for device in DEVICES]
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An empty table of rates, which is filled by what this fixture gives: experiment, device -> all rates chosen."""
    monkeypatch.setattr(rates, "TABLE", tmp_path / "rates.json")
    rates.table.cache_clear()

    def fill(name, device):
        rates.write({name: [tuned(case) for case in experiments.EXPERIMENTS[name].cases(device)]})

    yield fill
    rates.table.cache_clear()


def tuned(case):
    """A tuning record, by which the higher rate is chosen."""
    looks = [{"step": 1, "loss_nats": 2.0 - 10 * case["rate"]}]
    return {"device": "cpu-any", "configuration": case, "facts": {"loss": [3.0], "validation": looks}}


def but(case, *names):
    """A case without some of what it says."""
    return tuple((name, value) for name, value in case.items() if name not in names)


@every_list
def test_tuning_comes_first_and_what_counts_is_asked_for_when_its_rate_is_chosen(table, name, device):
    experiment = experiments.EXPERIMENTS[name]
    tuning = experiment.cases(device)
    assert {case["seed"] for case in tuning} == {rates.TUNING}
    each = Counter(but(case, "rate") for case in tuning)
    assert set(each.values()) == {len(language.TRIED)}, "all have as many rates to choose from"
    table(name, device)
    cases = experiment.cases(device)
    assert cases[: len(tuning)] == tuning
    counting = cases[len(tuning) :]
    assert [case["seed"] for case in counting] == [seed for seed in language.SEEDS for _ in each]
    highest = {but(case, "seed", "rate"): case["rate"] for case in tuning}  # the last that is tried
    for seed in language.SEEDS:
        assert {but(c, "seed", "rate"): c["rate"] for c in counting if c["seed"] == seed} == highest
    assert len({records.key(case) for case in cases}) == len(cases)


def test_a_rate_is_chosen_for_an_arm_alone(table):
    tuning = language.BYTES.cases("cpu")
    frozen = [case for case in tuning if case["arm"] == "frozen"]
    rates.write({"bytes": map(tuned, frozen)})
    assert {case["arm"] for case in language.BYTES.cases("cpu")[len(tuning) :]} == {"frozen"}


def test_neither_one_rate_nor_another_experiment_chooses(table):
    tuning = language.BYTES.cases("cpu")
    frozen = [case for case in tuning if case["arm"] == "frozen"]
    rates.write({"bytes": [tuned(frozen[0])]})  # one rate alone is no choice
    rates.write({"bytes-little": map(tuned, frozen)})  # of another experiment
    assert language.BYTES.cases("cpu") == tuning


@every_list
def test_every_case_holds_its_rule_and_what_readers_need(table, name, device):
    table(name, device)
    experiment = experiments.EXPERIMENTS[name]
    for case in experiment.cases(device):
        assert Decision.of(case) == language.DECISION
        assert set(case) == set(experiment.needs.configuration)
        assert all(type(case[field]) is kind for field, kind in experiment.needs.configuration.items())
        assert case["device"] == device and case["d"] % case["H"] == 0
        assert experiment.work(case) > 0 and case["arm"] in experiment.label(case)


@pytest.mark.parametrize("device", DEVICES)
def test_all_arms_have_the_training_flop_of_the_baseline(device):
    sizes = language.SIZES[device]
    cases = language.of_equal_flop(device)
    assert {case["arm"] for case in cases} == set(arms(sizes["H"], sizes["N"]))
    want = flop(next(case for case in cases if case["arm"] == "learned"))
    assert want == sizes["steps"] * flop(language.case("learned", device=device, matched="steps", steps=1))
    for case in cases:
        assert case["d_ff"] == 4 * case["d"]
        assert abs(flop(case) - want) <= flop({**case, "steps": 1}) / 2, case["arm"]  # the integer that comes nearest


def flop(case):
    arm = arms(case["H"], case["N"])[case["arm"]]
    sizes = (case[name] for name in "BNdL")
    return case["steps"] * training_flop(arm, *sizes, vocab_size=VOCAB_SIZE, d_ff=case["d_ff"])


@pytest.mark.parametrize("device", DEVICES)
def test_arms_of_equal_parameters_differ_by_less_than_a_hidden_unit(device):
    sizes = language.SIZES[device]
    cases = {case["arm"]: case for case in language.of_equal_parameters(device)}
    H, d, L = (sizes[name] for name in "HdL")
    assert {"learned", "positional", f"1 learned + {H - 1} positional", "1 learned, wider"} <= set(cases)
    assert cases["learned"]["d_ff"] == 4 * d

    def parameters(case):
        arm = arms(H, case["N"])[case["arm"]]
        with torch.device("meta"):
            return trained_parameters(arm.build(VOCAB_SIZE, d, L, d_ff=case["d_ff"]))

    for case in cases.values():
        assert case["steps"] == sizes["steps"]
        # A unit has a row of d and a column of d in each of L layers; the nearest integer is at most half of that off.
        assert abs(parameters(case) - parameters(cases["learned"])) <= d * L, case["arm"]


@pytest.mark.parametrize("device", DEVICES)
def test_budgets_and_limits(table, device):
    sizes = language.SIZES[device]
    few = set(language.few(sizes["H"]))
    assert few <= set(arms(sizes["H"], sizes["N"]))
    budgets = language.of_budgets(device)
    base = {(case["steps"], case["d"]) for case in budgets if case["arm"] == "learned"}
    steps = sizes["steps"]
    assert base == {(steps // 4, sizes["d"]), (4 * steps, sizes["d"]), (steps, 2 * sizes["d"])}
    little = language.of_little_text(device)
    limits = {(case["limit"], case["dropout"]) for case in little}
    assert limits == {(50_000, 0.0), (200_000, 0.0), (1_000_000, 0.0), (50_000, 0.1), (50_000, 0.3)}
    for cases, groups in ((budgets, len(base)), (little, len(language.LIMITS))):
        told = Counter(case["arm"] for case in cases if not case["dropout"])
        assert told == dict.fromkeys(few, groups * len(language.TRIED))


def test_a_model_twice_as_wide_tries_rates_half_as_high(table):
    tried = {case["d"]: set() for case in language.of_budgets("cpu")}
    for case in language.of_budgets("cpu"):
        tried[case["d"]].add(case["rate"])
    assert tried == {64: {5e-3, 1e-2}, 128: {2.5e-3, 5e-3}}


def test_the_arms_of_other_numbers_of_heads():
    assert language.few(4) == language.FEW
    assert set(language.few(8)) <= set(arms(8, 16)) and "1 learned + 7 positional" in language.few(8)


BAD = [
    ({"arm": "none"}, ValueError, "arm: expected one of 'learned'"),
    ({"device": "tpu"}, ValueError, "device: expected one of 'cpu', 'cuda', got 'tpu'"),
    ({"matched": "time"}, ValueError, "matched: expected one of 'flop', 'parameters', 'steps', got 'time'"),
    ({"width": 8}, TypeError, "sizes: expected some of B, N, d, H, L, steps, tested, got width"),
    ({"steps": 0}, ValueError, "steps: expected an integer of at least 1, got 0"),
    ({"B": 1.5}, TypeError, "B: expected an integer of at least 1"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_an_impossible_case_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        language.case(**{"arm": "learned", **given})
