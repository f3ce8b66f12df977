"""How many layers connect which tokens: statements for all small lengths and sizes, by products of the masks."""

import pytest
import torch

from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import LocalDilated
from ortho.attention.sparse.fixed import Fixed, FixedColumns
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.strided import LocalStrided, Strided
from ortho.attention.sparse.window import Window
from ortho.theory.reachability import layers_between, layers_to_reach, reached

LENGTHS = range(1, 31)


def causal(pattern, n):
    return pattern.mask(n, is_causal=True)


def earlier(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def paths(masks, residual):
    """Where (n, n) token i holds what token j had, found by following each path from each token, layer by layer."""
    n = len(masks[0])
    found = torch.zeros(n, n, dtype=torch.bool)
    for token in range(n):
        holders = {token}
        for mask in masks:
            holders = {i for i in range(n) if (residual and i in holders) or any(mask[i, j] for j in holders)}
        found[list(holders), token] = True
    return found


@pytest.mark.parametrize("residual", [False, True])
def test_reached_follows_paths(residual):
    g = torch.Generator().manual_seed(0)
    for layers in (1, 2, 3):
        masks = [torch.rand(9, 9, generator=g) < 0.2 for _ in range(layers)]
        assert torch.equal(reached(*masks, residual=residual), paths(masks, residual))


def test_layers_between_is_the_first_power_that_reaches():
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.12
    layers = layers_between(mask)
    for number in range(13):
        through = reached(*[mask] * number) if number else torch.eye(12, dtype=torch.bool)
        assert torch.equal(through, (layers >= 0) & (layers <= number))
    assert (layers < 0).any() and layers.max() > 2


@pytest.mark.parametrize("l", [1, 2, 3, 5, 8, 40])
def test_two_strided_layers_reach_every_earlier_token(l):
    """Two layers do in either order, with l keys in the window; with one key fewer they miss some tokens as soon as
    there are l. Neither layer suffices alone, however often it is repeated."""
    for n in LENGTHS:
        window, columns = causal(Window(l), n), causal(Strided(l), n)
        for layers in ((window, columns), (columns, window)):
            assert torch.equal(reached(*layers, residual=False), earlier(n))
        if 1 < l <= n:
            fewer = causal(Window(l - 1), n)
            assert not torch.equal(reached(fewer, columns), earlier(n))
        if 1 < l < n:
            assert not torch.equal(reached(window, window), earlier(n)) or n <= 2 * l - 1
            assert layers_to_reach(columns) is None
        for pattern in (LocalStrided(l), LocalDilated(l)):
            assert layers_to_reach(causal(pattern, n)) <= 2


@pytest.mark.parametrize(("l", "c"), [(1, 1), (2, 1), (4, 1), (4, 3), (5, 2), (7, 7), (40, 1)])
def test_two_fixed_layers_reach_every_earlier_token(l, c):
    """Two layers do with blocks first, then summaries. The other way round, a token that is not a summary does not
    leave its block. Without residual connections a token before its block's summaries loses what it has."""
    for n in LENGTHS:
        blocks, summaries = causal(BlockedWindow(l), n), causal(FixedColumns(l, c), n)
        assert torch.equal(reached(blocks, summaries), earlier(n))
        assert layers_to_reach(causal(Fixed(l, c), n)) <= 2
        if n > l > c:
            assert not reached(summaries, blocks)[l, 0]
            assert not reached(blocks, summaries, residual=False)[0, 0]


@pytest.mark.parametrize("w", [1, 2, 3, 5, 12, 40])
def test_windows(w):
    for n in LENGTHS:
        expected = 0 if n == 1 else -(-(n - 1) // (w - 1)) if w > 1 else None
        assert layers_to_reach(causal(Window(w), n)) == expected
        assert layers_to_reach(Window(w).mask(n), is_causal=False) == expected


@pytest.mark.parametrize(("w", "g"), [(2, 1), (3, 2), (5, 1), (4, 9)])
def test_global_tokens(w, g):
    """Two layers connect all tokens through a global token. In a causal model a global token collects nothing: it
    reaches all others in one layer, but these reach each other in as many layers as with a window alone."""
    for n in LENGTHS:
        pattern = GlobalLocal(w, g)
        assert layers_to_reach(pattern.mask(n), is_causal=False) <= 2
        layers = layers_between(causal(pattern, n))
        assert int(layers[:, :g].max()) <= 1
        others = layers[g:, g:]
        if n > g:
            assert torch.equal(others, layers_between(causal(Window(w), n - g)))
