"""What the records of arms paired by seed say, those of `images` and of `fine-tuning`: over seeds, and pair by pair."""

import copy

import pytest
from experiment_fakes import SLUG

from paper.experiments import measure
from paper.experiments.learning import analysis, fine_tuning, images, rates

SEEDS = (1, 2, 3, 4, 5)
TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 8}


@pytest.fixture(scope="module")
def measured():
    return measure(images.IMAGES, images.case("learned", 1, **TINY), "cpu")


def record(measured, arm, seed, correct, **changes):
    found = copy.deepcopy(measured)
    found["configuration"] |= {"arm": arm, "seed": seed, **changes}
    found["repetitions"]["test"] = {
        "correct_fraction": [correct],
        "faultless_fraction": [correct],
        "loss_nats": [1 - correct],
    }
    return found


@pytest.fixture
def several(measured):
    """Seeds out of order, the tuning seed's runs and other images among them."""
    good = [record(measured, "learned", seed, 0.9 + seed / 1000) for seed in (3, 1, 2, 5, 4)]
    like = [record(measured, "linear", seed, 0.904 + seed / 1000) for seed in (1, 2, 3, 4, 5)]
    bad = [record(measured, "frozen", seed, 0.8 + seed / 1000 + (seed == 2) / 1000) for seed in (1, 2, 3, 4, 5, 6)]
    tuning = [record(measured, "learned", rates.TUNING, 0.1, rate=rate) for rate in (0.1, 0.2)]
    return [*tuning, *good, *like, *bad, record(measured, "learned", 1, 0.4, data="cifar10")]


def test_rows_are_of_the_runs_that_count(several):
    found = images.by_arm(several, SLUG)
    assert list(found) == ["learned", "linear", "frozen"]
    one = found["learned"]
    assert one.seeds == (1, 2, 3, 4, 5)
    assert one.values["correct"] == (0.901, 0.902, 0.903, 0.904, 0.905)
    assert one.values["loss"] == pytest.approx((0.099, 0.098, 0.097, 0.096, 0.095))
    assert one.mean("correct") == pytest.approx(0.903)
    assert "seed" not in one.configuration
    assert images.by_arm(several, SLUG, "cifar10")["learned"].values["correct"] == (0.4,)
    assert images.by_arm(several, "abacus") == {}


def test_arms_are_judged_pair_by_pair(several):
    found = images.by_arm(several, SLUG)
    like = images.judged(found["linear"], found["learned"])
    assert (like.pairs, like.outcome) == (5, "equivalent")
    assert like.difference.mean == pytest.approx(0.004)
    worse = images.judged(found["frozen"], found["learned"])
    assert (worse.pairs, worse.outcome) == (5, "worse")
    assert worse.difference.mean == pytest.approx(-0.0998)
    assert images.judged(found["learned"], found["frozen"]).outcome == "better"
    few = images.by_arm(several, SLUG, "cifar10")["learned"]
    assert images.judged(few, found["learned"]) is None
    # Of a loss lower is better, so that the rule, which is for shares, is told of shares alone.
    assert analysis.judged(found["frozen"], found["learned"], "loss").difference.mean == pytest.approx(0.0998)


def test_a_difference_is_of_the_seeds_that_both_have(several):
    found = images.by_arm(several, SLUG)
    frozen, learned = found["frozen"], found["learned"]  # of six seeds and of five
    one, surer = (analysis.paired(frozen, learned, "correct", confidence) for confidence in (0.5, 0.9))
    assert one.mean == surer.mean == pytest.approx(-0.0998)
    assert one == analysis.paired(frozen._replace(seeds=(1, 2, 3, 4, 5, 9)), learned, "correct", 0.5)
    assert surer.interval[0] <= one.interval[0] <= one.interval[1] <= surer.interval[1] != one.interval[1]
    assert analysis.paired(images.by_arm(several, SLUG, "cifar10")["learned"], learned, "correct", 0.5) is None


def test_runs_that_differ_in_more_than_the_seed_are_not_put_together(several, measured):
    several.append(record(measured, "linear", 6, 0.5, steps=3))
    with pytest.raises(ValueError, match="wanted: expected runs of 'linear' that differ in the seed alone"):
        images.by_arm(several, SLUG)


def test_the_table(several):
    lines = images.IMAGES.show(several).splitlines()
    assert lines[1].startswith(f"digits on {SLUG}")
    assert [line[:8].strip() for line in lines[2:5]] == ["linear", "learned", "frozen"]
    assert "0.9070 [0.9050, 0.9090]" in lines[2] and "against 'learned': equivalent" in lines[2]
    assert "against" not in lines[3]
    assert lines[4].endswith("against 'learned': worse")
    assert lines[6].startswith(f"cifar10 on {SLUG}")
    assert lines[-1].startswith("rates chosen: 1")


@pytest.fixture(scope="module")
def tuned():
    return measure(
        fine_tuning.FINE_TUNING, fine_tuning.case("all trained", 1, **{**TINY, "first_steps": 2, "N": 16}), "cpu"
    )


def of_texts(tuned, arm, seed, **nats):
    found = copy.deepcopy(tuned)
    found["configuration"] |= {"arm": arm, "seed": seed}
    for test, values in found["repetitions"].items():
        values["loss_nats"] = [nats.get(test.replace(", ", "_"), 1.0)]
    return found


def test_bits_of_two_texts(tuned):
    two = 0.6931471805599453  # nats in a bit
    several = [
        of_texts(tuned, "all trained", seed, new=seed * two, old=3 * two, old_before=two) for seed in (2, 1, 3, 5, 4)
    ]
    several += [of_texts(tuned, "QK frozen", seed, new=(seed + 0.01) * two) for seed in SEEDS]
    several += [of_texts(tuned, fine_tuning.SCRATCH, seed, new=(seed + 1 + seed / 100) * two) for seed in SEEDS]
    several += [of_texts(tuned, "all trained", rates.TUNING)]
    found = fine_tuning.by_arm(several, SLUG)
    assert list(found) == ["all trained", "QK frozen", fine_tuning.SCRATCH]
    one = found["all trained"]
    assert one.seeds == SEEDS
    assert one.values["new"] == pytest.approx(SEEDS)
    assert one.values["old"] == pytest.approx((3,) * 5)
    assert one.values["forgotten"] == pytest.approx((2,) * 5)
    assert one.values["new, before"] == pytest.approx((1 / two,) * 5)
    like = fine_tuning.judged(found["QK frozen"], one)
    assert (like.outcome, like.pairs) == ("equivalent", 5)
    assert like.difference.mean == pytest.approx(0.01)
    assert fine_tuning.judged(found[fine_tuning.SCRATCH], one).outcome == "worse"
    assert fine_tuning.judged(found["QK frozen"], one, "forgotten").outcome == "better"
    lines = fine_tuning.FINE_TUNING.show(several).splitlines()
    assert [line[:16].strip() for line in lines[2:5]] == list(found)
    assert "against" not in lines[2]
    assert lines[3].endswith("'all trained': equivalent") and lines[4].endswith("'all trained': worse")
