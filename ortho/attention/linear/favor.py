r"""Softmax attention with its kernel estimated by random features: Performer's FAVOR+, its kin and its successors.

$\exp(x^T y) = E\, \phi(x)^T \phi(y)$ with $x = q K^{-1/4}$ and $y = k K^{-1/4}$ is the softmax kernel
(`random_features` has the maps as in their formulas, and other draws of the rows). The error of the estimate grows
fast with the norms: with standard normal q and k of width 16 or more, and 256 positive features, a plain average of the
values is nearer to softmax attention than the estimate is (Choromanski et al. 2021, arXiv:2009.14794, lemma 2).

Each token's exponential features are divided by the largest of them, and random Fourier features leave out their factor
exp(|x|^2/2). A query's divisor cancels in the attention; a key's goes into `log_k`. Neither depends on other tokens,
so nothing leaks from the future, and nothing is added that would not cancel. Since the result does not depend on the
divisors, they are constants to autograd.
"""

from math import sqrt
from typing import Any

import torch

from ortho import checks
from ortho._typing import Float, Size, Tensor
from ortho.attention.draws import drawn_once
from ortho.attention.linear.feature_map import FeatureMap, Features
from ortho.attention.linear.linear_attention import kernel_mechanism
from ortho.attention.scores import root_scale
from ortho.orthogonal import haar

FEATURES = 256  # the default, as in the authors' code; K ln K, the order in their theorem 4, is 266 at K = 64
# The seed of the default rows, which are the same in every call. Nobody seeds data with this number: rows drawn from
# the seed of q and k would be aligned with them.
SEED = 2009_14794


def orthogonal_features(
    m: int,
    K: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "m K"]:
    r"""m rows, each $N(0, I_K)$, orthogonal to each other within each block of K of them (Choromanski et al. 2021).

    A block is Haar, and its rows are scaled by independent lengths of law $\chi(K)$, like those of Gaussian vectors.
    With rows of a fixed length, or from a QR whose signs are not corrected, the estimate of the kernel is biased.

    Returns (m, K).
    """
    blocks = [haar(K, generator=generator, dtype=dtype, device=device) for _ in range(-(-m // K))]
    lengths = torch.randn(m, K, generator=generator, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:m] * lengths


@drawn_once
def default_rows(m: int, K: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthogonal rows (m, K) for a map without rows of its own."""
    generator = torch.Generator().manual_seed(SEED)
    return orthogonal_features(m, K, generator=generator, dtype=torch.float64).to(device, dtype)


class RandomFeatureMap(FeatureMap):
    r"""A map to m features on random rows: `features` (rows, K) of `random_features`, or by default the same rows in
    every call.

    To draw anew, make a new map, or call `RandomFeatureAttention.redraw`. Raises ValueError for an `m` that is no
    multiple of the features of a row, or that is given beside `features`; and, when called, for `features` that are not
    as wide as q.
    """

    scales_keys = True
    of_a_row = 1  # features per row

    def __init__(self, features: Float[Tensor, "rows K"] | None = None, *, m: int | None = None) -> None:
        if features is not None:
            checks.expect(m is None, "m", "None beside features", m)
            m = self.of_a_row * len(features)
        self.m = checks.positive_int("m", FEATURES if m is None else m)
        checks.expect(self.m % self.of_a_row == 0, "m", f"a multiple of the {self.of_a_row} features of a row", m)
        self.features = features

    def __repr__(self) -> str:
        return f"{type(self).__name__}(m={self.m})"

    def rows(self, x: Tensor) -> Tensor:
        """The rows (rows, K) for K-wide x."""
        if self.features is None:
            return default_rows(self.m // self.of_a_row, x.shape[-1], x.dtype, x.device)
        if self.features.shape[-1] != x.shape[-1]:
            got = tuple(self.features.shape)
            raise ValueError(f"features: expected shape (rows, {x.shape[-1]}), as wide as q, got {got}")
        return self.features.to(x)

    def projected(self, q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' products with x (..., N, rows) and with y (..., M, rows), and |y|^2 / 2 (..., M, 1)."""
        square = 1 / sqrt(q.shape[-1]) if scale is None else scale
        omega = self.rows(q) * root_scale(square)
        return q @ omega.mT, k @ omega.mT, (k * k).sum(-1, keepdim=True) * (square / 2)

    def width(self, K: Size) -> Size:
        return self.m


class PositiveFeatures(RandomFeatureMap):
    r"""FAVOR+: $m^{-1/2} \exp(\Omega x - |x|^2/2)$ (Choromanski et al. 2021, arXiv:2009.14794, lemma 1)."""

    def __call__(self, q: Tensor, k: Tensor, *, scale: float | None = None, **_: Any) -> Features:
        return exponentials(*self.projected(q, k, scale))

    def flops(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> tuple[Size, Size]:
        products = 2 * G * (N + M) * K * m
        return products, products


def exponentials(q: Tensor, k: Tensor, half: Tensor) -> Features:
    """exp(q) and exp(k - half) for projections q and k, each token relative to its largest; overwrites q and k."""
    top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (q, k))
    lift = half.detach() - half - top_k  # has the value of -top_k and the gradient of -half
    return Features(q.sub_(top_q).exp_(), k.add_(lift).exp_(), (top_k - half.detach())[..., 0])


class RandomFourierFeatures(RandomFeatureMap):
    r"""$m^{-1/2} \exp(|x|^2/2)\, [\sin \Omega x, \cos \Omega x]$ (Rahimi & Recht 2007): weights may be negative."""

    weights = "signed"
    of_a_row = 2

    def __call__(self, q: Tensor, k: Tensor, *, scale: float | None = None, **_: Any) -> Features:
        q, k, half = self.projected(q, k, scale)
        lift = (half - half.detach()).exp()  # 1, with the derivatives that log_k does not carry
        waves_q, waves_k = (torch.cat([x.sin(), x.cos()], -1) for x in (q, k))
        return Features(waves_q, waves_k * lift, half.detach()[..., 0])

    def flops(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> tuple[Size, Size]:
        products = G * (N + M) * K * m  # with m/2 rows
        return products, products


RFF = kernel_mechanism("rff", RandomFourierFeatures, "Rahimi & Recht 2007")
FAVOR = kernel_mechanism("favor", PositiveFeatures, "Choromanski et al. 2021, arXiv:2009.14794")
MECHANISMS = (RFF, FAVOR)
