"""Learning rates: what chooses them, for what they are chosen, and the table that keeps them."""

import json

import pytest
from experiment_fakes import made_up

from paper.experiments.learning import rates, studies, study

RATES = (0.01, 0.03)


def make(arm, seed, nats, rate=0.01, device="cpu-a", **changes):
    """A record of a loss on the validation part."""
    evaluations = [{"step": step, "loss_nats": nats + 1 / step - 0.5} for step in (1, 2)]
    case = study.case(studies.PARITY_STUDY, arm, seed, rate, steps=2, B=2, tested=4) | changes
    return made_up("parity", case, {}, device=device, validation=evaluations)


@pytest.fixture
def tuning():
    return [make("linear", rates.TUNING, nats, rate) for nats, rate in ((1.0, 0.01), (1.5, 0.03))]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The file to which the rates are written."""
    monkeypatch.setattr(rates, "TABLE", tmp_path / "rates.json")
    rates.table.cache_clear()
    yield rates.TABLE
    rates.table.cache_clear()


def test_the_lowest_loss_on_the_validation_part_chooses_and_only_at_the_tuning_seed(tuning):
    (chosen,) = rates.choose(tuning).items()
    assert chosen[1] == 0.01 and "arm=linear" in chosen[0]
    counting = [make("linear", seed, 0.1, 0.03) for seed in (1, 2)]
    assert rates.choose([*tuning, *counting]) == rates.choose(tuning)
    assert rates.choose(counting) == {} == rates.choose(tuning[:1])
    tuning[1]["facts"]["validation"][0]["loss_nats"] = 0.1  # an early one is as good as a late one
    assert list(rates.choose(tuning).values()) == [0.03]


def test_a_rate_is_chosen_for_all_that_a_case_has():
    found = [
        make("linear", rates.TUNING, 1.0 if rate == better else 2.0, rate, steps=steps)
        for steps, better in zip((2, 9), RATES, strict=True)
        for rate in RATES
    ]
    rule = [make("linear", rates.TUNING, 1.0, rate, decision_margin=0.9) for rate in RATES]
    assert sorted(rates.choose(found).values()) == [0.01, 0.03]
    assert set(rates.choose(rule)) < set(rates.choose(found)), "the rule of judgement has no part in it"


def test_losses_of_two_devices_are_not_compared(tuning):
    """One rate from each device gives no choice; if both devices have all rates, the CPU's choice counts."""
    theirs = [make("linear", rates.TUNING, *one, "nvidia-h200") for one in ((2.0, 0.01), (1.0, 0.03))]
    assert rates.choose([tuning[0], theirs[1]]) == {}
    for order in ([*tuning, *theirs], [*theirs, *tuning]):
        assert list(rates.choose(order).values()) == [0.01]
    assert list(rates.choose([tuning[0], *theirs]).values()) == [0.03]


def test_what_is_written_is_what_is_asked_for(tuning, table):
    case = {**tuning[0]["configuration"], "seed": 3, "rate": 0.5}
    assert rates.chosen("parity", case) is None
    rates.write({"parity": tuning, "recall": []})
    assert rates.chosen("parity", case) == 0.01
    assert rates.chosen("recall", case) is None and rates.chosen("parity", {**case, "d": 16}) is None
    assert list(json.loads(table.read_text())) == ["parity"]
    assert rates.with_chosen("parity", [case, {**case, "arm": "delta"}]) == [{**case, "rate": 0.01}]
    rates.write({"recall": tuning})
    assert set(rates.table()) == {"parity", "recall"}, "others' stay"
