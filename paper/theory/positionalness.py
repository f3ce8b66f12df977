r"""How positional a trained head is: the share of its weights' variation that the positions explain.

Let $A_s$ be a head's N x N weights on input s and $C_s = A_s - u$ their difference from even attention,
$u_{ij} = 1/n_i$ over the $n_i$ keys that row i may attend to. If the pattern is fixed all $C_s$ are the same; if the
weights depend on what tokens hold, and not on where they stand, the mean of $C_s$ over inputs is 0. The share

$$\frac{|E\,C_s|^2}{E\,|C_s|^2} = \frac{E\, C_s \cdot C_t}{E\,|C_s|^2} \qquad (s, t \text{ independent})$$

is 1 and 0 in these cases, and otherwise between them. It is the mean's part of the squared length, or how alike the
weights on two inputs are. Both expectations on the right are estimated without bias, so that an estimate of a share
near 0 can fall below 0.

For a family of patterns $C_s$ is projected on its span first: on all functions $f(j - i)$, each less its mean over a
row's keys; or on one pattern, less even attention.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch

from ortho._typing import Float, Tensor
from ortho.attention.positional.positional_attention import SEVEN, PositionalPattern, named
from ortho.checks import describe, expect, one_of, within
from ortho.layers.multihead import MultiheadAttention
from ortho.theory.estimates import Estimate, estimate

BY = ("absolute", "relative")
ROUNDING = 1e-3  # how far a row's sum may be from 1 in any precision: half's eps, as weights may have been made in half


class PatternFit(NamedTuple):
    """A pattern, its weight in the mixture with even attention that comes nearest to the head, and the share explained.

    The weight is that of least squares: negative where the head avoids what the pattern attends to.
    """

    pattern: PositionalPattern
    weight: Estimate
    share: Estimate


def positionalness(weights: Float[Tensor, "S N N"], *, by: str = "absolute", is_causal: bool = False) -> Estimate:
    """The share of one head's variation that is explained by position, and its standard error (jackknife).

    weights (S, N, N): the head's weights on S independent inputs of N tokens. Rows sum to 1; causal weights are 0 above
    the diagonal. `by` says what the pattern may be a function of: "absolute", of the query's and the key's position, or
    "relative", of their difference. Even attention on all inputs, to the rounding of the dtype, is a fixed pattern:
    share 1. At a share of 0 the standard error is on the safe side: the jackknife's variance is up to twice the true
    one there.

    Raises TypeError or ValueError, naming the argument, for fewer than 3 inputs, rows that do not sum to 1, weights on
    later keys in causal calls, and an unknown `by`.
    """
    one_of("by", by, BY)
    centred = _centred(weights, is_causal)
    lengths = centred.square().sum((1, 2))
    if by == "absolute":
        flat = centred.flatten(1)
        return _share(flat @ flat.T, lengths)
    N = centred.shape[-1]
    i = torch.arange(N, device=centred.device)
    offset = i - i[:, None] + N - 1  # (N, N), from 0 on
    allowed = (i <= i[:, None]) if is_causal else torch.ones_like(offset, dtype=torch.bool)
    rows = centred.new_zeros(N, 2 * N - 1).scatter(1, offset, allowed.to(centred))  # which offsets a row has
    # Scalar products of the functions that are 1 at one offset, less their means over rows, and of C_s with them
    products = rows.sum(0).diag() - rows.T @ (rows / rows.sum(1, keepdim=True))
    sums = centred.new_zeros(len(centred), 2 * N - 1).index_add(1, offset.flatten(), centred.flatten(1))
    return _share(sums @ torch.linalg.pinv(products, hermitian=True) @ sums.T, lengths)


def pattern_fits(
    weights: Float[Tensor, "S N N"], patterns: Sequence[PositionalPattern | str] = SEVEN, *, is_causal: bool = False
) -> list[PatternFit]:
    """How near one head comes to each pattern, whose empty rows stand for even attention.

    Arguments and errors as in `positionalness`. A pattern with only empty rows, such as `next` in causal calls, has
    weight and share 0. If the head has even attention on all inputs, the others have weight 0 and share 1.
    """
    centred = _centred(weights, is_causal)
    N = centred.shape[-1]
    fits = []
    for pattern in named(patterns):
        matrix = pattern.weights(N, is_causal=is_causal).to(centred)
        direction = torch.where(matrix.sum(-1, keepdim=True) > 0, matrix - _even(N, is_causal, matrix.device), 0)
        square = float(direction.square().sum())
        if square == 0:
            fits.append(PatternFit(pattern, Estimate(0.0, 0.0), Estimate(0.0, 0.0)))
            continue
        along = (centred * direction).sum((1, 2)) / sqrt(square)
        share = _share(along[:, None] * along, centred.square().sum((1, 2)))
        fits.append(PatternFit(pattern, estimate(along / sqrt(square)), share))
    return fits


def nearest_pattern(
    weights: Float[Tensor, "S N N"], patterns: Sequence[PositionalPattern | str] = SEVEN, *, is_causal: bool = False
) -> PatternFit:
    """The pattern that explains the greatest share, among those with positive weight if there are any.

    Arguments and errors as in `pattern_fits`; ValueError for no patterns.
    """
    fits = pattern_fits(weights, patterns, is_causal=is_causal)
    if not fits:
        raise ValueError("patterns: expected at least one, got none")
    return max(fits, key=lambda fit: (fit.weight.value > 0, fit.share.value))


def head_weights(
    layer: MultiheadAttention, x: Float[Tensor, "S N d"], *, is_causal: bool = False
) -> Float[Tensor, "S H N N"]:
    """The weights (S, H, N, N) of all heads of a layer on x (S, N, d), without gradients (in training after dropout).

    Raises TypeError for an attention that is a custom module, and ValueError for one that has no weights.
    """
    if not isinstance(layer, MultiheadAttention) or not isinstance(layer.attention, str):
        raise TypeError(f"layer: expected a MultiheadAttention with a mechanism's name, got {describe(layer)}")
    with torch.no_grad():
        weights: Tensor = layer(x, is_causal=is_causal, need_weights=True)[1]
    return weights


def _even(N: int, is_causal: bool, device: torch.device) -> Float[Tensor, "N N"]:
    """Even attention."""
    ones = torch.ones(N, N, dtype=torch.float64, device=device)
    ones = ones.tril() if is_causal else ones
    return ones / ones.sum(-1, keepdim=True)


def _centred(weights: Tensor, is_causal: bool) -> Float[Tensor, "S N N"]:
    """The weights, float64, less even attention."""
    expect(len(weights) >= 3, "weights", "shape (S, N, N) with S of at least 3", tuple(weights.shape))
    # A row's sum and its quotient with each weight are rounded by eps/2 or less: together by eps, in relation to a
    # weight, and as much in a row's new sum.
    eps = torch.finfo(weights.dtype).eps
    weights, rounding = weights.detach().double(), max(ROUNDING, eps)
    within("weights", "sums of rows, less 1,", weights.sum(-1) - 1, -rounding, rounding)
    if is_causal:
        within("weights", "weights on later keys", weights.triu(1), 0, 0)
    even = _even(weights.shape[-1], is_causal, weights.device)
    centred = weights - even
    return centred.masked_fill(centred.abs() <= eps * even, 0)  # weights that are even up to rounding


def _share(products: Float[Tensor, "S S"], lengths: Float[Tensor, "S"]) -> Estimate:
    """E C_s C_t / E C_s^2 from the scalar products of projected and the squared lengths of unprojected differences."""
    S, total = len(lengths), float(lengths.sum())
    if total == 0:
        return Estimate(1.0, 0.0)
    of_one = products.sum(1) - products.diag()  # with all other inputs
    share = float(of_one.sum()) / (S - 1) / total
    # Without each input in turn; where even attention is all that is left, 1 as above.
    without = ((of_one.sum() - 2 * of_one) / (S - 2) / (lengths.sum() - lengths)).nan_to_num(1.0)
    spread = (without - without.mean()).square().sum() * ((S - 1) / S)
    return Estimate(share, sqrt(float(spread)))
