"""Losses of predictions: values by hand, derivatives against autograd, what they may see, what they cost."""

from itertools import product
from math import e, log

import pytest
import torch
from torch.nn.functional import huber_loss

from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, HuberNorm, Squared
from ortho.cost.counting import OperationCounter, saved_bytes

LOSSES = [Squared(), Huber(0.7), HuberNorm(0.9), Contrastive(0.6)]
# Two float64 computations of sums of a dozen numbers of size 1 to 10, behind one exponential at most.
close = {"atol": 1e-12, "rtol": 1e-12}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vector(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("earlier", [0, 3])
def test_psi_is_the_derivative(loss, earlier):
    """Of residuals within delta and beyond: 0.1 to 3 long."""
    size = torch.logspace(-1, 0.5, 5, dtype=torch.float64)[:, None]
    v = draw(2, 5 + earlier, 4)
    p = (v[:, earlier:] + size * draw(2, 5, 4, seed=1)).requires_grad_()
    hidden = torch.zeros(2, 5 + earlier, dtype=torch.bool)
    hidden[:, [0, 3]] = True
    for mask in (None, hidden):
        rows = slice(None) if mask is None else ~mask[0, earlier:]  # a hidden token has no loss
        (expected,) = torch.autograd.grad(loss(p, v, mask)[:, rows].sum(), p)
        torch.testing.assert_close(loss.gradient(p, v, mask)[:, rows], expected[:, rows], **close)


def test_values_by_hand():
    p, v = vector(3.0, 0.0), vector(0.0, 4.0)  # a residual of length 5
    for loss, value, psi in (
        (Squared(), 12.5, (3.0, -4.0)),
        (Huber(1.0), 2.5 + 3.5, (1.0, -1.0)),
        (Huber(3.5), 4.5 + 3.5 * 2.25, (3.0, -3.5)),
        (HuberNorm(1.0), 4.5, (0.6, -0.8)),
        (HuberNorm(6.0), 12.5, (3.0, -4.0)),
    ):
        torch.testing.assert_close(loss(p, v), torch.tensor([value], dtype=p.dtype), **close)
        torch.testing.assert_close(loss.gradient(p, v), vector(*psi), **close)


def test_contrastive_by_hand():
    """One candidate of score 1 beside the zero vector's 0; then two, the own one second."""
    p, v = vector(2.0, 0.0), vector(1.0, 1.0)
    loss = Contrastive(2.0)
    torch.testing.assert_close(loss(p, v), torch.tensor([log(1 + 1 / e)], dtype=p.dtype), **close)
    torch.testing.assert_close(loss.gradient(p, v), -vector(1.0, 1.0) / 2 / (1 + e), **close)
    both = torch.cat([vector(-1.0, 0.0), v])
    torch.testing.assert_close(loss(p, both), torch.tensor([log((1 + e + 1 / e) / e)], dtype=p.dtype), **close)


def test_pytorch_has_the_same_huber_loss():
    p, v = draw(7, 4), 2 * draw(7, 4, seed=1)
    expected = huber_loss(p, v, reduction="none", delta=0.7).sum(-1)
    torch.testing.assert_close(Huber(0.7)(p, v), expected, **close)


def test_bounds():
    """However large an outlier: no number of Huber's psi is above delta, none of the norm's longer than delta."""
    p, v = draw(50, 4), 10.0 ** torch.arange(50, dtype=torch.float64)[:, None] * draw(50, 4, seed=1)
    assert Huber(0.7).gradient(p, v).abs().max() == 0.7
    lengths = HuberNorm(0.9).gradient(p, v).norm(dim=-1)
    torch.testing.assert_close(lengths[2:], torch.full_like(lengths[2:], 0.9), **close)
    # The contrastive one is a difference of two candidates' means: as long as twice the longest at most.
    v = draw(50, 4)
    assert Contrastive(0.6).gradient(30 * p, v).norm(dim=-1).max() <= 2 * v.norm(dim=-1).max() / 0.6


def test_within_delta_huber_is_the_squared_loss():
    p, v = draw(7, 4), draw(7, 4, seed=1)
    for loss in (Huber(100.0), HuberNorm(100.0)):
        torch.testing.assert_close(loss(p, v), Squared()(p, v), **close)
        torch.testing.assert_close(loss.gradient(p, v), Squared().gradient(p, v), **close)


def test_the_norm_prefers_no_direction():
    turn = torch.linalg.qr(draw(4, 4, seed=2))[0]
    p, v = draw(7, 4), 2 * draw(7, 4, seed=1)
    turned = [loss.gradient(p @ turn, v @ turn) - loss.gradient(p, v) @ turn for loss in (HuberNorm(), Huber())]
    assert turned[0].abs().max() < 1e-12 < 0.1 < turned[1].abs().max()


@pytest.mark.parametrize("loss", LOSSES)
def test_later_and_hidden_values_are_not_seen(loss):
    p, v = draw(6, 4), draw(6, 4, seed=1)
    hidden = torch.tensor([False, True, False, False, True, False])
    psi = loss.gradient(p, v, hidden)
    for t in range(6):
        other = v.clone()
        other[t + 1 :] = 1e3
        other[hidden & (torch.arange(6) != t)] = 1e3
        if not hidden[t]:
            assert torch.equal(loss.gradient(p, other, hidden)[t], psi[t])
    if loss.looks_back:  # the others are
        assert not torch.equal(loss.gradient(p, torch.cat([2 * v[:1], v[1:]]), hidden)[2], psi[2])


@pytest.mark.parametrize("loss", LOSSES)
def test_in_parts(loss):
    """The last predictions, with the values before them."""
    p, v = draw(6, 4), draw(6, 4, seed=1)
    whole = loss.gradient(p, v)
    for t in range(6):
        torch.testing.assert_close(loss.gradient(p[t : t + 1], v[: t + 1]), whole[t : t + 1], **close)


@pytest.mark.parametrize("loss", LOSSES)
def test_at_the_target(loss):
    """Where the residual is 0, second derivatives are finite."""
    p = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    (d_p,) = torch.autograd.grad(loss.gradient(p, torch.zeros_like(p)).square().sum(), p)
    assert torch.equal(d_p, torch.zeros_like(p))


@pytest.mark.parametrize("loss", LOSSES)
def test_curvature(loss):
    """The largest eigenvalue of the Hessian is at most what is declared, and is reached at the target."""
    if loss.curvature is None:
        return
    for seed, size in product(range(5), (0.0, 0.3, 3.0)):
        v = draw(1, 4, seed=seed)
        hessian = torch.autograd.functional.jacobian(lambda p, v=v: loss.gradient(p[None], v)[0], (1 + size) * v[0])
        largest = torch.linalg.eigvalsh(hessian).max()
        assert largest <= loss.curvature + 1e-12
        assert size or largest == loss.curvature


@pytest.mark.parametrize("loss", LOSSES)
def test_cost(loss):
    for (n, m), V in product([(4, 4), (1, 3), (1, 1), (2, 5)], (1, 3)):
        p = torch.ones(2, n, V, requires_grad=True)
        v, hidden = torch.ones(2, m, V, requires_grad=True), torch.zeros(2, m, dtype=torch.bool)
        with OperationCounter() as ahead, saved_bytes([v]) as kept:
            psi = loss.gradient(p, v, hidden)
        counted = []
        for wanted in ([p, v], [v]):
            with OperationCounter() as back:
                torch.autograd.grad(psi, wanted, torch.ones_like(psi), retain_graph=True)
            counted.append(back)
        cost = loss.cost(2 * n, 2 * m, 2 * n * m, V, 4)
        assert (ahead.flops.total(), ahead.elementwise.total()) == (cost.forward, cost.elementwise_forward)
        assert counted[0].flops.total() == cost.backward
        assert counted[0].elementwise.total() == cost.elementwise_backward
        assert kept() == cost.saved_bytes
        if loss.looks_back:
            constant = loss.gradient(p.detach(), v, hidden)
            with OperationCounter() as back:
                torch.autograd.grad(constant, [v], torch.ones_like(constant))
            assert back.flops.total() == cost.backward - loss.into_predictions(2 * n * m, V)


@pytest.mark.bad_input
@pytest.mark.parametrize(("loss", "name"), [(Huber, "delta"), (HuberNorm, "delta"), (Contrastive, "temperature")])
def test_errors(loss, name):
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{name}: expected a positive number, got {value}"):
            loss(value)
    for value in ("1", True, None):
        with pytest.raises(TypeError, match=f"{name}: expected a positive number, got"):
            loss(value)


def test_a_residual_whose_square_leaves_the_range_is_refused():
    """Its inverse root would be 0, and the step with it."""
    p, v = torch.zeros(1, 2), torch.full((1, 2), 1e20)
    with pytest.raises(ValueError, match="v: expected squared residuals within 0 and 3.4e\\+38, got inf"):
        HuberNorm().gradient(p, v)
