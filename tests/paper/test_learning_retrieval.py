"""Where content matters: a run climbs from length to length, the tasks at each length, the rule that judges records."""

import pytest
from task_draws import drawn

from paper.experiments.learning import rates, retrieval, retrieval_analysis
from paper.experiments.learning.retrieval_analysis import PAIRS, boundaries, climbs, judged, predicted_boundary
from paper.experiments.learning.retrieval_tasks import (
    ARMS,
    GROUPS,
    LEARNED,
    LENGTHS,
    ONE,
    SETTINGS,
    UNTRAINED,
    part,
    task,
)
from paper.tasks.text import VOCAB_SIZE

TINY = {"N": 32, "d": 16, "L": 1, "steps": 2, "tokens": 64, "tested": 4}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(retrieval, "LENGTHS", (16, 32))
    monkeypatch.setattr(retrieval, "EVERY", 1)


def tiny(arm=UNTRAINED, name="mqar", **changed):
    return retrieval.case(name, arm, **TINY) | changed


@pytest.mark.usefixtures("short")
def test_a_run_ends_at_the_first_length_that_is_not_learnt():
    """No model learns the first length, as none can be right in more than all answers."""
    case = tiny(success_fraction=1.1, enough_fraction=1.1)
    found = retrieval.run(case)
    assert set(found["repetitions"]) == {"16 tokens"}
    assert [(look["N"], look["step"]) for look in found["facts"]["validation"]] == [(16, 1), (16, 2)]
    again = retrieval.run(case)
    assert all(again[name] == found[name] for name in ("seeds", "repetitions"))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("arm", "name"), [*((arm, "mqar") for arm in ARMS), *((LEARNED, name) for name in list(SETTINGS)[1:])]
)
def test_a_run_climbs_with_what_it_has_learnt(arm, name, monkeypatch):
    """The share to reach is 0, so that every model stops at the first look at each length, and one model goes on. Arms
    and tasks are independent: not every pair is run."""
    models, trained = [], retrieval._trained
    monkeypatch.setattr(retrieval, "_trained", lambda model, *own: models.append(model) or trained(model, *own))
    found = retrieval.run(tiny(arm, name, success_fraction=0.0, enough_fraction=0.0))
    assert list(found["repetitions"]) == ["16 tokens", "32 tokens"]
    assert [(look["N"], look["step"]) for look in found["facts"]["validation"]] == [(16, 1), (32, 1)]
    assert models[0] is models[1]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("N", LENGTHS)
def test_tasks_have_the_length_and_as_many_other_tokens_as_the_law_is_asked_for(name, N):
    """Recall shows all its pairs and the blank; some of the n-grams' symbols may never occur."""
    own = task(name, N)
    tokens, _ = drawn(own.train, 3)
    assert tokens.shape == (3, N) and own.vocab_size <= VOCAB_SIZE
    if name == "mqar":
        assert {len(set(row)) for row in tokens.tolist()} == {SETTINGS[name].others(N) + 1}
    if name == "ngrams":
        assert own.vocab_size == SETTINGS[name].others(N) + 1


def test_cases(monkeypatch):
    """Rates first, at the shortest length; then three seeds of every arm, and three more of one head that retrieves."""
    options = [(name, arm) for _, _, names, arms in GROUPS for name in names for arm in arms]
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: None)
    tried = retrieval.cases("cpu")
    assert len(tried) == 2 * len(options)
    assert {(case["seed"], case["N"]) for case in tried} == {(rates.TUNING, LENGTHS[0])}
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: 0.004)
    counted = retrieval.cases("cpu")[len(tried) :]
    assert {case["N"] for case in counted} == {1024}
    assert len({repr(case) for case in counted}) == len(counted)
    assert len(counted) == 3 * len(options) + 3 * sum(arm in ONE for _, arm in options)


def test_a_rate_is_chosen_for_the_climb(monkeypatch):
    """The records of the shortest length choose the rate; runs are made with this rate, and only these count."""
    runs = [
        record(UNTRAINED, rates.TUNING, (share,), N=LENGTHS[0], rate=rate) for rate, share in ((3e-3, 0.5), (1e-2, 1.0))
    ]
    chosen = rates.choose(runs)
    monkeypatch.setattr(rates, "table", lambda: {"retrieval": chosen, "made-up": chosen})
    counted = [case for case in retrieval.cases("cpu") if case["seed"] != rates.TUNING]
    assert {(case["task"], case["arm"], case["rate"]) for case in counted} == {("mqar", UNTRAINED, 1e-2)}
    assert [case["seed"] for case in counted] == list(retrieval.SEEDS)
    made = [record(UNTRAINED, 1, (1.0,), rate=rate) for rate in (3e-3, 1e-2)]
    assert [retrieval_analysis.counts(one) for one in made] == [False, True]


def record(arm, seed, shares, name="mqar", steps=100, rate=3e-3, **sizes):
    """A run with these shares of right answers, length by length; at each length the second look has this share."""
    tests = {part(N): {"correct_fraction": [share]} for N, share in zip(LENGTHS, shares, strict=False)}
    looks = [
        {"N": N, "step": step, "correct_fraction": share if step == steps else 0.1, "loss_nats": 1.1 - share}
        for N, share in zip(LENGTHS, shares, strict=False)
        for step in (steps // 2, steps)
    ]
    return {
        "experiment": "made-up",
        "device": "cpu-x",
        "provenance": {"device_name": "x"},
        "configuration": retrieval.case(name, arm, seed=seed, rate=rate, **sizes),
        "repetitions": tests,
        "facts": {"validation": looks, "loss": [1.0], "train_s": 1.0},
    }


def test_a_boundary_is_what_more_than_half_of_the_seeds_learn():
    shares = [(1.0, 1.0, 0.8, 0.81), (1.0, 1.0, 1.0, 0.79), (1.0, 0.95, 0.8, 1.0), (1.0, 1.0, 0.3), (0.2,)]
    runs = [record(UNTRAINED, seed, own) for seed, own in enumerate(shares, 1)]
    (key, found), *others = climbs([*runs, record(UNTRAINED, rates.TUNING, (0.0,))]).items()
    assert key == ("mqar", UNTRAINED, 4, 64) and not others
    assert found.reached == (1024, 256, 1024, 64, 0) and [found.successes(N) for N in LENGTHS] == [4, 4, 3, 2]
    assert found.steps[1] == {32: 100, 64: 100, 256: 100} and boundaries(runs) == {key: 256}
    assert found.rate(1024) == pytest.approx((0.0527, 0.8534), abs=1e-4)  # tables of Clopper and Pearson: 2 of 5
    assert boundaries(runs[3:]) == {key: 0}  # one of two is not more than half


def test_which_goes_further():
    """All six runs of one arm go further than all six of the other in one of 924 orders, which is below the level of
    twenty tests, .05 / 20. Five of each are not enough; nothing is shown of arms that were not measured."""
    ours = [record(UNTRAINED, seed, (1.0, 1.0, 1.0, 1.0)) for seed in retrieval.SEEDS]
    theirs = [record(LEARNED, seed, (1.0, 0.5)) for seed in retrieval.SEEDS]
    found = judged(ours + theirs)
    assert len(found) == 2 * len(PAIRS) == 20
    assert {key: value for key, value in found.items() if value != (1.0, False)} == {
        ("mqar", UNTRAINED, 4, 64): (1 / 924, True)
    }
    lower = [record(UNTRAINED, seed, (0.2,)) for seed in retrieval.SEEDS]
    assert judged(lower + theirs)["mqar", LEARNED, 4, 64] == (1 / 924, True)
    assert judged(ours[1:] + theirs)["mqar", UNTRAINED, 4, 64] == (1 / 462, True)
    assert judged(ours[1:] + theirs[1:])["mqar", UNTRAINED, 4, 64] == (1 / 252, False)


def test_the_law_puts_the_boundary_between_the_lengths():
    """Beyond 42 other tokens at K = 8 (d = 32), and beyond 2733 at K = 16 (d = 64), the chance to find the right token
    is below .8; a sequence of length N has about N / 4 others."""
    assert [predicted_boundary(name, 64) for name in SETTINGS] == [1024, 1024, None, None]
    assert [predicted_boundary(name, 32) for name in SETTINGS] == [64, 64, None, None]


def test_words():
    runs = [record(UNTRAINED, seed, (1.0, 1.0, 0.5)) for seed in (1, 2)]
    assert retrieval_analysis.line(runs[0]) == (
        "32 tokens 1.000 after 100 steps, 64 tokens 1.000 after 100 steps, 256 tokens 0.500 not learnt, 1 s"
    )
    said = retrieval_analysis.table(runs)
    assert f"mqar     {UNTRAINED} + convolution, d=64: boundary 64, predicted 1024" in said
    assert "     64: 2 of 2 [0.16, 1.00], median 100 steps" in said and "    256: 0 of 2 [0.00, 0.84]\n" in said
    assert f"mqar + convolution, d=64: {UNTRAINED} goes further than the other, chance 1.0000: not shown" in said


@pytest.mark.bad_input
def test_errors():
    for call, message in (
        (lambda: retrieval.case("needles", UNTRAINED), "task: expected one of"),
        (lambda: retrieval.case("mqar", "lerned"), "arm: expected one of"),
        (lambda: retrieval.case("mqar", "learned", N=100), "N: expected one of 32, 64, 256, 1024, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.usefixtures("short")
def test_weights_differ_and_batches_too():
    """Runs are independent samples: no two share a seed."""
    cases = [tiny(arm, seed=seed) for arm in (UNTRAINED, LEARNED) for seed in (1, 2)]
    seeds = [retrieval.seeds_of(case)["training"] for case in cases]
    assert len(set(seeds)) == len(seeds)
