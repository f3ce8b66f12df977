"""Experiments on translation: arms and what they cost, pairs of like lengths, what is scored."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from experiment_fakes import go, only
from learning_fakes import along_budgets
from seeded import SIGMAS, generator

from ortho import cost
from ortho.attention.positional.positional_attention import SEVEN
from ortho.layers.positional import PositionalHeads
from paper.experiments.engine import records
from paper.experiments.learning import fitting, rates, translating, translation_budgets
from paper.experiments.learning.analysis import judged
from paper.experiments.learning.translating import H, arms, build, training_flop
from paper.experiments.statistics import student
from paper.tasks import transduction
from paper.tasks import translation as texts
from paper.tasks.pairs import exact_matches
from paper.tasks.task import NONE
from paper.tasks.transduction import task as made_up
from paper.training import Recipe, Trainer

TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 4, "looked": 2}
PAIRS = 1000
NAMES = list(arms(16))


def tiny(task, arm="8 learned", seed=1, **changes):
    own = {"subwords": 80} if task == "translation" else {}
    pairs = PAIRS if task == "translation" else 0
    return translating.case(task, arm, seed, **{"pairs": pairs, **TINY, **own, **changes})


@pytest.fixture
def corpus(monkeypatch):
    """Texts in place of Multi30k's, some of them too long."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")

    def part(first, count):
        return [
            (f"das ist Satz {i} von {i * i}", f"this is sentence {i} of {i * i}") for i in range(first, first + count)
        ]

    long = [("lang " * 20, "long"), ("lang", "long " * 20)]
    found = texts.Corpus(long + part(0, PAIRS), long + part(PAIRS, 8), part(2 * PAIRS, 8))
    monkeypatch.setattr(translating, "multi30k_corpus", lambda: found)
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
    heads = {
        "1 learned": 2 * d * d // H,
        "7 fixed + 1 learned": 2 * d * d // H,
        "7 stopped + 1 learned": 2 * d * d // H,
    }
    qk = {**heads, "8 learned": 2 * d * d, "1 learned, wide": 2 * d * d}.get(arm, 0)  # of the encoder's layer
    all_learned = build("8 learned", vocab, d, L, max_length=9, dropout=0.0, generator=generator())
    less = sum(p.numel() for p in all_learned.parameters()) - sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    narrow = L * 2 * d * (d - d // H) if arm == "1 learned" else 0  # of W_V and W_O
    beside = 2 * L * 2 * d * d if arm == "8 frozen everywhere" else 0
    assert less == L * (2 * d * d - qk) + narrow + beside


def test_fixed_heads_have_the_seven_patterns():
    model = build("7 fixed + 1 learned", 30, 16, 2, max_length=9, dropout=0.0, generator=generator())
    found = [part.patterns for part in model.modules() if isinstance(part, PositionalHeads)]
    assert found == [SEVEN, SEVEN]
    assert not [part for part in model.decoder.modules() if isinstance(part, PositionalHeads)]


def test_batches_are_of_pairs_of_like_lengths():
    draw = made_up(pairs=64).train
    one = translating.alike(draw)
    padding = []
    for make in (draw, one):
        batches = [make(8, generator(seed)) for seed in range(20)]
        padding.append(sum(float((~batch.inputs[2]).double().mean()) for batch in batches))
        for (source, target, mask), answers in batches:
            assert source.shape == mask.shape and target.shape == answers.shape
            assert mask.any(0).all() and (answers != NONE).any(0).all()  # no column of padding alone
            assert torch.equal(target[:, 1:][answers[:, 1:] != NONE], answers[:, :-1][answers[:, 1:] != NONE])
    assert padding[1] < padding[0] / 2


def test_every_pair_is_as_likely_among_those_of_like_lengths():
    """Of 4 pairs of unlike lengths, each has a mean share of a quarter. Batches are drawn independently, and a pair's
    share in a batch has a standard deviation of at most 1/2."""
    pairs, count = made_up(pairs=4), 2000
    known = [tuple(row[row != NONE].tolist()) for row in pairs.train(64, generator()).answers]
    assert len(set(known)) == 4
    one, drawn = translating.alike(pairs.train), generator(1)
    answers = [one(1, drawn).answers[0] for _ in range(count)]
    for pair in set(known):
        share = sum(tuple(row.tolist()) == pair for row in answers) / count
        assert abs(share - 1 / 4) <= SIGMAS / 2 / count**0.5


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
        case = tiny("transduction", tested=16)
        shares = fitting.evaluate(model, draw, case, torch.Generator())
        matches = exact_matches(translating.written(model, mixed, case), draw(16, torch.Generator()).answers)
        found.append(float(matches.double().mean()))
        assert shares["faultless_fraction"] == [found[-1]]
    assert found[0] > 0.5 > found[1]


def test_a_translation_is_stored_with_what_bleu_it_has(corpus, tmp_path):
    case = tiny("translation", "7 fixed + 1 learned")
    assert not go(only("translation", case), tmp_path).errors
    (record,) = records.read_all(tmp_path, "translation")
    assert 0 <= record["repetitions"]["test"]["bleu_fraction"][0] <= 1
    facts = record["facts"]
    assert "tok:13a" in facts["bleu_signature"] and len(facts["vocabulary_sha256"]) == 64
    assert facts["vocab_size"] == facts["subwords"] <= case["subwords"]
    assert case["dropout"] == case["smoothing"] == 0.1


def test_what_is_written_is_what_is_scored(corpus, monkeypatch):
    def right(model, task, case):
        return task.tests["test"](case["tested"], generator()).answers

    monkeypatch.setattr(translating, "written", right)
    assert translating.run(tiny("translation"))["repetitions"]["test"]["bleu_fraction"] == [1.0]


def test_pairs_that_were_seen_are_of_all_lengths(corpus, monkeypatch):
    """Batches of like lengths are only for training."""
    asked = []
    evaluate = fitting.evaluate
    monkeypatch.setattr(fitting, "evaluate", lambda *given: asked.append(given[1]) or evaluate(*given))
    case = tiny("translation")
    translating.run(case)
    found, task = translating.subject(case)
    assert found.task.train in asked and task.train not in asked


def test_texts_are_as_short_as_the_case_says(corpus):
    found, _ = translating.subject(tiny("translation"))
    assert all(max(map(len, pair)) <= 60 for part in found.texts.values() for pair in part)
    assert len(found.texts["validation"]) == len(corpus.validation) - 2
    with pytest.raises(ValueError, match=f"pairs: expected at most the {PAIRS} of the training part, got 10000"):
        translating.subject(tiny("translation", pairs=10_000))


def test_a_translation_follows_from_its_seed(corpus):
    """This holds with dropout too, which is at work only in training."""
    one, other = (translating.run(tiny("translation", seed=seed)) for seed in (1, 2))
    translating._multi30k.cache_clear()
    again = translating.run(tiny("translation"))
    for outcome in (one, again):
        del outcome["facts"]["train_s"]
    assert one == again and one["facts"]["loss"] != other["facts"]["loss"]


def test_data_that_are_not_at_hand_are_reported(monkeypatch, tmp_path):
    translating._multi30k.cache_clear()
    monkeypatch.setenv("ORTHO_DATA", str(tmp_path))
    report = go(only("translation", tiny("translation")), tmp_path)
    assert len(report.errors) == 1 and "ORTHO_DATA: expected multi30k/train.de.gz in" in report.errors[0]
    assert not records.read_all(tmp_path, "translation")


def test_a_package_that_is_missing_is_named(corpus, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    report = go(only("translation", tiny("translation")), tmp_path)
    assert len(report.errors) == 1 and "pip install ortho[translation]" in report.errors[0]


LONGER = {"base": 2, "budget": 2, "B": 2, "d": 16, "L": 2, "tested": 4, "looked": 8, "characters": 60, "subwords": 80}


def longer(arm="8 learned", seed=1, **changes):
    return translation_budgets.case(arm, seed, 0.01, **{"pairs": PAIRS, **LONGER, **changes})


@pytest.fixture
def in_two_parts(monkeypatch):
    monkeypatch.setattr(translation_budgets, "BLOCKS", 2)


def test_a_translation_is_tested_at_each_budget(corpus, in_two_parts, tmp_path):
    case = longer()
    assert not go(only("translation-budgets", case), tmp_path).errors
    (record,) = records.read_all(tmp_path, "translation-budgets")
    looks = record["facts"]["validation"]
    assert [(look["budget"], look["step"]) for look in looks] == [(1, 2), (2, 4)]
    assert set(record["repetitions"]) == {"1 x", "2 x"}
    assert all(len(numbers) == 2 for numbers in record["repetitions"]["2 x"].values())
    assert translation_budgets.bleu([record], 2) == [pytest.approx(looks[1]["bleu_fraction"], abs=1e-6)]
    for layer in looks[1]["heads"]:
        assert len(layer) == H and all(head["absolute"] <= 1 for head in layer)
    assert "BLEU" in translation_budgets.line(record)
    assert records.differences(record | translation_budgets.run(case), record) == {}


def test_a_run_that_chooses_a_rate_is_not_tested(corpus):
    outcome = translation_budgets.run(longer(seed=rates.TUNING, budget=1))
    assert set(outcome["repetitions"]["1 x"]) == {"loss_nats"}
    assert "bleu_fraction" not in outcome["facts"]["validation"][0]


def test_bleu_of_counts_is_that_of_the_texts(corpus, in_two_parts):
    """The counts of the parts are added up; sacrebleu smooths only if no n-gram of an order is right."""
    found, task = translating.subject(longer())
    answers = task.tests["test"](4, generator()).answers
    counts = found.counts("test", answers, 2)
    table = np.array([counts[name] for name in translation_budgets.COUNTS], dtype=float)
    assert translation_budgets.score(table.sum(1)) == 1.0
    swapped = answers[[0, 1, 3, 2]]
    counts = found.counts("test", swapped, 2)
    table = np.array([counts[name] for name in translation_budgets.COUNTS], dtype=float)
    assert 100 * translation_budgets.score(table.sum(1)) == pytest.approx(found.bleu("test", swapped).score)
    table[6] = 0
    assert translation_budgets.score(table.sum(1)) == 0


def test_arms_are_judged_at_their_best_budgets_and_said_to_have_converged_or_not():
    ours = along_budgets("7 fixed + 1 learned", (3.0, 2.0, 2.5), (5, 15, 1))
    theirs = along_budgets("8 learned", (4.0, 3.0, 2.98), (1, 5, 10))
    assert translation_budgets.best(ours) == 2 and translation_budgets.best(theirs) == 4
    arms = translation_budgets.by_pairs([*ours, *theirs])[5000]
    assert arms["8 learned"].mean("score") == pytest.approx(0.5)
    assert arms["8 learned"].mean("loss") == 2.5 and arms["8 learned"].mean("seen") == 2.0
    found = judged(arms["7 fixed + 1 learned"], arms["8 learned"], "score")
    assert found.difference.mean == pytest.approx(0.25) and found.difference.interval == pytest.approx((0.25, 0.25))
    assert found.outcome == "better" and found.pairs == len(translation_budgets.SEEDS)
    falling = along_budgets("8 learned", (4.0, 3.0, 2.96), (1, 5, 10))
    assert translation_budgets.converged(theirs) and not translation_budgets.converged(falling)
    assert "+0.2500 [+0.2500, +0.2500] against '8 learned': better" in translation_budgets.table([*theirs, *ours])
    assert "not converged" in translation_budgets.table(falling)


def test_an_arm_that_lacks_a_seed_is_not_judged():
    whole = along_budgets("8 learned", (4.0,), (10,))
    part = along_budgets("7 fixed + 1 learned", (4.0,), (15,), seeds=translation_budgets.SEEDS[:-1])
    assert list(translation_budgets.by_pairs([*whole, *part])[5000]) == ["8 learned"]
    assert translation_budgets.by_pairs(part) == {}
    assert "against" not in translation_budgets.table([*whole, *part])


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


def test_longer_runs_begin_with_their_rates(monkeypatch):
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: None)
    assert {case["seed"] for case in translation_budgets.cases("cpu")} == {rates.TUNING}
    monkeypatch.setattr(rates, "chosen", lambda experiment, case: 0.005)
    counted = [case for case in translation_budgets.cases("cpu") if case["seed"] != rates.TUNING]
    assert len(counted) == 3 * 3 * len(translation_budgets.ARMS)
    with pytest.raises(ValueError, match="budget: expected a power of two, got 3"):
        longer(budget=3)
