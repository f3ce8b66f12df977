r"""The standard layer and the whole Transformer: time, space and parameters.

All orders are judged by a layer with H heads, whether the source names them or not: a claim that leaves H out is
corrected.
"""

from paper.claims.evidence.layer import CORE, STANDARD, kept, product, quadratic, softmax, time

__all__ = ["CORE", "STANDARD", "kept", "product", "quadratic", "softmax", "time"]
