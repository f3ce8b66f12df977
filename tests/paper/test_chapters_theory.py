"""What chapters read from `paper.theory` and `paper.memory`: closed forms against draws, loops and counts."""

from math import sqrt

import pytest
import torch
from seeded import generator

from ortho import MECHANISMS, MultiheadAttention
from ortho.attention.linear.random_features import iid_features
from ortho.attention.positional.positional_attention import PATTERNS
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared
from ortho.cost.big_o import H, N, d
from ortho.theory.estimates import SIGMAS, estimate
from paper.elementwise import elementwise, formulas
from paper.theory import approximation as approx
from paper.theory.approximation import FEATURES, attention_errors, drawn_errors
from paper.theory.drawn_data import DATA, sample_data
from paper.theory.positionalness import head_weights, nearest_pattern, pattern_fits, positionalness
from paper.theory.robustness import errors, pairs, replaced, retrieved, stream
from paper.theory.traffic import Traffic, columns_first, columns_first_tile, rows_first, rows_first_tile

# --------------------------------------------------------------------------------------------------- losses of memories


# Sums of a thousand float64 numbers of size 1 in another order.
close = {"atol": 1e-12, "rtol": 1e-12}


@pytest.mark.parametrize("loss", [Squared(), Huber(0.1)])
def test_errors_by_hand(loss):
    data, eta = stream(0.1, 3.0, generator=generator(), draws=2), 0.3
    S = torch.zeros_like(data.target)
    for k, v in zip(data.k.unbind(1), data.v.unbind(1), strict=True):
        r = torch.einsum("rkv,rk->rv", S, k) - v
        if isinstance(loss, Huber):
            r = r.clamp(-0.1, 0.1)
        S = S - eta * k[:, :, None] * r[:, None, :]
    found = torch.linalg.matrix_norm(S - data.target) / torch.linalg.matrix_norm(data.target)
    torch.testing.assert_close(errors(loss, eta, data), found, **close)


def test_orthogonal_keys_hold_everything():
    """As many pairs as dimensions, with orthogonal keys, are found after one write, and new values after one more."""
    k = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    (_, old), (_, new) = (pairs(8, 8, generator=generator(s), draws=3) for s in (0, 1))
    for loss in (Squared(), Huber(0.2), Contrastive()):
        assert retrieved(loss, 1.0, k, old, mini_batch_size=1, passes=1, generator=generator()).min() == 1
    assert replaced(Squared(), 1.0, k, old, new).min() == 1
    # After steps of a tenth a prediction is 0.09 of the old value and 0.1 of the new one: another may score higher.
    assert replaced(Squared(), 0.1, k, old, new).max() < 1


# ------------------------------------------------------------------------------------------------------ random features


F64 = torch.float64


@pytest.mark.parametrize("kind", FEATURES)
def test_errors_of_draws(kind):
    """The errors are those of one draw made here; all kinds have the same data; the mean caps the error of each row."""
    K, m = 8, 16
    rows = m // 2 if kind == "rff" else m
    g = generator(1)
    x, y = sample_data("isotropic", 128, K, 1.0, generator=g)
    omega = iid_features(rows, K, generator=g, dtype=F64)
    expected = approx.row_errors(
        approx.weights(approx.kernel_estimates(kind, x, y, omega)), torch.softmax(x @ y.mT, -1)
    )
    found = drawn_errors(kind, "iid", m, K, 1.0, draws=3)
    assert found.shape == (3, 128)
    assert torch.equal(found[1], expected)
    mean = attention_errors(kind, "iid", m, K, 1.0, draws=3)
    assert mean == estimate(found.clamp(max=2).mean(-1))
    assert (float(found.max()) > 2) == (kind == "rff")


@pytest.mark.parametrize("name", DATA)
def test_scores_of_the_data(name):
    """Scores have the standard deviation `spread` by design, over scales too. It is estimated from 60 draws of 40 x 40
    scores, to about 60^-1/2 of its variation from draw to draw."""
    g, spread = generator(1), 0.7
    squares = []
    for _ in range(60):
        x, y = sample_data(name, 40, 16, spread, generator=g)
        assert x.shape == y.shape == (40, 16) and x.dtype == F64
        if name == "shifted":
            assert float((x.mean(0) @ y.mean(0)).sqrt() / sqrt(spread * 4)) == pytest.approx(1, abs=0.5)
            x, y = x - x.mean(0), y - y.mean(0)
        squares.append((x @ y.mT).square().mean())
    squares = torch.stack(squares) / (1 - 1 / 40 if name == "shifted" else 1) ** 2
    error = float(squares.std()) / sqrt(60)
    assert abs(float(squares.mean()) - spread**2) < SIGMAS * error
    assert error < spread**2 / 20


# --------------------------------------------------------------------------------------------- how positional heads are


def one_key_each(inputs, n, *, causal=False, seed=0):
    """Each row has its whole weight on one of its keys, drawn evenly: E |C|^2 is the sum of 1 - 1/n_i."""
    shares = torch.ones(n, n).tril() if causal else torch.ones(n, n)
    keys = torch.multinomial(shares, inputs, replacement=True, generator=generator(seed)).T  # (inputs, n)
    return torch.nn.functional.one_hot(keys, n).double()


def fixed(pattern, inputs, n, causal):
    return pattern.weights(n, is_causal=causal).expand(inputs, n, n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_between(weight, causal):
    """For a P + (1 - a) R with keys drawn evenly, the share is a^2 |P - u|^2 over this plus (1 - a)^2 sum 1 - 1/n_i."""
    n, seen = 16, torch.arange(1, 17).double() if causal else torch.full((16,), 16.0).double()
    noise = (1 - 1 / seen).sum()
    for pattern in (PATTERNS["end"], PATTERNS["current"]):
        even = (torch.ones(n, n).tril() if causal else torch.ones(n, n)) / seen[:, None]
        signal = (pattern.weights(n, is_causal=causal) - even).square().sum()
        expected = float(weight**2 * signal / (weight**2 * signal + (1 - weight) ** 2 * noise))
        mixed = weight * fixed(pattern, 200, n, causal) + (1 - weight) * one_key_each(200, n, causal=causal)
        estimate = positionalness(mixed, is_causal=causal)
        assert abs(estimate.deviation(expected)) <= SIGMAS and estimate.standard_error < 0.02
        if causal:
            continue
        # With little weight another pattern may be as near by chance, but not from a half on.
        if weight >= 0.5:
            assert nearest_pattern(mixed).pattern == pattern
        (fit,) = (one for one in pattern_fits(mixed) if one.pattern == pattern)
        assert abs(fit.weight.deviation(weight)) <= SIGMAS and fit.weight.standard_error < 0.03
        assert abs(fit.share.deviation(expected)) <= SIGMAS


def test_the_weights_of_heads():
    x = torch.randn(5, 8, 12, generator=generator(1), dtype=torch.float64)
    v = torch.randn(5, 3, 8, 4, generator=generator(2), dtype=torch.float64)
    for attention in ("softmax", "linear", "rotary"):
        layer = MultiheadAttention(12, 3, attention=attention, generator=generator(), dtype=torch.float64)
        weights = head_weights(layer, x)
        assert not weights.requires_grad
        positionalness(weights[:, 0])  # rows sum to 1
        expected = MECHANISMS[attention].fast(*layer.projection(x), v)
        torch.testing.assert_close(weights @ v, expected, atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------ bytes and scalar operations


def test_scalar_operations_by_hand():
    """Six a score forward: the scale and five of the softmax. Index arithmetic is free."""
    made = formulas(lambda _, width, heads, __: MultiheadAttention(width, heads, form="reference"), H * N**2, N * d)
    assert made == (6 * H * N**2, 5 * H * N**2 + 2 * N * d)
    places = torch.arange(6)
    forward, _ = elementwise(lambda x: x * 2 + x.sum() + x[places * 2 // 3 > 1].exp().sum(), torch.ones(6))
    assert dict(forward) == {"mul": 6, "add": 12, "sum": 6 + 3, "exp": 3}


# ----------------------------------------------------------------------------------------- memory traffic of attention


class Memory:
    """A fast memory of M numbers that counts what it loads and stores, and refuses what it cannot hold."""

    def __init__(self, M):
        self.M, self.held, self.reads, self.writes = M, {}, 0, 0

    def load(self, name, numbers):
        self.keep(name, numbers)
        self.reads += numbers

    def keep(self, name, numbers):
        self.held[name] = numbers
        assert sum(self.held.values()) <= self.M, self.held

    def store(self, numbers):
        self.writes += numbers


def blocks(N, size):
    return [min(size, N - start) for start in range(0, N, size)]


def by_columns(N, d, M):
    """Four blocks of M / 4d rows of d numbers fill the memory. Algorithm 1 also holds the scores of a tile and two
    numbers a row; these are left out here, as its authors leave them out."""
    memory, tile = Memory(M), columns_first_tile(d, M)
    memory.store(N * (d + 2))  # outputs 0, maxima -inf, sums 0
    for columns in blocks(N, tile.columns):
        memory.load("K", columns * d), memory.load("V", columns * d)
        for rows in blocks(N, tile.rows):
            memory.load("Q", rows * d), memory.load("O", rows * d)
            memory.reads += 2 * rows
            memory.store(rows * (d + 2))
    return Traffic(memory.reads, memory.writes)


def by_rows(N, d, M):
    memory, tile = Memory(M), rows_first_tile(d, M)
    for rows in blocks(N, tile.rows):
        memory.load("Q", rows * d), memory.keep("O", rows * d)
        memory.keep("maxima and sums", 2 * rows), memory.keep("scores", rows)
        for columns in blocks(N, tile.columns):
            memory.load("K", columns * d), memory.load("V", columns * d)
        memory.store(rows * (d + 1))
    return Traffic(memory.reads, memory.writes)


@pytest.mark.parametrize(("N", "d", "M"), [(1, 1, 7), (10, 2, 11), (100, 4, 64), (130, 8, 300), (64, 16, 2000)])
def test_closed_forms(N, d, M):
    assert rows_first(N, d, M) == by_rows(N, d, M)
    if 4 * d <= M:
        assert columns_first(N, d, M) == by_columns(N, d, M)
