"""Each training study on its own: data, cases and what is read from its records."""

import pytest
import torch
from experiment_fakes import made_up

from ortho.layers.multihead import MultiheadAttention
from paper.experiments.learning import fine_tuning, fitting, language, rates, retrieval
from paper.experiments.learning.arms import arms
from paper.experiments.learning.fine_tuning import SCRATCH
from paper.experiments.learning.retrieval_analysis import PAIRS, climbs, judged
from paper.experiments.learning.retrieval_tasks import ARMS, LEARNED, LENGTHS, SETTINGS, UNTRAINED, part
from paper.tasks.text import VOCAB_SIZE

# ------------------------------------------------------------------------------------------------------ models of bytes


TINY = {"steps": 2, "B": 2, "N": 16, "d": 16, "H": 4, "L": 1, "tested": 4}
every_device = pytest.mark.parametrize("device", ["cpu", "cuda"])


@every_device
def test_all_arms_have_the_training_flop_of_the_baseline(device):
    sizes = language.SIZES[device]
    cases = language.of_equal_flop(device)
    assert {case["arm"] for case in cases} == set(arms(sizes["H"], sizes["N"]))
    baseline = next(case for case in cases if case["arm"] == "learned")
    assert baseline["steps"] == sizes["steps"]
    want = baseline["steps"] * language.step_flop(baseline)
    for case in cases:
        assert case["d_ff"] == 4 * case["d"]
        own = language.step_flop(case)
        assert abs(case["steps"] * own - want) <= own / 2, case["arm"]  # the nearest integer


@every_device
def test_arms_of_equal_parameters_differ_by_less_than_a_hidden_unit(device):
    sizes = language.SIZES[device]
    cases = {case["arm"]: case for case in language.of_equal_parameters(device)}
    H, d, L = (sizes[name] for name in "HdL")
    assert {"learned", "positional", f"1 learned + {H - 1} positional", "1 learned, wider"} <= set(cases)
    assert cases["learned"]["d_ff"] == 4 * d

    def parameters(case):
        arm = arms(H, case["N"])[case["arm"]]
        with torch.device("meta"):
            model = arm.build(VOCAB_SIZE, d, L, d_ff=case["d_ff"])
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    for case in cases.values():
        assert case["steps"] == sizes["steps"]
        # A unit has a row of d and a column of d in each of L layers; the nearest integer is at most half a unit off.
        assert abs(parameters(case) - parameters(cases["learned"])) <= d * L, case["arm"]


def test_dropout_is_for_training_alone_and_fewer_bytes_are_the_first(library):
    """Otherwise the two forms of the model would differ, as each would leave out other numbers."""
    run = language.run(language.case("learned", 1, dropout=0.5, limit=300, **TINY))
    plain = language.run(language.case("learned", 1, limit=300, **TINY))
    assert run["facts"]["loss"] != plain["facts"]["loss"]
    assert run["facts"]["text"] == library.limited(300).facts() and run["facts"]["text"]["train"]["bytes"] == 300
    assert run["facts"]["kinds"] == arms(4, 16)["learned"].describe()


# ---------------------------------------------------------------------------------------------------------- fine-tuning


TINY_TUNING = {"first_steps": 3, "steps": 2, "B": 2, "N": 16, "d": 16, "L": 2, "tested": 4}
FIT = fitting.fit
PRETRAINED = [arm for arm in fine_tuning.ARMS if arm != SCRATCH]


def tuned(arm, seed=1, **more):
    return fine_tuning.case(arm, seed, **{**TINY_TUNING, **more})


def watch(patch):
    """Note what is trained from now on: for each call the model, its weights before, and the task's name."""
    found = []

    def watched(model, task, *arguments, **options):
        found.append((model, {name: weight.clone() for name, weight in model.state_dict().items()}, task.name))
        return FIT(model, task, *arguments, **options)

    patch.setattr(fitting, "fit", watched)
    return found


@pytest.fixture(scope="module")
def runs(library):
    """Arm -> the outcome of a tiny run, and what it trained."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for arm in fine_tuning.ARMS:
            trained = watch(patch)
            found[arm] = fine_tuning.run(tuned(arm)), trained
    return found


@pytest.mark.parametrize("arm", fine_tuning.ARMS)
def test_an_arm_trains_what_it_says(arm, runs):
    case = tuned(arm)
    outcome, (*first, (model, begun, name)) = runs[arm]
    assert [one[2] for one in first] == ([] if arm == SCRATCH else ["python-sources"])
    assert name == "python-help"
    parts = {"QK": ("weight_q", "weight_k"), "VO": ("weight_v", "weight_o")}.get(arm.partition(" ")[0], ())
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, begun[key]) == key.endswith(tuple(parts)) if parts else True
        assert parts or not torch.equal(weight, begun[key]) or "norm" in key
    every = sum(p.numel() for p in fine_tuning.build(case, torch.Generator()).parameters())
    assert outcome["facts"]["parameters"] == every - (2 * case["L"] * case["d"] ** 2 if parts else 0)
    layers = [one for one in model.modules() if isinstance(one, MultiheadAttention)]
    assert len(layers) == case["L"]
    for layer in layers:
        assert getattr(layer.projection, "stop_gradient", False) == (arm == "QK stopped")
        assert layer.attention == "rotary"


def test_the_arms_of_a_seed_begin_with_the_same_model_where_its_first_stage_ended(runs):
    """Only an arm that says so has redrawn queries and keys; another seed shares no random numbers."""
    outcomes = {arm: outcome for arm, (outcome, _) in runs.items()}
    (_, at_first, _), (_, begun, _) = runs["all trained"][1]
    assert any(not torch.equal(at_first[key], begun[key]) for key in begun)
    for arm in PRETRAINED:
        (_, first, _), (_, weights, _) = runs[arm][1]
        assert all(torch.equal(first[key], at_first[key]) for key in begun)
        for key, weight in begun.items():
            redrawn = arm == "QK redrawn" and key.endswith(("weight_q", "weight_k"))
            assert torch.equal(weight, weights[key]) != redrawn
            if redrawn:
                eye = weights[key] @ weights[key].T
                torch.testing.assert_close(eye, torch.eye(16), rtol=0, atol=1e-5)  # 16 products of float32
        assert outcomes[arm]["seeds"] == outcomes["all trained"]["seeds"]
    before = {arm: outcome["repetitions"]["old, before"] for arm, outcome in outcomes.items()}
    assert all((found == before["all trained"]) is (arm != SCRATCH) for arm, found in before.items())
    seeds = [*outcomes[SCRATCH]["seeds"].values(), *fine_tuning.seeds_of(tuned("all trained", 2)).values()]
    assert len(set(seeds)) == len(seeds)


# ------------------------------------------------------------------------------------------------------------ retrieval


TINY_CLIMB = {"N": 32, "d": 16, "L": 1, "steps": 2, "tokens": 64, "tested": 4}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(retrieval, "LENGTHS", (16, 32))
    monkeypatch.setattr(retrieval, "EVERY", 1)


def tiny(arm=UNTRAINED, name="mqar", **changed):
    return retrieval.case(name, arm, **TINY_CLIMB) | changed


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("arm", "name"), [*((arm, "mqar") for arm in ARMS), *((LEARNED, name) for name in list(SETTINGS)[1:])]
)
def test_a_run_climbs_with_what_it_has_learnt(arm, name, monkeypatch):
    """The share to reach is 0: every model stops at the first evaluation at each length, and one model goes on. Arms
    and tasks are independent: not every pair is run."""
    models, trained = [], retrieval._trained
    monkeypatch.setattr(retrieval, "_trained", lambda model, *own: models.append(model) or trained(model, *own))
    found = retrieval.run(tiny(arm, name, success_fraction=0.0, enough_fraction=0.0))
    assert list(found["repetitions"]) == ["16 tokens", "32 tokens"]
    assert [(one["N"], one["step"]) for one in found["facts"]["validation"]] == [(16, 1), (32, 1)]
    assert models[0] is models[1]


def record(arm, seed, shares, name="mqar", steps=100, rate=3e-3, **sizes):
    """A run with these shares of right answers by length; at each the second evaluation has this share."""
    tests = {part(N): {"correct_fraction": [share]} for N, share in zip(LENGTHS, shares, strict=False)}
    evaluations = [
        {"N": N, "step": step, "correct_fraction": share if step == steps else 0.1, "loss_nats": 1.1 - share}
        for N, share in zip(LENGTHS, shares, strict=False)
        for step in (steps // 2, steps)
    ]
    case = retrieval.case(name, arm, seed=seed, rate=rate, **sizes)
    return made_up("made-up", case, tests, validation=evaluations)


def test_a_boundary_is_what_more_than_half_of_the_seeds_learn():
    shares = [(1.0, 1.0, 0.8, 0.81), (1.0, 1.0, 1.0, 0.79), (1.0, 0.95, 0.8, 1.0), (1.0, 1.0, 0.3), (0.2,)]
    runs = [record(UNTRAINED, seed, own) for seed, own in enumerate(shares, 1)]
    (key, found), *others = climbs([*runs, record(UNTRAINED, rates.TUNING, (0.0,))]).items()
    assert key == ("mqar", UNTRAINED, 4, 64) and not others
    assert found.reached == (1024, 256, 1024, 64, 0) and [found.successes(N) for N in LENGTHS] == [4, 4, 3, 2]
    assert found.steps[1] == {32: 100, 64: 100, 256: 100}
    assert found.rate(1024) == pytest.approx((0.0527, 0.8534), abs=1e-4)  # tables of Clopper and Pearson: 2 of 5


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
