"""The evidence on orthogonal matrices: another outcome of the runs is another verdict."""

from math import log

import pytest
from experiment_fakes import SLUG

from ortho.orthogonal import DRAWS
from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import orthogonal_or_gaussian as initialisation
from paper.experiments.learning import images, language, rates

TINY = {"B": 2, "N": 16, "d": 16, "H": 2, "L": 1, "tested": 4}
GPU = "nvidia-h200"
# Bits a byte, and shares of right answers, by seed: levels differ by more than arms do, so that only pairs show these.
LEVEL = {seed: 2 + seed / 10 for seed in language.SEEDS}
RIGHT = {seed: 0.9 - seed / 100 for seed in images.SEEDS}
# What the others have more than the orthogonal ones of the right scale.
MORE = {"low-rank": 0.2, "4 x": 0.3, "1/4 x": 0.4, "Gaussian": 0.0}


def varied(arm, seed):
    """By which the difference of a pair differs from one seed to the next: 0 or 0.004."""
    return 0.004 * (seed % 2) if " " in arm else 0.0


def record(name, device, case, test):
    facts = {"validation": [{"step": 2, "loss_nats": 1.0}], "parameters": 9, "train_s": 1.0}
    repetitions = {"test": {quantity: [value] for quantity, value in test.items()}}
    found = {"experiment": name, "device": device, "configuration": case, "facts": facts, "repetitions": repetitions}
    return found | {"provenance": {}}


def on_bytes(arm, more, device=SLUG, seeds=language.SEEDS):
    return [
        record(
            "bytes",
            device,
            language.case(arm, seed, 0.01, steps=2, **TINY),
            {"loss_nats": (LEVEL[seed] + more + varied(arm, seed)) * log(2)},
        )
        for seed in seeds
    ]


def on_digits(arm, more, device=SLUG, seeds=images.SEEDS):
    return [
        record(
            "images",
            device,
            images.case(arm, seed, 0.01, steps=2, B=2, d=16, L=1, tested=4),
            {"correct_fraction": RIGHT[seed] - more - varied(arm, seed) / 4, "loss_nats": 1.0},
        )
        for seed in seeds
    ]


def runs(device=SLUG, **more):
    """Runs of all arms; `more` changes what those of a way have more, by its name or by arm."""
    more = {**MORE, **{name.replace("_", " "): value for name, value in more.items()}}
    found = {"bytes": [], "images": []}
    for kind in ("frozen", "stopped", "learned"):
        found["bytes"] += on_bytes(kind, 0.0, device)
        for way, amount in MORE.items():
            if kind != "learned" or way in initialisation.WAYS[:2]:
                arm = f"{kind} {way}"
                found["bytes"] += on_bytes(arm, more.get(arm, more.get(way, amount)), device)
    found["images"] += on_digits("frozen", 0.0, device)
    found["images"] += on_digits("frozen Gaussian", more.get("digits", more["Gaussian"] / 4), device)
    return found


@pytest.fixture
def judge(monkeypatch):
    """The finding, given the records."""
    monkeypatch.setattr(rates, "chosen", lambda *_: None)

    def judged(stored):
        monkeypatch.setattr(experiments, "load", lambda name: stored.get(name, []))
        return initialisation.orthogonal_is_required()

    return judged


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, Verdict.REFUTED),
        ({"Gaussian": 0.1}, Verdict.CONFIRMED),
        ({"Gaussian": -0.1}, Verdict.REFUTED),
        ({"frozen_Gaussian": 0.1}, Verdict.CONDITIONAL),
        ({"digits": 0.03}, Verdict.CONDITIONAL),
        ({"Gaussian": 0.1, "1/4 x": 0.0}, Verdict.CONDITIONAL),
        ({"Gaussian": 0.1, "frozen_low-rank": 0.0}, Verdict.CONDITIONAL),
        ({"Gaussian": 0.1, "low-rank": 0.0}, Verdict.REFUTED),  # another scale says nothing of other laws
        ({"Gaussian": 0.1, "low-rank": 0.0, "4 x": 0.0, "1/4 x": 0.0}, Verdict.REFUTED),
    ],
)
def test_the_verdict_follows_the_runs(judge, more, verdict):
    found = judge(runs(**more))
    assert found.verdict == verdict
    assert "make orthogonal matrices" in found.source


def test_intervals_are_those_of_the_pairs(judge):
    found = judge(runs(frozen_Gaussian=0.1))
    assert "holds at frozen on bytes; not shown at stopped on bytes: -0.004 to 0 (equivalent)" in found.ours
    assert "learned 4 x: -0.304 to -0.3 (better)" in found.ours, "the level of a seed is in no difference"
    assert "from 0.05 bits a byte, 0.01 of the digits' right answers on" in found.ours


def test_parts_say_what_the_other_matrices_are(judge):
    told = judge(runs(frozen_Gaussian=0.1)).ours
    low, _, scale = told.partition("orthogonal against orthogonal, of another scale: ")
    low, scale = low.partition("of a low rank: ")[2], scale.partition("QR, SVD, Haar")[0]
    assert "stopped low-rank" in low and " x" not in low and "stopped 1/4 x" in scale and "low-rank" not in scale


def test_heads_that_add_nothing_are_noted(judge):
    stored = runs()
    assert "see no other token" not in judge(stored).ours
    stored["bytes"] += on_bytes("identity", 0.0)
    stored["bytes"] = [r for r in stored["bytes"] if r["configuration"]["arm"] != "frozen Gaussian"]
    stored["bytes"] += on_bytes("frozen Gaussian", -0.2)
    told = judge(stored).ours.partition("than heads that see no other token: ")[2]
    assert "stopped: 0 (equivalent)" in told and "frozen Gaussian: -0.2 to -0.196 (better)" in told


def test_runs_that_do_not_decide(judge):
    stored = runs()
    for place, one in enumerate(r for r in stored["bytes"] if r["configuration"]["arm"] == "stopped Gaussian"):
        one["repetitions"]["test"]["loss_nats"][0] += 0.3 * (-1) ** place
    found = judge(stored)
    assert found.verdict == Verdict.UNTESTABLE and "undecided at stopped on bytes" in found.ours


def test_nothing_is_judged_before_all_seeds_have_run(judge):
    found = judge({})
    assert found.verdict == Verdict.UNTESTABLE
    for label in ("frozen on bytes", "frozen on digits", "stopped 1/4 x"):
        assert label in found.ours
    stored = runs(Gaussian=0.1)
    left_out = max(language.SEEDS)
    stored["bytes"] = [
        r
        for r in stored["bytes"]
        if (r["configuration"]["arm"], r["configuration"]["seed"]) != ("stopped 4 x", left_out)
    ]
    found = judge(stored)
    assert found.verdict == Verdict.UNTESTABLE and "not yet all runs of stopped 4 x" in found.ours
    assert "stopped 4 x" in initialisation.compared(initialisation.OTHER_MATRICES, every_seed=False)
    assert "stopped 4 x" not in initialisation.compared(initialisation.OTHER_MATRICES)


def test_a_gpu_is_judged_only_where_there_is_no_cpu(judge):
    ours, theirs = runs(), runs(GPU, Gaussian=0.1)
    assert judge(theirs).verdict == Verdict.CONFIRMED
    both = {name: [*theirs[name], *ours[name]] for name in ours}
    assert judge(both).verdict == Verdict.REFUTED
    beside = initialisation.compared(initialisation.SAME_SCALE, device=GPU)
    assert [one.outcome for one in beside.values()] == ["better"] * 3


def test_runs_that_choose_the_rates_do_not_count(judge):
    stored = runs()
    stored["bytes"] += on_bytes("frozen", -1.0, seeds=(1,))
    stored["bytes"][-1]["configuration"]["seed"] = rates.TUNING
    assert judge(stored).verdict == Verdict.REFUTED


def nearly(d, **options):
    """Orthogonal but for what no rounding explains."""
    return DRAWS["haar"](d, **options) * (1 + 1e-11)


def test_a_draw_that_is_not_orthogonal_is_found(judge, monkeypatch):
    stored = runs(Gaussian=0.1)
    assert judge(stored).verdict == Verdict.CONFIRMED
    for way in initialisation.WAYS_TO_DRAW:
        for other in (DRAWS["gaussian"], nearly):
            with monkeypatch.context() as patch:
                patch.setitem(initialisation.WAYS_TO_DRAW, way, other)
                assert judge(stored).verdict == Verdict.REFUTED
