"""The tasks of the learning experiments: what is drawn, held to other ways of saying the answers; bad sizes."""

from functools import partial

import pytest
import torch

from ortho.experiments import flip_flop, recall
from ortho.experiments import state_tracking as tracking
from ortho.experiments.learning import NONE

SIGMAS = 4.42  # two-sided error rate 1e-5
TASKS = {task.name: task for task in (recall.TASK, tracking.PARITY_TASK, tracking.PERMUTATIONS_TASK, flip_flop.TASK)}
DRAWS = [(name, split, draw) for name, task in TASKS.items() for split, draw in [("", task.train), *task.tests.items()]]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("name", "_", "draw"), DRAWS)
def test_drawn_answers_are_the_solvers_wherever_one_is_asked_for(name, _, draw):
    task = TASKS[name]
    for seed in range(3):
        tokens, answers = draw(5, generator(seed))
        assert tokens.shape == answers.shape and len(tokens) == 5
        assert tokens.min() >= 0 and max(tokens.max(), answers.max()) < task.vocab_size
        for row, drawn in zip(tokens.tolist(), answers.tolist(), strict=True):
            solved = task.solve(row)
            assert all(a in (NONE, b) for a, b in zip(drawn, solved, strict=True))
            asked = [t for t, a in enumerate(drawn) if a != NONE]
            # Nothing is left out but what stands before the first that is asked for.
            assert [t for t, a in enumerate(solved) if a != NONE and asked and t >= asked[0]] == asked


@pytest.mark.parametrize("name", TASKS)
def test_training_sequences_are_no_longer_than_said_and_answer_with_tokens_never_read(name):
    task = TASKS[name]
    lengths, read, said = set(), set(), set()
    for seed in range(20):
        tokens, answers = task.train(64, generator(seed))
        lengths.add(tokens.shape[1])
        read |= set(tokens.flatten().tolist())
        said |= set(answers.flatten().tolist()) - {NONE}
    assert max(lengths) == task.longest
    assert not read & said
    assert read | said == set(range(task.vocab_size))


@pytest.mark.parametrize(("name", "_", "draw"), DRAWS)
def test_the_seed_says_what_is_drawn(name, _, draw):
    first, again, other = (draw(4, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.answers, again.answers)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize(("pairs", "writes"), [(1, 1), (4, 1), (16, 2), (3, 8)])
def test_recall_writes_each_key_so_often_with_values_that_differ_and_asks_for_it_once(pairs, writes):
    tokens, answers = recall.draw(200, generator(), pairs=pairs, writes=writes)
    written, asked = tokens[:, : pairs * writes], tokens[:, pairs * writes :] - recall.QUERY
    assert written.max() < recall.QUERY and asked.min() >= 0
    for row, queries, wanted in zip(written.tolist(), asked.tolist(), answers.tolist(), strict=True):
        assert len(set(row)) == len(row)  # no key twice with the same value
        keys = [token // recall.VALUES for token in row]
        assert len(set(queries)) == len(queries) == pairs
        assert sorted(keys) == sorted(queries * writes)
        by_key = {key: token % recall.VALUES for key, token in zip(keys, row, strict=True)}  # the last stays
        assert wanted == [NONE] * len(row) + [recall.ANSWER + by_key[key] for key in queries]


def test_recall_is_not_to_be_guessed():
    """Keys and values are any of those there are, and neither the order of writes nor that of queries says a thing."""
    count, pairs = 4000, 4
    tokens, answers = recall.draw(count, generator(), pairs=pairs, writes=2)
    keys, asked = tokens[:, : 2 * pairs] // recall.VALUES, tokens[:, 2 * pairs :] - recall.QUERY
    # Sequences are independent: the first of each is counted.
    found = {
        "key": (torch.bincount(asked[:, 0], minlength=recall.KEYS), 1 / recall.KEYS),
        "value": (torch.bincount(answers[:, 2 * pairs] - recall.ANSWER, minlength=recall.VALUES), 1 / recall.VALUES),
        "same key written at once again": ((keys[:, 0] == keys[:, 1]).sum(), 1 / (2 * pairs - 1)),
        "first written, first asked": ((keys[:, 0] == asked[:, 0]).sum(), 1 / pairs),
        "last written, first asked": ((keys[:, -1] == asked[:, 0]).sum(), 1 / pairs),
    }
    for what, (counts, share) in found.items():
        spread = (share * (1 - share) / count) ** 0.5
        assert ((counts / count - share).abs() <= SIGMAS * spread).all(), what


def test_parity_is_the_count_of_ones_modulo_2():
    tokens, answers = tracking.draw(20, generator(), things=2, last=30)
    assert torch.equal(answers, 2 + tokens.cumsum(-1) % 2)


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


@pytest.mark.parametrize("word", flip_flop.IGNORED)
def test_flip_flop_ignores_its_share_and_reads_at_the_end(word):
    count, length, ignored = 500, 101, flip_flop.IGNORED[word]
    tokens, answers = flip_flop.draw(count, generator(), ignored=ignored, last=length)
    assert (tokens[:, 0] < flip_flop.IGNORE).all() and (tokens[:, -1] == flip_flop.READ).all()
    assert torch.equal(answers != NONE, tokens == flip_flop.READ)
    inner = tokens[:, 1:-1]
    wanted = {0: (1 - ignored) / 4, 1: (1 - ignored) / 4, 2: ignored / 2, 3: ignored / 2, 4: (1 - ignored) / 2}
    for token, share in wanted.items():
        spread = (share * (1 - share) / inner.numel()) ** 0.5
        assert abs((inner == token).double().mean() - share) <= SIGMAS * spread


def test_tests_ask_within_their_range_alone():
    for task in (tracking.PARITY_TASK, tracking.PERMUTATIONS_TASK, flip_flop.TASK):
        for name, draw in task.tests.items():
            first, last = (int(word) for word in name.split("tokens ")[1].split(" to "))
            tokens, answers = draw(64, generator())
            asked = (answers != NONE).any(0).nonzero().flatten() + 1
            assert tokens.shape[1] == last == asked.max() and asked.min() >= first


BAD = [
    (partial(recall.draw, pairs=17, writes=1), ValueError, "pairs: expected at most 16, got 17"),
    (partial(recall.draw, pairs=4, writes=9), ValueError, "writes: expected at most 8, got 9"),
    (partial(recall.draw, pairs=0, writes=1), ValueError, "pairs: expected an integer of at least 1, got 0"),
    (partial(tracking.draw, things=0, last=4), ValueError, "things: expected an integer of at least 1, got 0"),
    (partial(tracking.draw, things=2, last=4, first=5), ValueError, "first: expected at most last = 4, got 5"),
    (partial(tracking.draw, things=2, last=4.0), TypeError, "last: expected an integer"),
    (partial(flip_flop.draw, ignored=1.0), ValueError, r"ignored: expected a share in \(0, 1\), got 1.0"),
    (partial(flip_flop.draw, ignored=0.5, first=9, last=8), ValueError, "first: expected at most last = 8, got 9"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("draw", "error", "message"), BAD)
def test_impossible_sizes_are_refused(draw, error, message):
    with pytest.raises(error, match=message):
        draw(2, generator())


@pytest.mark.bad_input
@pytest.mark.parametrize("name", TASKS)
def test_no_sequences_are_refused(name):
    with pytest.raises(ValueError, match="count: expected an integer of at least 1, got 0"):
        TASKS[name].train(0, generator())
