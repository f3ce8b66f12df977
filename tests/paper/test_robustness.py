"""Outliers, retrieval and replacement: the streams, and figures compared with loops by hand."""

import pytest
import torch
from refusals import refuses
from seeded import generator

from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared
from ortho.theory.estimates import SIGMAS, estimate
from paper.theory.robustness import best_rate, errors, moved, pairs, replaced, retrieved, stream

# Sums of a thousand float64 numbers of size 1 in another order.
close = {"atol": 1e-12, "rtol": 1e-12}


def test_streams_differ_by_their_outliers():
    clean, some, more = (stream(share, 5.0, generator=generator(), noise=0.3) for share in (0.0, 0.1, 0.4))
    assert torch.equal(clean.target, more.target) and torch.equal(clean.k, more.k)
    hit, hit_more = ((x.v != clean.v).any(-1) for x in (some, more))
    assert (hit <= hit_more).all()
    torch.testing.assert_close(more.v[hit_more].norm(dim=-1), torch.full((int(hit_more.sum()),), 5.0).double(), **close)
    # A share of n = 16384 values, of standard deviation sqrt(p (1 - p) / n).
    for share, found in ((0.1, hit), (0.4, hit_more)):
        assert abs(float(found.double().mean()) - share) < SIGMAS * (share * (1 - share) / found.numel()) ** 0.5


def test_lengths_of_values_and_noise():
    """Mean squares of 32 x 512 values of 8 numbers; those of one draw share a target, so the spread is over draws."""
    data = stream(0.0, 1.0, generator=generator(), noise=0.3)
    noise = data.v - data.k @ data.target
    for x, expected in ((data.k @ data.target, 1.0), (noise, 0.3**2)):
        found = estimate(x.square().sum(-1).mean(-1))
        assert abs(found.deviation(expected)) < SIGMAS
    assert float(stream(0.0, 1.0, generator=generator(), noise=0.0).v.sub(data.k @ data.target).abs().max()) < 1e-12


@pytest.mark.parametrize("loss", [Squared(), Huber(0.1)])
def test_errors_by_hand(loss):
    data, eta = stream(0.1, 3.0, generator=generator(), draws=2, length=20), 0.3
    S, found = torch.zeros_like(data.target), []
    for k, v in zip(data.k.unbind(1), data.v.unbind(1), strict=True):
        r = torch.einsum("rkv,rk->rv", S, k) - v
        if isinstance(loss, Huber):
            r = r.clamp(-0.1, 0.1)
        S = S - eta * k[:, :, None] * r[:, None, :]
        found.append(torch.linalg.matrix_norm(S - data.target) / torch.linalg.matrix_norm(data.target))
    torch.testing.assert_close(errors(loss, eta, data, after=(1, 7, 20)), torch.stack([found[i] for i in (0, 6, 19)]))
    torch.testing.assert_close(errors(loss, eta, data)[0], found[-1], **close)


def test_the_best_rate():
    data = stream(0.0, 1.0, generator=generator(), draws=4, length=100)
    rates = (0.01, 0.3, 1.9)
    means = {eta: float(errors(Squared(), eta, data).mean()) for eta in rates}
    assert best_rate(Squared(), data, rates) == min(means, key=means.get) == 0.3


def test_the_move_of_one_outlier():
    """The squared loss: the value's length. Huber: so much for each number beyond delta."""
    sizes, eta, most = [0.1, 1.0, 1e3, 1e6], 0.5, 0.2 * 8**0.5
    for loss, lengths in (
        (Squared(), sizes),
        (Huber(0.2), [0.1, most, most, most]),
        # An empty memory predicts 0: the value and the zero vector share the weight equally.
        (Contrastive(2.0), [size / 2 / 2 for size in sizes]),
    ):
        torch.testing.assert_close(moved(loss, eta, sizes), eta * torch.tensor(lengths, dtype=torch.float64), **close)


def test_orthogonal_keys_hold_everything():
    """As many pairs as dimensions, with orthogonal keys, are found after one write, and new values after one more."""
    k = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    (_, old), (_, new) = (pairs(8, 8, generator=generator(s), draws=3) for s in (0, 1))
    for loss in (Squared(), Huber(0.2), Contrastive()):
        assert retrieved(loss, 1.0, k, old, mini_batch_size=1, passes=1, generator=generator()).min() == 1
    assert replaced(Squared(), 1.0, k, old, new).min() == 1
    # After steps of a tenth a prediction is 0.09 of the old value and 0.1 of the new one: another may score higher.
    assert replaced(Squared(), 0.1, k, old, new).max() < 1


def test_retrieval_counts_the_right_pairs():
    """Pairs that are never written are found by chance alone: 1 in 20, of 32 x 20."""
    k, v = pairs(20, 6, generator=generator())
    nothing = retrieved(Squared(), 0.0, k, v, mini_batch_size=4, passes=1, generator=generator())
    assert torch.equal(nothing, torch.full((32,), 1 / 20, dtype=torch.float64))  # ties go to the first
    found = retrieved(Squared(), 0.5, k, v, mini_batch_size=4, passes=3, generator=generator())
    assert 0.2 < found.mean() < 1
    again = retrieved(Squared(), 0.5, k, v, mini_batch_size=4, passes=3, generator=generator())
    assert torch.equal(found, again)


@pytest.mark.bad_input
def test_errors_are_clear():
    refuses("share: expected a number within 0 and 1, got 1.5", stream, 1.5, 1.0, generator=generator())
    data = stream(0.0, 1.0, generator=generator(), draws=1, length=5)
    for after in ((3, 3), (6,), (0,)):
        refuses("after: expected rising numbers up to 5, got", errors, Squared(), 0.1, data, after=after)
