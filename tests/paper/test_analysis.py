"""What is read from the training records: results over seeds, arms compared by ranks and in pairs, and the tables."""

from math import log

import pytest
import torch

from ortho import cost
from paper.experiments.learning import (
    analysis,
    fine_tuning,
    images,
    language,
    rates,
    studies,
    study,
    synthetic,
    translating,
)
from paper.experiments.learning.arms import arms

TWO = log(2)  # nats in a bit
LEVEL = [2.0, 2.1, 2.2, 2.3, 2.4]  # bits a byte, over the seeds 1 to 5
SEEDS = (1, 2, 3, 4, 5)


def record(name, case, tests, **facts):
    """A record of a run: its case, and test -> (share of right answers, nats)."""
    found = {
        test: {"correct_fraction": [correct], "faultless_fraction": [correct / 2], "loss_nats": [nats]}
        for test, (correct, nats) in tests.items()
    }
    facts = {"loss": [1.0, 0.5], "validation": [], "parameters": 10, "train_s": 11.0, **facts}
    own = {"experiment": name, "device": "here", "configuration": case, "provenance": {"device_name": "a machine"}}
    return {**own, "repetitions": found, "facts": facts}


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
    assert row["faultless"] == [0.255, 0.26, 0.265]
    assert (row["low"], row["median"], row["high"]) == (0.51, 0.52, 0.53)
    assert found["delta"][NEAR]["correct"] == [0.91, 0.92, 0.93]
    assert (row["device"], row["N"], row["rate"]) == ("here", 40, 3e-3)
    assert analysis.tuning(several, "here") == {"linear": {3e-3: 0.4, 1e-2: 0.3}}
    assert analysis.results(several, "another") == analysis.tuning(several, "another") == {}
    several.append(parity("linear", 4, 0.5, steps=3))
    with pytest.raises(ValueError, match="records: expected runs of 'linear' on here that differ in the seed alone"):
        analysis.rows(several)


def test_right_answers_in_per_cent():
    assert analysis.per_cent({"low": 0.114, "median": 0.5, "high": 0.996}) == "50 (11\xa0to\xa0100)"
    assert analysis.per_cent({"low": 0.996, "median": 0.998, "high": 1.0}) == "100"  # equal in the digits shown


def test_two_arms_compared(several):
    found = analysis.results(several, "here")
    assert analysis.compare(found, NEAR, "delta", "linear") == {
        "difference": pytest.approx(0.4),
        "by_chance": 1 / 20,
    }
    assert analysis.compare(found, NEAR, "linear", "delta")["by_chance"] == 1
    with pytest.raises(ValueError, match=f"results: expected 'kda' with .*'{NEAR}'"):
        analysis.compare(found, NEAR, "delta", "kda")
    with pytest.raises(ValueError, match="results: expected 'delta' with .*'all'"):
        analysis.compare(found, "all", "delta", "linear")


def test_the_table_has_medians_ranges_and_rates(several):
    text = analysis.table(several)
    assert "linear" in text and "0.520 [0.510, 0.530]  3 seeds, rate 0.003" in text
    assert "loss at the tuning seed: 0.4000 at 0.003, 0.3000 at 0.01" in text
    assert "tokens 1 to 40 0.990" in analysis.line(several[0])


# --------------------------------------------------------------------------------------------------- runs in pairs


def model(arm, seed, bits, rate=0.01, **changes):
    """A run on bytes."""
    sizes = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 2, "L": 1, "tested": 4}
    looks = [{"step": step, "loss_nats": bits * TWO + 1 / step} for step in (1, 2)]
    case = language.case(arm, seed, rate, matched="steps", **sizes) | changes
    return record("bytes", case, {"test": (0.5, bits * TWO)}, validation=looks)


@pytest.fixture
def models():
    """Runs of two arms, with seeds in no order and tuning runs among them."""
    ours = [model("frozen", seed, LEVEL[seed - 1] + 0.5) for seed in (3, 1, 5, 2, 4)]
    theirs = [model("learned", seed, LEVEL[seed - 1]) for seed in (5, 4, 3, 2, 1)]
    tuning = [model("frozen", rates.TUNING, bits, rate) for bits, rate in ((1.0, 0.01), (1.5, 0.03))]
    return [*tuning, *ours, *theirs]


def test_runs_are_those_of_an_arm_over_its_seeds_without_the_tuning(models):
    frozen, learned = language.runs(models, "here")
    assert (frozen.arm, learned.arm) == ("frozen", "learned")
    assert frozen.seeds == learned.seeds == SEEDS
    assert learned.values["bits"] == pytest.approx(LEVEL)
    assert frozen.values["bits"] == pytest.approx([bits + 0.5 for bits in LEVEL])
    assert learned.mean("bits") == pytest.approx(2.2)
    assert [step for step, _ in learned.curves[0]] == [1, 2]
    assert [nats for _, nats in learned.curves[1]] == pytest.approx([2.1 * TWO + 1, 2.1 * TWO + 0.5])
    assert learned.configuration["rate"] == 0.01 and "seed" not in learned.configuration
    counted = cost.of(arms(2, 16)["learned"].build(256, 16, 1), torch.zeros(2, 16, dtype=torch.long))
    assert (learned.flop, learned.parameters) == (2 * (counted.forward + counted.backward), 10)
    assert language.runs(models, "another") == []


def test_runs_that_differ_in_more_than_the_seed_are_kept_apart(models):
    models += [model("learned", seed, 1.0, steps=9) for seed in (1, 2)]
    assert [len(one.seeds) for one in language.runs(models, "here")] == [5, 5, 2]
    assert [one.mean("bits") for one in language.runs(models, "here", steps=9)] == pytest.approx([1.0])
    assert set(language.by_arm(models, "here", steps=2)) == {"frozen", "learned"}
    with pytest.raises(ValueError, match="wanted: expected runs of 'learned' that differ in the seed alone, got {}"):
        language.by_arm(models, "here")


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


def test_the_table_of_bytes_has_means_ranges_and_settings_the_best_first(models):
    lines = language.table(models).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["learned", "frozen"]
    assert "2.2000 [2.0000, 2.4000]  5 seeds, matched steps, d=16, 2 steps" in lines[2]
    assert "2.7000 [2.5000, 2.9000]  5 seeds" in lines[3]
    assert lines[-1] == "rates chosen: 1"
    assert language.line(models[-1]) == "2.0000 bits a byte, 11 s"


def test_arms_on_images():
    def run(arm, seed, correct, **changes):
        return record("images", images.case(arm, seed, 0.01, steps=2) | changes, {"test": (correct, 1 - correct)})

    runs = [run("learned", seed, 0.9 + seed / 1000) for seed in (3, 1, 2, 5, 4)]
    runs += [run("linear", seed, 0.904 + seed / 1000) for seed in SEEDS]
    runs += [run("frozen", seed, 0.8 + seed / 1000 + (seed == 2) / 1000) for seed in (*SEEDS, 6)]
    runs += [run("learned", rates.TUNING, 0.1, rate=rate) for rate in (0.1, 0.2)]
    runs += [run("learned", 1, 0.4, data="cifar10")]
    found = images.by_arm(runs, "here")
    assert list(found) == ["learned", "linear", "frozen"]
    assert found["learned"].values["correct"] == (0.901, 0.902, 0.903, 0.904, 0.905)
    assert found["learned"].values["loss"] == pytest.approx((0.099, 0.098, 0.097, 0.096, 0.095))
    assert images.by_arm(runs, "here", "cifar10")["learned"].values["correct"] == (0.4,)
    for arm, outcome, mean in (("linear", "equivalent", 0.004), ("frozen", "worse", -0.0998)):
        judged = images.judged(found[arm], found["learned"])
        assert (judged.pairs, judged.outcome) == (5, outcome) and judged.difference.mean == pytest.approx(mean)
    lines = images.table(runs).splitlines()
    assert lines[1].startswith("digits on here") and lines[6].startswith("cifar10 on here")
    assert "0.9070 [0.9050, 0.9090]" in lines[2] and "against 'learned': equivalent" in lines[2]
    assert "against" not in lines[3] and lines[4].endswith("against 'learned': worse")
    assert lines[-1] == "rates chosen: 1"


def test_bits_of_two_texts():
    def run(arm, seed, **bits):
        names = ("old, before", "new, before", "old", "new")
        tests = {name: (0.5, bits.get(name.replace(", ", "_"), 1 / TWO) * TWO) for name in names}
        return record("fine-tuning", fine_tuning.case(arm, seed, steps=2), tests)

    runs = [run("all trained", seed, new=seed, old=3, old_before=1) for seed in (2, 1, 3, 5, 4)]
    runs += [run("QK frozen", seed, new=seed + 0.01) for seed in SEEDS]
    runs += [run(fine_tuning.SCRATCH, seed, new=seed + 1 + seed / 100) for seed in SEEDS]
    runs += [run("all trained", rates.TUNING)]
    found = fine_tuning.by_arm(runs, "here")
    assert list(found) == ["all trained", "QK frozen", fine_tuning.SCRATCH]
    one = found["all trained"]
    assert one.seeds == SEEDS
    for name, values in (("new", SEEDS), ("old", (3,) * 5), ("forgotten", (2,) * 5), ("new, before", (1 / TWO,) * 5)):
        assert one.values[name] == pytest.approx(values)
    for arm, measure, outcome in (
        ("QK frozen", "new", "equivalent"),
        (fine_tuning.SCRATCH, "new", "worse"),
        ("QK frozen", "forgotten", "better"),
    ):
        assert analysis.judged(found[arm], one, measure).outcome == outcome
    lines = fine_tuning.table(runs).splitlines()
    assert [line[:16].strip() for line in lines[2:5]] == list(found)
    assert "against" not in lines[2]
    assert lines[3].endswith("'all trained': equivalent") and lines[4].endswith("'all trained': worse")
    assert "bits a byte, old 3.0000 (+2.0000), 11 s" in fine_tuning.line(runs[0])


def test_translations_by_pairs_and_arm():
    def run(arm, seed, score, *, pairs=0, rate=5e-3, loss=2.0):
        case = translating.case("transduction", arm, seed, rate, pairs=pairs, steps=2, d=16)
        facts = {"source_tokens": 7.6, "target_tokens": 11.2, "vocab_size": 90, "seen": {"loss_nats": 0.25}}
        tests = {"like training": (2 * score, 1 - score)}
        return record("transduction", case, tests, validation=[{"step": 1, "loss_nats": loss}], **facts)

    runs = [run("8 frozen", 0, 0.9, rate=rate, loss=loss) for rate, loss in ((5e-3, 2.0), (1e-2, 1.5))]
    runs += [run("8 learned", seed, 0.6 + seed / 100) for seed in (3, 1, 5, 4, 2)]
    runs += [run("8 frozen", seed, 0.3 + seed / 50) for seed in (2, 3, 4, 1, 6, 5)]
    runs += [run("8 learned", 1, 0.1, pairs=500)]
    found = translating.by_pairs(runs, "here")
    assert {pairs: sorted(known) for pairs, known in found.items()} == {
        0: ["8 frozen", "8 learned"],
        500: ["8 learned"],
    }
    one = found[0]["8 learned"]
    assert one.seeds == SEEDS and one.mean("score") == pytest.approx(0.63)
    assert one.values["loss"] == pytest.approx((0.39, 0.38, 0.37, 0.36, 0.35))
    assert one.values["seen"] == (0.25,) * 5 and one.curves == (((1, 2.0),),) * 5
    sizes = (one.configuration["B"], 8, 11, 16, one.configuration["L"])
    assert one.flop == 2 * translating.training_flop("8 learned", *sizes, vocab_size=90)
    told = translating.judged(found[0]["8 frozen"], one)
    assert (told.pairs, told.outcome) == (5, "worse") and told.difference.mean == pytest.approx(-0.27)
    assert translating.judged(one, found[500]["8 learned"]) is None
    text = translating.table(runs)
    assert "faultless, mean [lowest, highest]" in text and "rates chosen: 1" in text
    assert "8 learned             0.6300 [0.6100, 0.6500]" in text
    assert translating.by_pairs(runs, "another") == {}
    runs.append(run("8 learned", 6, 0.5, rate=1e-2))
    with pytest.raises(ValueError, match="wanted: expected runs of '8 learned' that differ .*, got {'pairs': 0}"):
        translating.by_pairs(runs, "here")
    assert translating.by_pairs(runs, "here", rate=1e-2)[0]["8 learned"].seeds == (6,)


def test_what_was_learnt_how_often_and_when():
    def run(arm, seed, correct, looks):
        seen = [{"step": 10 * (i + 1), "correct_fraction": look, "loss_nats": 1.0} for i, look in enumerate(looks)]
        case = synthetic.case("induction", arm, seed, steps=40)
        return record("synthetic", case, {"hops: 1": (correct, 0.5)}, validation=seen)

    runs = [
        run("learned", 3, 0.95, [0.2, 0.91, 0.95]),
        run("learned", 1, 0.90, [0.2, 0.5, 0.89]),  # no look was as good as the test
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
    assert "  2 of  3 [0.09, 0.99]  right answers: median 0.900 [0.890, 0.950]" in synthetic.table(runs)
    assert "learnt after 20 steps" in synthetic.line(runs[0]) and "not learnt" in synthetic.line(runs[2])
