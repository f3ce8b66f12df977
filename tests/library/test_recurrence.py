"""States written token by token: products of matrices, both forms and all gradients across chunks, states, masks.
Test-time training: by hand, and compared with the delta rule; its losses and their derivatives.

`test_properties.py` and `test_decoding.py` show what holds for every mechanism, up to 40 tokens.
"""

from inspect import signature
from itertools import product
from math import e, log

import pytest
import torch
from piecewise import K, V, operands
from refusals import refuses
from seeded import draw
from torch.nn.functional import huber_loss

from ortho import MECHANISMS
from ortho.attention.recurrent.delta import delta_rule, reorthogonalised
from ortho.attention.recurrent.selective_scan import selective_scan, selective_scan_reference
from ortho.attention.recurrent.ttt import MINI_BATCH, StepSize, state_now, ttt_attention, ttt_attention_reference
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared
from ortho.attention.scores import TINY, unit

GATES = {"beta", "log_decay", "dt", "A"}
# The selective scan has a decay for each number of its state, so a file of its own tests it.
NAMES = [
    name
    for name, m in MECHANISMS.items()
    if m.family == "recurrent" and GATES.issuperset(m.gates) and name != "selective-scan"
]
ADDING = [name for name in NAMES if "beta" not in MECHANISMS[name].gates]  # they erase nothing
NORMALISING = [name for name in NAMES if "qk_l2norm" in signature(MECHANISMS[name].reference).parameters]
FORMS = ["reference", "fast"]
FUNCTIONS = {(name, form): MECHANISMS[name].form(form) for name in NAMES for form in FORMS}
SCALES = {"gla": 0.5}  # the factor of queries of width 4, where it is not 1
# Sums of at most 130 rounded products, the largest about 10, through systems whose inverses have entries of at most 2:
# an error of about 1e-13. A wrong term would show at 1e-2.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}


def arguments(name, *lead, length, keys=None, state=True, seed=0):
    """Everything that a call can be given, by name; by default as many queries as keys. `initial_state` is a tensor."""
    given = operands(MECHANISMS[name], *lead, length=keys or length, seed=seed)
    if keys is not None:
        given["q"] = draw(*lead, length, K, seed=100 * seed + 30)
    return given | ({"initial_state": draw(*lead, K, V, seed=100 * seed + 31)} if state else {})


def call(function, given, **kwargs):
    """(o, S)."""
    state = {"initial_state": (given["initial_state"],)} if "initial_state" in given else {}
    o, (S,) = function(**given | state, return_state=True, **kwargs)
    return o, S


def with_gradients(function, given, wanted=None, **kwargs):
    """The output, the state, and the gradients of `wanted` (all by default), for fixed upstream gradients of both."""
    wanted = list(given) if wanted is None else wanted
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in given.items()}
    o, S = call(function, leaves, **kwargs)
    reached = [(x, draw(*x.shape, seed=98 + i).to(x.dtype)) for i, x in enumerate((o, S)) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in reached], [leaves[name] for name in wanted], [upstream for _, upstream in reached]
    )
    return [o, S, *gradients]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


ERASING = [name for name in NAMES if name not in ADDING]


def by_products(q, k, v, beta, log_decay, S, *, is_causal, erase=True, before_fading=False):
    """(o, S) for one sequence, with every matrix S_t = (I - b k k^T) Diag(a) S_{t-1} + b k v^T multiplied out; without
    erasing, Diag(a) S_{t-1} + b k v^T; if it erases `before_fading`, (Diag(a) - b k k^T) S_{t-1} + b k v^T."""
    rows, identity = [], torch.eye(k.shape[1], dtype=k.dtype)
    for t in range(len(k)):
        b = 1 if beta is None else beta[t]
        erased = b * torch.outer(k[t], k[t]) if erase else 0 * identity
        a = identity if log_decay is None else torch.diag_embed(log_decay[t].exp().expand(k.shape[1]))
        A = a - erased if before_fading else (identity - erased) @ a
        S = A @ S + b * torch.outer(k[t], v[t])
        if is_causal:
            rows.append(S.mT @ q[t])
    return torch.stack(rows) if is_causal else q @ S, S


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_formula(name, form, causal, scale):
    """As published, with all gradients. Without a scale GLA divides by sqrt(K), which is 2 here; mechanisms that erase
    divide by the lengths of queries and keys, unless these are to be taken as they are. SSD's decay is made of dt
    and A."""
    given = arguments(name, length=7, keys=7 if causal else 9)
    kwargs = {"is_causal": causal, "scale": scale} | ({"chunk": 4} if form == "fast" else {})
    factor = SCALES.get(name, 1) if scale is None else scale

    def expected(length):
        def function(q, k, v, beta=None, log_decay=None, dt=None, A=None, *, return_state, initial_state):
            q, k = (x / length(x) for x in (q, k))
            if name == "ssd":
                beta, log_decay = dt, -dt * A
            kind = {"is_causal": causal, "erase": name in ERASING, "before_fading": name == "vector-gated"}
            o, S = by_products(factor * q, k, v, beta, log_decay, initial_state[0], **kind)
            return o, (S,)

        return with_gradients(function, given)

    function = FUNCTIONS[name, form]
    if name in ADDING:
        close(with_gradients(function, given, **kwargs), expected(lambda x: 1))
        return
    close(with_gradients(function, given, **kwargs), expected(lambda x: (x.square().sum(-1, True) + 1e-6).sqrt()))
    if name not in NORMALISING:
        return
    given["k"] = given["k"] / given["k"].norm(dim=-1, keepdim=True) * torch.linspace(0, 1, len(given["k"]))[:, None]
    close(with_gradients(function, given, **kwargs, qk_l2norm=False), expected(lambda x: 1))


def test_the_selective_scan():
    """By loops over tokens and both channels, with all gradients; the fast form in chunks that do not divide N."""
    N, K, V = 7, 3, 2
    given = {"q": draw(N, K), "k": draw(N, K, seed=1), "v": draw(N, V, seed=2)}
    given |= {"dt": draw(N, V, seed=3).abs(), "A": draw(V, K, seed=4).square(), "initial_state": draw(K, V, seed=5)}

    def by_loops(q, k, v, dt, A, *, initial_state, is_causal, return_state):
        S = [[initial_state[0][a, b] for b in range(V)] for a in range(K)]
        rows = []
        for t in range(N):
            for a in range(K):
                for b in range(V):
                    S[a][b] = (-dt[t, b] * A[b, a]).exp() * S[a][b] + dt[t, b] * k[t, a] * v[t, b]
            rows.append(torch.stack([sum(S[a][b] * q[t, a] for a in range(K)) for b in range(V)]))
        return torch.stack(rows), (torch.stack([torch.stack(row) for row in S]),)

    expected = with_gradients(by_loops, given, is_causal=True)
    close(with_gradients(selective_scan_reference, given, is_causal=True), expected)
    close(with_gradients(selective_scan, given, is_causal=True, chunk=3), expected)


def test_a_state_orthogonalised_again():
    """All singular values become their root mean square: the norm stays, the directions too."""
    S = draw(2, 5, 3)
    found = reorthogonalised(S)
    mean = S.square().sum((-1, -2)) / 3
    close(found.mT @ found, mean[:, None, None] * torch.eye(3, dtype=S.dtype))
    close(reorthogonalised(found), found)


def test_unit():
    """The unit of x is x / sqrt(|x|^2 + 1e-6): long vectors get length 1; zero stays zero, and has a gradient."""
    x = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [0.0, 0.0], [1e150, 0.0]], dtype=torch.float64, requires_grad=True)
    expected = [[0.6, 0.8], [0.5**0.5, 0.0], [0.0, 0.0], [1.0, 0.0]]
    torch.testing.assert_close(unit(x), torch.tensor(expected, dtype=torch.float64), atol=TINY / 25, rtol=0)
    (gradient,) = torch.autograd.grad(unit(x).sum(), x)
    torch.testing.assert_close(gradient[2], torch.full((2,), TINY**-0.5, dtype=torch.float64))
    assert gradient.isfinite().all()
    for dtype, large in ((torch.float32, 1e20), (torch.float64, 1e160)):
        with pytest.raises(ValueError, match=r"^x: expected squared lengths within 0 and .*, got 0 to inf"):
            unit(torch.tensor([[1.0, large], [0.0, 0.0]], dtype=dtype))


# --------------------------------------------------------------------------------------------------- test-time training

LOSSES = [Squared(), Huber(0.4), Contrastive(0.6)]
TTT_FORMS = [ttt_attention_reference, ttt_attention]
# Two float64 computations of sums of about 1e3 terms of size 1 in different orders (2e-13). A wrong term shows at 1e-2.
ttt_close = {"atol": 1e-12, "rtol": 1e-12}
LENGTH, TTT_K, TTT_V = 37, 5, 4


def vector(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def ttt_operands(length=LENGTH, *, lead=(2, 3), largest=0.4, seed=0):
    q, k, v = (draw(*lead, length, width, seed=3 * seed + i) for i, width in enumerate((TTT_K, TTT_K, TTT_V)))
    eta = largest * torch.rand((*lead, length), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q, k, v, eta


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, **ttt_close)


@pytest.mark.parametrize("form", TTT_FORMS)
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


@pytest.mark.parametrize("form", TTT_FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mini_batch_of_one_is_the_delta_rule(form, causal):
    q, k, v, eta = ttt_operands(largest=2.0)
    o, state = form(q, k, v, eta=eta, mini_batch_size=1, is_causal=causal, return_state=True)
    expected, (S,) = delta_rule(q, k, v, beta=eta, is_causal=causal, return_state=True)
    assert_same([o, state_now(state)], [expected, S])
    assert (o - form(q, k, v, eta=eta, mini_batch_size=2, is_causal=causal)).abs().max() > 0.1


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_gradients_of_the_loss(loss):
    """A mini-batch moves the memory against autograd's gradient in S of its losses, weighted by their steps."""
    q, k, v, eta = ttt_operands(12)
    _, state = ttt_attention(q, k, v, loss=loss, eta=eta, mini_batch_size=8, qk_l2norm=True, return_state=True)
    unit = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    S = torch.zeros(2, 3, TTT_K, TTT_V, dtype=torch.float64, requires_grad=True)
    for part in (slice(0, 8), slice(8, 12)):
        total = (eta[..., part] * loss(unit[..., part, :] @ S, v[..., part, :])).sum()
        (gradient,) = torch.autograd.grad(total, S)
        S = (S - gradient).detach().requires_grad_()
    assert_same([state_now(state)], [S.detach()])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", TTT_FORMS)
def test_a_masked_token_holds_its_place(loss, form):
    """It writes nothing, whatever it holds; other tokens stay in their mini-batches, also if the sequence goes on."""
    q, k, v, eta = ttt_operands()
    mask = torch.ones(LENGTH, dtype=torch.bool)
    mask[[2, 17, 18, 36]] = False
    kwargs = {"loss": loss, "mini_batch_size": 8, "return_state": True}
    o, state = form(q, k, v, eta=eta, is_causal=True, attn_mask=mask[None], **kwargs)
    k2, v2 = (torch.where(mask[:, None], x, 30 * x.flip(-1)) for x in (k, v))
    other, other_state = form(q, k2, v2, eta=eta, is_causal=True, attn_mask=mask[None], **kwargs)
    assert_same([other], [o])
    if not loss.looks_back:  # as with steps of size 0
        assert_same([form(q, k, v, eta=eta * mask, is_causal=True, **kwargs)[0]], [o])
    *more, rates = ttt_operands(5, seed=1)
    ends = [form(*more, eta=rates, is_causal=True, initial_state=s, **kwargs)[0] for s in (state, other_state)]
    assert_same(ends[:1], ends[1:])


@pytest.mark.parametrize("form", TTT_FORMS)
def test_options(form):
    """Steps of 1 / mini_batch_size, unit queries and keys, outputs scaled, one memory for all queries."""
    q, k, v, _ = ttt_operands()
    o = form(q, k, v, is_causal=True)
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    mean = torch.full(k.shape[:-1], 1 / MINI_BATCH, dtype=k.dtype)
    assert_same([form(*unit, v, eta=mean, qk_l2norm=False, is_causal=True)], [o])
    assert_same([form(q, k, v, scale=-3.0, is_causal=True)], [-3 * o])
    everything, state = form(q[..., :7, :], k, v, return_state=True)
    assert_same([everything], [unit[0][..., :7, :] @ state_now(state)])
    assert_same([everything[..., :1, :]], [form(q[..., :1, :].expand_as(q), k, v, is_causal=True)[..., -1:, :]])


def test_the_gate():
    gate = StepSize(8, 2, generator=torch.Generator().manual_seed(0))
    eta = gate(30 * draw(3, 50, 8).float())
    assert eta.shape == (3, 2, 50)
    assert 0 <= eta.min() < 0.01 / MINI_BATCH < 0.99 / MINI_BATCH < eta.max() <= 1 / MINI_BATCH


@pytest.mark.bad_input
@pytest.mark.parametrize("form", TTT_FORMS)
def test_errors(form):
    q, k, v, eta = ttt_operands(4)
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
@pytest.mark.parametrize("form", TTT_FORMS)
def test_wrong_states(form):
    q, k, v, _ = ttt_operands(6)
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
        call = {"loss": loss, "initial_state": state, "mini_batch_size": 4}
        refuses("initial_state: expected keys of 1 to 4 tokens, got 6", form, q, k, v, **call)


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
        torch.testing.assert_close(loss.gradient(p, v, mask)[:, rows], expected[:, rows], **ttt_close)


def test_contrastive_by_hand():
    """One candidate of score 1 beside the zero vector's 0; then two candidates, the token's own second."""
    p, v = vector(2.0, 0.0), vector(1.0, 1.0)
    loss = Contrastive(2.0)
    torch.testing.assert_close(loss(p, v), torch.tensor([log(1 + 1 / e)], dtype=p.dtype), **ttt_close)
    torch.testing.assert_close(loss.gradient(p, v), -vector(1.0, 1.0) / 2 / (1 + e), **ttt_close)
    both = torch.cat([vector(-1.0, 0.0), v])
    torch.testing.assert_close(loss(p, both), torch.tensor([log((1 + e + 1 / e) / e)], dtype=p.dtype), **ttt_close)


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
