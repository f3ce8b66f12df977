r"""S0, section 2: what freezing $W_Q$ and $W_K$ takes out of the layer's work, and what it leaves there."""

from paper.claims.evidence.frozen_layer import (
    PRODUCTS,
    VALUES_FIRST,
    VALUES_LAST,
    ValuesLast,
    backward_counted,
    backward_products,
    backward_settings,
    graph,
    linear_backward,
    train_once,
)

__all__ = [
    "PRODUCTS",
    "VALUES_FIRST",
    "VALUES_LAST",
    "ValuesLast",
    "backward_counted",
    "backward_products",
    "backward_settings",
    "graph",
    "linear_backward",
    "train_once",
]
