"""Closed forms of `ortho.attention.selected.sparse_linear`."""

from typing import NamedTuple

from ortho._checks import checked
from ortho.attention.chunking import CHUNK
from ortho.attention.linear.feature_maps import EluPlusOne, FeatureMap
from ortho.attention.mechanism import AttentionCost
from ortho.attention.selected.sparse_linear_band import WINDOW, Band

FEATURES = EluPlusOne()


@checked
def sparse_linear_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    window: int = WINDOW,
    feature_map: FeatureMap = FEATURES,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with `log_far`, in either form, for a number of tokens."""
    G, item, m, reach = B * H, max(itemsize, 4), feature_map.width(K), int(qk_grad)
    mapped = feature_map.cost(G, N, N, K, m)
    back = mapped if form == "reference" or N > 1 else feature_map.cost(G, 1, 0, K, m)  # a lone key is not far
    if form == "reference":
        rest = _materialised(G, N, K, V, m, reach, item)
        decode, state = feature_map.cost(G, 1, N, K, m).forward + 2 * G * N * (K + m + V), itemsize * G * N * (K + V)
    else:
        near = min(N, window)
        if N == 1:
            rest = _lone(G, K, V, m, reach, item)
        else:
            rest = _in_chunks(G, N, K, V, m, Band(window, chunk, causal, -(-N // chunk)), reach, item)
        if mapped.keeps_features and (N % chunk or N == 1):  # the map's own
            rest = rest._replace(saved_bytes=rest.saved_bytes + 2 * reach * item * G * m * N)
        decode = feature_map.cost(G, 1, near, K, m).forward + 2 * G * (near * (K + V) + m * (V + 1))
        state = G * (itemsize * min(N, window - 1) * (K + V) + item * m * (V + 1))
    return AttentionCost(
        forward=rest.forward + mapped.forward,
        backward=rest.backward + reach * back.backward,
        elementwise_forward=rest.elementwise_forward + mapped.elementwise_forward,
        elementwise_backward=rest.elementwise_backward + reach * back.elementwise_backward,
        saved_bytes=rest.saved_bytes + reach * item * mapped.saved,
        decode=decode,
        state_bytes=state,
    )


class _Rest(NamedTuple):
    """Without the feature map."""

    forward: int
    backward: int
    elementwise_forward: int
    elementwise_backward: int
    saved_bytes: int


# Below: G, the sequences; m, the features; `reach`, whether gradients reach q and k, as 0 or 1; item, bytes a number.
# A gradient's sum over a broadcast axis is left out by autograd where that axis has length 1.


def _materialised(G: int, N: int, K: int, V: int, m: int, reach: int, item: int) -> _Rest:
    rows, pairs, several = G * N, G * N * N, int(N != 1)
    return _Rest(
        forward=2 * pairs * (K + m + V),
        backward=2 * pairs * (2 * V + reach * 2 * (K + m)),
        # Scale, block, maximum, subtract, exp; far weights blocked, their sum, times their factor; sum of both, row
        # sum, quotient. What a row is relative to, 9; divisors.
        elementwise_forward=11 * pairs + 12 * rows,
        # Quotient, five, and one more for its sum; the factor's product and sum, exp and block. For q and k: factor,
        # exp, block, scale; far weights blocked; and each is used twice.
        elementwise_backward=pairs * (7 + 2 * several + reach * 5) + 3 * rows + reach * 2 * rows * K,
        # Weights before and after their quotient, far ones without their factor; factors, divisors, masks of both. For
        # q and k near weights, both masks, features and operands.
        saved_bytes=item * (3 * pairs + 2 * rows + rows * V)
        + 2 * rows
        + reach * (item * pairs + 2 * pairs + 2 * item * rows * (K + m)),
    )


def _lone(G: int, K: int, V: int, m: int, reach: int, item: int) -> _Rest:
    """Of one query and key."""
    return _Rest(
        forward=2 * G * (K + V + m * (V + 1)),
        backward=2 * G * (V + reach * (V + 2 * K + m * (V + 1))),
        elementwise_forward=G * (K + 3 * V + 18),
        # Quotient; the factor's products, a sum of one, both added, exp, block. To reach q and k: exp, scale, the far
        # output and total, features, which are used twice.
        elementwise_backward=G * ((6 + 2 * int(V != 1)) * V + 5 + reach * (3 + V + m + 2 * K)),
        # One weight, one factor, one divisor, masks of both; what is far, and its sum; the output's numerators. To
        # reach q and k an empty memory.
        saved_bytes=G * (item * (4 + 2 * V) + 2 + reach * item * (2 * K + V + m * (V + 1))),
    )


def _in_chunks(G: int, N: int, K: int, V: int, m: int, band: Band, reach: int, item: int) -> _Rest:
    C, ways, mixed = band.chunk, 1 if band.is_causal else 2, int(bool(band.mixed))
    T = -(-N // C)
    rows, memory = G * T * C, G * m * (V + 1)
    X, F = len(band.offsets) * C, len(band.mixed) * C
    near, far = rows * X, rows * F
    beside = G * C * _beside(T, band.offsets)  # places that gradients of neighbouring chunks are added up in
    beside_far = G * C * _beside(T, band.mixed)
    summed = G * m * (T * ways + (T + 1) * ways + T * (ways - 1))  # gathered; running sums; both ways added
    return _Rest(
        forward=2 * near * (K + V) + 4 * rows * m * V + 2 * rows * m + 2 * far * (m + V),
        # Of v in the band, of the sums, and of far ones; and of q and k
        backward=2 * near * V
        + 4 * rows * m * V
        + 2 * far * V
        + reach * (2 * near * (2 * K + V) + 4 * rows * m * (V + 1) + 2 * far * (2 * m + V)),
        # Scaled queries; block, maximum, subtract, exp, row sum; what a row is relative to, 9, far totals times their
        # factor, sum of totals, divisors; z of each chunk; running sums; far outputs times their factor, added,
        # divided. Far: block, sum.
        elementwise_forward=G * N * K
        + 5 * near
        + 14 * rows
        + rows * m
        + memory * ((T + 1) * ways + T * (ways - 1))
        + 3 * rows * V
        + 2 * far
        + mixed * rows * (V + 1),
        elementwise_backward=rows * ((5 + int(V != 1)) * V + 1)  # quotient
        + rows * ((2 + int(V != 1)) * V + 4)  # factor: its products and their sums, added, exp, block
        + summed * V
        + beside * V
        + beside_far * V
        + rows * V * (1 + mixed)
        # Near weights; far ones, their totals and z; features; and q and k, which are used twice, the former scaled
        + reach
        * (
            3 * near
            + 2 * far
            + rows
            + summed
            + beside * K
            + beside_far * m
            + 2 * rows * m * (1 + mixed)
            + 3 * G * N * K
        ),
        # Near weights, factors, features; far outputs and totals, far weights; numerators, divisors, masks of factors
        # and divisors; chunks' numbers. For q and k queries, keys and values of the band, the band's mask, values and
        # chunks' numbers; memories, the far keys' features and values, and their mask.
        saved_bytes=item * (near + rows * (3 + 2 * m + 2 * V) + far)
        + 2 * rows
        + 8 * T * ways
        + reach
        * (
            item * (rows * (K + V) + G * T * X * (K + V) + T * memory + G * T * F * (m + V))
            + T * C * X
            + 8 * T * ways
            + C * F
        ),
    )


def _beside(T: int, offsets: list[int]) -> int:
    """Chunks in which the gradients of those at these offsets are added up, for each but the first."""
    return (len(offsets) - 1) * (T + max(0, -offsets[0]) + max(0, offsets[-1])) if offsets else 0
