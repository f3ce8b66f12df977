"""S2, section 3.1: the table of what standard attention takes, step by step, with one head, as the source writes it."""

import sympy

from ortho.cost.big_o import N, d
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, growth
from paper.claims.s1.transformer import CHAPTER, CORE, HEADS, LAYER, PRODUCT
from paper.claims.verdicts import Finding

# Numbers that a step gives out: queries, keys and values; scores; weights; the weighted sums.
RESULTS = {"projection": 3 * N * d, "similarity": N**2, "softmax": N**2, "aggregation": N * d}
SOURCE = {  # time and space
    "projection": ("N*d^2", "N*d"),
    "similarity": ("N^2*d", "N^2"),
    "softmax": ("N^2", "N^2"),
    "aggregation": ("N^2*d", "N*d"),
    "total": ("N^2*d", "N^2"),
}


@evidence("S2.3.1a", chapter=CHAPTER)
def step_by_step() -> Finding:
    time = {
        "projection": LAYER.forward - CORE.forward,
        "similarity": PRODUCT,
        "softmax": CORE.elementwise_forward,
        "aggregation": CORE.forward - PRODUCT,
        "total": LAYER.forward + LAYER.elementwise_forward,
    }
    space = {**RESULTS, "total": LAYER.saved_bytes / LAYER.itemsize}
    found = {}
    for step, claimed in SOURCE.items():
        for name, said, exact in zip(("time", "space"), claimed, (time[step], space[step]), strict=True):
            found[f"{step}, {name}"] = growth(said, sympy.expand(exact))
    return all_of(found).noting(f"{HEADS}. The totals hold where $N$ grows at least in proportion to $d$")
