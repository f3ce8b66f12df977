"""S4, on sparse attention: the rule that is printed for it, and what it takes for the rule to pay."""

from fractions import Fraction
from math import inf
from typing import Any

import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.sparse.dilated import LocalDilated
from ortho.attention.sparse.pattern import Pattern, pattern_attention, pattern_attention_reference
from ortho.attention.sparse.window import Window
from ortho.cost.big_o import N, d
from ortho.cost.counting import count_forward
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, contradiction, counted, growth, region
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows

CHAPTER = "15-sparse-patterns"

TOKENS, FAR = 256, 16  # N, k
# Width 16 is enough to count products, whose number is in proportion to it.
COUNTED, WIDTH = 512, 16
PATTERNS: dict[str, Pattern] = {"window of 64": Window(64), "local and dilated, $k = 16$": LocalDilated(16)}


def _distance(n: int) -> Tensor:
    return (torch.arange(n)[:, None] - torch.arange(n)).abs()


def as_meant(n: int, k: int) -> Tensor:
    """Local and dilated attention together: distances up to k, and the multiples of k (n, n)."""
    return (_distance(n) <= k) | (_distance(n) % k == 0)


def as_printed(n: int, k: int) -> Tensor:
    """What is left if distances above k, and the multiples of k, are set to 0 (n, n)."""
    return ~((_distance(n) > k) | (_distance(n) % k == 0))


@evidence("S4.1a", chapter=CHAPTER)
def printed_rule() -> Finding:
    meant, printed = as_meant(TOKENS, FAR), as_printed(TOKENS, FAR)
    multiples = _distance(TOKENS) % FAR == 0
    return all_of(
        {
            "self-attention": growth("N^2", MECHANISMS["softmax"].cost(1, N, 1, d, d).forward, held=("d",)),
            f"of $N = {TOKENS}$, $k = {FAR}$, at multiples of $k$": contradiction(
                ("dilated and local attention combined", int((meant & multiples).sum())),
                ("multiples of k set to 0", int((printed & multiples).sum())),
                unit=" pairs",
            ),
        }
    ).noting(
        f"Combined they have {int(meant.sum()):,} pairs. The printed rule leaves {int(printed.sum()):,}, and no token "
        "sees itself"
    )


def depends_on_input(pattern: Pattern, n: int = 64) -> int:
    """In how many pairs the weights of two inputs differ in whether they are 0."""
    generator = torch.Generator().manual_seed(0)
    supports = []
    for _ in range(2):
        q, k = torch.randn(2, n, 8, generator=generator)
        weights: Any = pattern_attention(q, k, torch.eye(n), pattern=pattern)
        supports.append(weights > 0)
    return int((supports[0] != supports[1]).sum())


def products(pattern: Pattern, form: str) -> Fraction:
    """FLOPs of the products of a form, over those of dense attention; causal."""
    q, k, v = torch.zeros(3, 1, COUNTED, WIDTH)
    run = {"mask": pattern_attention_reference, "parts": pattern_attention}[form]
    flops = count_forward(lambda *x: run(*x, pattern=pattern, is_causal=True), q, k, v)[0]
    return Fraction(flops, count_forward(MECHANISMS["softmax"].reference, q, k, v)[0])


def timed() -> dict[str, float]:
    """How many times as long a window takes as a mask for the fused attention than in parts, by device and length."""
    found = {}
    for device, lines in attention_rows.curves(experiments.load("pattern-speed"), "patterns").items():
        if {"sdpa masked", "window"} <= lines.keys():
            by_parts = {row["N"]: row["seconds"][1] for row in lines["window"]}
            for row in lines["sdpa masked"]:
                if row["N"] in by_parts:
                    found[f"$N = {row['N']:,}$ on {device}"] = round(row["seconds"][1] / by_parts[row["N"]], 1)
    return found


@evidence("S4.1b", chapter=CHAPTER)
def by_hand_and_made_for_it() -> Finding:
    clock = timed()
    measured = {"time by a mask over that in parts": region((1, inf), clock)} if clock else {}
    return all_of(
        {
            "kept pairs that differ between two inputs": counted(
                dict.fromkeys(PATTERNS, 0), {name: depends_on_input(p) for name, p in PATTERNS.items()}
            ),
            "products under a mask, over all": counted(
                dict.fromkeys(PATTERNS, 1), {name: products(p, "mask") for name, p in PATTERNS.items()}
            ),
            "in parts": region((0, 1), {name: round(float(products(p, "parts")), 3) for name, p in PATTERNS.items()}),
            **measured,
        }
    )
