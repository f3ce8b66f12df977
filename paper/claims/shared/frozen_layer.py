r"""S0, section 2: what freezing $W_Q$ and $W_K$ takes out of the layer's work, and what it leaves there."""

from paper.claims.evidence.frozen_layer import backward_products

__all__ = ["backward_products"]
