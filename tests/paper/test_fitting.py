"""One run of an experiment with training: its seeds, its checks, what it learns, how it is tested."""

import dataclasses

import pytest
import torch
from seeded import generator

from ortho.attention import MECHANISMS
from paper.experiments.learning import fitting, study
from paper.experiments.learning.studies import PARITY_STUDY
from paper.tasks import NONE, Batch, state_tracking

TINY = {"steps": 2, "B": 2, "tested": 4}


def tiny(arm="softmax", seed=1, **more):
    return study.case(PARITY_STUDY, arm, seed, **{**TINY, **more})


def with_task(**changes):
    """The study with another task."""
    return dataclasses.replace(PARITY_STUDY, task=dataclasses.replace(PARITY_STUDY.task, **changes))


def test_the_recorded_seeds_are_those_that_are_drawn_from(monkeypatch):
    drawn = []

    def watched(part, draw):
        return lambda count, generator: drawn.append((part, generator.initial_seed())) or draw(count, generator)

    task = PARITY_STUDY.task
    tests = {name: watched("tests", draw) for name, draw in task.tests.items()}
    build = study.build
    monkeypatch.setattr(study, "build", lambda *x: drawn.append(("weights", x[2].initial_seed())) or build(*x))
    own = with_task(train=watched("training", task.train), tests=tests)
    seeds = study.run(own, tiny())["seeds"]
    unseen = {("checks", seeds["checks"]), ("dropout", seeds["dropout"])}
    assert {pair for pair in drawn if pair[1] != seeds["checks"]} == set(seeds.items()) - unseen


class Known(torch.nn.Module):
    """Answers parity rightly, except at the given tokens."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, tokens):
        answers = 2 + tokens.cumsum(-1) % 2
        for place in self.wrong:
            answers[place] = 0
        return torch.nn.functional.one_hot(answers, 4).float()


def evaluated(wrong, draw):
    found = fitting.evaluate(Known(wrong), draw, tiny(), generator())
    return found["correct_fraction"][0], found["faultless_fraction"][0]


@pytest.mark.parametrize(
    ("wrong", "correct", "faultless"),
    [([], 1, 1), ([(0, 5)], 1 - 1 / 48, 1 - 1 / 4), ([(0, 5), (0, 7), (1, 11)], 1 - 3 / 48, 0.5), ([(0, 2)], 1, 1)],
)
def test_shares_of_right_answers_and_of_faultless_sequences(wrong, correct, faultless):
    def draw(count, generator):  # 12 of 16 tokens are asked for
        return state_tracking.draw(count, generator, things=2, first=5, last=16)

    assert evaluated(wrong, draw) == (round(correct, 6), faultless)


def test_wrong_answers_and_tests_that_ask_nothing_are_not_trained_on():
    def silent(count, generator):
        inputs, answers = PARITY_STUDY.task.train(count, generator)
        return Batch(inputs, torch.full_like(answers, NONE))

    wrong = {"solve": lambda tokens: PARITY_STUDY.task.solve(tokens)[::-1]}
    for part, changes in (("training", wrong), ("silent", {"tests": {"silent": silent}})):
        with pytest.raises(AssertionError, match=f"parity, {part}: expected the answers"):
            study.run(with_task(**changes), tiny())


def test_a_fast_form_that_is_off_by_a_millionth_is_found(monkeypatch):
    right = MECHANISMS["linear"]
    off = dataclasses.replace(right, fast=lambda *own, **options: right.fast(*own, **options) * (1 + 1e-6))
    monkeypatch.setitem(MECHANISMS, "linear", off)
    with pytest.raises(AssertionError, match="fast form: expected a relative error of at most"):
        study.run(PARITY_STUDY, tiny("linear"))
