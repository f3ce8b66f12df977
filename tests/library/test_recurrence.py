"""States written token by token: products of matrices, both forms and all gradients across chunks, states, masks.

`test_properties.py` and `test_decoding.py` show what holds for every mechanism, up to 40 tokens.
"""

from inspect import signature
from itertools import product

import pytest
import torch
from piecewise import K, V, operands
from seeded import draw

from ortho import MECHANISMS
from ortho.attention import chunked_recurrence
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.recurrence import token_by_token
from ortho.attention.recurrent.delta import reorthogonalised
from ortho.attention.recurrent.selective_scan import selective_scan, selective_scan_reference
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


@pytest.mark.parametrize("tile", [chunked_recurrence.TILE, 1])
@pytest.mark.parametrize(("erase", "strengths", "decays", "causal"), list(product((False, True), repeat=4)))
def test_chunks(erase, strengths, decays, causal, tile, monkeypatch):
    """Outputs, the state and all gradients of chunks are those of the recurrence, with one key or two for a query, with
    lengths that do not fill a chunk, and with decays that leave nothing."""
    monkeypatch.setattr(chunked_recurrence, "TILE", tile)
    for steps, N in product((1, 2), (1, 7, 70)):
        k = unit(draw(2, 3, N * steps, 5, seed=1))
        beta = draw(2, 3, N * steps, seed=2).abs().clamp(max=2) if strengths else None
        fading = -draw(2, 3, N * steps, seed=3).square() if decays else None
        if fading is not None:
            fading[..., ::5] *= 1e30
        given = {"q": draw(2, 3, N, 5), "k": k, "v": draw(2, 3, N * steps, 4, seed=4), "beta": beta}
        given |= {"log_decay": fading, "S": draw(2, 3, 5, 4, seed=5)}
        given = {name: x for name, x in given.items() if x is not None}
        kind = {"is_causal": causal, "erase": erase, "steps": steps}
        found = []
        for form, size in ((token_by_token, {}), (in_chunks, {"chunk": 16})):
            leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
            o, S = form(**{"beta": None, "log_decay": None} | leaves, **kind, **size)
            upstream = [draw(*x.shape, seed=6 + i) for i, x in enumerate((o, S))]
            found.append([o, S, *torch.autograd.grad([o, S], list(leaves.values()), upstream)])
        close(*found)


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


@pytest.mark.parametrize("attend", [FUNCTIONS["delta", form] for form in FORMS], ids=FORMS)
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
