"""What chapters read from `paper.theory` and `paper.memory`: closed forms against draws, loops and counts."""

import math

import pytest
import torch
from scipy import stats
from seeded import draw as normal
from seeded import generator
from torch import nn

from ortho import MECHANISMS, MultiheadAttention, cost
from ortho.attention.linear.random_features import iid_features
from ortho.attention.positional.positional_attention import PATTERNS, SEVEN
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared
from ortho.cost.big_o import H, N, d
from ortho.orthogonal import DRAWS, haar
from ortho.theory.estimates import SIGMAS, estimate
from paper.elementwise import elementwise, formulas
from paper.memory import formula, kept, layer_bytes
from paper.theory import approximation as approx
from paper.theory import delta_memory
from paper.theory import scores as laws
from paper.theory.approximation import FEATURES, attention_errors, drawn_errors
from paper.theory.delta_memory import operands
from paper.theory.drawn_data import sample_data
from paper.theory.positionalness import head_weights, nearest_pattern, pattern_fits, positionalness
from paper.theory.robustness import errors, moved, pairs, replaced, retrieved, stream

# --------------------------------------------------------------------------------------------------------------- recall


def error_of(*args, **gates):
    return delta_memory.expected_answer(*args, **gates).error


@pytest.mark.parametrize("memory", ["linear", "delta"])
@pytest.mark.parametrize(
    ("K", "pairs", "beta", "decay"),
    [(1, 3, 1.0, 1.0), (2, 5, 1.0, 1.0), (4, 12, 1.0, 1.0), (4, 12, 0.6, 1.0), (4, 6, 2.0, 1.0), (6, 14, 1.5, 0.9)],
)
def test_drawn_errors_have_the_expected_mean(memory, K, pairs, beta, decay):
    """100 means in all, each beyond SIGMAS with probability 1e-5: a false alarm in 1 of 1,000 seeds."""
    gates = {"beta": beta, "decay": decay}
    found = delta_memory.sampled_errors(memory, K, pairs, draws=4000, generator=generator(), **gates)
    for age, error in enumerate(found):
        expected = error_of(memory, K, pairs, age, **gates)
        if age == 0 and beta == 1 and memory == "delta":
            assert expected == 0
            assert error.value < 1e-28  # the square of rounding
        else:
            assert abs(error.deviation(expected)) < SIGMAS
            assert error.standard_error < 0.1 * (1 + expected)


# -------------------------------------------------------------------------------------------------------- narrow states


STRENGTHS = ((0.0, 1.0), (0.0, 2.0), (2.0, 2.0))
STEPS, WIDTH = 4096, 8


@pytest.fixture(scope="module")
def long_run():
    """(operands, marks, exact memories), at a length that takes a second."""
    x, at = operands(STEPS, WIDTH, STRENGTHS, generator=torch.Generator().manual_seed(0)), [64, 192, 512, 1472, STEPS]
    return x, at, delta_memory.chunked(x, at, torch.float64)


def test_expected_error_is_its_recursion():
    """The recursion is e <- r e + u^2 s with s <- r s + 1, for strengths with r known by hand."""
    for strengths, r in (((1.0, 1.0), 1 - 1 / WIDTH), ((0.0, 2.0), 1 - 2 / 3 / WIDTH), ((2.0, 2.0), 1.0)):
        e = s = 0.0
        for _ in range(50):
            s = r * s + 1
            e = r * e + delta_memory.rounding_error(8) ** 2 * s
        assert delta_memory.expected_error(strengths, WIDTH, 50, 8) == pytest.approx((e / s) ** 0.5)
    # Rounded once per chunk: the same number of roundings, with a chunk's decay between them.
    assert delta_memory.expected_error((2.0, 2.0), WIDTH, 640, 8, every=64) == delta_memory.expected_error(
        (2.0, 2.0), WIDTH, 10, 8
    )


def test_errors_are_as_derived(long_run):
    """In bfloat16 only roundings of the memory matter: within a factor of 2, as chance moves errors by about 1/WIDTH.

    float32's arithmetic rounds as finely as its state: within a factor of 2.5 for one step at a time. A chunk sums
    products of many tokens, with alternating signs at beta = 2: less than 30 times the derived error.
    """
    x, at, exact = long_run
    single, narrow = (
        delta_memory.relative_errors(S, exact) for S in delta_memory.recurrent(x, at, tuple(delta_memory.STATES))
    )
    in_chunks = delta_memory.relative_errors(delta_memory.chunked(x, at, torch.bfloat16), exact)
    single_chunks = delta_memory.relative_errors(delta_memory.chunked(x, at, torch.float32), exact)
    for i, steps in enumerate(at):
        for run_number, strengths in enumerate(STRENGTHS):
            by_step, by_chunk = (
                delta_memory.expected_error(strengths, WIDTH, steps, 8, every=every)
                for every in (1, delta_memory.CHUNK)
            )
            assert 0.5 < narrow[i, run_number] / by_step < 2
            assert 0.5 < in_chunks[i, run_number] / by_chunk < 2
            by_step = delta_memory.expected_error(strengths, WIDTH, steps, 24)
            assert 0.5 < single[i, run_number] / by_step < 2.5
            assert 0.5 < single_chunks[i, run_number] / by_step < 30
    assert narrow[-1, 0] < 2 * narrow[0, 0]  # errors decay
    assert narrow[-1, 2] > 3 * narrow[0, 2]  # but not at beta = 2


# --------------------------------------------------------------------------------------------------- losses of memories


# Sums of a thousand float64 numbers of size 1 in another order.
close = {"atol": 1e-12, "rtol": 1e-12}


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


# ------------------------------------------------------------------------------------------------------ random features


F64 = torch.float64


@pytest.mark.parametrize("kind", FEATURES)
def test_errors_of_draws(kind):
    """The errors are those of one draw made here; all kinds have the same data; the mean caps the error of each row."""
    K, m = 8, 16
    rows = m // 2 if kind == "rff" else m
    g = generator(6)
    x, y = sample_data("isotropic", 20, K, 1.0, generator=g)
    omega = iid_features(rows, K, generator=g, dtype=F64)
    expected = approx.row_errors(
        approx.weights(approx.kernel_estimates(kind, x, y, omega)), torch.softmax(x @ y.mT, -1)
    )
    found = drawn_errors(kind, "iid", m, K, 1.0, tokens=20, draws=3, seed=5)
    assert found.shape == (3, 20)
    assert torch.equal(found[1], expected)
    mean = attention_errors(kind, "iid", m, K, 1.0, tokens=20, draws=3, seed=5)
    assert mean == estimate(found.clamp(max=2).mean(-1))
    assert (float(found.max()) > 2) == (kind == "rff")


# ----------------------------------------------------------------------------------------- scores of random projections


FALSE_ALARM = 1e-4  # chance that the right law fails one comparison
LIMIT = stats.norm.isf(FALSE_ALARM / 2)  # standard errors


@pytest.mark.parametrize("draw", list(DRAWS))
def test_moments(draw):
    scores = laws.sample_scores(draw, 6, 3, 2000, generator=generator())
    for order in (1, 2, 3, 4):
        assert abs(laws.moment_deviation(scores, draw, 6, 3, order)) < LIMIT


def test_closed_forms():
    assert laws.score_moment("haar", 8, 2, 2) == laws.score_moment("gaussian", 8, 2, 2) == 2 / 64
    assert laws.score_moment("gaussian", 8, 2, 4) == pytest.approx(
        laws.score_moment("haar", 8, 2, 4) * (1 + 2 / 8) ** 2
    )
    # One head: W_Q W_K^T is itself Haar, and s is a coordinate of a uniform unit vector, of fourth moment 3/(d(d+2)).
    assert laws.score_moment("haar", 8, 8, 4) == pytest.approx(3 / 8 / 10)


def test_a_map_before_carries_the_scores():
    g = generator()
    q, k = (haar(12, 5, generator=g, dtype=torch.float64) for _ in "qk")
    wanted_q, wanted_k = normal(2, 12, 5, seed=1)
    P = laws.carrying(q, k, wanted_q, wanted_k)
    x, y = normal(2, 12, seed=2)
    expected = x @ wanted_q @ wanted_k.T @ y
    torch.testing.assert_close((P @ x) @ q @ k.T @ (P @ y), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(P.T @ q, wanted_q, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------- how positional heads are


def softmax_of_noise(inputs, n, *, causal=False, scale=1.0, seed=0):
    """Weights that depend on nothing but content: scores are independent from input to input, alike for all keys."""
    scores = scale * torch.randn(inputs, n, n, generator=generator(seed), dtype=torch.float64)
    future = torch.ones(n, n, dtype=torch.bool).triu(1) & causal
    return scores.masked_fill(future, -math.inf).softmax(-1)


def one_key_each(inputs, n, *, causal=False, seed=0):
    """Each row has its whole weight on one of its keys, drawn evenly: E |C|^2 is the sum of 1 - 1/n_i."""
    shares = torch.ones(n, n).tril() if causal else torch.ones(n, n)
    keys = torch.multinomial(shares, inputs, replacement=True, generator=generator(seed)).T  # (inputs, n)
    return torch.nn.functional.one_hot(keys, n).double()


def fixed(pattern, inputs, n, causal):
    return pattern.weights(n, is_causal=causal, empty="self").expand(inputs, n, n)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SEVEN, ids=lambda p: p.name)
def test_a_fixed_pattern(pattern, causal):
    """Exactly 1, up to the rounding of sums of 400 squares."""
    share, error = positionalness(fixed(pattern, 5, 20, causal), is_causal=causal)
    assert share == pytest.approx(1, abs=1e-13) and error < 1e-12


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
        fit = nearest_pattern(mixed, is_causal=causal)
        # With little weight another pattern may be as near by chance, but not from a half on.
        if weight >= 0.5:
            assert fit.pattern == pattern
        (fit,) = pattern_fits(mixed, [pattern], is_causal=causal)
        assert abs(fit.weight.deviation(weight)) <= SIGMAS and fit.weight.standard_error < 0.03
        assert abs(fit.share.deviation(expected)) <= SIGMAS


@pytest.mark.parametrize("causal", [False, True])
def test_relative_by_least_squares(causal):
    """The share in the span of functions f(j - i), each less its mean over a row's keys, is that of a least-squares
    fit. It is 1 for weights that are such a function, and 0 for weights that are orthogonal to them."""
    n = 9
    allowed = torch.ones(n, n).tril().bool() if causal else torch.ones(n, n).bool()
    even = allowed.double() / allowed.sum(-1, keepdim=True)
    basis = []
    for offset in range(1 - n, n):
        one = torch.diag(torch.ones(n - abs(offset)), offset).double() * allowed
        basis.append((one - one.sum(-1, keepdim=True) * even).flatten())
    basis = torch.stack(basis, 1)
    weights = softmax_of_noise(3, n, causal=causal)[:1].expand(4, n, n)  # the same for all: the share is of one matrix
    centred = (weights[0] - even).flatten()
    solution = torch.linalg.lstsq(basis, centred[:, None], driver="gelsd").solution
    expected = float((basis @ solution).square().sum() / centred.square().sum())
    assert 0.05 < expected < 0.95
    assert positionalness(weights, by="relative", is_causal=causal).value == pytest.approx(expected, abs=1e-10)
    for f, share in ((basis @ solution, 1), (centred[:, None] - basis @ solution, 0)):
        weights = (even + 0.01 * f.view(n, n)).expand(4, n, n)
        assert positionalness(weights, by="relative", is_causal=causal).value == pytest.approx(share, abs=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_the_weights_of_heads(causal):
    layer = MultiheadAttention(12, 3, generator=generator(), dtype=torch.float64)
    x = torch.randn(5, 8, 12, generator=generator(1), dtype=torch.float64)
    weights = head_weights(layer, x, is_causal=causal)
    q, k = layer.projection(x)
    future = torch.ones(8, 8, dtype=torch.bool).triu(1) & causal
    expected = (q @ k.mT / 2).masked_fill(future, -math.inf).softmax(-1)
    torch.testing.assert_close(weights, expected, atol=1e-14, rtol=0)
    assert not weights.requires_grad
    v = torch.randn(5, 3, 8, 4, generator=generator(2), dtype=torch.float64)
    for attention in ("linear", "alibi", "rotary", "fox"):
        layer = MultiheadAttention(12, 3, attention=attention, generator=generator(), dtype=torch.float64)
        weights = head_weights(layer, x, is_causal=True)
        positionalness(weights[:, 0], is_causal=True)  # rows sum to 1, and later keys have none
        made = {name: gate(x) for name, gate in layer.gates.items()}
        expected = MECHANISMS[attention].fast(*layer.projection(x), v, is_causal=True, **made)
        torch.testing.assert_close(weights @ v, expected, atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------ bytes and scalar operations


def test_formulas_by_hand():
    """A layer keeps x, q, k, v, the merged heads, and a number a row or all weights; frozen ones keep as much."""
    for projection in ("learned", "frozen"):
        assert formula(projection=projection) == 4 * (5 * N * d + H * N)
        assert formula(projection=projection, form="reference") == 4 * (5 * N * d + H * N**2)
    assert kept(lambda _, width, *__: nn.Sequential(nn.Linear(width, width), nn.Tanh()), N * d) == 2 * N * d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_hold_at_larger_sizes(dtype):
    x = torch.zeros(1, 200, 64, dtype=dtype, requires_grad=True)
    found = cost.of(MultiheadAttention(64, 4, projection="stopped", dtype=dtype), x).saved_bytes
    assert layer_bytes(200, 64, 4, projection="stopped", dtype=dtype) == found


def test_scalar_operations_by_hand():
    """Six a score forward: the scale and five of the softmax. Index arithmetic is free."""
    made = formulas(lambda _, width, heads, __: MultiheadAttention(width, heads, form="reference"), H * N**2, N * d)
    assert made == (6 * H * N**2, 5 * H * N**2 + 2 * N * d)
    places = torch.arange(6)
    forward, _ = elementwise(lambda x: x * 2 + x.sum() + x[places * 2 // 3 > 1].exp().sum(), torch.ones(6))
    assert dict(forward) == {"mul": 6, "add": 12, "sum": 6 + 3, "exp": 3}
