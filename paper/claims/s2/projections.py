r"""S2, sections 4.2 and 4.3: what random orthogonal projections keep of distances, and how FAVOR+ and ORA use them."""

from functools import cache
from math import inf

import sympy
import torch

from ortho.cost.big_o import d
from ortho.orthogonal import haar
from ortho.theory.johnson_lindenstrauss import dimension, distortion, failure_bound, least_dimension
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds, region
from paper.claims.s0.methods import EXACT, FAVOR_WIDTH, SOME, favor_misplaced, unlike_softmax
from paper.claims.s0.rows import COSTS
from paper.claims.verdicts import Finding

CHAPTER = "10-johnson-lindenstrauss"

POINTS, EPS = 100, 0.5
WIDTHS = (222, 256, 512, 2048)  # of the space; the first is the k that the source's section 4.3 asks for
SIZES = ((5, 0.1), (1000, 0.5), (1000, 0.3), (1000, 0.1), (10**6, 0.1))  # n, eps
# "With high probability": the source gives no figure. Any up to 0.89 would decide the same.
LIKELY = (0.8, 1)


@cache
def distortions(width: int) -> tuple[float, float]:
    """How far off squared distances are after a projection to the k of section 4.3: as it is, and rescaled."""
    k = dimension(POINTS, EPS)
    g = torch.Generator().manual_seed(0)
    points = torch.randn(POINTS, width, generator=g, dtype=torch.float64)
    images = points @ haar(width, k, generator=g, dtype=torch.float64)
    return distortion(points, images), distortion(points, (width / k) ** 0.5 * images)


@evidence("S2.4.2b", chapter=CHAPTER)
def distances_kept() -> Finding:
    k = dimension(POINTS, EPS)
    labels = {width: "$d = k$" if width == k else f"$d = {width:,}$" for width in WIDTHS}
    off = {label: round(distortions(width)[0], 2) for width, label in labels.items()}
    rescaled = max(distortions(width)[1] for width in WIDTHS)
    change = f"greatest relative change of a squared distance, {POINTS} points, $k = {k}$"
    return all_of({change: region((0, EPS), off)}).noting(
        f"Section 4.3 has this $k$ for $\\epsilon = {EPS}$. Times $\\sqrt{{d/k}}$ the projection changes none by more "
        f"than {rescaled:.2f} at these widths"
    )


def unlikely(n: int, eps: float) -> float:
    """How likely it is, at most, that a random projection to the k of section 4.3 does not keep n points."""
    k = dimension(n, eps)
    return failure_bound(n, k, k, eps, draw="gaussian")  # what orthogonal draws' bound grows to with d


@evidence("S2.4.3a", chapter=CHAPTER)
def lemma() -> Finding:
    labels = {(n, eps): f"{n:,} points, $\\epsilon = {eps}$" for n, eps in SIZES}
    asked = {size: dimension(*size) for size in SIZES}
    n, eps, width = 1000, 0.3, 1024
    return all_of(
        {
            "$k$ that suffices": region(
                {labels[size]: (-inf, k) for size, k in asked.items()},
                {labels[size]: least_dimension(size[0], k, size[1], draw="gaussian") for size, k in asked.items()},
            ),
            "probability with the source's": region(
                LIKELY, {labels[size]: round(1 - unlikely(*size), 3) for size in SIZES}
            ),
        }
    ).noting(
        f"This holds for any $d$ and the projection times $\\sqrt{{d/k}}$. In {width:,} dimensions {n:,} points and "
        f"$\\epsilon = {eps}$ need no more than $k = {least_dimension(n, width, eps)}$"
    )


@evidence("S2.4.3d", chapter=CHAPTER)
def two_uses() -> Finding:
    standard, favor, ora = (COSTS[name] for name in ("learned", "favor", "frozen"))
    others = {"FAVOR+": favor.trained - 4 * d**2, "ORA": ora.trained - 2 * d**2}  # than the weights that both train
    return all_of(
        {
            "trained entries of the orthogonal matrices": counted(dict.fromkeys(others, 0), others),
            "FAVOR+, in time": growth("N", sympy.expand(favor.forward), held=("d", "H", "m")),
            "ORA, in time": growth("N^2", sympy.expand(ora.forward), held=("d", "H")),
            "trained parameters that ORA saves": region(
                SOME, {"": 100 - 100 * float(ora.trained / standard.trained)}, unit=" %"
            ),
            f"weight that FAVOR+ misplaces, $K = {FAVOR_WIDTH}$": region(
                SOME, {f"$m = {m}$": round(favor_misplaced(0.25, m)[0]) for m in (64, 1024)}, unit=" %"
            ),
            "ORA": holds("softmax attention, exactly", unlike_softmax(), EXACT),
        }
    )
