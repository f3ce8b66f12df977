"""Tasks that are drawn: answers equal those of other code, no place gives them away, and splits do not overlap."""

from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import count as counting
from math import comb, log2

import pytest
import torch
from seeded import SIGMAS, generator

from paper.tasks import NONE, TASKS, copying, flip_flop, induction, modular_addition, mqar, needle, ngrams, recall, text
from paper.tasks import state_tracking as tracking
from paper.tasks.counting import repeats, table_bits, task_bits


def drawn(draw, count, seed=0):
    """Tokens and answers (count, N)."""
    (tokens,), answers = draw(count, generator(seed))
    return tokens, answers


def assert_shares(found, count):
    """Assert that each number (or each in a tensor) of `count` independent draws has the share beside it."""
    for what, (counts, share) in found.items():
        spread = (share * (1 - share) / count) ** 0.5
        assert ((counts / count - share).abs() <= SIGMAS * spread).all(), what


# Beside the usual sizes: the smallest there are, odd ones, those that leave no room, and other kinds.
OTHERS = (
    mqar.task(pairs=1, length=3, vocab_size=4),
    mqar.task(pairs=4, length=12, vocab_size=11),
    induction.task(length=4, symbols=3),
    induction.task(length=40, symbols=5),
    copying.task(length=1, shortest=1, symbols=1),
    copying.task(length=5, shortest=5, symbols=3),
    copying.task(length=7, shortest=1, symbols=4),
    needle.task(needles=1, length=5, symbols=1),
    needle.task(needles=5, length=17, symbols=5),
    ngrams.task(order=1, length=3, symbols=1),
    ngrams.task(order=3, length=40, symbols=2),
    modular_addition.task(modulus=5),
    modular_addition.task(modulus=11, trained=0.9),
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


def test_recall_is_not_to_be_guessed():
    """All keys and values are equally likely, and the orders of writes and of queries give nothing away."""
    count, pairs = 4000, 4
    tokens, answers = drawn(partial(recall.draw, pairs=pairs, writes=2), count)
    keys, asked = tokens[:, : 2 * pairs] // recall.VALUES, tokens[:, 2 * pairs :] - recall.QUERY
    # Sequences are independent; in each of them only the first is counted.
    found = {
        "key": (torch.bincount(asked[:, 0], minlength=recall.KEYS), 1 / recall.KEYS),
        "value": (torch.bincount(answers[:, 2 * pairs] - recall.ANSWER, minlength=recall.VALUES), 1 / recall.VALUES),
        "same key written at once again": ((keys[:, 0] == keys[:, 1]).sum(), 1 / (2 * pairs - 1)),
        "first written, first asked": ((keys[:, 0] == asked[:, 0]).sum(), 1 / pairs),
        "last written, first asked": ((keys[:, -1] == asked[:, 0]).sum(), 1 / pairs),
    }
    assert_shares(found, count)


@pytest.mark.parametrize("things", [1, 2, 3, 4])
def test_products_of_permutations_are_a_group_that_does_not_commute_from_three_things_on(things):
    table = tracking.products(things)
    every = torch.arange(len(table))
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every)  # the identity is number 0
    assert all(torch.equal(line.sort().values, every) for line in (*table, *table.T))
    assert torch.equal(table[table], table[every[:, None, None], table])  # (s t) u = s (t u)
    assert torch.equal(table, table.T) == (things < 3)
    swaps = [torch.tensor(move) for move in tracking.elements(things)]
    matrices = torch.stack([torch.eye(things)[move] for move in swaps])  # row i has its one in column move[i]
    composed = matrices[:, None] @ matrices[None]
    assert torch.equal(composed, matrices[table])


def test_tests_ask_within_their_range_alone():
    for task in (tracking.PARITY, tracking.PERMUTATIONS, flip_flop.TASK):
        for name, draw in task.tests.items():
            first, last = (int(word) for word in name.split("tokens ")[1].split(" to "))
            tokens, answers = drawn(draw, 64)
            asked = (answers != NONE).any(0).nonzero().flatten() + 1
            assert tokens.shape[1] == last == asked.max() and asked.min() >= first


def test_what_followed_the_last_match_is_the_answer():
    solve = induction.task(length=40, symbols=4).solve
    assert solve([0, 1, 2, 0, 1, 3, 1, 0]) == [NONE, NONE, NONE, 1, 2, NONE, 3, 1]


def whole(draw):
    """All pairs of a part, in its order."""
    pairs = []
    with suppress(ValueError):
        for count in counting(1):
            pairs = [tuple(row[:2]) for row in drawn(draw, count)[0].tolist()]
    return pairs


@pytest.mark.parametrize(("modulus", "trained"), [(7, 0.5), (11, 0.2)])
def test_every_pair_is_in_one_part_with_both_of_its_orders(modulus, trained):
    task = modular_addition.task(modulus=modulus, trained=trained)
    (test,) = task.tests.values()
    parts = [whole(draw) for draw in (task.validation, test)]
    tokens, _ = drawn(task.train, 5000)
    counts = torch.bincount(tokens[:, 0] * modulus + tokens[:, 1], minlength=modulus**2)
    seen = [divmod(pair, modulus) for pair in counts.nonzero().flatten().tolist()]
    assert sorted([*seen, *parts[0], *parts[1]]) == [(a, b) for a in range(modulus) for b in range(modulus)]
    for part in (seen, *parts):
        assert {(b, a) for a, b in part} == set(part)
    orderless = [len({tuple(sorted(pair)) for pair in part}) for part in (seen, *parts)]
    assert orderless[0] == round(trained * modulus * (modulus + 1) / 2) and orderless[2] - orderless[1] in (0, 1)
    assert_shares({"pair": (counts[counts > 0], 1 / len(seen))}, len(tokens))
    assert drawn(test, 3)[0].tolist() == drawn(test, 5, seed=1)[0][:3].tolist()


def _value_of_needle(needles=4, length=64, symbols=32):
    """The largest share of sequences with the answer at one place: as the needle's value, or by chance."""
    things = length - 2 - 2 * needles
    ways = [
        sum(
            comb(x - 2 * r, r) * comb(things - 1 - x + 2 * r, needles - 1 - r)
            for r in range(needles)
            if 0 <= x - 2 * r < things
        )
        for x in range(length - 4)
    ]  # the numbers of ways to have the needle that is asked for at x
    assert sum(ways) == needles * comb(things, needles)
    share = max(ways) / sum(ways)
    return share + (1 - share) / symbols


def _neighbour_of_match(length=64, symbols=16):
    """The share of asking sequences whose answer equals the last token but one: the match is there, or it is i tokens
    further back and a walk of i steps, over all symbols but the one looked for, has come back to the answer."""
    others = symbols - 1
    back = [(1 - 1 / others) ** i / others for i in range(length - 2)]  # i tokens from the answer to the last but one
    same = [1 / others + (1 - 1 / others) * (-1 / (others - 1)) ** i for i in range(length - 2)]
    return sum(p * q for p, q in zip(back, same, strict=True)) / sum(back)


# A place that asks, and how often the answer is at the one earlier place where it is most often.
BY_PLACE = {
    "mqar": (31, 1 / 8),  # each pair is equally likely
    "induction": (63, _neighbour_of_match()),
    "copying": (15, 1 / 8 + 7 / 8 / 16),  # strings of 8 to 15 ask there, each from another place; or chance
    "needle": (63, _value_of_needle()),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_no_place_tells_the_answer(name):
    asks, expected = BY_PLACE[name]
    tokens, answers = drawn(TASKS[name].train, 4000)
    asked = answers[:, asks] != NONE
    same = tokens[asked, : asks + 1] == answers[asked, asks : asks + 1]
    share, count = float(same.double().mean(0).max()), int(asked.sum())
    assert share <= expected + SIGMAS * (expected * (1 - expected) / count) ** 0.5
    assert count > 400


# --------------------------------------------------------------------------------------------- tables of the last bytes


def by_dictionaries(seen, tested, longest):
    followers, found = {}, []
    for row in seen.tolist():
        for t in range(len(row)):
            for n in range(min(t, longest) + 1):
                followers.setdefault(tuple(row[t - n : t]), Counter())[row[t]] += 1

    def share(context, byte):
        lower = share(context[1:], byte) if context else 1 / 256
        after = followers.get(tuple(context), Counter())
        if not after:
            return lower
        return (after[byte] + len(after) * lower) / (after.total() + len(after))

    for n in range(1, longest + 1):
        asked = [(row[max(t - n, 0) : t], row[t]) for row in tested.tolist() for t in range(1, len(row))]
        found.append(sum(-log2(share(*one)) for one in asked) / len(asked))
    return tuple(found)


def test_equals_dictionaries():
    """On bytes that repeat and bytes never seen, at every length. The tolerance 1e-12 is for sums of 300 float64."""
    made = torch.Generator().manual_seed(0)
    seen = torch.randint(4, (40, 12), generator=made) + 252
    tested = torch.randint(5, (30, 11), generator=made) + 251
    assert table_bits(seen, tested, 6) == pytest.approx(by_dictionaries(seen, tested, 6), rel=1e-12)


def test_the_tables_of_a_task_are_of_what_it_draws():
    task = text.language_modelling("numbers", "counting", text.Parts(*(bytes(range(200)) * 9 for _ in range(3))), 16)
    windows = [text.whole_windows(draw(count, torch.Generator().manual_seed(0))) for draw, count in (
        (task.train, 30), (task.tests["test"], 7)
    )]  # fmt: skip
    assert [tuple(one.shape) for one in windows] == [(30, 17), (7, 17)]
    assert task_bits(task, 30, 7, 2) == table_bits(*windows, 2)


def test_repeats():
    """Compared with counting by hand, on three symbols, so that matches are many."""
    windows = torch.randint(3, (3, 31), generator=torch.Generator().manual_seed(0))
    found = repeats(windows, 5)
    for row, x in enumerate(windows.tolist()):
        for t in range(30):
            best, place = 0, None
            for s in range(t):
                length = 0
                while length < 5 and s >= length and x[s - length] == x[t - length]:
                    length += 1
                if length and length >= best:
                    best, place = length, s
            assert found.length[row, t] == best
            assert bool(found.right[row, t]) == (place is not None and x[place + 1] == x[t + 1])
