r"""S1, section 2.2: linear attention as printed there, and what it may lose."""

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.linear.feature_maps import Exp, Relu
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.cost.big_o import N, d
from ortho.theory import recall
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, growth, holds, region
from paper.claims.s0 import lookup
from paper.claims.s0.methods import EXACT, SOME
from paper.claims.verdicts import Finding

CHAPTER = "07-linear-attention"

MAPS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {"ReLU": (Relu(), torch.relu), "exp": (Exp(), torch.exp)}
# What the sum under Q (K^T V) can be over, for features k (N, K), and what it then divides.
READINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "everything": lambda q, k, v: q @ (k.mT @ v) / k.sum(),
    "positions, dividing the outputs' columns": lambda q, k, v: q @ (k.mT @ v) / k.sum(-2),
    "positions, dividing features": lambda q, k, v: q @ (k.mT @ v / k.sum(-2)[:, None]),
}


def operands(tokens: int = 64, width: int = 8) -> Tensor:
    """Normal q, k and v, together (3, N, K), float64."""
    return torch.randn(3, tokens, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def away(reading: str) -> float:
    """How far the printed formula is from linear attention, relatively: the nearer of the source's two maps."""
    q, k, v = operands()
    found = []
    for feature_map, function in MAPS.values():
        exact: Any = linear_attention_reference(q, k, v, feature_map=feature_map)
        found.append(float((READINGS[reading](function(q), function(k), v) - exact).norm() / exact.norm()))
    return min(found)


def ones_become(reading: str) -> tuple[float, float]:
    """The least and the greatest output of the printed formula, with ReLU, for values that are all 1."""
    q, k, v = operands()
    low, high = READINGS[reading](q.relu(), k.relu(), torch.ones_like(v)).aminmax()
    return float(low), float(high)


@evidence("S1.2.2a", chapter=CHAPTER)
def printed_formula() -> Finding:
    nearest = min(READINGS, key=away)
    low, high = ones_become(nearest)
    core = MECHANISMS["linear"].cost(1, N, 1, d, d)
    return all_of(
        {
            "value": holds(
                "$Q (K^\\top V) / \\sum(K^\\top)$ is linear attention",
                away(nearest),
                EXACT,
                at=f"normal tokens, with the sum over {nearest}",
            ),
            "time": growth("N*d^2", sympy.expand(core.forward)),
            "space": growth("N*d", sympy.expand(core.saved_bytes / 4), held=("d",)),
        }
    ).noting(
        "What divides row $i$ must depend on its query, $\\phi(q_i)^\\top \\sum_j \\phi(k_j)$. As printed, values of 1 "
        f"become outputs from {low:.1f} to {high:.1f}; the other readings are further off"
    )


FEATURES = lookup.D_MODEL // lookup.HEADS
NEAR, FAR = FEATURES - 1, (15, 31, 63)  # tokens


def near_error() -> float:
    """How much of the target a head that is built for it misses when it copies from `NEAR` tokens back."""
    q, k = recall.copying(recall.tokens(NEAR, 20), NEAR, FEATURES)
    return float(recall.copy_error(recall.causal_weights(q, k), NEAR))


@evidence("S1.2.2b", chapter=CHAPTER)
def power_lost() -> Finding:
    looked_up = 100 * lookup.low_rank_error(lookup.ENTRIES, FEATURES)
    copied = {f"{r} tokens back": 100 * recall.least_error(r, FEATURES) for r in FAR}
    nothing = near_error() <= lookup.SOLVED
    return all_of(
        {
            "modelling power": region(SOME, {f"a lookup among {lookup.ENTRIES} entries": looked_up}, unit=" %"),
            "long range": region(SOME, copied, unit=" %"),
        }
    ).noting(
        f"These are the least shares of the target that a head with {FEATURES} features misses, whatever its weights. "
        f"Up to {NEAR} tokens back it {'need not' if nothing else 'must'} miss any"
    )
