r"""S2, sections 2.1 and 3.2: linear attention, its feature maps, and the theorem on kernels behind them."""

from math import log
from typing import Any

import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.feature_maps import CosFormer, Cosine, EluPlusOne, FeatureMap, Powers, Taylor
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.cost.big_o import H, N, d, m
from ortho.theory import associativity, mercer
from paper.claims.figures import show
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding

CHAPTER = "07-linear-attention"

TOKENS, WIDTH = 64, 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@evidence("S2.2.1a", chapter=CHAPTER)
def reordered() -> Finding:
    features = EluPlusOne().function
    q, k, v = normal(3, TOKENS, WIDTH)
    found = associativity.reorder(features(q), features(k).mT, v)
    work = associativity.flops(N, d, N, d)
    head = MECHANISMS["linear"].cost(1, N, 1, d, d)
    heads = MECHANISMS["linear"].cost(1, N, H, d / H, d / H)
    return all_of(
        {
            "value": holds(
                "$(\\phi(Q) \\phi(K)^\\top) V = \\phi(Q) (\\phi(K)^\\top V)$",
                found.difference,
                found.bound,
                at=f"{TOKENS} normal tokens of width {WIDTH}",
            ),
            "from the left": growth("N^2*d", sympy.expand(work.left)),
            "from the right": growth("N*d^2", sympy.expand(work.right)),
            "stored in place of the $N^2$ weights": growth("d^2", sympy.expand(head.state_bytes / 4)),
        }
    ).noting(
        f"For a backward pass more is kept, {show(sympy.expand(head.saved_bytes / 4))} numbers. With $H$ heads: "
        f"{show(sympy.expand(heads.forward))} FLOPs, {show(sympy.expand(heads.state_bytes / 4))} numbers stored"
    )


def weights(feature_map: FeatureMap, size: float = 1.0) -> Tensor:
    """A map's weights of all pairs of tokens (N, N), with normal entries of that standard deviation; not divided."""
    return kernel_weights(feature_map, *(size * normal(2, TOKENS, WIDTH)))


def negative(feature_map: FeatureMap, size: float) -> float:
    """Which share of these weights is below 0, in per cent."""
    return 100 * float((weights(feature_map, size) < 0).double().mean())


def cosine_away() -> float:
    """Relative difference of the weights of phi(x) = cos(x), divided by their row sums, to those of cosFormer."""
    ours, theirs = (w / w.sum(-1, keepdim=True) for w in (weights(Cosine()), weights(CosFormer(TOKENS))))
    return float((ours - theirs).norm() / theirs.norm())


# Queries and keys of two pairs, each with the score 1.
SAME_SCORE = (torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def of_same_score(feature_map: FeatureMap) -> tuple[float, float]:
    """The weights of the two pairs of `SAME_SCORE`."""
    first, second = kernel_weights(feature_map, *(x[:, None] for x in SAME_SCORE)).flatten().tolist()
    return first, second


@evidence("S2.2.1b", chapter=CHAPTER)
def feature_maps() -> Finding:
    x = normal(1000)
    elu = (EluPlusOne().function(x) - (torch.nn.functional.elu(x) + 1)).abs().max()
    outer, entrywise = of_same_score(Taylor(2)), of_same_score(Powers(2))
    below = negative(Cosine(), 2), negative(CosFormer(TOKENS), 2)
    return all_of(
        {
            "elu": holds("$\\operatorname{elu}(x) + 1$ as it is defined", float(elu), EXACT),
            "cosine": holds(
                "$\\cos(x)$ gives the weights of Qin et al. (2022)", cosine_away(), EXACT, at=f"{TOKENS} normal tokens"
            ),
            "powers, as outer products": holds(
                "a function of $q^\\top k$", abs(outer[0] - outer[1]), EXACT, at="two pairs of the same score"
            ),
        }
    ).noting(
        f"For entries of standard deviation 2, {below[0]:.0f} % of the weights of $\\cos(x)$ are negative, of "
        f"cosFormer's {below[1]:.0f} %. Powers of each entry give the two pairs the weights {show(entrywise[0])} and "
        f"{show(entrywise[1])}"
    )


POINTS = 40


def mercer_error(width: int = 4) -> float:
    """The greatest difference of an entry of a kernel's matrix to the inner product of the features found for it."""
    found = []
    for kernel in mercer.KERNELS.values():
        matrix = mercer.gram(kernel, normal(POINTS, width))
        phi = mercer.features_of(matrix)
        found.append(float((phi @ phi.T - matrix).abs().max()))
    return max(found)


@evidence("S2.3.2a", chapter=CHAPTER)
def inner_products() -> Finding:
    points = normal(POINTS, 4)
    rank = mercer.rank(mercer.gram(mercer.KERNELS["softmax"], points), 4)
    without = mercer.least_eigenvalue(mercer.gram(mercer.INDEFINITE["ReLU"], points))
    return holds(
        "$\\kappa(x, y) = \\phi(x)^\\top \\phi(y)$",
        mercer_error(),
        mercer.rounding(POINTS, POINTS),
        at=f"{len(mercer.KERNELS)} kernels on {POINTS} points",
    ).noting(
        f"The features may be infinitely many: $e^{{x^\\top y}}$ needs {rank} on these {POINTS} points. A kernel that "
        f"is not positive semi-definite has none: ReLU of the score has an eigenvalue of {without:.1f} there"
    )


@evidence("S2.3.2b", chapter=CHAPTER)
def normalised() -> Finding:
    q, k, v = normal(3, TOKENS, WIDTH)
    weights = (q @ k.T).exp()
    D = weights.sum(-1).diag()
    exact: Any = softmax_attention_reference(q, k, v, scale=1.0)
    error = float((D.inverse() @ weights @ v - exact).norm() / exact.norm())
    return holds(
        "$\\operatorname{softmax}(Q K^\\top) V = D^{-1} \\exp(Q K^\\top) V$, $D$ the row sums",
        error,
        EXACT,
        at=f"{TOKENS} normal tokens of width {WIDTH}",
    ).noting(
        f"As written the exponentials overflow beyond scores of {log(torch.finfo(torch.float32).max):.1f} in float32"
    )


@evidence("S2.3.2c", chapter=CHAPTER)
def by_sums() -> Finding:
    linear, favor = (MECHANISMS[name] for name in ("linear", "favor"))
    q, k, v = normal(3, TOKENS, WIDTH)
    one, other = linear.reference(q, k, v), linear.fast(q, k, v)
    plain, mapped = (mechanism.cost(1, N, 1, d, d, m=m) for mechanism in (linear, favor))
    return all_of(
        {
            "value": holds(
                "$O_i = \\phi(q_i)^\\top S / \\phi(q_i)^\\top z$",
                float((one - other).norm() / one.norm()),
                EXACT,
                at=f"{TOKENS} normal tokens",
            ),
            "numbers": counted({"$S$ and $z$": "m*d + m"}, {"$S$ and $z$": sympy.expand(plain.state_bytes / 4)}),
            "all queries": growth("N*m*d", sympy.expand(mapped.forward)),
            "one more": growth("m*d", sympy.expand(mapped.decode)),
        }
    ).noting(f"With random features made as well; $S$ alone takes {show(associativity.product_flops(m, N, d))}")
