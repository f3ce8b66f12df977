r"""S1, sections 2.3, 2.4 and 4.2: windows, dilated windows, and windows beside tokens that see all.

Orders of growth are those of sequences that are longer, by m tokens, than what a query reaches.
"""

from math import inf
from typing import Any

import sympy
import torch

from ortho.attention.sparse.dilated import Dilated
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import Pattern, pattern_attention, pattern_attention_reference, pattern_cost
from ortho.attention.sparse.window import BlockedWindow, Window
from ortho.cost import orders
from ortho.cost.big_o import N, d
from ortho.theory.reachability import layers_to_reach
from paper.claims import figures
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds, region
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding

CHAPTER = "15-sparse-patterns"

# Pairs that are kept of N tokens, in closed form.
LATEST = "k*N - k*(k - 1)/2"  # each with the k latest keys
DILATED = "k*N - D*k*(k - 1)/2"  # each with k keys, every D-th
EITHER_SIDE = "(2*w + 1)*N - w*(w + 1)"
GLOBAL = f"{EITHER_SIDE} + 2*g*N - g^2 - 2*g*w - g"  # the first g tokens, g <= w, see all and are seen by all
TOKENS, REACH, FIRST, STEP = 256, 8, 4, 3  # N, w or k, g, D


def closed(formula: str, **sizes: int) -> Any:
    """A formula in sympy's symbols, with these sizes put in."""
    return orders.parse(formula).subs({sympy.Symbol(name, positive=True): size for name, size in sizes.items()})


def longer(formula: Any, than: str) -> Any:
    """A formula in N for sequences of N = m + `than` tokens."""
    return orders.parse(formula).subs(N, orders.parse(f"m + {than}"))


def time(claimed: str, pairs: str, than: str) -> Finding:
    """The order of the products of one head, two FLOPs for each number of a key and of a value."""
    return growth(longer(claimed, than), sympy.expand(longer(4 * d * orders.parse(pairs), than)))


def space(claimed: str, pairs: str, than: str) -> Finding:
    """The order of the weights that are kept."""
    return growth(longer(claimed, than), sympy.expand(longer(pairs, than)))


def saved() -> Any:
    """Numbers that the form in parts keeps for the backward pass, which stores no weights."""
    return sympy.expand(pattern_cost(1, N, 1, d, d, pattern=Window(REACH), causal=True).saved_bytes / 4)


def either_space(claimed: str, pairs: str, than: str) -> dict[str, Finding]:
    """Where the source does not say whose space: of weights, which a form may store, and of a form that stores none."""
    return {
        "space, weights stored": space(claimed, pairs, than),
        "space, none stored": growth(claimed, saved(), held=("d",)),
    }


def kept(pattern: Pattern, *, is_causal: bool = True) -> int:
    """How many pairs its mask has."""
    return int(pattern.mask(TOKENS, is_causal=is_causal).sum())


@evidence("S1.2.3a", chapter=CHAPTER)
def local_and_dilated() -> Finding:
    sizes = {"N": TOKENS, "k": REACH}
    return all_of(
        {
            f"pairs of $N = {TOKENS}$, $k = {REACH}$": counted(
                {"local": closed(LATEST, **sizes), f"every {STEP}rd": closed(DILATED, **sizes, D=STEP)},
                {"local": kept(Window(REACH)), f"every {STEP}rd": kept(Dilated(REACH, STEP))},
            ),
            "time, local, $N = k + m$": time("N*k*d", LATEST, "k"),
            "time, every $D$-th, $N = D k + m$": time("N*k*d", DILATED, "D*k"),
            "space of the sparse matrix": space("N*k", LATEST, "k"),
        }
    ).noting(f"A form that stores no weights keeps {figures.show(saved())} numbers, whatever $k$ is")


def later_keys(*, is_causal: bool) -> int:
    """The most keys behind itself that a query attends to, global tokens apart."""
    mask = GlobalLocal(REACH + 1, FIRST).mask(TOKENS, is_causal=is_causal)
    return int(mask[FIRST:].triu(FIRST + 1).sum(1).max())


@evidence("S1.2.4a", chapter=CHAPTER)
def local_and_global() -> Finding:
    sizes = {"N": TOKENS, "w": REACH, "g": FIRST}
    pattern, window = GlobalLocal(REACH + 1, FIRST), Window(REACH + 1)
    hops, causal, alone = (
        layers_to_reach(p.mask(TOKENS, is_causal=is_causal), is_causal=is_causal)
        for p, is_causal in ((pattern, False), (pattern, True), (window, True))
    )
    return all_of(
        {
            f"pairs of $N = {TOKENS}$, $w = {REACH}$, $g = {FIRST}$": counted(
                {"": closed(GLOBAL, **sizes)}, {"": kept(pattern, is_causal=False)}
            ),
            "time, $N = w + g + m$": time("N*w*d + N*g*d", GLOBAL, "(w + g)"),
            **either_space("N*(w + g)", GLOBAL, "(w + g)"),
            "causality, later keys of a query": region(
                (0, 0),
                {
                    "a window on either side, as described": later_keys(is_causal=False),
                    "a causal mask": later_keys(is_causal=True),
                },
            ),
        }
    ).noting(
        f"To connect {TOKENS} tokens takes {hops} layers both ways; causal, {causal}, and {alone} without the global "
        "tokens, which at the front see nothing but each other"
    )


def shared_keys(pattern: Pattern) -> int:
    """How many keys two neighbours have in common at least, away from the ends of the sequence."""
    mask = pattern.mask(TOKENS)[REACH:-REACH]
    return int((mask[1:] & mask[:-1]).sum(1).min())


def away(*, is_causal: bool) -> float:
    """How far the form in parts is from the definition, relatively."""
    q, k, v = torch.randn(3, TOKENS, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options: dict[str, Any] = {"pattern": Window(REACH), "is_causal": is_causal}
    one: Any = pattern_attention(q, k, v, **options)
    other: Any = pattern_attention_reference(q, k, v, **options)
    return float((one - other).norm() / other.norm())


@evidence("S1.4.2a", chapter=CHAPTER)
def sliding_window() -> Finding:
    sizes = {"N": TOKENS, "w": REACH}
    return all_of(
        {
            f"pairs of $N = {TOKENS}$, $w = {REACH}$ on either side": counted(
                {"": closed(EITHER_SIDE, **sizes)}, {"": kept(Window(REACH + 1), is_causal=False)}
            ),
            "time, $N = w + m$": time("N*w*d", EITHER_SIDE, "w"),
            **either_space("N*w", EITHER_SIDE, "w"),
            "keys shared by any neighbours, overlapping": region(
                (1, inf), {f"window, {REACH} on either side": shared_keys(Window(REACH + 1))}
            ),
            "not overlapping": region((0, 0), {f"blocks of {REACH}": shared_keys(BlockedWindow(REACH))}),
            "causal or not": holds(
                "windows are computed as they are defined", max(away(is_causal=c) for c in (False, True)), EXACT
            ),
        }
    )
