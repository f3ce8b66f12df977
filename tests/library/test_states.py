"""What a state holds that is erased from: exact tables, reflections, its limits without erasing and with decays."""

import pytest
import torch
from recurrent_operands import arguments, call, close
from seeded import draw

from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from ortho.attention.scores import unit

EITHER = pytest.mark.parametrize("attend", [delta_rule_reference, delta_rule])
EPS = torch.finfo(torch.float64).eps


def orthonormal(K):
    return torch.linalg.qr(draw(K, K, seed=7))[0]


@EITHER
def test_a_table(attend):
    """With orthonormal keys and strength 1: every read gives what was last written at its key, exactly, and nothing for
    keys that nothing was written at."""
    K, N = 6, 80
    keys = orthonormal(K)
    index = torch.randint(K, (N,), generator=torch.Generator().manual_seed(0))
    wanted = index.roll(3)
    v = draw(N, 5)
    o = attend(keys[wanted], keys[index], v, qk_l2norm=False, is_causal=True)
    unwritten = 0
    for t in range(N):
        written = (index[: t + 1] == wanted[t]).nonzero()
        unwritten += not len(written)
        expected = v[written[-1, 0]] if len(written) else torch.zeros(5, dtype=torch.float64)
        torch.testing.assert_close(o[t], expected, atol=N * K * EPS, rtol=0)
    assert 0 < unwritten < 10


@EITHER
def test_strengths(attend):
    """0 leaves the state alone, bit for bit; 2 reflects it, and 2 twice restores it; a share replaces a share."""
    given = arguments("delta", 2, length=70)
    S = given["initial_state"]
    o, after = call(attend, given | {"beta": torch.zeros(2, 70, dtype=torch.float64)}, is_causal=True)
    assert torch.equal(after, S)
    close([o], [unit(given["q"]) @ S])
    k = orthonormal(4)[:1].expand(2, 1, 4)
    one = {"q": k, "k": k, "initial_state": S, "v": torch.zeros(2, 1, 3, dtype=torch.float64)}
    for share in (0.0, 0.3, 1.0, 1.7, 2.0):
        beta = torch.full((2, 1), share, dtype=torch.float64)
        o, after = call(attend, one | {"beta": beta}, is_causal=True, qk_l2norm=False)
        close([o, after], [(1 - share) * k @ S, S - share * k.mT @ k @ S])
        o, _ = call(attend, one | {"beta": beta, "v": draw(2, 1, 3)}, is_causal=True, qk_l2norm=False)
        close([o], [(1 - share) * k @ S + share * draw(2, 1, 3)])
    twice = {name: x.expand(2, 2, -1) if name != "initial_state" else x for name, x in one.items()}
    beta = torch.full((2, 2), 2.0, dtype=torch.float64)
    o, after = call(attend, twice | {"beta": beta}, is_causal=True, qk_l2norm=False)
    close([o[:, :1], o[:, 1:], after], [-k @ S, k @ S, S])


@EITHER
@pytest.mark.parametrize("strength", [0.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_never_grows_by_erasing(attend, strength, dtype):
    """The spectral norm stays or falls over 3000 tokens without values, with keys that vary and with a fixed key."""
    N = 3000
    S = draw(2, 8, 3, dtype=dtype)
    k = torch.stack([draw(N, 8, seed=1, dtype=dtype), draw(8, seed=2, dtype=dtype).expand(N, 8)])
    q, v, beta = k, torch.zeros(2, N, 3, dtype=dtype), torch.full((2, N), strength, dtype=dtype)
    o, after = call(attend, {"q": q, "k": k, "v": v, "beta": beta, "initial_state": S}, is_causal=True)
    # A step rounds K products and their sums.
    growth = 1 + N * 8 * torch.finfo(dtype).eps
    before = torch.linalg.matrix_norm(S, 2)
    assert (torch.linalg.matrix_norm(after, 2) <= growth * before).all()
    assert (o.norm(dim=-1) <= growth * before[:, None]).all()


@EITHER
def test_faint_strengths_are_linear_attention(attend):
    """o / b tends to the sum of (q_i . k_j) v_j: at each key, at most b times the earlier values is erased."""
    given = arguments("delta", length=40, state=False)
    q, k, v = unit(given["q"]), unit(given["k"]), given["v"]
    linear = (q @ k.mT).tril() @ v
    sizes = v.norm(dim=-1)
    bound = (sizes.cumsum(0) - sizes).cumsum(0)  # the sum over t <= i and j < t of |v_j|
    for b in (1e-2, 1e-4, 1e-6):
        o, _ = call(attend, given | {"beta": torch.full((40,), b, dtype=torch.float64)}, is_causal=True)
        rounding = 40 * 40 * EPS * sizes.sum()
        assert ((o / b - linear).norm(dim=-1) <= b * bound + rounding).all()


@EITHER
@pytest.mark.parametrize("constant", [False, True])
def test_decays_are_a_scale_of_values(attend, constant):
    """With c_t the sum of log decays, S_t e^-c_t is the state without decay for values v_t e^-c_t."""
    given = arguments("gated-delta", 2, length=70)
    if constant:
        given["log_decay"] = torch.full((2, 70), -0.05, dtype=torch.float64)
    given["log_decay"] = given["log_decay"].clamp(min=-0.2)  # otherwise the scale would leave no digits
    o, S = call(attend, given, is_causal=True)
    scale = given.pop("log_decay").cumsum(-1).exp()[..., None]
    plain, plain_S = call(attend, given | {"v": given["v"] / scale}, is_causal=True)
    close([o, S], [plain * scale, plain_S * scale[:, -1:]])
