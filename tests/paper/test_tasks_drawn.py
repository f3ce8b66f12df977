"""What the synthetic tasks draw: how it is laid out, how it is distributed, and that no place gives the answer away."""

from contextlib import suppress
from functools import partial
from itertools import count as counting
from math import comb

import pytest
import torch
from seeded import SIGMAS
from task_draws import assert_shares, drawn

from paper.tasks import NONE, TASKS, copying, flip_flop, induction, modular_addition, mqar, needle, ngrams, recall
from paper.tasks import state_tracking as tracking


@pytest.mark.parametrize(("pairs", "writes"), [(1, 1), (4, 1), (16, 2), (3, 8)])
def test_recall_writes_each_key_so_often_with_values_that_differ_and_asks_for_it_once(pairs, writes):
    tokens, answers = drawn(partial(recall.draw, pairs=pairs, writes=writes), 200)
    written, asked = tokens[:, : pairs * writes], tokens[:, pairs * writes :] - recall.QUERY
    assert written.max() < recall.QUERY and asked.min() >= 0
    for row, queries, wanted in zip(written.tolist(), asked.tolist(), answers.tolist(), strict=True):
        assert len(set(row)) == len(row)  # no key twice with the same value
        keys = [token // recall.VALUES for token in row]
        assert len(set(queries)) == len(queries) == pairs
        assert sorted(keys) == sorted(queries * writes)
        by_key = {key: token % recall.VALUES for key, token in zip(keys, row, strict=True)}  # the last write stays
        assert wanted == [NONE] * len(row) + [recall.ANSWER + by_key[key] for key in queries]


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


def test_parity_is_the_count_of_ones_modulo_2():
    tokens, answers = drawn(partial(tracking.draw, things=2, last=30), 20)
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
    tokens, answers = drawn(partial(flip_flop.draw, ignored=ignored, last=length), count)
    assert (tokens[:, 0] < flip_flop.IGNORE).all() and (tokens[:, -1] == flip_flop.READ).all()
    assert torch.equal(answers != NONE, tokens == flip_flop.READ)
    inner = tokens[:, 1:-1]
    wanted = {0: (1 - ignored) / 4, 1: (1 - ignored) / 4, 2: ignored / 2, 3: ignored / 2, 4: (1 - ignored) / 2}
    assert_shares({token: ((inner == token).sum(), share) for token, share in wanted.items()}, inner.numel())


def test_tests_ask_within_their_range_alone():
    for task in (tracking.PARITY, tracking.PERMUTATIONS, flip_flop.TASK):
        for name, draw in task.tests.items():
            first, last = (int(word) for word in name.split("tokens ")[1].split(" to "))
            tokens, answers = drawn(draw, 64)
            asked = (answers != NONE).any(0).nonzero().flatten() + 1
            assert tokens.shape[1] == last == asked.max() and asked.min() >= first


@pytest.mark.parametrize(("pairs", "length", "vocab_size"), [(8, 32, 64), (4, 12, 11)])
def test_mqar_shows_the_pairs_first_and_asks_for_each_key_once(pairs, length, vocab_size):
    count, half = 4000, vocab_size // 2
    tokens, answers = drawn(mqar.task(pairs=pairs, length=length, vocab_size=vocab_size).train, count)
    keys, values, later = tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2], tokens[:, 2 * pairs :]
    assert keys.min() > mqar.BLANK and keys.max() < half <= values.min()
    assert all(len(set(row)) == pairs for row in (*keys.tolist(), *values.tolist()))
    assert torch.equal(later.sort(-1).values[:, -pairs:], keys.sort(-1).values)
    assert (later == mqar.BLANK).sum() == count * (length - 3 * pairs)
    assert torch.equal(answers != NONE, tokens.index_fill(1, torch.arange(2 * pairs), mqar.BLANK) != mqar.BLANK)
    asked_at = (later == keys[:, :1]).long().argmax(-1)  # where the first pair's key is asked for
    found = {
        "place": (torch.bincount(asked_at, minlength=length - 2 * pairs), 1 / (length - 2 * pairs)),
        "key": (torch.bincount(keys[:, 0], minlength=half)[1:], 1 / (half - 1)),
        "value": (torch.bincount(values[:, 0] - half, minlength=vocab_size - half), 1 / (vocab_size - half)),
    }
    assert_shares(found, count)


def test_induction_is_on_all_sequences_whose_neighbours_differ():
    """At the last place: how far back its token last occurred, and what is answered."""
    count, symbols, length = 4000, 8, 40
    tokens, answers = drawn(induction.task(length=length, symbols=symbols).train, count)
    assert (tokens.diff(dim=-1) != 0).all()
    back = (tokens[:, :-1].flip(-1) == tokens[:, -1:]).long()
    distances = torch.bincount(torch.where(back.any(-1), back.argmax(-1), length - 1), minlength=length)
    again = 1 / (symbols - 1)  # the chance of a token at each step from another one
    found = {f"{2 + i} back": (distances[1 + i], (1 - again) ** i * again) for i in range(10)}
    none = (1 - again) ** (length - 2)
    found["not asked"] = ((answers[:, -1] == NONE).sum(), none)
    found["first"] = (torch.bincount(tokens[:, 0], minlength=symbols), 1 / symbols)
    found["answer"] = (torch.bincount(answers[:, -1] + 1, minlength=symbols + 1)[1:], (1 - none) / symbols)
    assert_shares(found, count)


@pytest.mark.parametrize(("hops", "length", "least"), [(1, 4, 1), (2, 7, 1), (3, 10, 1), (2, 10, 4)])
def test_induction_asks_in_all_places_but_so_many(hops, length, least):
    symbols = 3
    count = 100 * symbols * (symbols - 1) ** (length - 1)  # a hundred times the number of sequences: none is missing
    _, answers = drawn(induction.task(hops=hops, symbols=symbols, length=length).train, count)
    asked = (answers != NONE).sum(-1)
    assert asked.min() >= least == length - hops * symbols
    assert hops > 1 or asked.min() == least  # one hop is lost at the first of each symbol and nowhere else


def test_hops_follow_one_another():
    tokens = [0, 1, 2, 0, 1, 3, 1, 0]
    once = [NONE, NONE, NONE, 1, 2, NONE, 3, 1]
    # From the 1 that follows the 0 in the middle to the 2 after the first 1; no other second hop is possible.
    twice = [NONE] * 7 + [2]
    for hops, wanted in ((1, once), (2, twice)):
        assert induction.task(hops=hops, length=40, symbols=4).solve(tokens) == wanted


@pytest.mark.parametrize("backwards", [False, True])
def test_copies_are_shown_a_token_late_and_strings_are_as_long_as_said(backwards):
    count, shortest, length, symbols = 4000, 3, 9, 6
    task = copying.task(length=length, shortest=shortest, symbols=symbols, backwards=backwards)
    tokens, answers = drawn(task.train, count)
    sizes = (tokens == symbols).long().argmax(-1)
    for row, wanted, size in zip(tokens.tolist(), answers.tolist(), sizes.tolist(), strict=True):
        copy = row[:size][:: -1 if backwards else 1]
        assert wanted == [NONE] * size + copy + [NONE] * 2 * (length - size)
        assert row == (row[:size] + [symbols] + copy + [symbols + 1] * 2 * length)[: 2 * length]
    found = {
        "size": (torch.bincount(sizes, minlength=length + 1)[shortest:], 1 / (length - shortest + 1)),
        "first": (torch.bincount(tokens[:, 0], minlength=symbols), 1 / symbols),
        "second is like the first": ((tokens[:, 0] == tokens[:, 1]).sum(), 1 / symbols),
    }
    assert_shares(found, count)


def test_needles_lie_anywhere_and_noise_is_of_the_same_symbols():
    count, needles, length, symbols = 6000, 3, 30, 16
    tokens, answers = drawn(needle.task(needles=needles, length=length, symbols=symbols).train, count)
    assert (tokens[:, -2] == needle.MARK).all()  # the mark that asks, before the key
    places = (tokens[:, :-2] == needle.MARK).nonzero()[:, 1].view(count, needles)
    assert (places.diff(dim=-1) >= 3).all() and places.max() + 3 <= length - 2
    keys, key = tokens.gather(-1, places + 1), tokens[:, -1:]
    assert ((keys == key).sum(-1) == 1).all() and all(len(set(row)) == needles for row in keys.tolist())
    rank = (keys == key).long().argmax(-1, keepdim=True)
    things = length - 2 - 2 * needles  # needles, and tokens of noise
    found = {
        "rank": (torch.bincount(rank[:, 0], minlength=needles), 1 / needles),
        # Which of the things in the row is asked for; each needle before it takes two places more than noise does.
        "thing": (torch.bincount((places.gather(-1, rank) - 2 * rank)[:, 0], minlength=things), 1 / things),
        "key": (torch.bincount(key[:, 0] - 1, minlength=symbols), 1 / symbols),
        "value": (torch.bincount(answers[:, -1] - 1, minlength=symbols), 1 / symbols),
    }
    assert_shares(found, count)
    noise = tokens[:, 0] != needle.MARK
    assert_shares({"key without a mark": ((tokens[:, :1] == key)[noise].sum(), 1 / symbols)}, int(noise.sum()))


def test_ngrams_follow_their_favourites_and_ask_for_the_leader():
    """The first follower is the favourite or any symbol; the second follower of the same context equals it if both are
    favourites, or by chance. One sequence is checked by hand."""
    count, symbols, likely = 6000, 5, 0.6
    tokens, answers = drawn(ngrams.task(order=1, length=40, symbols=symbols, likely=likely).train, count)
    again = tokens[:, :-1] == tokens[:, :1]  # where the first symbol comes again
    again[:, 0] = False
    place = again.long().argmax(-1, keepdim=True)
    second, there = tokens.gather(1, place + 1)[:, 0], again.any(-1)
    found = {
        "follower": (torch.bincount(tokens[:, 1], minlength=symbols), 1 / symbols),
        "first": (torch.bincount(tokens[:, 0], minlength=symbols), 1 / symbols),
    }
    assert_shares(found, count)
    like = likely**2 + (1 - likely**2) / symbols
    assert_shares({"like the first follower": ((second == tokens[:, 1])[there].sum(), like)}, int(there.sum()))
    assert torch.equal(answers.gather(1, place)[there, 0], tokens[there, 1])  # a single follower leads
    by_hand = ngrams.task(order=2, length=40, symbols=3)
    assert by_hand.solve([0, 1, 2, 0, 1, 0, 1, 2, 0, 1]) == [*[NONE] * 4, 2, NONE, NONE, 0, 1, 2]


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
    other = modular_addition.task(modulus=modulus, trained=trained, split=1)
    assert sorted(whole(other.validation)) != sorted(parts[0])


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
TOLD = {
    "mqar": (31, 1 / 8),  # each pair is equally likely
    "induction": (63, _neighbour_of_match()),
    "copying": (15, 1 / 8 + 7 / 8 / 16),  # strings of 8 to 15 ask there, each from another place; or chance
    "needle": (63, _value_of_needle()),
}


def best_place(task, asks, count=4000):
    """The number of sequences that ask at a place, and the largest share of them with the answer at one place."""
    tokens, answers = drawn(task.train, count)
    asked = answers[:, asks] != NONE
    same = tokens[asked, : asks + 1] == answers[asked, asks : asks + 1]
    return int(asked.sum()), float(same.double().mean(0).max())


@pytest.mark.parametrize("name", TOLD)
def test_no_place_tells_the_answer(name):
    asks, told = TOLD[name]
    count, share = best_place(TASKS[name], asks)
    assert share <= told + SIGMAS * (told * (1 - told) / count) ** 0.5
    assert count > 400


def test_strings_of_one_length_are_copied_from_one_place():
    _, share = best_place(copying.task(length=16, shortest=16), 20)
    assert share == 1
