"""Test-time training: the definition, compared with values by hand and the delta rule; mini-batches, states, masks,
limits. Its losses: values by hand, derivatives by autograd, what they may see, what they cost."""

from itertools import product
from math import e, log

import pytest
import torch
from refusals import refuses
from seeded import draw
from torch.nn.functional import huber_loss

from ortho.attention.recurrent.delta import delta_rule
from ortho.attention.recurrent.ttt import MINI_BATCH, StepSize, state_now, ttt_attention, ttt_attention_reference
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared

LOSSES = [Squared(), Huber(0.4), Contrastive(0.6)]
FORMS = [ttt_attention_reference, ttt_attention]
# Two float64 computations of sums of about 1e3 terms of size 1 in different orders (2e-13). A wrong term shows at 1e-2.
close = {"atol": 1e-12, "rtol": 1e-12}
LENGTH, K, V = 37, 5, 4


def vector(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def operands(length=LENGTH, *, lead=(2, 3), largest=0.4, seed=0):
    q, k, v = (draw(*lead, length, width, seed=3 * seed + i) for i, width in enumerate((K, K, V)))
    eta = largest * torch.rand((*lead, length), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q, k, v, eta


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("form", FORMS)
def test_by_hand(form):
    """Three tokens, a mini-batch of two: the second predicts with the empty memory, the third with both steps."""
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    v = torch.tensor([[2.0], [4.0], [10.0]]).double()
    eta = torch.tensor([0.5, 0.25, 0.5]).double()
    kwargs = {"eta": eta, "mini_batch_size": 2, "qk_l2norm": False, "is_causal": True, "return_state": True}
    o, (S, keys, steps) = form(torch.ones(3, 2).double(), k, v, **kwargs)
    # Steps 0.5 x 2 and 0.25 x 4 at the first key: 1, then 1 + 1; then 5 at the second one.
    assert_same([o, S, keys, steps], [v.new_tensor([[1], [2], [7]]), v.new_tensor([[2], [0]]), k[2:], -v[2:] / 2])
    # Token by token the second step is 0.25 (4 - 1).
    assert_same(
        [form(k, k, v, **(kwargs | {"mini_batch_size": 1, "return_state": False}))[:2]], [v.new_tensor([[1], [1.75]])]
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mini_batch_of_one_is_the_delta_rule(form, causal):
    q, k, v, eta = operands(largest=2.0)
    o, state = form(q, k, v, eta=eta, mini_batch_size=1, is_causal=causal, return_state=True)
    expected, (S,) = delta_rule(q, k, v, beta=eta, is_causal=causal, return_state=True)
    assert_same([o, state_now(state)], [expected, S])
    assert (o - form(q, k, v, eta=eta, mini_batch_size=2, is_causal=causal)).abs().max() > 0.1


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_gradients_of_the_loss(loss):
    """A mini-batch moves the memory against autograd's gradient in S of its losses, weighted by their steps."""
    q, k, v, eta = operands(12)
    _, state = ttt_attention(q, k, v, loss=loss, eta=eta, mini_batch_size=8, qk_l2norm=True, return_state=True)
    unit = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    S = torch.zeros(2, 3, K, V, dtype=torch.float64, requires_grad=True)
    for part in (slice(0, 8), slice(8, 12)):
        total = (eta[..., part] * loss(unit[..., part, :] @ S, v[..., part, :])).sum()
        (gradient,) = torch.autograd.grad(total, S)
        S = (S - gradient).detach().requires_grad_()
    assert_same([state_now(state)], [S.detach()])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_a_masked_token_holds_its_place(loss, form):
    """It writes nothing, whatever it holds; other tokens stay in their mini-batches, also if the sequence goes on."""
    q, k, v, eta = operands()
    mask = torch.ones(LENGTH, dtype=torch.bool)
    mask[[2, 17, 18, 36]] = False
    kwargs = {"loss": loss, "mini_batch_size": 8, "return_state": True}
    o, state = form(q, k, v, eta=eta, is_causal=True, attn_mask=mask[None], **kwargs)
    k2, v2 = (torch.where(mask[:, None], x, 30 * x.flip(-1)) for x in (k, v))
    other, other_state = form(q, k2, v2, eta=eta, is_causal=True, attn_mask=mask[None], **kwargs)
    assert_same([other], [o])
    if not loss.looks_back:  # as with steps of size 0
        assert_same([form(q, k, v, eta=eta * mask, is_causal=True, **kwargs)[0]], [o])
    *more, rates = operands(5, seed=1)
    ends = [form(*more, eta=rates, is_causal=True, initial_state=s, **kwargs)[0] for s in (state, other_state)]
    assert_same(ends[:1], ends[1:])


@pytest.mark.parametrize("form", FORMS)
def test_options(form):
    """Steps of 1 / mini_batch_size, unit queries and keys, outputs scaled, one memory for all queries."""
    q, k, v, _ = operands()
    o = form(q, k, v, is_causal=True)
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    mean = torch.full(k.shape[:-1], 1 / MINI_BATCH, dtype=k.dtype)
    assert_same([form(*unit, v, eta=mean, qk_l2norm=False, is_causal=True)], [o])
    assert_same([form(q, k, v, scale=-3.0, is_causal=True)], [-3 * o])
    everything, state = form(q[..., :7, :], k, v, return_state=True)
    assert_same([everything], [unit[0][..., :7, :] @ state_now(state)])
    assert_same([everything[..., :1, :]], [form(q[..., :1, :].expand_as(q), k, v, is_causal=True)[..., -1:, :]])


def test_a_state_holds_no_more_than_it_says():
    q, k, v, eta = operands(1000, lead=(1,))
    for loss in LOSSES:
        _, state = ttt_attention(q, k, v, loss=loss, eta=eta, return_state=True)
        assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in state)


def test_the_gate():
    gate = StepSize(8, 2, generator=torch.Generator().manual_seed(0))
    eta = gate(30 * draw(3, 50, 8).float())
    assert eta.shape == (3, 2, 50)
    assert 0 <= eta.min() < 0.01 / MINI_BATCH < 0.99 / MINI_BATCH < eta.max() <= 1 / MINI_BATCH


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_errors(form):
    q, k, v, eta = operands(4)
    nan = torch.full_like(eta, float("nan"))
    for wrong, error, words in (
        ({"mini_batch_size": 0}, ValueError, "mini_batch_size: expected an integer of at least 1, got 0"),
        ({"eta": eta[..., :3]}, ValueError, r"eta: expected shape \(2, 3, 4\) like the keys, got \(2, 3, 3\)"),
        ({"eta": eta + 1.7}, ValueError, "eta: expected steps within 0 and 2, got"),
        ({"eta": -eta}, ValueError, "eta: expected steps within 0 and 2, got"),
        ({"eta": nan}, ValueError, "eta: expected steps within 0 and 2, got nan"),
        ({"qk_l2norm": False, "eta": eta + 1, "loss": Huber()}, ValueError, r"k: expected eta \|k\|\^2 within 0 and 2"),
        ({"attn_mask": torch.ones(4, 4) > 0}, ValueError, "attn_mask: expected a mask of keys"),
    ):
        refuses(words, form, q, k, v, error=error, **wrong)
    form(q, k, v, loss=Contrastive(), qk_l2norm=False, eta=eta + 1)  # its gradients are bounded


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_wrong_states(form):
    q, k, v, _ = operands(6)
    for loss in (Squared(), Contrastive()):
        _, state = form(q, k, v, loss=loss, return_state=True)
        for wrong in (
            state[:-1],
            [x[:1] for x in state],
            [x.float() for x in state],
            [state[0].mT, *state[1:]],
            [state[0], *(x[..., :0, :] for x in state[1:3]), *state[3:]],
        ):
            refuses("initial_state: expected", form, q, k, v, loss=loss, initial_state=tuple(wrong))
        refuses(
            r"initial_state: expected keys of 1 to 4 tokens, got 6",
            form,
            q,
            k,
            v,
            loss=loss,
            initial_state=state,
            mini_batch_size=4,
        )


def test_values_by_hand():
    """Huber's loss also has PyTorch's values; within delta it is the squared loss."""
    p, v = vector(3.0, 0.0), vector(0.0, 4.0)  # a residual of length 5
    for loss, value, psi in (
        (Squared(), 12.5, (3.0, -4.0)),
        (Huber(1.0), 2.5 + 3.5, (1.0, -1.0)),
        (Huber(3.5), 4.5 + 3.5 * 2.25, (3.0, -3.5)),
        (Huber(6.0), 12.5, (3.0, -4.0)),
    ):
        assert_same([loss(p, v), loss.gradient(p, v)], [torch.tensor([value], dtype=p.dtype), vector(*psi)])
    p, v = draw(7, 4), 2 * draw(7, 4, seed=1)
    assert_same([Huber(0.7)(p, v)], [huber_loss(p, v, reduction="none", delta=0.7).sum(-1)])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("earlier", [0, 3])
def test_psi_is_the_derivative(loss, earlier):
    """For residuals within delta and beyond, which are 0.1 to 3 long."""
    size = torch.logspace(-1, 0.5, 5, dtype=torch.float64)[:, None]
    v = draw(2, 5 + earlier, 4)
    p = (v[:, earlier:] + size * draw(2, 5, 4, seed=1)).requires_grad_()
    hidden = torch.zeros(2, 5 + earlier, dtype=torch.bool)
    hidden[:, [0, 3]] = True
    for mask in (None, hidden):
        rows = slice(None) if mask is None else ~mask[0, earlier:]  # a hidden token has no loss
        (expected,) = torch.autograd.grad(loss(p, v, mask)[:, rows].sum(), p)
        torch.testing.assert_close(loss.gradient(p, v, mask)[:, rows], expected[:, rows], **close)


def test_contrastive_by_hand():
    """One candidate of score 1 beside the zero vector's 0; then two candidates, the token's own second."""
    p, v = vector(2.0, 0.0), vector(1.0, 1.0)
    loss = Contrastive(2.0)
    torch.testing.assert_close(loss(p, v), torch.tensor([log(1 + 1 / e)], dtype=p.dtype), **close)
    torch.testing.assert_close(loss.gradient(p, v), -vector(1.0, 1.0) / 2 / (1 + e), **close)
    both = torch.cat([vector(-1.0, 0.0), v])
    torch.testing.assert_close(loss(p, both), torch.tensor([log((1 + e + 1 / e) / e)], dtype=p.dtype), **close)


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


@pytest.mark.bad_input
@pytest.mark.parametrize(("loss", "name"), [(Huber, "delta"), (Contrastive, "temperature")])
def test_errors_of_losses(loss, name):
    for value in (0, -1.0, float("nan")):
        refuses(f"{name}: expected a positive number, got {value}", loss, value)
