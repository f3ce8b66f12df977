r"""How positional a trained head is: the share of its weights' variation that the positions explain.

Let $A_s$ be a head's N x N weights on input s and $C_s = A_s - u$ their difference from even attention,
$u_{ij} = 1/n_i$ over the $n_i$ keys that row i may attend to. If the pattern is fixed all $C_s$ are the same; if the
weights depend on what tokens hold, and not on where they stand, the mean of $C_s$ over inputs is 0. The share

$$\frac{|E\,C_s|^2}{E\,|C_s|^2} = \frac{E\, C_s \cdot C_t}{E\,|C_s|^2} \qquad (s, t \text{ independent})$$

is 1 and 0 in these cases, and otherwise between them. It is the mean's part of the squared length, or how alike the
weights on two inputs are. Both expectations on the right are estimated without bias, so that an estimate of a share
near 0 can fall below 0.

For one pattern $C_s$ is projected first on the pattern, less even attention.
"""

from math import sqrt
from typing import NamedTuple

import torch

from ortho._typing import Float, Tensor
from ortho.attention.positional.positional_attention import SEVEN, PositionalPattern
from ortho.checks import expect, within
from ortho.layers.multihead import MultiheadAttention
from ortho.theory.estimates import Estimate, estimate

ROUNDING = 1e-3  # how far a row's sum may be from 1 in any precision: half's eps, as weights may have been made in half


class PatternFit(NamedTuple):
    """A pattern, its weight in the mixture with even attention that comes nearest to the head, and the share explained.

    The weight is that of least squares: negative where the head avoids what the pattern attends to.
    """

    pattern: PositionalPattern
    weight: Estimate
    share: Estimate


def positionalness(weights: Float[Tensor, "S N N"], *, is_causal: bool = False) -> Estimate:
    """The share of one head's variation that is explained by position, and its standard error (jackknife).

    weights (S, N, N): the head's weights on S independent inputs of N tokens. Rows sum to 1; causal weights are 0 above
    the diagonal. The pattern may be any function of the query's and the key's position. Even attention on all inputs,
    to the rounding of the dtype, is a fixed pattern: share 1. At a share of 0 the standard error is on the safe side:
    the jackknife's variance is up to twice the true one there.

    Raises TypeError or ValueError, naming the argument, for fewer than 3 inputs, rows that do not sum to 1, and weights
    on later keys in causal calls.
    """
    flat = _centred(weights, is_causal).flatten(1)
    return _share(flat @ flat.T, flat.square().sum(1))


def pattern_fits(weights: Float[Tensor, "S N N"]) -> list[PatternFit]:
    """How near one head without a causal mask comes to each of the seven patterns, whose empty rows stand for even
    attention.

    Arguments and errors as in `positionalness`. If the head has even attention on all inputs, all have weight 0 and
    share 1.
    """
    centred = _centred(weights, is_causal=False)
    N = centred.shape[-1]
    fits = []
    for pattern in SEVEN:
        matrix = pattern.weights(N, is_causal=False).to(centred)
        direction = torch.where(matrix.sum(-1, keepdim=True) > 0, matrix - 1 / N, 0)
        square = float(direction.square().sum())
        along = (centred * direction).sum((1, 2)) / sqrt(square)
        share = _share(along[:, None] * along, centred.square().sum((1, 2)))
        fits.append(PatternFit(pattern, estimate(along / sqrt(square)), share))
    return fits


def nearest_pattern(weights: Float[Tensor, "S N N"]) -> PatternFit:
    """The pattern that explains the greatest share, among those with positive weight if there are any.

    Arguments and errors as in `pattern_fits`.
    """
    return max(pattern_fits(weights), key=lambda fit: (fit.weight.value > 0, fit.share.value))


@torch.no_grad()
def head_weights(layer: MultiheadAttention, x: Float[Tensor, "S N d"]) -> Float[Tensor, "S H N N"]:
    """The weights (S, H, N, N) of all heads of a layer on x (S, N, d), without gradients (in training after dropout).

    Raises what the layer raises with `need_weights`.
    """
    weights: Tensor = layer(x, need_weights=True)[1]
    return weights


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
    ones = torch.ones_like(weights[0])
    ones = ones.tril() if is_causal else ones
    even = ones / ones.sum(-1, keepdim=True)
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
