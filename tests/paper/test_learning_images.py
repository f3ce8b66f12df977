"""The experiment on images: its heads, that it learns, is paired, stored and resumed; and what its records say."""

import dataclasses

import pytest
import torch
from experiment_fakes import SLUG, go, within

from ortho.attention import MECHANISMS
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import fitting, images, rates
from paper.tasks.digits import digits
from paper.tasks.images import Images, classification
from paper.training import trainer

TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 8}
SIGMAS = 4.42  # two-sided 1e-5


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def only(*cases):
    return dataclasses.replace(images.IMAGES, cases=lambda _: list(cases))


def stored(results):
    return records.read(records.path(results, images.IMAGES.name, SLUG), images.IMAGES.needs)


def without_seconds(outcome):
    return {**outcome, "facts": {name: fact for name, fact in outcome["facts"].items() if name != "train_s"}}


@pytest.fixture
def photographs(monkeypatch):
    """CIFAR-10's place taken by as many kinds of noise."""
    drawn = [
        Images(torch.randint(256, (30, 3, 32, 32), generator=generator(i), dtype=torch.uint8), torch.arange(30) % 10)
        for i in range(3)
    ]
    parts = dict(zip(("train", "validation", "test"), drawn, strict=True))
    task = classification("cifar10", "noise", classes=10, white=255, **parts)
    monkeypatch.setitem(images.DATA, "cifar10", images.DATA["cifar10"]._replace(task=lambda: task))


@pytest.mark.parametrize("arm", images.ARMS)
def test_an_arm_is_trained_tested_and_stored_whole(arm, tmp_path):
    report = go(only(images.case(arm, 1, **TINY)), tmp_path)
    assert not report.errors
    (record,) = stored(tmp_path)
    assert list(record["repetitions"]) == ["test"]
    assert 0 <= record["repetitions"]["test"]["correct_fraction"][0] <= 1
    assert len(record["facts"]["loss"]) == TINY["steps"]
    assert len(record["facts"]["validation"]) == min(images.LOOKS, TINY["steps"])
    assert f"{images.correct(record):.3f} right" in images.IMAGES.line(record)
    assert f"\ndigits on {SLUG}" in images.IMAGES.show([record])


@pytest.mark.parametrize("arm", images.ARMS)
def test_arms_differ_in_queries_and_keys_alone(arm):
    case = images.case(arm)
    d, L = case["d"], case["L"]
    every, own = (
        sum(p.numel() for p in images.build(images.case(name), generator()).parameters()) for name in ("learned", arm)
    )
    without = {"linear": 0, "FAVOR+": 0, "learned": 0}.get(arm, 3 if arm.startswith("1 learned") else images.HEADS)
    assert every - own == without * 2 * L * d**2 // images.HEADS


@pytest.mark.parametrize("arm", images.ARMS)
def test_no_heads_are_causal_and_attention_has_no_biases(arm):
    model = images.build(images.case(arm, **TINY), generator())
    assert not any("bias" in name for name, _ in model.blocks[0].attention.named_parameters())
    assert model.blocks[0].feed_forward.bias_up is not None
    x = torch.randn(1, 17, 16, generator=generator(1), requires_grad=True)
    model.blocks[0].attention(x)[0, 8].sum().backward()
    seen = x.grad[0].abs().sum(-1) > 0
    if arm in ("identity", "positional"):
        assert seen.nonzero().flatten().tolist() == ([8] if arm == "identity" else [4, 7, 9, 12])
    else:
        assert seen.all()


def test_heads_see_the_neighbours_of_a_patch():
    """Of 4 x 4 patches behind the class token; the mechanism's own tests hold that it applies these weights."""
    layer = images.neighbours(16, 4, columns=4, generator=generator())
    weights = [pattern.weights(17) for pattern in layer.patterns]
    place = {(row, column): 1 + 4 * row + column for row in range(4) for column in range(4)}
    for row, column in ((1, 1), (2, 1), (2, 2)):
        seen = [int(matrix[place[row, column]].argmax()) for matrix in weights]
        assert seen == [place[row, column - 1], place[row - 1, column], place[row, column + 1], place[row + 1, column]]
    assert not weights[3][place[3, 0]].any()  # nothing is below the last row
    few = images.neighbours(12, 3, columns=8)
    assert [pattern.offset for pattern in few.patterns] == [-1, -8, 1]


def test_classes_are_read_from_the_mean_of_all_tokens():
    """In a model without attention each token counts as much: what is said of an image is the mean over tokens."""
    model = images.build(images.case("identity", **TINY), generator())
    pixels = torch.rand(2, 1, 8, 8, generator=generator(1))
    with torch.no_grad():
        each = model.encode(pixels) @ model.weight_head.T + model.bias_head
        torch.testing.assert_close(model(pixels), each.mean(1), rtol=0, atol=1e-5)  # to the rounding of results of 1
        assert (model(pixels) - each[:, 0]).abs().max() > 1e-2


def test_training_is_learnt_from_and_the_best_look_is_tested():
    case = images.case("1 learned + 3 positional", 3, 1e-2, steps=120)
    outcome = images.run(case)
    losses = [look["loss_nats"] for look in outcome["facts"]["validation"]]
    assert min(losses) < 1 < outcome["facts"]["loss"][0]  # a guess has log 10 = 2.3
    # Of as many guesses a tenth is right, and with the probability 1 - 1e-5 no more than so many.
    assert outcome["repetitions"]["test"]["correct_fraction"][0] > 0.1 + SIGMAS * (0.09 / case["tested"]) ** 0.5


def test_the_weights_of_the_best_look_are_tested(monkeypatch):
    models, losses = [], [0.5, 0.4, 0.1, 0.3, 0.6, 0.2, 0.7, 0.8]

    def scripted(model, *_):
        models.append(model.weight_head.clone())
        return {"loss_nats": [[*losses, 1.0][len(models) - 1]]}

    monkeypatch.setattr(fitting, "evaluate", scripted)
    outcome = images.run(images.case("learned", 1, **{**TINY, "steps": 16}))
    assert [look["loss_nats"] for look in outcome["facts"]["validation"]] == losses
    assert torch.equal(models[-1], models[2])
    assert not torch.equal(models[-1], models[7])


def test_the_arms_of_a_seed_share_all_but_the_weights():
    runs = [images.seeds_of(images.case(arm, seed)) for seed in images.SEEDS for arm in images.ARMS]
    runs += [images.seeds_of(images.case(arm, seed, data="cifar10")) for seed in (1, 2) for arm in images.ARMS]
    groups = len(images.SEEDS) + 2
    for part in ("training", "tests", "checks", "dropout"):
        assert len({run[part] for run in runs}) == groups
    assert len({run["weights"] for run in runs}) == len(runs)
    assert len({seed for run in runs for seed in run.values()}) == len(runs) + 4 * groups


def test_a_run_follows_from_its_seed():
    one, again, other = (without_seconds(images.run(images.case("static random", seed, **TINY))) for seed in (1, 1, 2))
    assert one == again
    assert one["facts"]["loss"] != other["facts"]["loss"]


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVERY_S", -1.0)  # a checkpoint after each step
    case, file = images.case("FAVOR+", 1, **{**TINY, "steps": 6}), tmp_path / "run.pt"
    whole = images.run(case)
    task = digits()
    drawn = []

    def interrupted(count, generator):
        drawn.append(count)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return task.train(count, generator)

    watched = images.DATA["digits"]._replace(task=lambda: dataclasses.replace(task, train=interrupted))
    monkeypatch.setitem(images.DATA, "digits", watched)
    with pytest.raises(KeyboardInterrupt):
        images.run(case, checkpoint=file)
    assert without_seconds(images.run(case, checkpoint=file)) == without_seconds(whole)
    assert len(drawn) == 4 + 3  # the fourth step is made anew, and the rest


def test_a_fast_form_that_is_off_is_not_stored(monkeypatch, tmp_path):
    right = MECHANISMS["linear"]

    def off(*arguments, **options):
        return right.fast(*arguments, **options) * (1 + 1e-6)

    monkeypatch.setitem(MECHANISMS, "linear", dataclasses.replace(right, fast=off))
    report = go(only(images.case("frozen linear", 1, **TINY)), tmp_path)
    assert len(report.errors) == 1 and "fast form: expected a relative error of at most" in report.errors[0]
    assert not stored(tmp_path)


def test_photographs_are_learnt_by_the_same_code(photographs):
    for arm in images.ARMS:
        record = measure(images.IMAGES, images.case(arm, 1, data="cifar10", **TINY), "cpu")
        assert record["configuration"]["N"] == 65
    sizes = images.case("learned", device="cuda", data="cifar10")
    assert sizes["d"] > images.case("learned", device="cuda")["d"] > images.case("learned")["d"]


@pytest.mark.parametrize(("device", "data"), [("cpu", ["digits"]), ("cuda", ["digits", "cifar10"])])
def test_every_arm_has_every_seed_and_the_tuning_seed_every_rate(device, data, monkeypatch):
    monkeypatch.setattr(rates, "chosen", lambda *_: None)
    tuning = images.cases(device)
    monkeypatch.setattr(rates, "chosen", lambda name, case: 0.5 if name == images.IMAGES.name else None)
    cases = images.cases(device)
    assert cases[: len(tuning)] == tuning
    runs = {(case["data"], case["arm"], case["seed"], case["rate"]) for case in cases}
    assert len(runs) == len(cases) == len(data) * len(images.ARMS) * (2 + len(images.SEEDS))
    assert {run[2] for run in runs if run[3] != 0.5} == {rates.TUNING}
    assert {run[2] for run in runs if run[3] == 0.5} == set(images.SEEDS)
    assert list(dict.fromkeys(case["data"] for case in tuning)) == data


def test_the_rule_is_in_the_configuration():
    case = images.case("learned")
    assert (case["decision_margin"], case["decision_level"], case["decision_higher_is_better"]) == (0.01, 0.05, True)


def test_there_are_as_many_digits_as_are_tested():
    task, tested = digits(), images.case("learned")["tested"]
    for draw in (task.validation, task.tests["test"]):
        assert len(draw(tested, generator()).answers) == tested
    with pytest.raises(ValueError, match=f"count: expected at most the {tested} images"):
        task.validation(tested + 1, generator())  # all of them


def test_the_sources_are_all_that_a_run_runs(photographs):
    for arm in images.ARMS:
        # What is imported late, or made once, need not be watched.
        case = images.case(arm, 1, **TINY)
        images.run(case)
        with within(images.IMAGES):
            images.run(case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arm", images.ARMS)
def test_a_case_runs_on_cuda(arm):
    assert measure(images.IMAGES, images.case(arm, 1, device="cuda", **TINY), "cuda")["facts"]["parameters"]


BAD = [
    ({"arm": "convolution"}, ValueError, "arm: expected one of 'learned'"),
    ({"device": "tpu"}, ValueError, "device: expected one of 'cpu', 'cuda'"),
    ({"data": "mnist"}, ValueError, "data: expected one of 'digits', 'cifar10'"),
    ({"steps": 0}, ValueError, "steps: expected an integer of at least 1, got 0"),
    ({"B": 1.5}, TypeError, "B: expected an integer of at least 1"),
    ({"H": 2}, TypeError, "sizes: expected some of B, d, L, steps, tested, got H"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_an_impossible_case_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        images.case(**{"arm": "learned", **given})
