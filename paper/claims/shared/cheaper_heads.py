r"""S2, sections 4.2, 4.3, 5.3: what frozen orthogonal projections save, and layers with heads of several kinds."""

from functools import cache
from typing import Any

import torch

from ortho.layers.multihead import MultiheadAttention
from paper.claims.shared.common import seeded

D, HEADS, TRAINED = 768, 12, 64  # GPT-2 small; the width of the layer that is trained
LAYERS, NARROW = 4, 16


@cache
def still_right(trained: bool) -> float:
    """Per cent of the numbers of q and k, computed in advance from embeddings, that a training step does not change."""
    kind: dict[str, Any] = {"generator": seeded(), "dtype": torch.float64}
    layer = MultiheadAttention(NARROW, 2, projection="frozen", **kind)
    embeddings = torch.randn(1, 8, NARROW, **kind).requires_grad_(trained)
    before = torch.cat(layer.projection(embeddings)).detach()
    optimiser = torch.optim.AdamW([*layer.parameters(), *([embeddings] if trained else [])])
    layer(embeddings).square().sum().backward()
    optimiser.step()
    return float(100 * (torch.cat(layer.projection(embeddings)) == before).double().mean())
