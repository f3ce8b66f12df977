"""The learning experiments: trained as said, checked before they are stored, resumed; what they depend on."""

import dataclasses

import pytest
import torch
from experiment_fakes import SLUG, go, within

from ortho import LanguageModel
from ortho.attention import MECHANISMS
from paper import experiments
from paper.experiments import measure
from paper.experiments.engine import records
from paper.experiments.learning import fitting, rates, studies
from paper.experiments.learning import study as learning
from paper.tasks import NONE, Batch, state_tracking

STUDIES = {
    study.name: study for study in (recall.STUDY, tracking.PARITY_STUDY, tracking.PERMUTATIONS_STUDY, flip_flop.STUDY)
}
ARMS = [(name, arm) for name, study in STUDIES.items() for arm in study.arms]
PARITY = tracking.PARITY_STUDY
TINY = {"steps": 2, "B": 2, "tested": 4}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def only(name, arms=("softmax",), seeds=(1, 2)):
    """The experiment with a few tiny cases."""
    cases = [learning.case(STUDIES[name], arm, seed, **TINY) for seed in seeds for arm in arms]
    return dataclasses.replace(experiments.EXPERIMENTS[name], cases=lambda _: cases)


def stored(results, name):
    return records.read(records.path(results, name, SLUG), experiments.EXPERIMENTS[name].needs)


def without_origin(record):
    found = {name: part for name, part in record.items() if name not in ("elapsed_s", "provenance")}
    return {**found, "facts": {name: fact for name, fact in record["facts"].items() if name != "train_s"}}


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_an_arm_is_trained_tested_and_stored_whole(name, arm, tmp_path):
    study = STUDIES[name]
    report = go(only(name, [arm], [1]), tmp_path)
    assert not report.errors
    (record,) = stored(tmp_path, name)
    assert list(record["repetitions"]) == list(study.task.tests)
    for shares in record["repetitions"].values():
        assert set(shares) == set(fitting.QUANTITIES)
        assert 0 <= shares["faultless_fraction"][0] <= 1 and 0 <= shares["correct_fraction"][0] <= 1
    assert len(record["facts"]["loss"]) == TINY["steps"]
    sizes = {"num_heads": study.H, **study.arms[arm]}
    model = LanguageModel(study.task.vocab_size, study.d, num_layers=study.L, **sizes)
    assert record["facts"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["facts"]["arm"]["attention"] == study.arms[arm]["attention"]
    assert record["configuration"]["H"] == sizes["num_heads"]
    assert experiments.EXPERIMENTS[name].line(record)


def test_an_arm_names_its_gates(tmp_path):
    go(only("parity", ["delta, beta to 2"], [1]), tmp_path)
    (record,) = stored(tmp_path, "parity")
    assert record["facts"]["arm"]["gates"] == {"beta": "ReflectingWriteStrength"}


def test_a_run_follows_from_its_seed():
    one, again, other = (
        without_origin(measure(only("parity"), learning.case(PARITY, "linear", seed, **TINY), "cpu"))
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one["facts"]["loss"] != other["facts"]["loss"]


def test_no_two_runs_share_random_numbers():
    seeds = [
        seed
        for study in STUDIES.values()
        for case in learning.cases(study, "cpu")
        for seed in learning.seeds_of(study, case).values()
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_recorded_seeds_are_those_that_are_drawn_from(monkeypatch):
    drawn = []

    def watched(part, draw):
        return lambda count, generator: drawn.append((part, generator.initial_seed())) or draw(count, generator)

    tests = {name: watched("tests", draw) for name, draw in PARITY.task.tests.items()}
    task = dataclasses.replace(PARITY.task, train=watched("training", PARITY.task.train), tests=tests)
    build = learning.build
    monkeypatch.setattr(learning, "build", lambda *x: drawn.append(("weights", x[2].initial_seed())) or build(*x))
    study = dataclasses.replace(PARITY, task=task)
    seeds = learning.run(study, learning.case(study, "softmax", 1, **TINY))["seeds"]
    unseen = {("checks", seeds["checks"]), ("dropout", seeds["dropout"])}
    assert {pair for pair in drawn if pair[1] != seeds["checks"]} == set(seeds.items()) - unseen


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_has_every_seed_and_the_tuning_seed_every_rate(name):
    study = STUDIES[name]
    cases = learning.cases(study, "cpu")
    runs = {(case["arm"], case["seed"], case["rate"]) for case in cases}
    assert len(runs) == len(cases) == len(study.arms) * (len(study.seeds) + len(study.tried))
    for arm in study.arms:
        rate = learning.chosen_rate(study, arm)
        assert rate in study.tried, "choose it: tools/rates.py"
        assert {seed for a, seed, r in runs if (a, r) == (arm, rate)} == {rates.TUNING, *study.seeds}
    assert [case["seed"] for case in cases[-len(study.arms) :]] == [study.seeds[-1]] * len(study.arms)


def test_the_rates_are_those_that_the_stored_tuning_runs_chose():
    tuned = {name: one for name, one in experiments.EXPERIMENTS.items() if "rate" in one.needs.configuration}
    chosen = {name: rates.choose(experiments.load(name)) for name in tuned}
    assert {name: found for name, found in chosen.items() if found} == rates.table()


def test_training_lowers_the_loss_and_what_is_learned_is_tested():
    case = learning.case(PARITY, "delta, beta to 2", 3, 1e-2, steps=150, B=16, tested=64)
    outcome = learning.run(PARITY, case)
    curve = outcome["facts"]["loss"]
    assert len(curve) == fitting.POINTS
    assert curve[-1] < 0.05 < 0.5 < curve[0]  # a guess has log 2 = 0.69
    near = outcome["repetitions"]["tokens 1 to 40"]
    assert near["correct_fraction"][0] > 0.99


class Known(torch.nn.Module):
    """Answers as parity is answered, but for the tokens given."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, tokens):
        answers = 2 + tokens.cumsum(-1) % 2
        for place in self.wrong:
            answers[place] = 0
        return torch.nn.functional.one_hot(answers, 4).float()


@pytest.mark.parametrize(
    ("wrong", "correct", "faultless"),
    [([], 1, 1), ([(0, 5)], 1 - 1 / 48, 1 - 1 / 4), ([(0, 5), (0, 7), (1, 11)], 1 - 3 / 48, 0.5), ([(0, 2)], 1, 1)],
)
def test_shares_of_right_answers_and_of_faultless_sequences(wrong, correct, faultless):
    case = learning.case(PARITY, "softmax", tested=4)

    def draw(count, generator):  # 12 of 16 tokens are asked for
        return state_tracking.draw(count, generator, things=2, first=5, last=16)

    found = fitting.evaluate(Known(wrong), draw, case, generator())
    assert found | {"loss_nats": None} == {
        "correct_fraction": [round(correct, 6)],
        "faultless_fraction": [round(faultless, 6)],
        "loss_nats": None,
    }


def test_sequences_that_ask_nothing_are_neither_right_nor_wrong():
    def draw(count, generator):
        batch = state_tracking.draw(count, generator, things=2, last=16)
        batch.answers[:2] = NONE
        return batch

    found = fitting.evaluate(Known([(0, 5), (3, 5)]), draw, learning.case(PARITY, "softmax", tested=4), generator())
    assert (found["correct_fraction"], found["faultless_fraction"]) == ([round(31 / 32, 6)], [0.5])


def test_a_test_in_parts_gives_what_the_whole_gives(monkeypatch):
    case = learning.case(PARITY, "softmax", tested=6)
    model = learning.build(PARITY, case, generator())
    draw = PARITY.task.tests["tokens 1 to 40"]
    whole = fitting.evaluate(model, draw, case, generator(1))
    calls = []
    model.register_forward_pre_hook(lambda _, arguments: calls.append(len(arguments[0])))
    monkeypatch.setattr(fitting, "TOKENS", 160)
    assert fitting.evaluate(model, draw, case, generator(1)) == whole
    assert calls == [4, 2]


def test_wrong_answers_are_not_trained_on(tmp_path):
    task = dataclasses.replace(PARITY.task, solve=lambda tokens: PARITY.task.solve(tokens)[::-1])
    wrong = dataclasses.replace(PARITY, task=task)
    with pytest.raises(AssertionError, match="parity, training: expected the answers"):
        learning.run(wrong, learning.case(PARITY, "softmax", 1, **TINY))


def test_a_test_that_asks_nothing_is_found(tmp_path):
    def silent(count, generator):
        inputs, answers = PARITY.task.train(count, generator)
        return Batch(inputs, torch.full_like(answers, NONE))

    wrong = dataclasses.replace(PARITY, task=dataclasses.replace(PARITY.task, tests={"silent": silent}))
    with pytest.raises(AssertionError, match="parity, silent: expected the answers"):
        learning.run(wrong, learning.case(PARITY, "softmax", 1, **TINY))


def test_a_fast_form_that_is_off_is_not_stored(monkeypatch, tmp_path):
    right = MECHANISMS["linear"]

    def off(*arguments, **options):
        return right.fast(*arguments, **options) * (1 + 1e-6)

    monkeypatch.setitem(MECHANISMS, "linear", dataclasses.replace(right, fast=off))
    report = go(only("parity", ["linear"], [1]), tmp_path)
    assert len(report.errors) == 1 and "fast form: expected a relative error of at most" in report.errors[0]
    assert not stored(tmp_path, "parity")


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    fit, started = fitting.fit, []

    def interrupted(model, task, recipe, case, draws, **options):
        started.append((case["arm"], case["seed"]))
        if len(started) == 3:
            raise KeyboardInterrupt
        return fit(model, task, recipe, case, draws, **options)

    monkeypatch.setattr(fitting, "fit", interrupted)
    experiment = only("flip-flop", ["softmax"], [1, 2, 3, 4])
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path)
    assert len(stored(tmp_path, "flip-flop")) == 2
    assert len(go(experiment, tmp_path).done) == 2
    assert started == [("softmax", seed) for seed in (1, 2, 3, 3, 4)]


@pytest.mark.parametrize("name", STUDIES)
def test_the_sources_are_all_that_a_run_runs(name):
    study = STUDIES[name]
    for arm in study.arms:
        # What is imported late, or made once, need not be watched.
        learning.run(study, learning.case(study, arm, **TINY))
        with within(experiments.EXPERIMENTS[name]):
            learning.run(study, learning.case(study, arm, **TINY))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_a_case_runs_on_cuda(name, arm):
    case = learning.case(STUDIES[name], arm, 1, device="cuda", **TINY)
    record = measure(experiments.EXPERIMENTS[name], case, "cuda")
    assert list(record["repetitions"]) == list(STUDIES[name].task.tests)


BAD = [
    ({"arm": "delta rule"}, ValueError, "arm: expected one of 'softmax'"),
    ({"seed": -1}, ValueError, "seed: expected an integer of at least 0, got -1"),
    ({"seed": True}, TypeError, "seed: expected an integer of at least 0, got bool True"),
    ({"rate": 0.0}, ValueError, r"rate: expected a number in \(0, 1\), got float 0.0"),
    ({"rate": float("nan")}, ValueError, r"rate: expected a number in \(0, 1\)"),
    ({"device": "tpu"}, ValueError, "device: expected one of 'cpu', 'cuda'"),
    ({"steps": 0}, ValueError, "steps: expected an integer of at least 1, got 0"),
    ({"B": 1.5}, TypeError, "B: expected an integer of at least 1"),
    ({"tested": 0}, ValueError, "tested: expected an integer of at least 1, got 0"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_an_impossible_case_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        learning.case(PARITY, **{"arm": "softmax", **given})


def test_a_record_of_another_task_is_refused(tmp_path, capsys):
    go(only("parity", seeds=[1]), tmp_path)
    file = records.path(tmp_path, "parity", SLUG)
    (record,) = records.read(file)
    del record["repetitions"]["tokens 41 to 80"]
    records.write(file, [record])
    with pytest.raises(records.RecordError, match="repetitions.tokens 41 to 80: missing"):
        experiments.load("parity", tmp_path)
