"""The matrices of the positional patterns: by hand, by their rules, and by exact fractions at great length."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from refusals import refusals

from ortho.attention.positional.patterns import RECENT, Recent
from ortho.attention.positional.positional_attention import PATTERNS, SEVEN, positional_attention

# Weights are quotients of exact sums: a few roundings each.
close = {"atol": 1e-14, "rtol": 1e-14}
ULP = 2.0**-53  # the largest relative change of a float64 by rounding to nearest

# Five tokens. Cubes are 1, 8, 27, 64, 125; their sums 1, 9, 36, 100, 225.
BY_HAND = {
    "current": ["1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1"],
    "previous": ["0 0 0 0 0", "1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0"],
    "next": ["0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1", "0 0 0 0 0"],
    "left": ["0 0 0 0 0", "0 0 0 0 0", "1 0 0 0 0", "1/9 8/9 0 0 0", "1/36 8/36 27/36 0 0"],
    "right": ["0 0 27/36 8/36 1/36", "0 0 0 8/9 1/9", "0 0 0 0 1", "0 0 0 0 0", "0 0 0 0 0"],
    "end": 5 * ["1/225 8/225 27/225 64/225 125/225"],
    "start": 5 * ["125/225 64/225 27/225 8/225 1/225"],
}
CAUSAL = {
    **{name: BY_HAND[name] for name in ("current", "previous", "left")},
    **dict.fromkeys(("next", "right"), 5 * ["0 0 0 0 0"]),
    "end": ["1 0 0 0 0", "1/9 8/9 0 0 0", "1/36 8/36 27/36 0 0", "1/100 8/100 27/100 64/100 0", BY_HAND["end"][0]],
    "start": ["1 0 0 0 0", "8/9 1/9 0 0 0", "27/36 8/36 1/36 0 0", "64/100 27/100 8/100 1/100 0", BY_HAND["start"][0]],
}


def matrix(rows):
    return torch.tensor([[float(Fraction(entry)) for entry in row.split()] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", SEVEN, ids=lambda p: p.name)
def test_by_hand(pattern, causal):
    """To the last bit: sums of cubes are integers, and each weight is one quotient of two."""
    expected = matrix((CAUSAL if causal else BY_HAND)[pattern.name])
    assert torch.equal(pattern.weights(5, is_causal=causal), expected)


RECENT_BY_HAND = [
    ["1 0 0 0 0", "1/2 1/2 0 0 0", "1/3 1/3 1/3 0 0", "0 1/3 1/3 1/3 0", "0 0 1/3 1/3 1/3"],
    ["1/3 1/3 1/3 0 0", "0 1/3 1/3 1/3 0", "0 0 1/3 1/3 1/3", "0 0 0 1/2 1/2", "0 0 0 0 1"],
]


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_tokens_by_hand(causal):
    """Each row is the mean of the tokens that there are; in a causal call no token is ahead."""
    one = "1 0 0 0 0", "0 1 0 0 0", "0 0 1 0 0", "0 0 0 1 0", "0 0 0 0 1"
    back, ahead = RECENT_BY_HAND
    expected = {Recent("", 3): back, Recent("", 3, ahead=True): one if causal else ahead, Recent("", 1): one}
    for pattern, rows in expected.items():
        assert torch.equal(pattern.weights(5, is_causal=causal), matrix(rows))
    assert (RECENT.width, RECENT.ahead, RECENT.vectors, RECENT.mirrored().vectors) == (8, False, 7, 0)


def exact(pattern, i, n, values, causal):
    """Row i times the values, in integers, which can be of any size."""
    seen = i + 1 if causal else n
    weights = [pattern.weight(i, j, seen) for j in range(seen)]
    return Fraction(sum(w * v for w, v in zip(weights, values, strict=False)), sum(weights))


@pytest.mark.parametrize(("name", "causal"), [*product(["left", "end", "start"], [False, True]), ("right", False)])
def test_cubes_at_great_length(name, causal):
    """65 536 tokens, whose cubes sum to 4.6e18, compared with exact fractions.

    A running sum to term i of weights t^3 is rounded at each term t, by one ULP of about t^4 / 4: in all by i / 5 ULP
    of the last sum. Each of the four nested sums of `start` adds the same error. So the error stays below N ULP of the
    largest value, which is at most 1. With float32 values the result is rounded once more, by 2^-24.
    """
    n = 65_536
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**20), 2**20 + 1, (n,), generator=g)
    v = (values.double() / 2**20)[None, None, :, None]
    rows = {"left": [2, 3, 1000, n - 1], "right": [0, n - 1000, n - 3]}.get(name, [0, 1, 1000, n - 1])
    o = positional_attention(v, [name], is_causal=causal)
    single = positional_attention(v.float(), [name], is_causal=causal)
    for i in rows:
        expected = float(exact(PATTERNS[name], i, n, values.tolist(), causal) / 2**20)
        assert abs(float(o[0, 0, i, 0]) - expected) <= n * ULP
        assert abs(float(single[0, 0, i, 0]) - expected) <= 2**-24 + n * ULP


@pytest.mark.parametrize("name", ["left", "end", "start"])
def test_state_at_great_length(name):
    """Zeros follow 10^6 values of 1, so that a row is the share of weight on the ones. The sums of weights, up to
    2.5e23, are beyond the integers of float64 and of int64."""
    length = 10**6
    _, state = positional_attention(torch.ones(1, 1, length, 1), [name], is_causal=True, return_state=True)
    o = positional_attention(torch.zeros(1, 1, 3, 1).double(), [name], is_causal=True, initial_state=state)
    for t, got in enumerate(o.flatten().tolist()):
        i = length + t
        cube = lambda m: (m * (m + 1) // 2) ** 2  # noqa: E731
        total = cube(i - 1) if name == "left" else cube(i + 1)
        ones = {"left": min(cube(length), total), "end": cube(length), "start": total - cube(t + 1)}[name]
        assert got == pytest.approx(float(Fraction(ones, total)), abs=length * ULP)


BAD = [
    (lambda: PATTERNS["left"].weights(0), "n: expected an integer of at least 1, got 0"),
    (lambda: Recent("", 0), "width: expected an integer of at least 1, got 0"),
]


@refusals(BAD)
def test_errors(refused):
    refused()
