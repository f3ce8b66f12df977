"""What a memory that erases holds: exact tables, reflections, its limits without erasing and with decays; its parts."""

from collections import namedtuple
from functools import partial

import pytest
import torch
from memory_operands import FORMS, FUNCTIONS, arguments, call, close, draw, with_gradients

from ortho.attention.operands import TINY, attention_form, unit
from ortho.attention.recurrent import recurrence as memory

Prepared = namedtuple("Prepared", "q k v beta log_decay S")
EPS = torch.finfo(torch.float64).eps


def orthonormal(K):
    return torch.linalg.qr(draw(K, K, seed=7))[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_table(form):
    """With orthonormal keys and strength 1: every read gives what was last written at its key, exactly, and nothing for
    keys that nothing was written at."""
    K, N = 6, 80
    keys = orthonormal(K)
    index = torch.randint(K, (N,), generator=torch.Generator().manual_seed(0))
    wanted = index.roll(3)
    v = draw(N, 5)
    o = FUNCTIONS[form](keys[wanted], keys[index], v, normalise=False, is_causal=True)
    unwritten = 0
    for t in range(N):
        written = (index[: t + 1] == wanted[t]).nonzero()
        unwritten += not len(written)
        expected = v[written[-1, 0]] if len(written) else torch.zeros(5, dtype=torch.float64)
        torch.testing.assert_close(o[t], expected, atol=N * K * EPS, rtol=0)
    assert 0 < unwritten < 10


@pytest.mark.parametrize("form", FORMS)
def test_strengths(form):
    """0 leaves the memory alone, bit for bit; 2 reflects it, and twice is not at all; a share replaces a share."""
    given = arguments(2, length=70, gated=False)
    S = given["initial_state"]
    o, after = call(FUNCTIONS[form], given | {"beta": torch.zeros(2, 70, dtype=torch.float64)}, is_causal=True)
    assert torch.equal(after, S)
    close([o], [unit(given["q"]) @ S])
    k = orthonormal(4)[:1].expand(2, 1, 4)
    one = {"q": k, "k": k, "initial_state": S, "v": torch.zeros(2, 1, 3, dtype=torch.float64)}
    for share in (0.0, 0.3, 1.0, 1.7, 2.0):
        beta = torch.full((2, 1), share, dtype=torch.float64)
        o, after = call(FUNCTIONS[form], one | {"beta": beta}, is_causal=True, normalise=False)
        close([o, after], [(1 - share) * k @ S, S - share * k.mT @ k @ S])
        o, _ = call(FUNCTIONS[form], one | {"beta": beta, "v": draw(2, 1, 3)}, is_causal=True, normalise=False)
        close([o], [(1 - share) * k @ S + share * draw(2, 1, 3)])
    twice = {name: x.expand(2, 2, -1) if name != "initial_state" else x for name, x in one.items()}
    beta = torch.full((2, 2), 2.0, dtype=torch.float64)
    o, after = call(FUNCTIONS[form], twice | {"beta": beta}, is_causal=True, normalise=False)
    close([o[:, :1], o[:, 1:], after], [-k @ S, k @ S, S])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strength", [0.5, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_memory_never_grows_by_erasing(form, strength, dtype):
    """Over 3000 tokens without values, with keys that vary and one that does not: its spectral norm stays, or falls."""
    N = 3000
    S = draw(2, 8, 3, dtype=dtype)
    k = torch.stack([draw(N, 8, seed=1, dtype=dtype), draw(8, seed=2, dtype=dtype).expand(N, 8)])
    q, v, beta = k, torch.zeros(2, N, 3, dtype=dtype), torch.full((2, N), strength, dtype=dtype)
    o, after = call(FUNCTIONS[form], {"q": q, "k": k, "v": v, "beta": beta, "initial_state": S}, is_causal=True)
    # A step rounds K products and their sums.
    growth = 1 + N * 8 * torch.finfo(dtype).eps
    before = torch.linalg.matrix_norm(S, 2)
    assert (torch.linalg.matrix_norm(after, 2) <= growth * before).all()
    assert (o.norm(dim=-1) <= growth * before[:, None]).all()


@pytest.mark.parametrize("form", FORMS)
def test_faint_strengths_are_linear_attention(form):
    """o / b tends to the sum of (q_i . k_j) v_j: what is erased is at most b times the values before, at each key."""
    given = arguments(length=40, gated=False, state=False)
    q, k, v = unit(given["q"]), unit(given["k"]), given["v"]
    linear = (q @ k.mT).tril() @ v
    sizes = v.norm(dim=-1)
    bound = (sizes.cumsum(0) - sizes).cumsum(0)  # the sum over t <= i and j < t of |v_j|
    for b in (1e-2, 1e-4, 1e-6):
        o, _ = call(FUNCTIONS[form], given | {"beta": torch.full((40,), b, dtype=torch.float64)}, is_causal=True)
        rounding = 40 * 40 * EPS * sizes.sum()
        assert ((o / b - linear).norm(dim=-1) <= b * bound + rounding).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_without_decay(form, causal):
    """A decay of 0 is none, in all gradients but its own; strengths are 1 by default."""
    given = arguments(2, length=70, gated=False)
    expected = with_gradients(FUNCTIONS[form], given, is_causal=causal)
    gated = given | {"log_decay": torch.zeros(2, 70, dtype=torch.float64)}
    close(with_gradients(FUNCTIONS[form], gated, list(given), is_causal=causal), expected)
    del given["beta"]
    ones = given | {"beta": torch.ones(2, 70, dtype=torch.float64)}
    close(
        with_gradients(FUNCTIONS[form], given, is_causal=causal),
        with_gradients(FUNCTIONS[form], ones, list(given), is_causal=causal),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("constant", [False, True])
def test_decays_are_a_scale_of_values(form, constant):
    """With c_t the sum of log decays, S_t e^-c_t is the memory without decay for values v_t e^-c_t."""
    given = arguments(2, length=70, gated=True)
    if constant:
        given["log_decay"] = torch.full((2, 70), -0.05, dtype=torch.float64)
    given["log_decay"] = given["log_decay"].clamp(min=-0.2)  # or the scale would leave no digits
    o, S = call(FUNCTIONS[form], given, is_causal=True)
    scale = given.pop("log_decay").cumsum(-1).exp()[..., None]
    plain, plain_S = call(FUNCTIONS[form], given | {"v": given["v"] / scale}, is_causal=True)
    close([o, S], [plain * scale, plain_S * scale[:, -1:]])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
def test_not_causal_reads_the_last_memory(form, gated):
    """For every query, of which there may be any number; and as the last query of a causal call does."""
    given = arguments(2, length=9, gated=gated)
    _, S = call(FUNCTIONS[form], given, is_causal=True)
    for queries in (1, 5, 9, 30):
        q = draw(2, queries, 4, seed=queries)
        o, after = call(FUNCTIONS[form], given | {"q": q})
        close([o, after], [unit(q) @ S, S])


def test_unit():
    """x / sqrt(|x|^2 + 1e-6): of length 1 for long ones; zero stays zero, and has a gradient."""
    x = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [0.0, 0.0], [1e150, 0.0]], dtype=torch.float64, requires_grad=True)
    expected = [[0.6, 0.8], [0.5**0.5, 0.0], [0.0, 0.0], [1.0, 0.0]]
    torch.testing.assert_close(unit(x), torch.tensor(expected, dtype=torch.float64), atol=TINY / 25, rtol=0)
    (gradient,) = torch.autograd.grad(unit(x).sum(), x)
    torch.testing.assert_close(gradient[2], torch.full((2,), TINY**-0.5, dtype=torch.float64))
    assert gradient.isfinite().all()
    for dtype, large in ((torch.float32, 1e20), (torch.float64, 1e160)):
        with pytest.raises(ValueError, match=r"^x: expected squared lengths within 0 and .*, got 0 to inf"):
            unit(torch.tensor([[1.0, large], [0.0, 0.0]], dtype=dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("channels", [None, False, True])
@pytest.mark.parametrize("written", [False, True])
def test_recurrence(causal, erase, channels, written):
    """S_t = (I - b k k^T) Diag(a_t) S_{t-1} + b k v^T with a decay a token or one a channel of the keys, or none; and,
    without erasing, Diag(a_t) S_{t-1} + b k v^T. Strengths are 1 by default."""
    given = arguments(2, 3, length=7, gated=True)
    q, k, v, S = (given[name] for name in ("q", "k", "v", "initial_state"))
    beta = given["beta"] if written else None
    log_decay = {None: None, False: given["log_decay"], True: -draw(*k.shape, seed=8).square()}[channels]
    o, after = memory.recurrence(q, k, v, beta, log_decay, S, is_causal=causal, erase=erase)
    identity, rows = torch.eye(4, dtype=torch.float64), []
    for t in range(7):
        b = beta[..., t, None, None] if written else 1
        if log_decay is not None:
            a = log_decay[..., t, :] if channels else log_decay[..., t, None].expand(2, 3, 4)
            S = torch.diag_embed(a.exp()) @ S
        outer = k[..., t, :, None] @ k[..., t, None, :]
        S = (identity - b * outer) @ S if erase else S
        S = S + b * k[..., t, :, None] @ v[..., t, None, :]
        rows.append(q[..., t, None, :] @ S)
    close([o, after], [torch.cat(rows, -2) if causal else q @ S, S])


@pytest.mark.parametrize("channels", [False, True])
def test_operands(channels):
    """In float32 at least and contiguous; hidden keys neither write nor fade, in any channel."""
    q, k, v = (draw(3, 2, 4, seed=i).to(torch.bfloat16).transpose(0, 1) for i in range(3))  # (2, 3, 4)
    log_decay = -draw(*(2, 3, 4)[: 2 + channels], seed=5).square()
    mask = torch.tensor([[[True, False, True]], [[False, False, True]]])

    @attention_form(fixed_state=True, check=partial(memory.check_writes, channels=channels))
    def form(q, k, v, *, is_causal, return_state, **own):
        seen.append(memory.prepared(q, k, v, normalise=True, **own))
        return v, (seen[-1][-1],)

    def made(**kwargs):
        given = {"beta": None, "log_decay": log_decay, "attn_mask": mask, "scale": None} | kwargs
        o, (S,) = form(q, k, v, **given, is_causal=True, return_state=True)
        assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
        return Prepared(*seen[-1])

    seen = []
    x = made()
    tensors = [each for each in x if isinstance(each, torch.Tensor)]
    assert {each.dtype for each in tensors} == {torch.float32} and all(each.is_contiguous() for each in tensors)
    assert torch.equal(x.beta, mask[:, 0].float())
    shown = mask.mT if channels else mask[:, 0]
    assert torch.equal(x.log_decay, torch.where(shown, log_decay.float(), 0.0))
    assert torch.equal(x.S, torch.zeros(2, 4, 4))
    assert made(attn_mask=None).beta is None and made(log_decay=None).log_decay is None
    assert torch.equal(made(scale=0.5).q, 0.5 * x.q)
    beta = torch.full((2, 3), 0.7, dtype=torch.float64)
    assert torch.equal(made(beta=beta).beta, torch.where(mask[:, 0], beta.float(), 0.0))
    wrong = log_decay[..., None] if not channels else log_decay[..., 0]
    with pytest.raises(ValueError, match=r"^log_decay: expected shape \(2, 3.*\) like the keys, got \(2, 3"):
        made(log_decay=wrong)
