"""What is read from the records of learning: over seeds, the rates, two arms compared, the view."""

import copy

import pytest
from experiment_fakes import SLUG

from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import analysis, rates, studies
from paper.experiments.learning import study as learning

TEST = "tokens 1 to 40"
TINY = {"steps": 2, "B": 2, "tested": 4}


@pytest.fixture(scope="module")
def measured():
    case = learning.case(tracking.PARITY_STUDY, "softmax", 1, **TINY)
    return measure(experiments.EXPERIMENTS["parity"], case, "cpu")


def record(measured, arm, seed, correct, *, rate=3e-3, loss=0.5, **changes):
    found = copy.deepcopy(measured)
    found["configuration"] |= {"arm": arm, "seed": seed, "rate": rate, **changes}
    found["repetitions"][TEST] = {
        "correct_fraction": [correct],
        "faultless_fraction": [correct / 2],
        "loss_nats": [0.1],
    }
    found["facts"]["loss"] = [1.0, loss]
    return found


@pytest.fixture
def several(measured):
    """Seeds out of order, and the tuning seed's runs among them."""
    good = [record(measured, "delta", seed, 0.9 + seed / 100) for seed in (3, 1, 2)]
    bad = [record(measured, "linear", seed, 0.5 + seed / 100) for seed in (1, 2, 3)]
    tuning = [record(measured, "linear", 0, 0.99, rate=rate, loss=loss) for rate, loss in ((3e-3, 0.4), (1e-2, 0.3))]
    return [*tuning, *good, *bad]


def test_rows_are_over_the_seeds_that_count(several):
    found = analysis.results(several, SLUG)
    row = found["linear"][TEST]
    assert row["seeds"] == [1, 2, 3]
    assert row["correct"] == [0.51, 0.52, 0.53]
    assert row["faultless"] == [0.255, 0.26, 0.265]
    assert (row["low"], row["median"], row["high"]) == (0.51, 0.52, 0.53)
    assert found["delta"][TEST]["correct"] == [0.91, 0.92, 0.93]
    assert (row["device"], row["N"], row["rate"]) == (SLUG, 40, 3e-3)
    assert analysis.results(several, "another") == {}


def test_right_answers_in_per_cent():
    assert analysis.per_cent({"low": 0.114, "median": 0.5, "high": 0.996}) == "50 (11\xa0to\xa0100)"
    assert analysis.per_cent({"low": 0.996, "median": 0.998, "high": 1.0}) == "100"  # to the digits shown


def test_runs_that_differ_in_more_than_the_seed_are_not_put_together(several, measured):
    several.append(record(measured, "linear", 4, 0.5, steps=3))
    with pytest.raises(ValueError, match=f"records: expected runs of 'linear' on {SLUG} that differ in the seed alone"):
        analysis.rows(several)


def test_curves_and_tuning_are_told_apart(several):
    assert analysis.curves(several, SLUG) == {"delta": [[1.0, 0.5]] * 3, "linear": [[1.0, 0.5]] * 3}
    assert analysis.tuning(several, SLUG) == {"linear": {3e-3: 0.4, 1e-2: 0.3}}
    assert analysis.curves(several, "another") == analysis.tuning(several, "another") == {}


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


def test_two_arms_compared(several):
    found = analysis.results(several, SLUG)
    pair = analysis.compare(found, TEST, "delta", "linear")
    assert pair == {"difference": pytest.approx(0.4), "by_chance": 1 / 20}
    assert analysis.compare(found, TEST, "linear", "delta")["by_chance"] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda found: analysis.compare(found, TEST, "delta", "kda"), f"results: expected 'kda' with .*'{TEST}'"),
        (
            lambda found: analysis.compare(found, "all", "delta", "linear"),
            "results: expected 'delta' with .*'all'",
        ),
    ],
)
def test_what_was_not_measured_is_not_compared(several, call, message):
    with pytest.raises(ValueError, match=message):
        call(analysis.results(several, SLUG))


def test_the_view_prints_medians_ranges_and_rates(several, tmp_path, capsys):
    records.write(records.path(tmp_path, "parity", SLUG), several)
    assert experiments.main(["--show", "parity", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "linear" in text and "0.520 [0.510, 0.530]  3 seeds, rate 0.003" in text
    assert "loss at the tuning seed: 0.4000 at 0.003, 0.3000 at 0.01" in text
    assert "tokens 1 to 40 0.990" in analysis.line(several[0])
