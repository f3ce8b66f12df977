r"""Windows, dilated, strided and fixed patterns, global tokens: what they keep, cost and connect.

S1, sections 2.3, 2.4 and 4.2; S2, section 2.3; S4, on sparse attention. Orders of growth are for sequences m tokens
longer than a query's reach.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import inf
from typing import Any

import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.dynamic_sparse.importance import importance_mask
from ortho.attention.dynamic_sparse.top_k import top_k_mask
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import Pattern, pattern_attention, pattern_attention_reference
from ortho.attention.sparse.strided import Strided
from ortho.attention.sparse.window import BlockedWindow, Window
from ortho.cost import orders
from ortho.cost.big_o import N, d
from ortho.cost.counting import flops_of
from ortho.theory.reachability import layers_to_reach, reached
from paper import experiments, memory
from paper.claims import figures
from paper.claims.evidence import hardware
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, contradiction, counted, growth, holds, mended, region, untestable
from paper.claims.shared import inputs
from paper.claims.shared.common import EXACT, IN_N, normal, relative_error, saves
from paper.claims.verdicts import Finding, Parts
from paper.experiments.speed import attention_analysis as attention_rows

CHAPTER = "15-sparse-patterns"
# Pairs that are kept for N tokens, in closed form.
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
    """Numbers that the form in parts, which stores no weights, keeps for the backward pass, its output included. That
    and the logarithms have one more row each, for places without a token."""

    def call(q: Tensor, k: Tensor, v: Tensor, _: int) -> Any:
        return pattern_attention(q, k, v, pattern=Window(REACH), is_causal=True)

    return memory.kept_by_call(call, N * d, N, d, sympy.Integer(1))


def either_space(claimed: str, pairs: str, than: str) -> dict[str, Finding]:
    """Both, as the source does not say whose space: of weights, if a form stores them, and of a form that stores
    none."""
    return {
        "space, weights stored": space(claimed, pairs, than),
        "space, none stored": growth(claimed, saved(), settings=IN_N),
    }


def kept(pattern: Pattern, *, is_causal: bool = True) -> int:
    """How many pairs the pattern's mask has."""
    return int(pattern.mask(TOKENS, is_causal=is_causal).sum())


@evidence("S1.2.3a", chapter=CHAPTER)
def local_and_dilated() -> Finding:
    sizes = {"N": TOKENS, "k": REACH}
    parts = {
        f"pairs of $N = {TOKENS}$, $k = {REACH}$": counted(
            {"local": closed(LATEST, **sizes), f"every {STEP}rd": closed(DILATED, **sizes, D=STEP)},
            {"local": kept(Window(REACH)), f"every {STEP}rd": kept(Dilated(REACH, STEP))},
        ),
        "time, local, $N = k + m$": time("N*k*d", LATEST, "k"),
        "time, every $D$-th, $N = D k + m$": time("N*k*d", DILATED, "D*k"),
        "space of the sparse matrix": space("N*k", LATEST, "k"),
    }
    return all_of(parts).noting(f"A form that stores no weights keeps {figures.show(saved())} numbers, whatever $k$ is")


def later_keys(*, is_causal: bool) -> int:
    """The most later keys that a query attends to, apart from global tokens."""
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
    parts = {
        f"pairs of $N = {TOKENS}$, $w = {REACH}$, $g = {FIRST}$": counted(
            {"": closed(GLOBAL, **sizes)}, {"": kept(pattern, is_causal=False)}
        ),
        "time, $N = w + g + m$": time("N*w*d + N*g*d", GLOBAL, "(w + g)"),
        **either_space("N*(w + g)", GLOBAL, "(w + g)"),
        "later keys of a query": contradiction(
            ("causality is kept", later_keys(is_causal=True)),
            (f"$w = {REACH}$ positions on the left and on the right", later_keys(is_causal=False)),
        ),
    }
    return all_of(parts).noting(
        f"To connect {TOKENS} tokens takes {hops} layers both ways; causal, {causal}, and {alone} without the global "
        "tokens, which at the front see nothing but each other"
    )


def shared_keys(pattern: Pattern) -> int:
    """The fewest keys that two neighbours have in common, away from the ends of the sequence."""
    mask = pattern.mask(TOKENS)[REACH:-REACH]
    return int((mask[1:] & mask[:-1]).sum(1).min())


def away(*, is_causal: bool) -> float:
    """How far the form in parts is from the definition, relatively."""
    qkv: Tensor = normal(3, TOKENS, 8)
    options: dict[str, Any] = {"pattern": Window(REACH), "is_causal": is_causal}
    return relative_error(pattern_attention(*qkv, **options), pattern_attention_reference(*qkv, **options))


@evidence("S1.4.2a", chapter=CHAPTER)
def sliding_window() -> Parts:
    sizes = {"N": TOKENS, "w": REACH}
    return {
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


# -------------------------------------------------------------------------------- S2: strided and fixed, and the others

# Pairs of the two heads for N tokens and a stride that divides N.
NEAREST, EVERY = "(l + 1)*N - l*(l + 1)/2", "N^2/(2*l) + N/2"
STRIDE = 16
# Among the patterns that the records time: the one made of blocks, and those that read keys one by one.
BELOW = 0.99  # the largest ratio, to two digits, that shows a saving
BLOCKS, OTHERS = "block-sparse", ("dilated", "local-strided", "fixed")
# What the source's picture may mean by a token's link to its hub.
PICTURES = ("tokens read their hub", "hubs read their tokens")
EXHAUSTED = 40  # tokens up to which every length and every stride is tried


def strided_pairs(n: int, stride: int) -> int:
    """The pairs of both heads for n tokens and any stride."""
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


def to_the_hubs(n: int, stride: int, *, hubs_read: bool) -> tuple[Tensor, Tensor]:
    """The masks of the source's picture (n, n): each token reads its hub, or with `hubs_read` is read by it; then the
    hubs read each other. Every `stride`-th token is a hub: that of itself and the tokens up to the next hub."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    own, hub = i == j, (i % stride == 0) & (j % stride == 0)
    nearest = i // stride * stride == j
    return own | (nearest.T if hubs_read else nearest), own | hub


def picture_share(n: int, stride: int, *, hubs_read: bool) -> float:
    """The share of all pairs that the source's picture connects."""
    return int(reached(*to_the_hubs(n, stride, hubs_read=hubs_read)).sum()) / n**2


@evidence("S2.2.3a", chapter=CHAPTER)
def strided() -> Finding:
    l = sympy.Symbol("l", positive=True)
    forms = {"the last $l$ and its own": NEAREST, "every $l$-th": EVERY}
    masks = strided_heads(TOKENS, STRIDE)
    union = int((masks[0] | masks[1]).sum())
    at_root = sympy.expand(sum(map(sympy.sympify, (closed(NEAREST), closed(EVERY)))).subs(l, sympy.sqrt(N)))
    best = min(range(1, 4096), key=lambda stride: strided_pairs(4096, stride))
    # The second head exactly as the formula has it, which gives no order of i and j.
    later = {n: int(Strided(STRIDE).mask(n).triu(1).sum()) for n in (TOKENS // 4, TOKENS)}
    parts = {
        f"pairs with $j \\le i$, $N = {TOKENS}$, $l = {STRIDE}$": counted(
            {name: closed(form, N=TOKENS, l=STRIDE) for name, form in forms.items()},
            {name: int(mask.sum()) for name, mask in zip(forms, masks, strict=True)},
        ),
        "earlier positions that the first head reads": counted({"": STRIDE}, {"": int(masks[0][-1, :-1].sum())}),
        "the second head, as printed": mended(
            "what a token reads is its own past",
            later[TOKENS],
            {"with $j \\le i$": int(masks[1].triu(1).sum())},
            0.5,  # of a count
            at=f"$N = {TOKENS}$, $l = {STRIDE}$: pairs with $j > i$",
        ),
        "both heads, $l = \\sqrt N$": growth("N*sqrt(N)", at_root),
    }
    return all_of(parts).noting(
        f"The first head reads its own position as well, the {STRIDE + 1}th. Of {TOKENS // 4} tokens the second has "
        f"{later[TOKENS // 4]:,} pairs in the future. One head with both kinds of pairs has {union:,}. "
        f"Fewest pairs need $l \\approx \\sqrt{{N / 2}}$: of 4,096 tokens $l = {best}$"
    )


def always_missed(*, is_causal: bool) -> int:
    """Pairs that two strided layers in either order miss, over all lengths up to `EXHAUSTED` and all strides."""
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
    parts = {
        "positions that the last cell of a block sees of it": counted({"": STRIDE}, {"": int(own[last].sum(1).min())}),
        "later positions that do not see such a cell": counted({"": 0}, {"": blind}),
        "earlier positions out of reach, blocks and then cells": counted({"": 0}, {"": missed(own, cells)}),
    }
    return all_of(parts).noting(
        f"$N = {TOKENS}$, $l = {STRIDE}$, one cell a block. With the cells first, {missed(cells, own):,} of "
        f"{TOKENS * (TOKENS + 1) // 2:,} pairs are out of reach: a summary is made before it is read"
    )


@evidence("S2.2.3c", chapter=CHAPTER)
def two_layers() -> Finding:
    within = f"all $N \\le {EXHAUSTED}$ and $l \\le N$"
    shares = {way: picture_share(TOKENS, STRIDE, hubs_read=way == "hubs read their tokens") for way in PICTURES}
    parts = {
        f"pairs of {within} that two strided layers miss, causal": counted(
            {"": 0}, {"": always_missed(is_causal=True)}
        ),
        "both ways": counted({"": 0}, {"": always_missed(is_causal=False)}),
        f"pairs connected by tokens to hubs, then hubs to hubs, $N = {TOKENS}$, $l = {STRIDE}$": region(
            (100, 100), {way: round(100 * share, 1) for way, share in shares.items()}, unit=" %"
        ),
    }
    return all_of(parts).noting(
        "Two strided layers do connect all, by other steps than the source's: a stride, and then the rest of the way. "
        "From hub to hub the third step is missing, from the hub to the token that asks"
    )


def time_a_flop() -> dict[str, dict[str, float]]:
    """By device and setting, from the records: the time of a FLOP of block-sparse attention over the least time of
    patterns that are not made of blocks. On GPUs each is one kernel, made by FlexAttention: tiles that PyTorch starts
    one after the other take the time of starting them, which says nothing about blocks."""
    per_flop: dict[tuple[str, int, str], dict[str, float]] = {}
    records = experiments.load("pattern-speed")
    made = [(row, "tiles") for row in attention_rows.beside_alike(records, "patterns")]
    made += [(row, "kernel") for row in attention_rows.beside_alike(records, "compiled patterns")]
    for row, form in made:
        name, *special = (word for word in row["arm"].split() if word != "flex")
        if name in (BLOCKS, *OTHERS) and form == ("tiles" if experiments.on_cpu(row["device"]) else "kernel"):
            times = per_flop.setdefault((row["device"], row["N"], " ".join(special)), {})
            times[name] = row["ratio_alike"][1] / row["flops_alike"]
    ratios: dict[str, dict[str, float]] = {}
    for (device, length, way), times in per_flop.items():
        if times.keys() == {BLOCKS, *OTHERS}:
            least = min(times[name] for name in OTHERS)
            setting = f"$N = {length:,}${way and f', {way}'}, {device}"
            ratios.setdefault(device, {})[setting] = round(times[BLOCKS] / least, 2)
    return ratios


def friendly() -> Finding:
    """Whether a FLOP in blocks takes less time than one of other patterns, on GPUs, as the source says."""
    ratios = time_a_flop()
    on_gpus = {
        setting: ratio
        for device, at in ratios.items()
        if not experiments.on_cpu(device)
        for setting, ratio in at.items()
    }
    if not on_gpus:
        missing = {f"`{BLOCKS}` as one kernel on a GPU": None}
        found = untestable("a FLOP takes less time in blocks", missing, lack="no record times")
        others = {setting: f"{ratio:g}" for at in ratios.values() for setting, ratio in at.items()}
        return found.noting(f"On CPUs the ratio is {figures.listing(others)}") if others else found
    return region((0, BELOW), on_gpus)


@evidence("S2.2.3d", chapter=CHAPTER)
def others() -> Finding:
    rows = GlobalLocal(REACH + 1, FIRST).mask(TOKENS).sum(1)
    parts = {
        "local": time("N*w*d", EITHER_SIDE, "w"),
        "block-sparse on GPUs, time of a FLOP over the least of other patterns": friendly(),
        f"keys of a global token, $N = {TOKENS}$": counted({"": TOKENS}, {"": int(rows[:FIRST].min())}),
    }
    return all_of(parts).noting(
        f"Every other token has {int(rows[TOKENS // 2])} keys, of $w = {REACH}$ on either side and {FIRST} global"
    )


# ---------------------------------------------------------------- S4: the rule that is printed, and when it is worth it

FAR = 16  # k
# Width 16 is enough to count products, whose number is in proportion to it.
COUNTED, WIDTH = 512, 16
PATTERNS: dict[str, Pattern] = {"window of 64": Window(64), "local and dilated, $k = 16$": LocalDilated(16)}
Choice = Callable[[Tensor, Tensor], Tensor]
# Sparse attention that looks at queries and keys, each with 16 keys a query at most.
CHOSEN: dict[str, Choice] = {
    "top-k": partial(top_k_mask, num_keys=16, is_causal=True),
    "by importance of keys": partial(importance_mask, num_keys=16, is_causal=True),
}
LOCAL = "drifting"  # the input of chapter 16 in which tokens near in position are alike


@evidence("S4.1a", chapter=CHAPTER)
def printed_rule() -> Finding:
    """Local and dilated attention together, and what is left if distances above k, and the multiples of k, go."""
    patterns = LocalDilated(FAR), NeitherFarNorMultiple(FAR), Strided(FAR)
    meant, printed, multiples = (pattern.mask(TOKENS) for pattern in patterns)
    parts = {
        "self-attention": growth("N^2", MECHANISMS["softmax"].cost(1, N, 1, d, d).forward, settings=IN_N),
        "numbers of the matrix": counted({"": hardware.TOKENS**2}, {"": hardware.largest("reference")}),
        f"of $N = {TOKENS}$, $k = {FAR}$, at multiples of $k$": contradiction(
            ("dilated and local attention combined", int((meant & multiples).sum())),
            ("multiples of k set to 0", int((printed & multiples).sum())),
            unit=" pairs",
        ),
    }
    return all_of(parts).noting(
        f"Combined they have {int(meant.sum()):,} pairs. The printed rule leaves {int(printed.sum()):,}, and no token "
        "sees itself"
    )


def support(q: Tensor, k: Tensor, *, pattern: Pattern) -> Tensor:
    """Where the weights of attention by a pattern are not 0."""
    weights: Any = pattern_attention(q, k, torch.eye(len(k), dtype=q.dtype), pattern=pattern)
    return weights > 0


def depends_on_input(choose: Choice, n: int = 128) -> int:
    """In how many pairs the choices for two inputs differ."""
    first, second = normal(2, 2, n, 8)
    return int((choose(*first) != choose(*second)).sum())


def products(pattern: Pattern, form: str) -> Fraction:
    """FLOPs of the products of a form, over those of dense attention; causal."""
    q, k, v = torch.zeros(3, 1, COUNTED, WIDTH)
    run = {"mask": pattern_attention_reference, "parts": pattern_attention}[form]
    flops = flops_of(lambda *x: run(*x, pattern=pattern, is_causal=True), q, k, v)
    return Fraction(flops, flops_of(MECHANISMS["softmax"].reference, q, k, v))


def timed() -> dict[str, tuple[float, float]]:
    """Seconds of a window in parts, and as a mask for the fused attention, by device and length."""
    found = {}
    for device, lines in attention_rows.curves(experiments.load("pattern-speed"), "patterns").items():
        if {"sdpa masked", "window"} <= lines.keys():
            by_parts = {row["N"]: row["seconds"][1] for row in lines["window"]}
            for row in lines["sdpa masked"]:
                if row["N"] in by_parts:
                    found[f"$N = {row['N']:,}$ on {device}"] = by_parts[row["N"]], row["seconds"][1]
    return found


@evidence("S4.1b", chapter=CHAPTER)
def by_hand_and_made_for_it() -> Parts:
    written = {name: depends_on_input(partial(support, pattern=pattern)) for name, pattern in PATTERNS.items()}
    chosen = {name: depends_on_input(choose) for name, choose in CHOSEN.items()}
    clock = timed()
    measured = {"less time in parts than by a mask": saves("less time", clock)} if clock else {}
    return {
        "chosen by hand: kept pairs that another input changes": region((0, 0), written | chosen),
        "products under a mask, over all": counted(
            dict.fromkeys(PATTERNS, 1), {name: products(p, "mask") for name, p in PATTERNS.items()}
        ),
        "in parts": saves("fewer products", {name: (products(p, "parts"), 1) for name, p in PATTERNS.items()}),
        **measured,
    }


@evidence("S4.1c", chapter=CHAPTER)
def efficient_where_local() -> Finding:
    held = {kind: round(100 * float(inputs.held(inputs.by_window, kind).mean()), 1) for kind in inputs.INPUTS}
    width = inputs.WINDOW
    parts = {
        "fewer products": saves(
            "than dense attention", {name: (products(p, "parts"), 1) for name, p in PATTERNS.items()}
        ),
        f"softmax's weight on the last {width} keys, where near tokens are alike": region(
            (50, 100), {LOCAL: held.pop(LOCAL)}, unit=" %"
        ),
    }
    return all_of(parts).noting(
        f"Where it is elsewhere, these keys hold less: {figures.listing({kind: f'{x} %' for kind, x in held.items()})}"
    )
