"""How positional a head is: 1 for fixed patterns, 0 for content, the exact share between; the errors' size; fits."""

import math

import pytest
import torch
from refusals import refusals
from seeded import generator

from ortho import MECHANISMS, MultiheadAttention
from ortho.attention.positional.positional_attention import PATTERNS, SEVEN
from ortho.theory.estimates import SIGMAS
from paper.theory.positionalness import head_weights, nearest_pattern, pattern_fits, positionalness


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


def test_relative_and_absolute_patterns():
    """A shift by one is a function of j - i, and of nothing else in causal rows, as the first has only one key.
    Attention to the start of the sequence, whose distance differs from row to row, is not."""
    relative = [
        positionalness(fixed(PATTERNS[name], 5, 20, True), by="relative", is_causal=True)
        for name in ("current", "previous", "start")
    ]
    assert [share for share, _ in relative[:2]] == pytest.approx([1, 1], abs=1e-12)
    assert all(error < 1e-12 for _, error in relative) and 0.1 < relative[2].value < 0.9


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by", ["absolute", "relative"])
def test_content_alone(by, causal):
    for draw in (softmax_of_noise, one_key_each):
        share, error = positionalness(draw(60, 16, causal=causal), by=by, is_causal=causal)
        assert abs(share) <= SIGMAS * error < 0.05


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


def test_the_standard_error():
    """The mean square of the deviations of 300 estimates is 1: between 0.7 and 1.4 with probability 1 - 1e-4, since for
    normal deviations it has a standard deviation of sqrt(2 / 300) = 0.08, and the jackknife's bias is of order 1/S."""
    n, weight, inputs = 6, 0.4, 40
    pattern = PATTERNS["start"]
    signal = weight**2 * float((pattern.weights(n) - 1 / n).square().sum())
    expected = signal / (signal + (1 - weight) ** 2 * (n - 1))
    mixed, alone = [], []
    for seed in range(300):
        noise = one_key_each(inputs, n, seed=seed)
        found = positionalness(weight * fixed(pattern, inputs, n, False) + (1 - weight) * noise)
        mixed.append(found.deviation(expected) ** 2)
        alone.append(positionalness(noise).deviation(0.0) ** 2)
    assert 0.7 < sum(mixed) / 300 < 1.4
    assert 0.35 < sum(alone) / 300 < 1.0  # safe: the jackknife's variance is twice the true one there


@pytest.mark.parametrize("by", ["absolute", "relative"])
def test_the_jackknife(by):
    """The error is computed from estimates that leave out each input in turn."""
    weights = softmax_of_noise(5, 6)
    values = torch.tensor([positionalness(weights[torch.arange(5) != s], by=by).value for s in range(5)])
    expected = math.sqrt(4 / 5 * float((values - values.mean()).square().sum()))
    assert positionalness(weights, by=by).standard_error == pytest.approx(expected, rel=1e-6)


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_even_attention_but_for_rounding(dtype, causal):
    """Weights are 1/n as the dtype has it, also from a softmax of equal scores; no pattern has a part in them. One
    weight that differs by more than rounding counts, however the others are rounded."""
    ones = torch.ones(23, 23, dtype=dtype)
    ones = ones.tril() if causal else ones
    softmax = torch.where(ones > 0, 0.7, -math.inf).to(dtype).softmax(-1)
    for weights in (softmax, ones / ones.sum(-1, keepdim=True)):
        weights = weights.expand(4, 23, 23)
        for by in ("absolute", "relative"):
            assert positionalness(weights, by=by, is_causal=causal) == (1, 0)
        assert all(fit.weight == (0, 0) for fit in pattern_fits(weights, is_causal=causal))
        other = weights.clone()
        other[0, 22, :2] += torch.tensor([-1, 1], dtype=dtype) / 64  # in one of 4 inputs: like none of the others
        found = positionalness(other, is_causal=causal)
        assert found.value == 0 and math.isfinite(found.standard_error)


def test_weights_of_half_precision():
    """Rows whose sums are off by rounding are not refused, and rounding makes next to no difference."""
    weights = softmax_of_noise(20, 300)
    share, error = positionalness(weights)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = weights.to(dtype)
        assert (rounded.double().sum(-1) - 1).abs().max() > 1e-5
        assert abs(positionalness(rounded).value - share) < error
    rough = torch.tensor([1 - 2**-8, 2**-7], dtype=torch.bfloat16).expand(3, 2, 2)  # two roundings of half of eps more
    assert positionalness(rough).value == pytest.approx(1)
    with pytest.raises(ValueError, match="sums of rows, less 1, within -0.0078 and 0.0078, got 0.012"):
        positionalness(torch.tensor([1, 3 / 256], dtype=torch.bfloat16).expand(3, 2, 2))


def test_the_nearest_pattern():
    """Each of the seven is nearest to itself, with all weight; a head that avoids a token is not near "current"."""
    for pattern in SEVEN:
        fit = nearest_pattern(fixed(pattern, 4, 12, False))
        assert fit.pattern == pattern
        assert fit.weight.value == pytest.approx(1, abs=0.1)  # rows that are empty look at themselves here
    n = 12
    avoids = (1 - torch.eye(n, dtype=torch.float64)).expand(4, n, n) / (n - 1)
    (fit,) = pattern_fits(avoids, ["current"])
    assert fit.weight.value == pytest.approx(-1 / (n - 1)) and fit.share.value == pytest.approx(1)
    assert nearest_pattern(avoids).pattern.name != "current"
    (fit,) = pattern_fits(softmax_of_noise(4, 5, causal=True), ["next"], is_causal=True)
    assert fit[1:] == ((0, 0), (0, 0))  # it has no rows


def test_the_nearest_of_none():
    """If no pattern is near, estimated shares may be below 0; the greatest one with a positive weight is taken."""
    for seed in range(30):
        weights = softmax_of_noise(4, 6, seed=seed)
        fits = [fit for fit in pattern_fits(weights) if fit.weight.value > 0]
        assert nearest_pattern(weights).share.value == max(fit.share.value for fit in fits)


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


BAD = [
    (lambda w: positionalness(2 * w), "rows, less 1, within -0.001 and 0.001, got 1 to 1"),
    (lambda w: positionalness(w, is_causal=True), "weights: expected weights on later keys within 0 and 0"),
    (lambda w: positionalness(w, by="key"), "by: expected one of 'absolute', 'relative', got 'key'"),
    (lambda w: nearest_pattern(w, []), "patterns: expected at least one, got none"),
    (lambda w: pattern_fits(w, ["gaussian 0"]), "patterns: expected rows that sum to 1, got Gaussian"),
    (lambda w: pattern_fits(w, ["last"]), "patterns: expected one of 'current'"),
]


@refusals(BAD)
def test_errors(refused):
    refused(softmax_of_noise(4, 5))
