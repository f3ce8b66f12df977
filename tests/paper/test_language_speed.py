"""The experiment bytes-speed: every arm of the language models trains in turn; what a reader gets."""

import pytest
from experiment_fakes import within

from paper.experiments import measure
from paper.experiments.learning import fitting, language
from paper.experiments.learning.arms import arms
from paper.experiments.speed import language_models as speed
from paper.experiments.speed import language_models_analysis as language_speed_rows
from paper.tasks import text

TINY = {"B": 2, "N": 16, "d": 16, "H": 4, "L": 1}


@pytest.fixture(scope="module", autouse=True)
def little_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * 9)
    parts = text.python_parts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        patch.setattr(speed, "REPETITIONS", (3, 5))
        yield


@pytest.fixture(scope="module")
def measured(little_text):
    """A record, all that ran for it being within the experiment's code."""
    with within(speed.BYTES_SPEED):
        return measure(speed.BYTES_SPEED, speed.case(**TINY), "cpu", seconds=0.01)


def test_every_arm_runs_once_a_repetition(measured):
    record = measured
    assert set(record["repetitions"]) == set(arms(TINY["H"], TINY["N"]))
    assert len(record["facts"]["order"]) == speed.REPETITIONS[0]
    assert all(sorted(order) == sorted(record["repetitions"]) for order in record["facts"]["order"])
    found = language_speed_rows.relative(record)
    assert set(found["learned"]) == {1.0}
    assert all(ratio > 0 for ratios in found.values() for ratio in ratios)
    table = language_speed_rows.table([record])
    assert all(f"{arm} " in table for arm in record["repetitions"])
    assert language_speed_rows.line(record).startswith("learned ")


def made_up(**seconds):
    repetitions = {arm: {"step_s": list(values), "step_cpu_s": list(values)} for arm, values in seconds.items()}
    return {"device": "cpu-abacus", "provenance": {"threads": 1}, "repetitions": repetitions}


def test_times_are_compared_within_repetitions():
    record = made_up(learned=(1.0, 2.0), frozen=(2.0, 3.0), linear=(3.0, 3.0))
    assert language_speed_rows.relative(record) == {"learned": [1, 1], "frozen": [2, 1.5], "linear": [3, 1.5]}
    steps = {"learned": 100, "frozen": 150}
    assert language_speed_rows.relative(record, steps) == {"learned": [1, 1], "frozen": [3, 2.25]}


def test_the_arms_and_sizes_are_those_of_the_language_models():
    for device in fitting.DEVICES:
        (case,) = speed.cases(device)
        runs = language.of_equal_flop(device)
        assert all({name: run[name] for name in case} == case for run in runs)
        assert set(arms(case["H"], case["N"])) == {run["arm"] for run in runs}


def test_an_arm_that_is_off_is_not_timed(monkeypatch):
    right = fitting.assert_close
    monkeypatch.setattr(fitting, "assert_close", lambda what, a, b, bound: right(what, a * (1 + 1e-6), b, bound))
    with pytest.raises(AssertionError, match="fast form"):
        speed.run(speed.case(**TINY), seconds=0.01)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"device": "tpu"}, ValueError), ({"N": 0}, ValueError), ({"d": 1.5}, TypeError), ({"steps": 3}, TypeError)],
)
def test_bad_input(wrong, error):
    with pytest.raises(error, match=f"{'sizes' if 'steps' in wrong else next(iter(wrong))}: expected"):
        speed.case(**{**TINY, **wrong})
