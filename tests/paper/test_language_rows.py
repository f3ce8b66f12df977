"""What is read from the records on bytes: runs over seeds, arms compared pair by pair, the rates, the view."""

import copy
import json
from math import log

import pytest
import torch
from experiment_fakes import SLUG

from ortho.cost.counting import count_step
from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import language, rates
from paper.experiments.learning.arms import arms
from paper.tasks import text
from tools import rates as tool

TINY = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 2, "L": 1, "tested": 4}
LEVEL = [2.0, 2.1, 2.2, 2.3, 2.4]  # bits a byte, over the seeds 1 to 5


@pytest.fixture(scope="module")
def measured():
    parts = text.Parts(*(bytes(range(256)) * count for count in (4, 2, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        return measure(language.BYTES, language.case("learned", 1, **TINY), "cpu")


@pytest.fixture
def make(measured):
    """Makes a record: an arm, its seed, its bits a byte, and what else its case says."""

    def made(arm, seed, bits, rate=0.01, **changes):
        found = copy.deepcopy(measured)
        found["configuration"] |= {"arm": arm, "seed": seed, "rate": rate, **changes}
        found["repetitions"]["test"]["loss_nats"] = [bits * log(2)]
        found["facts"]["validation"] = [{"step": step, "loss_nats": bits * log(2) + 1 / step} for step in (1, 2)]
        found["facts"]["train_s"] = 10.0 + seed
        return found

    return made


@pytest.fixture
def several(make):
    """Two arms, their seeds in no order, and tuning runs among them."""
    ours = [make("frozen", seed, LEVEL[seed - 1] + 0.5) for seed in (3, 1, 5, 2, 4)]
    theirs = [make("learned", seed, LEVEL[seed - 1]) for seed in (5, 4, 3, 2, 1)]
    tuning = [make("frozen", rates.TUNING, bits, rate) for bits, rate in ((1.0, 0.01), (1.5, 0.03))]
    return [*tuning, *ours, *theirs]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Where the rates are written."""
    monkeypatch.setattr(rates, "TABLE", tmp_path / "rates.json")
    rates.table.cache_clear()
    yield rates.TABLE
    rates.table.cache_clear()


def test_runs_are_those_of_an_arm_over_its_seeds_without_the_tuning(several):
    frozen, learned = language.runs(several, SLUG)
    assert (frozen.arm, learned.arm) == ("frozen", "learned")
    assert frozen.seeds == learned.seeds == (1, 2, 3, 4, 5)
    assert learned.values["bits"] == pytest.approx(LEVEL)
    assert frozen.values["bits"] == pytest.approx([bits + 0.5 for bits in LEVEL])
    assert learned.mean("bits") == pytest.approx(2.2)
    assert [step for step, _ in learned.curves[0]] == [1, 2]
    assert [nats for _, nats in learned.curves[1]] == pytest.approx([2.1 * log(2) + 1, 2.1 * log(2) + 0.5])
    assert learned.configuration["rate"] == 0.01 and "seed" not in learned.configuration
    assert language.runs(several, "another") == []


def test_flop_are_those_that_are_counted_and_parameters_those_that_are_stored(several, measured):
    learned = language.by_arm(several, SLUG)["learned"]
    model = arms(2, 16)["learned"].build(256, 16, 1)
    counted = count_step(model, torch.zeros(2, 16, dtype=torch.long))
    assert learned.flop == learned.configuration["steps"] * (counted.forward + counted.backward)
    assert learned.parameters == counted.trained == measured["facts"]["parameters"]


def test_budgets_are_the_multiples_of_the_steps_at_equal_flop():
    for arm in language.few(2):
        for steps, multiple in ((150, 0.25), (600, 1.0), (2400, 4.0)):
            for d in (16, 32):
                assert language.budget(language.case(arm, 1, **{**TINY, "steps": steps, "d": d})) == multiple
    with pytest.raises(ValueError, match="steps: expected those of a budget .* for 'learned', got 151"):
        language.budget(language.case("learned", 1, **{**TINY, "steps": 151}))


def test_runs_that_differ_in_more_than_the_seed_are_kept_apart(several, make):
    several += [make("learned", seed, 1.0, steps=9) for seed in (1, 2)]
    assert [len(one.seeds) for one in language.runs(several, SLUG)] == [5, 5, 2]
    assert [one.mean("bits") for one in language.runs(several, SLUG, steps=9)] == pytest.approx([1.0])
    assert set(language.by_arm(several, SLUG, steps=2)) == {"frozen", "learned"}
    with pytest.raises(ValueError, match="wanted: expected runs of 'learned' that differ in the seed alone, got {}"):
        language.by_arm(several, SLUG)


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ([0.5] * 5, "worse"),
        ([-0.06] * 5, "better"),
        ([0.04, -0.01, 0.02, 0.0, 0.01], "equivalent"),
        ([-0.4, 0.04, 0.04, 0.04, 0.04], "not worse"),
        ([0.4, -0.04, -0.04, -0.04, -0.04], "not better"),
        ([-0.3, 0.3, -0.2, 0.2, 0.0], "undecided"),
    ],
)
def test_an_arm_is_judged_by_the_rule_in_its_record_pair_by_pair(make, more, outcome):
    """The level of a seed differs by more than the arms do, so that only pairs can show what these are."""
    records = [make("learned", seed, LEVEL[seed - 1]) for seed in (1, 2, 3, 4, 5)]
    records += [make("frozen", seed, LEVEL[seed - 1] + more[seed - 1]) for seed in (4, 2, 5, 1, 3)]
    found = language.by_arm(records, SLUG)
    judged = language.judged(found["frozen"], found["learned"])
    assert (judged.outcome, judged.pairs) == (outcome, 5)
    assert judged.difference.mean == pytest.approx(sum(more) / 5)
    low, high = judged.difference.interval
    assert min(more) - 1e-9 <= low <= high <= max(more) + 1e-9  # no resample's mean lies outside


def test_the_margin_is_that_of_the_records(make):
    records = [make("learned", seed, LEVEL[seed - 1], decision_margin=0.2) for seed in (1, 2, 3, 4, 5)]
    records += [make("frozen", seed, LEVEL[seed - 1] + 0.1, decision_margin=0.2) for seed in (1, 2, 3, 4, 5)]
    found = language.by_arm(records, SLUG)
    assert language.judged(found["frozen"], found["learned"]).outcome == "equivalent"


def test_only_seeds_that_both_have_are_compared(make):
    def arm(name, seeds, more):
        return language.by_arm([make(name, s, LEVEL[s - 1] + more) for s in seeds], SLUG)[name]

    learned = arm("learned", (1, 2, 3), 0.0)
    assert language.judged(arm("frozen", (3, 4, 5), 0.5), learned) is None
    judged = language.judged(arm("frozen", (2, 3, 4, 5), 0.5), learned)
    assert judged.pairs == 2 and judged.difference.mean == pytest.approx(0.5)


def test_the_view_says_means_ranges_and_settings_the_best_first(several, tmp_path, capsys):
    records.write(records.path(tmp_path, "bytes", SLUG), several)
    assert experiments.main(["--show", "bytes", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    learned, frozen = (next(i for i, line in enumerate(lines) if line.startswith(arm)) for arm in ("learned", "frozen"))
    assert learned < frozen
    assert "2.2000 [2.0000, 2.4000]  5 seeds, matched flop, d=16, 2 steps" in lines[learned]
    assert "2.7000 [2.5000, 2.9000]  5 seeds" in lines[frozen]
    assert "rates chosen: 1" in lines
    assert language.line(several[-1]) == "2.0000 bits a byte, 11 s"


def test_the_lowest_loss_on_the_validation_part_chooses_and_only_at_the_tuning_seed(make):
    tuning = [make("frozen", rates.TUNING, bits, rate) for bits, rate in ((1.0, 0.01), (1.5, 0.03))]
    (chosen,) = rates.choose(tuning).items()
    assert chosen[1] == 0.01 and "arm=frozen" in chosen[0]
    counting = [make("frozen", seed, 0.1, 0.03) for seed in (1, 2)]
    assert rates.choose([*tuning, *counting]) == rates.choose(tuning)
    assert rates.choose(counting) == {} == rates.choose(tuning[:1])
    tuning[1]["facts"]["validation"][0]["loss_nats"] = 0.1  # an early look is as good as a late one
    assert list(rates.choose(tuning).values()) == [0.03]


def test_where_nobody_looked_at_the_validation_part_the_training_loss_chooses(make):
    tuning = [make("frozen", rates.TUNING, 2.0, rate) for rate in (0.01, 0.03)]
    for record, last in zip(tuning, (0.9, 0.5), strict=True):
        record["facts"] |= {"validation": [], "loss": [0.1, last]}
    assert list(rates.choose(tuning).values()) == [0.03]


def test_a_rate_is_chosen_for_all_that_a_case_is_told(make):
    tuning = [
        make("frozen", rates.TUNING, bits, rate, steps=steps)
        for steps, better in ((2, 0.01), (9, 0.03))
        for rate in (0.01, 0.03)
        for bits in (1.0 if rate == better else 2.0,)
    ]
    rule = [make("frozen", rates.TUNING, 1.0, rate, decision_margin=0.9) for rate in (0.01, 0.03)]
    assert sorted(rates.choose(tuning).values()) == [0.01, 0.03]
    assert set(rates.choose(rule)) < set(rates.choose(tuning)), "the rule of judgement has no part in it"


def test_losses_of_two_devices_are_not_compared(make):
    """One rate of each device is no choice; where both have all, the CPU's word is the last."""
    ours = [make("frozen", rates.TUNING, bits, rate) for bits, rate in ((1.0, 0.01), (2.0, 0.03))]
    theirs = [make("frozen", rates.TUNING, bits, rate) for bits, rate in ((2.0, 0.01), (1.0, 0.03))]
    for record in theirs:
        record["device"] = "nvidia-h200"
    assert rates.choose([ours[0], theirs[1]]) == {}
    for order in ([*ours, *theirs], [*theirs, *ours]):
        assert list(rates.choose(order).values()) == [0.01]
    assert list(rates.choose([ours[0], *theirs]).values()) == [0.03]


def test_rates_for_other_widths():
    assert rates.tried((5e-3, 1.5e-2), 64) == (5e-3, 1.5e-2)
    assert rates.tried((5e-3, 1.5e-2), 192) == (1.67e-3, 5e-3)


def test_what_is_written_is_what_is_asked_for(several, table):
    case = {**several[0]["configuration"], "seed": 3, "rate": 0.5}
    assert rates.chosen("bytes", case) is None
    rates.write({"bytes": several, "bytes-little": []})
    assert rates.chosen("bytes", case) == 0.01
    assert rates.chosen("bytes-little", case) is None and rates.chosen("bytes", {**case, "d": 32}) is None
    assert list(json.loads(table.read_text())) == ["bytes"]
    rates.write({"bytes-budgets": several})
    assert set(rates.table()) == {"bytes", "bytes-budgets"}, "others' stay"


def test_what_is_not_tuned_anew_keeps_its_rate(several, make, table, tmp_path):
    rates.write({"bytes": several})
    before = rates.table()
    rates.write({"bytes": several[2:], "bytes-little": []})  # no run chooses a rate
    assert rates.table() == before
    assert tool.main([str(tmp_path)]) == 0 and rates.table() == before, "of a folder without records"
    rates.write({"bytes": [make("learned", rates.TUNING, 1.0, rate) for rate in (0.03, 0.1)]})
    assert sorted(rates.table()["bytes"].values()) == [0.01, 0.03], "the other arm's stays"
    rates.write({"bytes": [make("frozen", rates.TUNING, 1.0, rate) for rate in (0.03, 0.1)]})
    assert list(rates.table()["bytes"].values()) == [0.03, 0.03], "what is tuned anew is replaced"


def test_the_tool_writes_the_table_from_a_folder_of_records(several, table, tmp_path, capsys):
    records.write(records.path(tmp_path, "bytes", SLUG), several)
    assert tool.main([str(tmp_path)]) == 0
    assert {name: list(found.values()) for name, found in rates.table().items()} == {"bytes": [0.01]}
    before = table.read_bytes()
    assert tool.main([str(tmp_path)]) == 0 and table.read_bytes() == before


@pytest.mark.bad_input
def test_the_tool_refuses_what_is_no_folder_of_records(table, tmp_path, capsys):
    rates.TABLE.write_text('{"bytes": {"arm=frozen": 0.01}}')
    assert tool.main(["a", "b"]) == 2 and "python tools/rates.py [DIR]" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "missing")]) == 2
    assert "DIR: expected a folder, got" in capsys.readouterr().err
    records.path(tmp_path, "bytes", SLUG).parent.mkdir()
    records.path(tmp_path, "bytes", SLUG).write_text("[{}]")
    assert tool.main([str(tmp_path)]) == 1
    assert f"{SLUG}.json: damaged or not a file of records" in capsys.readouterr().err
    assert rates.table() == {"bytes": {"arm=frozen": 0.01}}
