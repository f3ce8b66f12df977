r"""S1, section 2.3: sparse attention that chooses positions by what is there, by clusters or by importance.

"Importance sampling" is read as it says, drawing keys by their importance. (In statistics the word also stands for a
division by the probability of what was drawn, of which the source says nothing.)
"""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ortho.attention.selected.importance import importance_mask, key_norms, sampled_importance
from ortho.attention.selected.routing import draw_centroids, nearest, routing_mask
from ortho.theory.estimates import SIGMAS
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, region
from paper.claims.verdicts import Finding

CHAPTER = "16-dynamic-sparsity"

TOKENS, WIDTH, KEPT = 64, 8, 8  # N; K; keys that a query keeps at most, in clusters and by importance
LENGTHS, DRAWS = (1.0, 2.0, 3.0, 4.0), 4000

Choice = Callable[[Tensor, Tensor], Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def centroids() -> Tensor:
    return draw_centroids(WIDTH, count=4, generator=seeded(0))


def by_clusters(q: Tensor, k: Tensor) -> Tensor:
    """Up to `KEPT` keys nearest to the same centroid (N, N)."""
    return routing_mask(q, k, centroids=centroids(), width=KEPT // 2, is_causal=True)


def by_sample(q: Tensor, k: Tensor) -> Tensor:
    """`KEPT` keys drawn by their lengths, with the same random numbers for any keys (N, N)."""
    drawn = sampled_importance(k, generator=seeded(1))
    return importance_mask(q, k, count=KEPT, importance=drawn, is_causal=True)


CHOICES: dict[str, Choice] = {"clusters": by_clusters, "sample by importance": by_sample}


def operands(seed: int) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, TOKENS, WIDTH, generator=seeded(seed), dtype=torch.float64)
    return q, k


def differing(choose: Choice) -> int:
    """In how many pairs the choices for two inputs differ."""
    return int((choose(*operands(2)) != choose(*operands(3))).sum())


def strangers() -> int:
    """Kept pairs of a query and a key of different clusters."""
    q, k = operands(2)
    mates = nearest(q, centroids())[:, None] == nearest(k, centroids())
    return int((by_clusters(q, k) & ~mates).sum())


def off_by() -> float:
    """How far the shares in which keys of four lengths are drawn first are from the lengths', at most, in standard
    errors."""
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    k = lengths[:, None].expand(DRAWS, -1, 1)
    assert torch.equal(key_norms(k[0]), lengths.square())
    first = sampled_importance(k, generator=seeded(4)).argmax(-1)
    shares, expected = torch.bincount(first, minlength=len(LENGTHS)) / DRAWS, lengths / lengths.sum()
    return float(((shares - expected).abs() / (expected * (1 - expected) / DRAWS).sqrt()).max())


@evidence("S1.2.3b", chapter=CHAPTER)
def chosen_by_content() -> Finding:
    return all_of(
        {
            "kept pairs that differ between two inputs": region(
                (1, inf), {name: differing(choose) for name, choose in CHOICES.items()}
            ),
            "of clusters, kept pairs across them": counted({"": 0}, {"": strangers()}),
            "of a sample": holds(
                "a key is drawn in proportion to its importance, in standard errors", off_by(), SIGMAS
            ),
        }
    ).noting(
        f"({DRAWS:,} draws.) Clusters depend on query and key, importance on the key alone; and the $O(n k d)$ beside "
        "it is without the choice"
    )
