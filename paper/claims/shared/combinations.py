r"""Frozen orthogonal queries and keys with other attention (S2, section 5.3), and linear attention elsewhere (S4)."""

from paper.claims.evidence.combinations import KERNELS, LINEAR, SOFTMAX

__all__ = ["KERNELS", "LINEAR", "SOFTMAX"]
