"""Experiments on translation: arms and what they cost, pairs of like lengths, what is scored."""

import dataclasses

import numpy as np
import pytest
import torch
from experiment_fakes import go, made_up, only
from seeded import generator

from ortho import cost
from paper.experiments.engine import records
from paper.experiments.learning import fitting, translating, translation_budgets
from paper.experiments.learning.analysis import judged
from paper.experiments.learning.translating import H, arms, build, training_flop
from paper.experiments.statistics import student
from paper.tasks import transduction
from paper.tasks import translation as texts
from paper.tasks.pairs import until_stop
from paper.training import Recipe, Trainer

PAIRS = 1000
NAMES = list(arms(16))


@pytest.fixture
def corpus(monkeypatch):
    """Texts in place of Multi30k's, some of them too long."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")

    def part(first, count):
        numbers = range(first, first + count)
        return [(f"das ist Satz {i} von {i * i}", f"this is sentence {i} of {i * i}") for i in numbers]

    long = [("lang " * 20, "long"), ("lang", "long " * 20)]
    found = texts.Corpus(long + part(0, PAIRS), long + part(PAIRS, 8), part(2 * PAIRS, 8))
    monkeypatch.setattr(translating, "multi30k_corpus", lambda: found)
    monkeypatch.setattr(translation_budgets, "BLOCKS", 2)
    translating._multi30k.cache_clear()
    yield found
    translating._multi30k.cache_clear()


@pytest.mark.parametrize("arm", NAMES)
def test_costs_and_parameters_of_an_arm_are_those_counted(arm):
    """They agree exactly: the closed form counts what runs."""
    d, L, vocab, B, M, N = 16, 2, 30, 3, 5, 4
    model = build(arm, vocab, d, L, max_length=9, dropout=0.0, generator=generator())
    tokens = [torch.randint(4, vocab, (B, n), generator=generator(n)) for n in (M, N)]
    counts = cost.of(model, *tokens)
    assert training_flop(arm, B, M, N, d, L, vocab_size=vocab) == counts.forward + counts.backward
    one = 2 * d * d // H
    qk = {"1 learned": one, "7 fixed + 1 learned": one, "8 learned": 2 * d * d, "8 frozen": 0}[arm]  # of a layer
    all_learned = build("8 learned", vocab, d, L, max_length=9, dropout=0.0, generator=generator())
    less = sum(p.numel() for p in all_learned.parameters()) - sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    narrow = L * 2 * d * (d - d // H) if arm == "1 learned" else 0  # of W_V and W_O
    assert less == L * (2 * d * d - qk) + narrow


def test_no_mistake_after_right_tokens_is_what_greedy_decoding_writes():
    """Shown with a model that knows a few sentences and no others."""
    task = transduction.task(clauses=1, pairs=4)
    model = build(
        "7 fixed + 1 learned", task.vocab_size, 32, 1, max_length=task.longest, dropout=0.0, generator=generator()
    )
    Trainer(model, task.train, Recipe(150, 1e-2, 8), generator(1)).run()
    model.eval()
    found = []
    for draw in (task.train, task.tests["like training"]):
        mixed = dataclasses.replace(task, tests={"test": draw})
        case = translating.case("transduction", "8 learned", 1, pairs=0, tested=16)
        shares = fitting.evaluate(model, draw, case, torch.Generator())
        written = until_stop(translating.written(model, mixed, case))
        wanted = until_stop(draw(16, torch.Generator()).answers)
        found.append(sum(map(list.__eq__, written, wanted)) / len(wanted))
        assert shares["faultless_fraction"] == [found[-1]]
    assert found[0] > 0.5 > found[1]


LONGER = {"base": 2, "budget": 2, "B": 2, "d": 16, "L": 2, "tested": 4, "looked": 8, "characters": 60, "subwords": 80}


def longer(arm="8 learned", seed=1, **changes):
    return translation_budgets.case(arm, seed, 0.01, **{"pairs": PAIRS, **LONGER, **changes})


def test_a_translation_is_tested_at_each_budget(corpus, tmp_path):
    case = longer()
    assert not go(only("translation-budgets", case), tmp_path).errors
    (record,) = records.read_all(tmp_path, "translation-budgets")
    evaluations = record["facts"]["validation"]
    assert [(one["budget"], one["step"]) for one in evaluations] == [(1, 2), (2, 4)]
    assert set(record["repetitions"]) == {"1 x", "2 x"}
    assert all(len(numbers) == 2 for numbers in record["repetitions"]["2 x"].values())
    table = np.array([record["repetitions"]["2 x"][name] for name in translation_budgets.COUNTS], dtype=float)
    assert translation_budgets.score(table.sum(1)) == pytest.approx(evaluations[1]["bleu_fraction"], abs=1e-6)
    for layer in evaluations[1]["heads"]:
        assert len(layer) == H and all(head["absolute"] <= 1 for head in layer)
    assert records.differences(record | translation_budgets.run(case), record) == {}


def test_bleu_of_counts_is_that_of_the_texts(corpus):
    """The counts of the parts are added up; sacrebleu smooths only if no n-gram of an order is right."""
    found, task = translating.subject(longer())
    answers = task.tests["test"](4, generator()).answers
    for order, whole in (([0, 1, 2, 3], True), ([0, 1, 3, 2], False)):
        counts = found.counts("test", answers[order], 2)
        table = np.array([counts[name] for name in translation_budgets.COUNTS], dtype=float)
        share = translation_budgets.score(table.sum(1))
        assert 100 * share == pytest.approx(found.bleu("test", answers[order]).score) and (share == 1) is whole
    table[6] = 0
    assert translation_budgets.score(table.sum(1)) == 0


def along_budgets(arm, losses, right):
    """Runs of a translation along budgets; at each, `right` of 20 n-grams of each order are right in each of two parts
    of the test. Pairs seen take 2 nats a token, those of the test half a nat more."""
    counts = {name: [20.0, 20.0] for name in translation_budgets.COUNTS}
    correct = [name for name in counts if name.startswith("right")]
    tests = {f"{2**i} x": counts | dict.fromkeys(correct, [float(n)] * 2) for i, n in enumerate(right)}
    nats = {"test_nats": 2.5, "seen_nats": 2.0, "heads": []}
    evaluations = [{"budget": 2**i, "step": 2**i, "loss_nats": loss} | nats for i, loss in enumerate(losses)]
    sizes = {"pairs": 5000, "budget": evaluations[-1]["budget"]}
    cases = [translation_budgets.case(arm, seed, 0.01, **sizes) for seed in translation_budgets.SEEDS]
    return [made_up("translation-budgets", case, tests, validation=evaluations) for case in cases]


def test_arms_are_judged_at_their_best_budgets():
    ours = along_budgets("7 fixed + 1 learned", (3.0, 2.0, 2.5), (5, 15, 1))
    theirs = along_budgets("8 learned", (4.0, 3.0, 2.98), (1, 5, 10))
    assert translation_budgets.best(ours) == 2 and translation_budgets.best(theirs) == 4
    arms = translation_budgets.by_pairs([*ours, *theirs])[5000]
    assert arms["8 learned"].mean("score") == pytest.approx(0.5)
    assert arms["8 learned"].mean("loss") == 2.5 and arms["8 learned"].mean("seen") == 2.0
    found = judged(arms["7 fixed + 1 learned"], arms["8 learned"], "score")
    assert found.difference.mean == pytest.approx(0.25) and found.difference.interval == pytest.approx((0.25, 0.25))
    assert found.outcome == "better" and found.pairs == len(translation_budgets.SEEDS)


def test_an_interval_has_the_error_of_the_seeds_and_that_of_the_test():
    """Seeds that do not differ leave the jackknife's error, here by hand: each part has half of the n-grams."""
    ours, theirs = (along_budgets(arm, (4.0,), (10,)) for arm in ("7 fixed + 1 learned", "8 learned"))
    for run in ours:
        counts = run["repetitions"]["1 x"]
        counts |= {name: [8.0, 16.0] for name in counts if name.startswith("right")}
    arms = translation_budgets.by_pairs([*ours, *theirs])[5000]
    (low, high), mean = judged(arms["7 fixed + 1 learned"], arms["8 learned"], "score").difference.interval, 0.6 - 0.5
    left_out = (0.8 - 0.5, 0.4 - 0.5)
    reach = student(0.9, 2) * (max(left_out) - mean)  # of two parts: (2 - 1) times their variance, which is 0.2^2
    assert (low, high) == pytest.approx((mean - reach, mean + reach))
