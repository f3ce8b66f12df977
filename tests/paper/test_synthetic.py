"""The experiment on synthetic tasks: its cases, a whole record of each task, what its records say."""

import copy
import dataclasses

import pytest
import torch
from experiment_fakes import SLUG, go, within

from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import rates, synthetic

EXPERIMENT = experiments.EXPERIMENTS["synthetic"]
TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 4}


def tiny(task="induction", arm="learned", seed=1):
    return synthetic.case(task, arm, seed, **TINY)


@pytest.mark.parametrize("task", synthetic.SETTINGS)
def test_a_run_is_stored_whole(task, tmp_path):
    report = go(dataclasses.replace(EXPERIMENT, cases=lambda _: [tiny(task)]), tmp_path)
    assert not report.errors
    (record,) = records.read(records.path(tmp_path, "synthetic", SLUG), EXPERIMENT.needs)
    assert list(record["repetitions"]) == list(synthetic.task(task).tests)
    assert len(record["facts"]["loss"]) == 2 and record["facts"]["kinds"]["heads"] == "4 learned"
    assert EXPERIMENT.line(record) and task in EXPERIMENT.show([record])


def test_every_arm_tries_every_rate_and_has_every_seed_once_its_rate_is_chosen(monkeypatch):
    pairs = len(synthetic.SETTINGS) * len(synthetic.ARMS)
    monkeypatch.setattr(rates, "table", dict)
    tuning = synthetic.cases("cpu")
    assert {(case["seed"], case["rate"]) for case in tuning} == {(rates.TUNING, rate) for rate in synthetic.TRIED}
    assert len(tuning) == pairs * len(synthetic.TRIED)
    monkeypatch.setattr(rates, "chosen", lambda *_: 3e-3)
    cases = synthetic.cases("cpu")
    assert cases[: len(tuning)] == tuning
    assert len(cases) == len({records.key(case) for case in cases}) == pairs * (len(synthetic.TRIED) + 10)
    assert {case["rate"] for case in cases[len(tuning) :]} == {3e-3}


def test_the_arms_of_a_seed_share_their_batches():
    one, other = (synthetic.seeds_of(tiny(arm=arm)) for arm in ("learned", "frozen"))
    assert {part for part in one if one[part] != other[part]} == {"weights"}
    assert not set(one.values()) & set(synthetic.seeds_of(tiny(seed=2)).values())
    assert not set(one.values()) & set(synthetic.seeds_of(tiny("copying")).values())


def test_the_sources_are_all_that_a_run_runs():
    for task in synthetic.SETTINGS:
        for arm in synthetic.ARMS if task == "induction" else ("learned",):
            synthetic.run(tiny(task, arm))  # what is imported late, or made once, need not be watched
            synthetic.task.cache_clear()
            with within(EXPERIMENT):
                synthetic.run(tiny(task, arm))


def record(measured, arm, seed, correct, looks):
    found = copy.deepcopy(measured)
    found["configuration"] |= {"arm": arm, "seed": seed}
    found["repetitions"]["hops: 1"]["correct_fraction"] = [correct]
    found["facts"]["validation"] = [
        {"step": 10 * (i + 1), "correct_fraction": look, "faultless_fraction": 0.0, "loss_nats": 1.0}
        for i, look in enumerate(looks)
    ]
    return found


def test_what_was_learnt_how_often_and_when():
    measured = measure(EXPERIMENT, tiny(), "cpu")
    found = synthetic.learnt(
        [
            record(measured, "learned", 3, 0.95, [0.2, 0.91, 0.95]),
            record(measured, "learned", 1, 0.90, [0.2, 0.5, 0.89]),  # no look was as good as the test
            record(measured, "learned", 2, 0.89, [0.2, 0.95, 0.89]),  # no success in the end
            record(measured, "learned", rates.TUNING, 1.0, [1.0]),
            record(measured, "frozen", 1, 0.1, [0.1]),
        ],
        SLUG,
    )
    learned = found["induction"]["learned"]
    assert learned.seeds == (1, 2, 3) and learned.correct == (0.90, 0.89, 0.95)
    assert learned.steps == (measured["configuration"]["steps"], None, 20)
    assert learned.successes == 2 and 0.05 < learned.rate[0] < 2 / 3 < learned.rate[1] < 1
    assert found["induction"]["frozen"].successes == 0
    assert synthetic.learnt([measured], "another") == {}


BAD = [
    (lambda: synthetic.case("chess", "learned"), ValueError, "task: expected one of 'induction'"),
    (lambda: synthetic.case("mqar", "best"), ValueError, "arm: expected one of 'learned'"),
    (lambda: synthetic.case("mqar", "learned", device="tpu"), ValueError, "device: expected one of 'cpu', 'cuda'"),
    (lambda: synthetic.case("mqar", "learned", steps=0), ValueError, "steps: expected an integer of at least 1, got 0"),
    (lambda: synthetic.case("mqar", "learned", width=3), TypeError, "sizes: expected some of steps, B, .*, got width"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_cases(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_case_runs_on_cuda():
    assert measure(EXPERIMENT, synthetic.case("mqar", "learned", 1, device="cuda", **TINY), "cuda")["repetitions"]
