"""What is read from the training records: results over seeds, arms compared by ranks and in pairs, and the tables."""

from math import log

import pytest
from experiment_fakes import made_up

from paper.experiments.learning import analysis, language, rates, studies, study, synthetic

TWO = log(2)  # nats in a bit
LEVEL = [2.0, 2.1, 2.2, 2.3, 2.4]  # bits a byte, over the seeds 1 to 5
SEEDS = (1, 2, 3, 4, 5)


def record(name, case, tests, **facts):
    """A record of a run: its case, and test -> (share of right answers, nats)."""
    found = {
        test: {"correct_fraction": [correct], "faultless_fraction": [correct / 2], "loss_nats": [nats]}
        for test, (correct, nats) in tests.items()
    }
    return made_up(name, case, found, device="here", **facts)


# ------------------------------------------------------------------------------------------------- independent runs

NEAR = "tokens 1 to 40"


def parity(arm, seed, correct, *, rate=3e-3, last=0.5, **changes):
    case = study.case(studies.PARITY_STUDY, arm, seed, rate, steps=2) | changes
    return record("parity", case, {NEAR: (correct, 0.1), "tokens 41 to 80": (0.5, 0.2)}, loss=[1.0, last])


@pytest.fixture
def several():
    """Runs whose seeds are out of order, with the tuning seed's runs among them."""
    good = [parity("delta", seed, 0.9 + seed / 100) for seed in (3, 1, 2)]
    bad = [parity("linear", seed, 0.5 + seed / 100) for seed in (1, 2, 3)]
    tuning = [parity("linear", 0, 0.99, rate=rate, last=loss) for rate, loss in ((3e-3, 0.4), (1e-2, 0.3))]
    return [*tuning, *good, *bad]


def test_rows_are_over_the_seeds_that_count(several):
    found = analysis.results(several, "here")
    row = found["linear"][NEAR]
    assert row["seeds"] == [1, 2, 3]
    assert row["correct"] == [0.51, 0.52, 0.53]
    assert (row["low"], row["median"], row["high"]) == (0.51, 0.52, 0.53)
    assert found["delta"][NEAR]["correct"] == [0.91, 0.92, 0.93]
    assert (row["device"], row["N"], row["rate"]) == ("here", 40, 3e-3)
    assert analysis.tuning(several, "here") == {"linear": {3e-3: 0.4, 1e-2: 0.3}}
    assert analysis.results(several, "another") == analysis.tuning(several, "another") == {}
    several.append(parity("linear", 4, 0.5, steps=3))
    with pytest.raises(ValueError, match="records: expected runs of 'linear' on here that differ in the seed alone"):
        analysis.rows(several)


# --------------------------------------------------------------------------------------------------- runs in pairs


def model(arm, seed, bits, rate=0.01, **changes):
    """A run on bytes."""
    sizes = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 2, "L": 1, "tested": 4}
    evaluations = [{"step": step, "loss_nats": bits * TWO + 1 / step} for step in (1, 2)]
    case = language.case(arm, seed, rate, matched="steps", **sizes) | changes
    return record("bytes", case, {"test": (0.5, bits * TWO)}, validation=evaluations)


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
def test_an_arm_is_judged_by_the_rule_in_its_record_pair_by_pair(more, outcome):
    """Seeds differ in level by more than the arms do, so that only pairs of runs can show how the arms differ."""
    runs = [model("learned", seed, LEVEL[seed - 1]) for seed in SEEDS]
    runs += [model("frozen", seed, LEVEL[seed - 1] + more[seed - 1]) for seed in (4, 2, 5, 1, 3)]
    found = language.by_arm(runs, "here")
    judged = language.judged(found["frozen"], found["learned"])
    assert (judged.outcome, judged.pairs) == (outcome, 5)
    assert judged.difference.mean == pytest.approx(sum(more) / 5)
    low, high = judged.difference.interval
    assert min(more) - 1e-9 <= low <= high <= max(more) + 1e-9  # no resample's mean lies outside
    wide = [run | {"configuration": run["configuration"] | {"decision_margin": 9.0}} for run in runs]
    found = language.by_arm(wide, "here")
    assert language.judged(found["frozen"], found["learned"]).outcome == "equivalent"


def test_only_seeds_that_both_have_are_compared():
    def arm(name, seeds, more):
        return language.by_arm([model(name, s, LEVEL[s - 1] + more * s) for s in seeds], "here")[name]

    learned = arm("learned", (1, 2, 3), 0.0)
    assert language.judged(arm("frozen", (3, 4, 5), 0.5), learned) is None
    judged = language.judged(arm("frozen", (2, 3, 4, 5), 0.5), learned)
    assert judged.pairs == 2 and judged.difference.mean == pytest.approx(1.25)
    every, other = arm("learned", SEEDS, 0.0), arm("frozen", SEEDS, 0.5)
    one, surer = (analysis.paired(other, every, "bits", confidence) for confidence in (0.5, 0.9))
    assert surer.interval[0] <= one.interval[0] <= one.interval[1] <= surer.interval[1] != one.interval[1]


def test_what_was_learnt_how_often_and_when():
    def run(arm, seed, correct, shares):
        seen = [{"step": 10 * (i + 1), "correct_fraction": share, "loss_nats": 1.0} for i, share in enumerate(shares)]
        case = synthetic.case("induction", arm, seed, steps=40)
        return record("synthetic", case, {"hops: 1": (correct, 0.5)}, validation=seen)

    runs = [
        run("learned", 3, 0.95, [0.2, 0.91, 0.95]),
        run("learned", 1, 0.90, [0.2, 0.5, 0.89]),  # no evaluation was as good as the test
        run("learned", 2, 0.89, [0.2, 0.95, 0.89]),  # no success in the end
        run("learned", rates.TUNING, 1.0, [1.0]),
        run("frozen", 1, 0.1, [0.1]),
    ]
    found = synthetic.learnt(runs, "here")
    learned = found["induction"]["learned"]
    assert learned.seeds == (1, 2, 3) and learned.correct == (0.90, 0.89, 0.95)
    assert learned.steps == (40, None, 20)
    assert learned.successes == 2 and 0.05 < learned.rate[0] < 2 / 3 < learned.rate[1] < 1
    assert found["induction"]["frozen"].successes == 0
    assert synthetic.learnt(runs, "another") == {}
