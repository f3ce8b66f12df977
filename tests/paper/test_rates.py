"""Learning rates: what chooses them, for what they are chosen, and the table that keeps them."""

import json

import pytest
from experiment_fakes import SLUG

from paper.experiments import EXPERIMENTS, measure
from paper.experiments.engine import records
from paper.experiments.learning import rates, studies, study
from tools import rates as tool

RATES = (0.01, 0.03)


@pytest.fixture(scope="module")
def measured():
    case = study.case(studies.PARITY_STUDY, "softmax", rates.TUNING, steps=2, B=2, tested=4)
    return measure(EXPERIMENTS["parity"], case, "cpu")


@pytest.fixture
def make(measured):
    """Makes a record of an arm, a seed, a loss on the validation part, a rate, and changes of the case."""

    def made(arm, seed, nats, rate=0.01, **changes):
        looks = [{"step": step, "loss_nats": nats + 1 / step - 0.5} for step in (1, 2)]
        case = measured["configuration"] | {"arm": arm, "seed": seed, "rate": rate, **changes}
        return measured | {"configuration": case, "facts": measured["facts"] | {"validation": looks}}

    return made


@pytest.fixture
def tuning(make):
    return [make("linear", rates.TUNING, nats, rate) for nats, rate in ((1.0, 0.01), (1.5, 0.03))]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The file to which the rates are written."""
    monkeypatch.setattr(rates, "TABLE", tmp_path / "rates.json")
    rates.table.cache_clear()
    yield rates.TABLE
    rates.table.cache_clear()


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({3e-3: 0.4, 1e-2: 0.3}, 1e-2),
        ({3e-3: 0.3, 1e-2: 0.4}, 3e-3),
        ({1e-2: 1.0, 3e-3: 1.004}, 3e-3),
        ({0.1: 2.0}, 0.1),
    ],
)
def test_the_lowest_loss_chooses_the_rate_and_of_equals_the_lowest_rate(losses, rate):
    assert rates.best(losses) == rate


def test_the_lowest_loss_on_the_validation_part_chooses_and_only_at_the_tuning_seed(make, tuning):
    (chosen,) = rates.choose(tuning).items()
    assert chosen[1] == 0.01 and "arm=linear" in chosen[0]
    counting = [make("linear", seed, 0.1, 0.03) for seed in (1, 2)]
    assert rates.choose([*tuning, *counting]) == rates.choose(tuning)
    assert rates.choose(counting) == {} == rates.choose(tuning[:1])
    tuning[1]["facts"]["validation"][0]["loss_nats"] = 0.1  # an early look is as good as a late one
    assert list(rates.choose(tuning).values()) == [0.03]


def test_where_nobody_looked_at_the_validation_part_the_training_loss_chooses(tuning):
    for record, last in zip(tuning, (0.9, 0.5), strict=True):
        record["facts"] |= {"validation": [], "loss": [0.1, last]}
    assert list(rates.choose(tuning).values()) == [0.03]


def test_a_rate_is_chosen_for_all_that_a_case_is_told(make):
    found = [
        make("linear", rates.TUNING, 1.0 if rate == better else 2.0, rate, steps=steps)
        for steps, better in zip((2, 9), RATES, strict=True)
        for rate in RATES
    ]
    rule = [make("linear", rates.TUNING, 1.0, rate, decision_margin=0.9) for rate in RATES]
    assert sorted(rates.choose(found).values()) == [0.01, 0.03]
    assert set(rates.choose(rule)) < set(rates.choose(found)), "the rule of judgement has no part in it"


def test_losses_of_two_devices_are_not_compared(make, tuning):
    """One rate from each device gives no choice; if both devices have all rates, the CPU's choice counts."""
    theirs = [make("linear", rates.TUNING, *one) | {"device": "nvidia-h200"} for one in ((2.0, 0.01), (1.0, 0.03))]
    assert rates.choose([tuning[0], theirs[1]]) == {}
    for order in ([*tuning, *theirs], [*theirs, *tuning]):
        assert list(rates.choose(order).values()) == [0.01]
    assert list(rates.choose([tuning[0], *theirs]).values()) == [0.03]


def test_rates_for_other_widths():
    assert rates.tried((5e-3, 1.5e-2), 64) == (5e-3, 1.5e-2)
    assert rates.tried((5e-3, 1.5e-2), 192) == (1.67e-3, 5e-3)


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


def test_what_is_not_tuned_anew_keeps_its_rate(make, tuning, table, tmp_path):
    rates.write({"parity": tuning})
    before = rates.table()
    rates.write({"parity": tuning[:1], "recall": []})  # one rate alone is no choice
    assert rates.table() == before
    assert tool.main([str(tmp_path)]) == 0 and rates.table() == before, "of a folder without records"
    rates.write({"parity": [make("delta", rates.TUNING, 1.0, rate) for rate in (0.03, 0.1)]})
    assert sorted(rates.table()["parity"].values()) == [0.01, 0.03], "the other arm's stays"
    rates.write({"parity": [make("linear", rates.TUNING, 1.0, rate) for rate in (0.03, 0.1)]})
    assert list(rates.table()["parity"].values()) == [0.03, 0.03], "what is tuned anew is replaced"


def test_the_tool_writes_the_table_from_a_folder_of_records(tuning, table, tmp_path):
    for one in tuning:
        file = records.path(tmp_path, "parity", SLUG, one["configuration"])
        file.parent.mkdir(parents=True, exist_ok=True)
        records.write(file, one)
    assert tool.main([str(tmp_path)]) == 0
    assert {name: list(found.values()) for name, found in rates.table().items()} == {"parity": [0.01]}
    before = table.read_bytes()
    assert tool.main([str(tmp_path)]) == 0 and table.read_bytes() == before


@pytest.mark.bad_input
def test_the_tool_refuses_what_is_no_folder_of_records(table, tmp_path, capsys):
    rates.TABLE.write_text('{"bytes": {"arm=frozen": 0.01}}')
    assert tool.main(["a", "b"]) == 2 and "python -m tools.rates [DIR]" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "missing")]) == 2
    assert "DIR: expected a folder, got" in capsys.readouterr().err
    file = records.path(tmp_path, "bytes", SLUG, {"device": "cpu"})
    file.parent.mkdir(parents=True)
    file.write_text("[{}]")
    assert tool.main([str(tmp_path)]) == 1
    assert f"{file}: damaged or not a record" in capsys.readouterr().err
    assert rates.table() == {"bytes": {"arm=frozen": 0.01}}
