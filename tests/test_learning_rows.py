"""What is read from the records of learning: over seeds, the rates, the exact test, the view."""

import copy
import itertools
import math
import random

import pytest
from experiment_fakes import SLUG

from ortho import experiments
from ortho.experiments import learning, learning_rows, measure, records
from ortho.experiments import state_tracking as tracking

TEST = "tokens 1 to 40"
TINY = {"steps": 2, "B": 2, "tested": 4}


@pytest.fixture(scope="module")
def measured():
    case = learning.case(tracking.PARITY_TASK, "softmax", 1, **TINY)
    return measure(experiments.EXPERIMENTS["parity"], case, "cpu")


def record(measured, arm, seed, correct, *, rate=3e-3, loss=0.5, **changes):
    found = copy.deepcopy(measured)
    found["configuration"] |= {"arm": arm, "seed": seed, "rate": rate, **changes}
    found["repetitions"][TEST] = {"correct_fraction": [correct], "faultless_fraction": [correct / 2]}
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
    found = learning_rows.results(several, SLUG)
    row = found["linear"][TEST]
    assert row["seeds"] == [1, 2, 3]
    assert row["correct"] == [0.51, 0.52, 0.53]
    assert row["faultless"] == [0.255, 0.26, 0.265]
    assert (row["low"], row["median"], row["high"]) == (0.51, 0.52, 0.53)
    assert found["delta"][TEST]["correct"] == [0.91, 0.92, 0.93]
    assert (row["device"], row["N"], row["rate"]) == (SLUG, 40, 3e-3)
    assert learning_rows.results(several, "another") == {}


def test_runs_that_differ_in_more_than_the_seed_are_not_put_together(several, measured):
    several.append(record(measured, "linear", 4, 0.5, steps=3))
    with pytest.raises(ValueError, match=f"records: expected runs of 'linear' on {SLUG} that differ in the seed alone"):
        learning_rows.rows(several)


def test_curves_and_tuning_are_told_apart(several):
    assert learning_rows.curves(several, SLUG) == {"delta": [[1.0, 0.5]] * 3, "linear": [[1.0, 0.5]] * 3}
    assert learning_rows.tuning(several, SLUG) == {"linear": {3e-3: 0.4, 1e-2: 0.3}}
    assert learning_rows.curves(several, "another") == learning_rows.tuning(several, "another") == {}


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ({3e-3: 0.4, 1e-2: 0.3}, 1e-2),
        ({3e-3: 0.3, 1e-2: 0.4}, 3e-3),
        ({1e-2: 1.0, 3e-3: 1.04}, 3e-3),
        ({0.1: 2.0}, 0.1),
    ],
)
def test_the_lowest_loss_chooses_the_rate_and_of_equals_the_lowest_rate(losses, rate):
    assert learning_rows.chosen(losses) == rate


@pytest.mark.parametrize(
    ("better", "worse", "chance"),
    [
        ([1.0] * 5, [0.5] * 5, 1 / 252),
        ([0.9, 0.8, 0.7, 0.6, 0.4], [0.5, 0.3, 0.2, 0.1, 0.0], 2 / 252),
        ([0.5] * 5, [0.5] * 5, 1),
        ([0.1], [0.2], 1),
        ([0.2], [0.1], 1 / 2),
        ([2, 3], [1, 1], 1 / 6),
        ([2, 1], [1, 1], 1 / 2),  # the 2 is in the better arm
        ([0.0, 0.1], [0.2, 0.3], 1),
        ([0, 2], [1, 1], 4 / 6),  # equal values share the middle rank: 2.5 each
    ],
)
def test_the_probability_of_ranking_as_high_by_chance(better, worse, chance):
    assert learning_rows.better_by_chance(better, worse) == pytest.approx(chance, abs=1e-12)


def test_it_is_right_as_often_as_it_says():
    """Of all ways to deal the same values to two arms, at most a share p has a probability of at most p."""
    draw = random.Random(0)
    for _ in range(20):
        values = [draw.randrange(6) for _ in range(8)]
        found = [
            learning_rows.better_by_chance(
                [values[i] for i in chosen], [v for i, v in enumerate(values) if i not in chosen]
            )
            for chosen in itertools.combinations(range(8), 4)
        ]
        for p in set(found):
            assert sum(other <= p for other in found) <= p * len(found) + 1e-9


@pytest.mark.parametrize(
    ("better", "worse", "chance", "ends"),
    [
        ([6, 7, 8], [1, 2, 3], 1 / 20, (3, 7)),  # one choice of 20 separates the arms
        ([6, 7, 8], [1, 2, 3], 2 / 20, (4, 6)),  # of 3, 4, 4, 5, 5, 5, 6, 6, 7 the second and the last but one
        ([6, 7, 8], [1, 2, 3], 0.049, (-math.inf, math.inf)),
        ([1, 2, 3], [1, 2, 3], 1 / 20, (-2, 2)),
        ([1], [0], 0.4, (-math.inf, math.inf)),
    ],
)
def test_the_interval_of_a_gain(better, worse, chance, ends):
    assert learning_rows.gain(better, worse, chance) == ends
    assert learning_rows.gain(worse, better, chance) == (-ends[1], -ends[0])


def test_the_interval_is_the_exact_test():
    """Without equal values it lies above 0 exactly where the test's probability is within the chance; with equal ones
    no more often than that."""
    draw = random.Random(1)
    for values in ([*range(9)], [draw.randrange(5) for _ in range(9)]):
        for chance in (0.01, 0.05, 0.2):
            above = 0
            deals = list(itertools.combinations(range(9), 4))
            for chosen in deals:
                arms = [values[i] for i in chosen], [v for i, v in enumerate(values) if i not in chosen]
                shown = learning_rows.gain(*arms, chance)[0] > 0
                above += shown
                if len(set(values)) == len(values):
                    assert shown == (learning_rows.better_by_chance(*arms) <= chance)
            assert above <= chance * len(deals) + 1e-9


def test_two_arms_compared(several):
    found = learning_rows.results(several, SLUG)
    pair = learning_rows.compare(found, TEST, "delta", "linear")
    assert pair == {"difference": pytest.approx(0.4), "by_chance": 1 / 20}
    assert learning_rows.compare(found, TEST, "linear", "delta")["by_chance"] == 1


def test_better_needs_more_the_more_is_compared():
    """A positive difference is not enough, and 1 / 252, the least of five runs against five, does for twelve."""
    pair = {"difference": 0.1, "by_chance": 1 / 252}
    assert [learning_rows.is_better(pair, comparisons) for comparisons in (1, 12, 13)] == [True, True, False]
    assert not learning_rows.is_better({"difference": 0.1, "by_chance": 0.3}, 1)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda found: learning_rows.compare(found, TEST, "delta", "kda"), f"results: expected 'kda' with .*'{TEST}'"),
        (
            lambda found: learning_rows.compare(found, "all", "delta", "linear"),
            "results: expected 'delta' with .*'all'",
        ),
        (lambda _: learning_rows.better_by_chance([], [1.0]), "at least one value each, got 0 and 1"),
        (lambda _: learning_rows.gain([1.0], [], 0.1), "at least one value each, got 1 and 0"),
        (lambda _: learning_rows.gain([1.0], [1.0], 0.5), r"chance: expected a probability in \(0, 1/2\), got 0.5"),
    ],
)
def test_what_was_not_measured_is_not_compared(several, call, message):
    with pytest.raises(ValueError, match=message):
        call(learning_rows.results(several, SLUG))


def test_the_view_prints_medians_ranges_and_rates(several, tmp_path, capsys):
    records.write(records.path(tmp_path, "parity", SLUG), several)
    assert experiments.main(["--show", "parity", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "linear" in text and "0.520 [0.510, 0.530]  3 seeds, rate 0.003" in text
    assert "training loss of the tuning seed: 0.4000 at 0.003, 0.3000 at 0.01" in text
    assert "earlier state of the code" not in text
    assert "tokens 1 to 40 0.990" in learning_rows.line(several[0])
