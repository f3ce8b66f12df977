"""What is read from the records of translation: over seeds, by arm and number of pairs, two arms compared, the view."""

import copy

import pytest
from experiment_fakes import SLUG

from paper.experiments import measure
from paper.experiments.learning import rates, translating
from paper.experiments.learning.translating import training_flop

TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 4, "looked": 2}


@pytest.fixture(scope="module")
def measured():
    return measure(translating.TRANSDUCTION, translating.case("transduction", "8 learned", 1, pairs=0, **TINY), "cpu")


def record(measured, arm, seed, score, *, pairs=0, rate=5e-3, loss=2.0):
    found = copy.deepcopy(measured)
    found["configuration"] |= {"arm": arm, "seed": seed, "pairs": pairs, "rate": rate}
    found["repetitions"]["like training"] |= {"faultless_fraction": [score], "loss_nats": [1 - score]}
    found["facts"]["validation"] = [{"step": 1, "loss_nats": loss}]
    return found


@pytest.fixture
def several(measured):
    """Seeds out of order, the tuning seed's runs among them, and two numbers of pairs."""
    good = [record(measured, "8 learned", seed, 0.6 + seed / 100) for seed in (3, 1, 5, 4, 2)]
    bad = [record(measured, "8 frozen", seed, 0.3 + seed / 50) for seed in (2, 3, 4, 1, 6, 5)]
    tuning = [record(measured, "8 frozen", 0, 0.9, rate=rate, loss=loss) for rate, loss in ((5e-3, 2.0), (1e-2, 1.5))]
    return [*tuning, *good, *bad, record(measured, "8 learned", 1, 0.1, pairs=500)]


def test_runs_by_pairs_and_arm(several, measured):
    found = translating.by_pairs(several, SLUG)
    assert {pairs: sorted(known) for pairs, known in found.items()} == {
        0: ["8 frozen", "8 learned"],
        500: ["8 learned"],
    }
    one = found[0]["8 learned"]
    assert (one.seeds, one.values["score"]) == ((1, 2, 3, 4, 5), (0.61, 0.62, 0.63, 0.64, 0.65))
    assert one.mean("score") == pytest.approx(0.63)
    assert one.values["loss"] == pytest.approx((0.39, 0.38, 0.37, 0.36, 0.35))
    assert one.parameters == measured["facts"]["parameters"] and one.curves == (((1, 2.0),),) * 5
    assert one.values["seen"] == (measured["facts"]["seen"]["loss_nats"],) * 5
    facts = measured["facts"]
    sizes = (TINY["B"], round(facts["source_tokens"]), round(facts["target_tokens"]), TINY["d"], TINY["L"])
    assert one.flop == TINY["steps"] * training_flop("8 learned", *sizes, vocab_size=facts["vocab_size"])
    assert found[0]["8 frozen"].flop < one.flop
    assert translating.by_pairs(several, "another") == {}


def test_arms_are_judged_at_the_seeds_that_both_have(several):
    found = translating.by_pairs(several, SLUG)
    told = translating.judged(found[0]["8 frozen"], found[0]["8 learned"])
    assert told.pairs == 5 and told.outcome == "worse"
    assert told.difference.mean == pytest.approx(-0.27)
    assert translating.judged(found[0]["8 learned"], found[0]["8 learned"]).outcome == "equivalent"
    assert translating.judged(found[0]["8 learned"], found[500]["8 learned"]) is None


def test_runs_that_differ_in_more_than_the_seed_are_not_put_together(several, measured):
    several.append(record(measured, "8 learned", 6, 0.5, rate=1e-2))
    with pytest.raises(
        ValueError, match="wanted: expected runs of '8 learned' that differ in the seed alone, got {'pairs': 0}"
    ):
        translating.by_pairs(several, SLUG)
    assert translating.by_pairs(several, SLUG, rate=1e-2)[0]["8 learned"].seeds == (6,)


def test_the_view(several):
    text = translating.table(several)
    assert "faultless, mean [lowest, highest]" in text and "rates chosen: 1" in text
    assert "8 learned             0.6300 [0.6100, 0.6500]" in text
    assert rates.choose(several).popitem()[1] == 1e-2
