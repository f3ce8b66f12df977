"""S2, section 2.3: strided and fixed attention, what two layers of them connect, and the other patterns listed."""

import sympy
import torch
from torch import Tensor

from ortho.attention.sparse.global_local import GlobalLocal
from ortho.cost.big_o import N
from ortho.theory.reachability import reached
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, region, untestable
from paper.claims.s1 import patterns as s1
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows

CHAPTER = "15-sparse-patterns"

# Pairs of the two heads of N tokens with a stride that divides N.
LATEST, EVERY = "(l + 1)*N - l*(l + 1)/2", "N^2/(2*l) + N/2"
TOKENS, STRIDE = 256, 16
# Of what the records time: the pattern of blocks, and patterns that read keys one by one.
BLOCKS, OTHERS = "block-sparse", ("dilated", "strided", "fixed")
EXHAUSTED = 40  # tokens up to which every length and every stride is tried


def strided_pairs(n: int, stride: int) -> int:
    """Of both heads of n tokens, for any stride."""
    near, q = min(stride, n - 1), (n - 1) // stride
    return (near + 1) * n - near * (near + 1) // 2 + (q + 1) * n - stride * q * (q + 1) // 2


def strided_heads(n: int, stride: int) -> tuple[Tensor, Tensor]:
    """The masks of both heads as the source defines them, in a causal model (n, n)."""
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return (distance >= 0) & (distance <= stride), (distance >= 0) & (distance % stride == 0)


def fixed_heads(n: int, block: int, cells: int = 1) -> tuple[Tensor, Tensor]:
    """The masks of attention within blocks, and to the last cells of all blocks, in a causal model (n, n)."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return (j <= i) & (i // block == j // block), (j <= i) & (j % block >= block - cells)


def missed(first: Tensor, second: Tensor) -> int:
    """How many pairs j <= i two layers, with residual connections, do not connect."""
    return int((~reached(first, second)).tril().sum())


def picture_share(n: int, stride: int) -> float:
    """The share of the pairs j <= i that the source's picture connects.

    There each token attends to the nearest hub, before it, and itself, and then the hubs to each other.
    """
    i, j = torch.arange(n)[:, None], torch.arange(n)
    first = (j == i) | (j == i // stride * stride)
    second = (j <= i) & (i % stride == 0) & (j % stride == 0)
    return int(reached(first, second).tril().sum()) / (n * (n + 1) / 2)


@evidence("S2.2.3a", chapter=CHAPTER)
def strided() -> Finding:
    l = sympy.Symbol("l", positive=True)
    sizes = {"N": TOKENS, "l": STRIDE}
    forms = {"the last $l$": LATEST, "every $l$-th": EVERY}
    masks = strided_heads(TOKENS, STRIDE)
    union = int((masks[0] | masks[1]).sum())
    at_root = sympy.expand(sum(map(sympy.sympify, (s1.closed(LATEST), s1.closed(EVERY)))).subs(l, sympy.sqrt(N)))
    best = min(range(1, 4096), key=lambda stride: strided_pairs(4096, stride))
    return all_of(
        {
            f"pairs of $N = {TOKENS}$, $l = {STRIDE}$": counted(
                {name: s1.closed(form, **sizes) for name, form in forms.items()},
                {name: int(mask.sum()) for name, mask in zip(forms, masks, strict=True)},
            ),
            "both heads, $l = \\sqrt N$": growth("N*sqrt(N)", at_root),
        }
    ).noting(
        f"One head with both kinds of pairs has {union:,}. Fewest pairs need $l \\approx \\sqrt{{N / 2}}$: of 4,096 "
        f"tokens $l = {best}$"
    )


def always_missed(*, is_causal: bool) -> int:
    """Pairs that two strided layers in either order miss, of all lengths up to `EXHAUSTED` and all strides."""
    total = 0
    for n in range(1, EXHAUSTED + 1):
        for stride in range(1, n + 1):
            heads = strided_heads(n, stride)
            if not is_causal:
                heads = heads[0] | heads[0].T, heads[1] | heads[1].T
            wanted = torch.ones(n, n).tril() if is_causal else torch.ones(n, n)
            total += sum(int((wanted.bool() & ~reached(*layers)).sum()) for layers in (heads, heads[::-1]))
    return total


@evidence("S2.2.3b", chapter=CHAPTER)
def summaries() -> Finding:
    own, cells = fixed_heads(TOKENS, STRIDE)
    last = torch.arange(STRIDE - 1, TOKENS, STRIDE)
    blind = sum(int((~cells[cell:, cell]).sum()) for cell in last.tolist())
    return all_of(
        {
            "positions that the last cell of a block sees of it": counted(
                {"": STRIDE}, {"": int(own[last].sum(1).min())}
            ),
            "later positions that do not see such a cell": counted({"": 0}, {"": blind}),
            "earlier positions out of reach, blocks and then cells": counted({"": 0}, {"": missed(own, cells)}),
        }
    ).noting(
        f"$N = {TOKENS}$, $l = {STRIDE}$, one cell a block. With the cells first, {missed(cells, own):,} of "
        f"{TOKENS * (TOKENS + 1) // 2:,} pairs are out of reach: a summary is made before it is read"
    )


@evidence("S2.2.3c", chapter=CHAPTER)
def two_layers() -> Finding:
    within = f"all $N \\le {EXHAUSTED}$ and $l \\le N$"
    return all_of(
        {
            f"pairs of {within} that two layers miss, causal": counted({"": 0}, {"": always_missed(is_causal=True)}),
            "both ways": counted({"": 0}, {"": always_missed(is_causal=False)}),
        }
    ).noting(
        "The picture beside it, tokens to the nearest hub and then hubs to hubs, is another pattern: of "
        f"{TOKENS} tokens with $l = {STRIDE}$ it connects {100 * picture_share(TOKENS, STRIDE):.0f} % of the pairs"
    )


def friendly() -> Finding:
    """Whether a FLOP of block-sparse attention takes less time than one of patterns that are not made of blocks, by the
    records."""
    per_flop: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in attention_rows.beside_alike(experiments.load("pattern-speed"), "patterns"):
        name, *way = row["arm"].split()
        if name in (BLOCKS, *OTHERS):
            times = per_flop.setdefault((row["device"], row["N"], " ".join(way)), {})
            times[name] = row["ratio_alike"][1] / row["flops_alike"]
    ratios = {
        f"$N = {N:,}${way and f', {way}'}, {device}": round(times[BLOCKS] / min(times[name] for name in OTHERS), 2)
        for (device, N, way), times in per_flop.items()
        if times.keys() == {BLOCKS, *OTHERS}
    }
    if not ratios:
        return untestable("a FLOP takes less time in blocks", {f"`{BLOCKS}`": None}, lack="no record times")
    return region((0, 1), ratios)


@evidence("S2.2.3d", chapter=CHAPTER)
def others() -> Finding:
    rows = GlobalLocal(s1.REACH + 1, s1.FIRST).mask(TOKENS).sum(1)
    return all_of(
        {
            "local": s1.time("N*w*d", s1.EITHER_SIDE, "w"),
            "block-sparse, time of a FLOP over the least of other patterns": friendly(),
            f"keys of a global token, $N = {TOKENS}$": counted({"": TOKENS}, {"": int(rows[: s1.FIRST].min())}),
        }
    ).noting(
        f"Every other token has {int(rows[TOKENS // 2])} keys, of $w = {s1.REACH}$ on either side and {s1.FIRST} global"
    )
