r"""S2, sections 4.2, 4.3, 5.3: what frozen orthogonal projections save, and layers with heads of several kinds."""

from paper.claims.evidence.cheaper_heads import HEADS, LAYERS, NARROW, TRAINED, D, still_right

__all__ = ["HEADS", "LAYERS", "NARROW", "TRAINED", "D", "still_right"]
