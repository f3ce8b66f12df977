r"""S1, sections 2.1, 3.1, 3.2 and 4.1: tiles, decoding with a cache, recomputation, and mixtures of experts."""

from paper.claims.evidence.hardware import FORMS, TOKENS, WIDTH, largest, largest_tensor

__all__ = ["FORMS", "TOKENS", "WIDTH", "largest", "largest_tensor"]
