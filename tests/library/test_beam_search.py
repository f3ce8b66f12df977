"""Beam search: against all sequences there are, and against the same search written with lists."""

from itertools import product
from math import inf

import pytest
import torch

from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.generation import beam_search, penalty

START, STOP = 1, 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def scores(ours, source, mask, vocab, most, alpha):
    """The score of every sequence that ends within `most` tokens, and of those of that length that do not."""
    free = [token for token in range(vocab) if token != STOP]
    found = {}
    for length in range(1, most + 1):
        last = [STOP] if length < most else range(vocab)
        written = torch.tensor([(START, *w, end) for w in product(free, repeat=length - 1) for end in last])
        rows = len(written)
        logits = ours(source.expand(rows, -1), written[:, :-1], mask.expand(rows, -1)).log_softmax(-1)
        totals = logits.gather(-1, written[:, 1:, None]).sum((1, 2)) / penalty(length, alpha)
        found |= zip(map(tuple, written[:, 1:].tolist()), totals.tolist(), strict=True)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_as_many_beams_as_there_are_prefixes_search_all(alpha):
    vocab, most = 4, 4
    ours = EncoderDecoder(vocab, 8, 2, 1, max_length=most, dtype=torch.float64, generator=generator())
    with torch.no_grad():
        for i, parameter in enumerate(ours.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i), dtype=parameter.dtype))
    source = torch.randint(vocab, (5, 3), generator=generator())
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 3, 3])[:, None]
    beams = (vocab - 1) ** (most - 1) * vocab
    got = ours.beam_search(source, mask, beams=beams, start=START, stop=STOP, max_length=most, length_penalty=alpha)
    found = set()
    for b in range(5):
        every = scores(ours, source[b : b + 1], mask[b : b + 1], vocab, most, alpha)
        best = max(every, key=every.get)
        assert (*got[b].tolist(), *([STOP] * most))[:most] == (*best, *([STOP] * most))[:most]
        found.add(best)
    assert len(found) > 2


def test_the_penalty_of_a_length():
    """((5 + length) / 6)^alpha: none of a single token, and none with alpha 0."""
    assert penalty(1, 0.6) == penalty(9, 0.0) == 1
    assert penalty(7, 1.0) == penalty(19, 0.5) == 2


def table(vocab, depth, seed):
    """Log-probabilities that depend on the last two tokens and on the place."""
    logits = torch.randn(depth, vocab, vocab, vocab, generator=generator(seed), dtype=torch.float64) * 1.5

    def following(written):
        before = written[:, -2] if written.shape[1] > 1 else torch.zeros_like(written[:, -1])
        return logits[written.shape[1] - 1, before, written[:, -1]].log_softmax(-1)

    return following


def by_lists(following, beams, most, alpha, vocab):
    """The same search for one row, in plain Python."""
    live, places, best = [((START,), 0.0)], beams, (-inf, ())
    for length in range(1, most + 1):
        if not live:
            break
        rows = following(torch.tensor([w for w, _ in live])).tolist()
        further = [((*w, k), total + row[k]) for (w, total), row in zip(live, rows, strict=True) for k in range(vocab)]
        further = sorted(further, key=lambda pair: -pair[1])[:places]
        done = [(total / penalty(length, alpha), w) for w, total in further if w[-1] == STOP or length == most]
        best = max([best, *done])
        live = [(w, total) for w, total in further if w[-1] != STOP]
        places = beams - sum(w[-1] == STOP for w, _ in further) - (beams - places)
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_beam_search_is_the_one_written_with_lists(beams, alpha):
    vocab, most, lengths = 5, 6, set()
    for seed in range(20):
        following = table(vocab, most, seed)
        found = beam_search(following, 1, beams=beams, start=START, stop=STOP, max_length=most, length_penalty=alpha)
        score, wanted = by_lists(following, beams, most, alpha, vocab)
        assert tuple(found.tokens[0].tolist()) == wanted[1:]
        assert abs(float(found.scores) - score) <= 1e-12  # sums of six numbers of about 1
        lengths.add(len(wanted) - 1)
    assert len(lengths) > 2


def test_more_beams_find_better_sequences():
    """Not in each case, but in the mean over many."""
    mean = {}
    for beams in (1, 4, 64):
        found = [
            beam_search(table(5, 6, seed), 1, beams=beams, start=START, stop=STOP, max_length=6).scores
            for seed in range(50)
        ]
        mean[beams] = float(torch.cat(found).mean())
    assert mean[1] < mean[4] < mean[64]
