"""The synthetic tasks: answers equal those of other code; lengths, vocabularies, seeds; bad sizes are refused."""

from functools import partial

import pytest
import torch
from refusals import refusals
from seeded import generator
from task_draws import drawn

from paper.tasks import NONE, TASKS, copying, flip_flop, induction, modular_addition, mqar, needle, ngrams, recall
from paper.tasks import state_tracking as tracking
from paper.tasks.task import Batch, any_of, first_of

# Beside the usual sizes: the smallest there are, odd ones, those that leave no room, and other kinds.
OTHERS = (
    mqar.task(pairs=1, length=3, vocab_size=4),
    mqar.task(pairs=4, length=12, vocab_size=11),
    induction.task(hops=1, length=4, symbols=3),
    induction.task(hops=2, length=40, symbols=5),
    induction.task(hops=16, length=100, symbols=4),
    copying.task(length=1, shortest=1, symbols=1),
    copying.task(length=5, shortest=5, symbols=3),
    copying.task(length=7, shortest=1, symbols=4, backwards=True),
    needle.task(needles=1, length=5, symbols=1),
    needle.task(needles=5, length=17, symbols=5),
    ngrams.task(order=1, length=3, symbols=1),
    ngrams.task(order=3, length=40, symbols=2, likely=0.0),
    modular_addition.task(modulus=5),
    modular_addition.task(modulus=11, trained=0.9, split=1),
)


def parts(task):
    return {"train": task.train, "validation": task.validation, **task.tests}


DRAWS = [
    pytest.param(task, draw, id=f"{task.title}-{part}")
    for task in (*TASKS.values(), *OTHERS)
    for part, draw in parts(task).items()
]


@pytest.mark.parametrize(("task", "draw"), DRAWS)
def test_drawn_answers_are_the_solvers_wherever_one_is_asked_for(task, draw):
    for seed in range(3):
        tokens, answers = drawn(draw, 2, seed)
        assert tokens.shape == answers.shape and len(tokens) == 2
        assert tokens.dtype == answers.dtype == torch.long
        assert tokens.min() >= 0 and max(tokens.max(), answers.max()) < task.vocab_size
        for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
            solved = task.solve(row)
            assert all(a in (NONE, b) for a, b in zip(wanted, solved, strict=True))
            asked = [t for t, a in enumerate(wanted) if a != NONE]
            # Only answers before the first one that is asked for are left out.
            assert [t for t, a in enumerate(solved) if a != NONE and asked and t >= asked[0]] == asked


@pytest.mark.parametrize("name", TASKS)
def test_training_sequences_are_no_longer_than_said_and_use_the_whole_vocabulary(name):
    task = TASKS[name]
    lengths, read, said = set(), set(), set()
    for seed in range(20):
        tokens, answers = drawn(task.train, 64, seed)
        assert (answers != NONE).any(-1).all()
        lengths.add(tokens.shape[1])
        read |= set(tokens.flatten().tolist())
        said |= set(answers.flatten().tolist()) - {NONE}
    assert max(lengths) == task.longest
    assert read | said == set(range(task.vocab_size))
    if name in ("recall", "flip-flop", "parity", "permutations"):
        assert not read & said  # answers are tokens that are never read


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_says_what_is_drawn(name):
    task = TASKS[name]
    for draw in parts(task).values():
        (tokens, answers), again, (other, _) = (drawn(draw, 4, seed) for seed in (1, 1, 2))
        assert torch.equal(tokens, again[0]) and torch.equal(answers, again[1])
        fixed = name == "modular-addition" and draw is not task.train
        assert (tokens.shape == other.shape and torch.equal(tokens, other)) == fixed


BAD = [
    (partial(recall.draw, 2, pairs=17, writes=1), "pairs: expected at most 16, got 17"),
    (partial(recall.draw, 2, pairs=4, writes=9), "writes: expected at most 8, got 9"),
    (partial(recall.draw, 2, pairs=0, writes=1), "pairs: expected an integer of at least 1, got 0"),
    (partial(tracking.draw, 2, things=0, last=4), "things: expected an integer of at least 1, got 0"),
    (partial(tracking.draw, 2, things=2, last=4, first=5), "first: expected at most last = 4, got 5"),
    (partial(tracking.draw, 2, things=2, last=4.0), "last: expected an integer", TypeError),
    (partial(flip_flop.draw, 2, ignored=1.0), r"ignored: expected a share in \(0, 1\), got 1.0"),
    (partial(flip_flop.draw, 2, ignored=0.5, first=9, last=8), "first: expected at most last = 8, got 9"),
]
BAD_SIZES = [
    (partial(mqar.task, length=23), r"length: expected at least 3 \* pairs = 24, got 23"),
    (partial(mqar.task, vocab_size=17), r"vocab_size: expected at least 2 \* pairs \+ 2 = 18, got 17"),
    (partial(induction.task, hops=4), r"length: expected more than hops \* symbols = 64, got 64"),
    (partial(induction.task, symbols=2), "symbols: expected at least 3, got 2"),
    (partial(copying.task, length=7), "shortest: expected at most length = 7, got 8"),
    (partial(needle.task, length=13), r"length: expected at least 3 \* needles \+ 2 = 14, got 13"),
    (partial(needle.task, symbols=3), "symbols: expected at least needles = 4, got 3"),
    (partial(ngrams.task, length=3), r"length: expected more than order \+ 1 = 3, got 3"),
    (partial(ngrams.task, likely=1.0), r"likely: expected a number in \[0, 1\), got 1.0"),
    (partial(modular_addition.task, trained=1.0), r"trained: expected a number in \[0, 1\), got 1.0"),
    (partial(modular_addition.task, trained=0.0), "trained: expected a share that leaves pairs for all"),
    (partial(modular_addition.task, modulus=1), "trained: expected a share that .* of 1, got 0.5"),
]


@refusals(BAD)
def test_impossible_draws_are_refused(refused):
    refused(generator())


@refusals(BAD_SIZES)
def test_impossible_sizes_are_refused(refused):
    refused()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", TASKS)
def test_no_sequences_are_refused(name):
    for draw in parts(TASKS[name]).values():
        with pytest.raises(ValueError, match="count: expected an integer of at least 1, got 0"):
            draw(0, generator())


def test_a_part_gives_its_first_examples_or_any():
    def batch(picks):
        return Batch((picks,), picks)

    assert first_of(3, batch, 3, generator(1)).answers.tolist() == [0, 1, 2]
    assert first_of(3, batch, 2, generator(2)).answers.tolist() == [0, 1]
    assert set(any_of(3, batch, 100, generator()).answers.tolist()) == {0, 1, 2}
    with pytest.raises(ValueError, match="count: expected at most 3, all examples of this part, got 4"):
        first_of(3, batch, 4, generator())
