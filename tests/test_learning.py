"""The learning experiments: trained as said, checked before they are stored, resumed; what they depend on."""

import dataclasses
import json

import pytest
import torch
from experiment_fakes import SLUG, go, watching

from ortho import LanguageModel, experiments
from ortho.attention import MECHANISMS
from ortho.experiments import flip_flop, learning, learning_rows, measure, recall, records
from ortho.experiments import state_tracking as tracking

TASKS = {task.name: task for task in (recall.TASK, tracking.PARITY_TASK, tracking.PERMUTATIONS_TASK, flip_flop.TASK)}
ARMS = [(name, arm) for name, task in TASKS.items() for arm in task.arms]
PARITY = tracking.PARITY_TASK
TINY = {"steps": 2, "B": 2, "tested": 4}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def only(name, arms=("softmax",), seeds=(1, 2)):
    """The experiment with a few tiny cases."""
    cases = [learning.case(TASKS[name], arm, seed, **TINY) for seed in seeds for arm in arms]
    return dataclasses.replace(experiments.EXPERIMENTS[name], cases=lambda _: cases)


def stored(results, name):
    return records.read(records.path(results, name, SLUG), experiments.EXPERIMENTS[name].needs)


def without_origin(record):
    return {name: part for name, part in record.items() if name not in ("elapsed_s", "provenance")}


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_an_arm_is_trained_tested_and_stored_whole(name, arm, tmp_path):
    task = TASKS[name]
    report = go(only(name, [arm], [1]), tmp_path)
    assert not report.errors
    (record,) = stored(tmp_path, name)
    assert list(record["repetitions"]) == list(task.tests)
    for shares in record["repetitions"].values():
        assert set(shares) == set(learning.QUANTITIES)
        assert 0 <= shares["faultless_fraction"][0] <= 1 and 0 <= shares["correct_fraction"][0] <= 1
    assert len(record["facts"]["loss"]) == TINY["steps"]
    sizes = {"num_heads": task.H, **task.arms[arm]}
    model = LanguageModel(task.vocab_size, task.d, num_layers=task.L, **sizes)
    assert record["facts"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["facts"]["arm"]["attention"] == task.arms[arm]["attention"]
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
        for task in TASKS.values()
        for case in learning.cases(task, "cpu")
        for seed in learning.seeds_of(task, case).values()
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_recorded_seeds_are_those_that_are_drawn_from(monkeypatch):
    drawn = []

    def watched(part, draw):
        return lambda count, generator: drawn.append((part, generator.initial_seed())) or draw(count, generator)

    tests = {name: watched("tests", draw) for name, draw in PARITY.tests.items()}
    task = dataclasses.replace(PARITY, train=watched("training", PARITY.train), tests=tests)
    build = learning.build
    monkeypatch.setattr(learning, "build", lambda *x: drawn.append(("weights", x[2].initial_seed())) or build(*x))
    seeds = learning.run(task, learning.case(task, "softmax", 1, **TINY))["seeds"]
    assert {pair for pair in drawn if pair[1] != seeds["checks"]} == set(seeds.items()) - {("checks", seeds["checks"])}


@pytest.mark.parametrize("name", TASKS)
def test_every_arm_has_every_seed_and_the_tuning_seed_every_rate(name):
    task = TASKS[name]
    cases = learning.cases(task, "cpu")
    runs = {(case["arm"], case["seed"], case["rate"]) for case in cases}
    assert len(runs) == len(cases) == len(task.arms) * (len(task.seeds) + len(learning.RATES))
    assert set(task.rates) <= set(task.arms) and set(task.rates.values()) <= set(learning.RATES)
    for arm in task.arms:
        assert {seed for a, seed, rate in runs if (a, rate) == (arm, task.rates.get(arm, learning.RATES[0]))} == {
            learning_rows.TUNING,
            *task.seeds,
        }
    assert [case["seed"] for case in cases[: len(task.arms)]] == [task.seeds[0]] * len(task.arms)


@pytest.mark.parametrize("name", TASKS)
def test_the_rates_are_those_that_the_stored_tuning_runs_chose(name):
    task = TASKS[name]
    found = experiments.load(name)
    for device in records.by_device(found):
        for arm, losses in learning_rows.tuning(found, device).items():
            if device.startswith("cpu") and set(losses) == set(learning.RATES):
                assert task.rates.get(arm, learning.RATES[0]) == learning_rows.chosen(losses), (device, arm, losses)


def test_training_lowers_the_loss_and_what_is_learned_is_tested():
    case = learning.case(PARITY, "delta, beta to 2", 3, 1e-2, steps=150, B=16, tested=64)
    outcome = learning.run(PARITY, case)
    curve = outcome["facts"]["loss"]
    assert len(curve) == learning.POINTS
    assert curve[-1] < 0.05 < 0.5 < curve[0]  # a guess has log 2 = 0.69
    near = outcome["repetitions"]["tokens 1 to 40"]
    assert near["correct_fraction"][0] > 0.99


def test_the_rate_rises_then_falls_to_nothing():
    shares = [learning.share_of_rate(step, 100) for step in range(100)]
    top = shares.index(1.0)
    assert top == 9 and shares[0] == 0.1
    assert max(shares) == 1
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top + 1 :] == sorted(shares[top + 1 :], reverse=True)
    assert 0 < shares[-1] < 1e-3
    assert learning.share_of_rate(0, 1) == 1


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
        return tracking.draw(count, generator, things=2, first=5, last=16)

    found = learning.evaluate(Known(wrong), draw, case, generator())
    assert found == {"correct_fraction": [round(correct, 6)], "faultless_fraction": [round(faultless, 6)]}


def test_sequences_that_ask_nothing_are_neither_right_nor_wrong():
    def draw(count, generator):
        batch = tracking.draw(count, generator, things=2, last=16)
        batch.answers[:2] = learning.NONE
        return batch

    found = learning.evaluate(Known([(0, 5), (3, 5)]), draw, learning.case(PARITY, "softmax", tested=4), generator())
    assert found == {"correct_fraction": [round(31 / 32, 6)], "faultless_fraction": [0.5]}


def test_a_test_in_parts_gives_what_the_whole_gives(monkeypatch):
    case = learning.case(PARITY, "softmax", tested=6)
    model = learning.build(PARITY, case, generator())
    draw = PARITY.tests["tokens 1 to 40"]
    whole = learning.evaluate(model, draw, case, generator(1))
    calls = []
    model.register_forward_pre_hook(lambda _, arguments: calls.append(len(arguments[0])))
    monkeypatch.setattr(learning, "TOKENS", 160)
    assert learning.evaluate(model, draw, case, generator(1)) == whole
    assert calls == [4, 2]


def test_wrong_answers_are_not_trained_on(tmp_path):
    wrong = dataclasses.replace(PARITY, solve=lambda tokens: PARITY.solve(tokens)[::-1])
    with pytest.raises(AssertionError, match="parity, training: expected the answers"):
        learning.run(wrong, learning.case(PARITY, "softmax", 1, **TINY))


def test_a_test_that_asks_nothing_is_found(tmp_path):
    def silent(count, generator):
        tokens, answers = PARITY.train(count, generator)
        return learning.Batch(tokens, torch.full_like(answers, learning.NONE))

    wrong = dataclasses.replace(PARITY, tests={"silent": silent})
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
    train, started = learning.train, []

    def interrupted(model, task, case, generator):
        started.append((case["arm"], case["seed"]))
        if len(started) == 3:
            raise KeyboardInterrupt
        return train(model, task, case, generator)

    monkeypatch.setattr(learning, "train", interrupted)
    experiment = only("flip-flop", ["softmax"], [1, 2, 3, 4])
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path)
    assert len(stored(tmp_path, "flip-flop")) == 2
    assert len(go(experiment, tmp_path).done) == 2
    assert started == [("softmax", seed) for seed in (1, 2, 3, 3, 4)]


@pytest.mark.parametrize("name", TASKS)
def test_the_sources_are_all_that_a_run_runs(name):
    ours, task = set(), TASKS[name]
    for arm in task.arms:
        learning.run(task, learning.case(task, arm, **TINY))  # what is imported late, or made once, need not be watched
        with watching(ours):
            learning.run(task, learning.case(task, arm, **TINY))
    named = set(experiments.EXPERIMENTS[name].sources)
    assert ours <= named
    assert named - ours <= {"attention/feature_map.py"}  # declarations, on which the linear arms depend


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_a_case_runs_on_cuda(name, arm):
    case = learning.case(TASKS[name], arm, 1, device="cuda", **TINY)
    record = measure(experiments.EXPERIMENTS[name], case, "cuda")
    assert list(record["repetitions"]) == list(TASKS[name].tests)


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
    (record,) = json.loads(file.read_text())
    del record["repetitions"]["tokens 41 to 80"]
    file.write_text(json.dumps([record]))
    with pytest.raises(records.RecordError, match="repetitions.tokens 41 to 80: missing"):
        experiments.load("parity", tmp_path)
