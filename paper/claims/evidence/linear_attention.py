r"""Linear attention: the reordered products, their cost, feature maps, the printed formulas, and what it may lose.

S1, section 2.2; S2, sections 2.1 and 3.2; S3, sections 1 and 2; S4, on linear attention. S3 has one head, with K = d.
"""

import re
from collections.abc import Callable
from functools import cache
from math import inf, log
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

import paper
from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.efficient import efficient_attention
from ortho.attention.linear.feature_maps import CosFormer, Cosine, EluPlusOne, Exp, FeatureMap, Powers, Relu, Taylor
from ortho.attention.linear.linear_attention import kernel_weights, linear_attention_reference
from ortho.cost import layer
from ortho.cost.big_o import H, N, d, m
from ortho.theory import associativity, kernels
from ortho.theory.associativity import Matrix, left_first, product, product_flops, right_first
from paper import experiments, memory
from paper.claims.evidence import hardware
from paper.claims.evidence.combinations import KERNELS
from paper.claims.evidence.layer import softmax
from paper.claims.figures import show
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, contradiction, counted, growth, holds, improves, mended, region, untestable
from paper.claims.shared import lookup
from paper.claims.shared.common import (
    EXACT,
    IN_N,
    SOME,
    mean_interval,
    normal,
    orders,
    relative_error,
    saves,
    seeded,
    without_records,
)
from paper.claims.verdicts import Finding, Parts
from paper.experiments.learning import images
from paper.experiments.speed import attention_analysis as attention_rows
from paper.experiments.speed.analysis import Row

CHAPTER = "07-linear-attention"

TOKENS, WIDTH = 64, 16
HEAD = MECHANISMS["linear"].cost(1, N, 1, d, d)
SOFTMAX = MECHANISMS["softmax"].cost(1, N, 1, d, d, form="reference")
SOFTMAX_OF_HEADS = MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference")
LINEAR_OF_HEADS = MECHANISMS["linear"].cost(1, N, H, d / H, d / H)
PRODUCTS = associativity.flops(N, d, N, d)  # of (Q K^T) V and of Q (K^T V)


@cache
def kept(width: sympy.Expr = d) -> sympy.Expr:
    """Numbers that a head of linear attention of this width keeps for the backward pass, with its output."""
    found = memory.kept_by_call(lambda q, k, v, _: MECHANISMS["linear"].fast(q, k, v), N * d, N, d**2, d)
    return sympy.expand(found.subs(d, width))


NARROW = 64  # d, where lengths are compared with it

# ----------------------------------------------------------------------------------------------- the reordered products


def reordering(features: Callable[[Tensor], Tensor] = lambda x: x) -> associativity.Reordering:
    """How far the two orders are apart for normal tokens in float64."""
    q, k, v = normal(3, TOKENS, WIDTH)
    return associativity.reorder(features(q), features(k).mT, v)


def doubling(cost: Any) -> Any:
    """The factor by which a closed form in N grows if the length doubles."""
    return sympy.factor(sympy.cancel(cost.subs(N, 2 * N) / cost))


# What the source prints of its example with v = (a, b), k = (c, d), q = (e, f).
EXAMPLE = {
    "$k^\\top q$": ("c*e + d*f",),
    "$v\\, (k^\\top q)$": ("a*(c*e + d*f)", "b*(c*e + d*f)"),
    "$v k^\\top$": ("a*c", "a*d", "b*c", "b*d"),
    "$(v k^\\top)\\, q$": ("a*(c*e + d*f)", "b*(c*e + d*f)"),
}


def worked_example(*numbers: Any) -> dict[str, tuple[Any, ...]]:
    """The entries of the four results for these six numbers a to f, by default for the letters."""
    values = numbers or sympy.symbols("a:f", positive=True)
    v, k, q = (tuple((x,) for x in values[i : i + 2]) for i in (0, 2, 4))
    row = associativity.transpose(k)
    found = (product(row, q), right_first(v, row, q), product(v, row), left_first(v, row, q))
    return {name: tuple(x for r in matrix for x in r) for name, matrix in zip(EXAMPLE, found, strict=True)}


def numbered(entries: tuple[Any, ...]) -> dict[str, Any]:
    """Entries by their number, for the rule; a single one without."""
    return {f"({i})" if len(entries) > 1 else "": entry for i, entry in enumerate(entries, 1)}


def differing(one: Callable[..., Matrix], other: Callable[..., Matrix], *, tokens: int = 12, width: int = 4) -> int:
    """Entries in which two ways of computing causal outputs differ, on random fractions."""
    g = seeded()
    operands = [associativity.rational(tokens, width, generator=g) for _ in "qkv"]
    pairs = zip(one(*operands), other(*operands), strict=True)
    return sum(x != y for rows in pairs for x, y in zip(*rows, strict=True))


LONGER = (4, 16, 64)  # times the width: where the source has d << N


def fewer(times: int) -> float:
    """Per cent of the FLOPs of (phi(Q) phi(K)^T) V that phi(Q) (phi(K)^T V) saves, for N = `times` d, H = 1."""
    return round(float(100 * (1 - PRODUCTS.right / PRODUCTS.left).subs(N, times * d)), 1)


@evidence("S2.2.1a", chapter=CHAPTER)
def reordered() -> Finding:
    found = reordering(EluPlusOne().function)
    left, right = SOFTMAX_OF_HEADS, LINEAR_OF_HEADS
    parts = {
        "value": holds(
            "$(\\phi(Q) \\phi(K)^\\top) V = \\phi(Q) (\\phi(K)^\\top V)$",
            found.difference,
            found.bound,
            at=f"{TOKENS} normal tokens of width {WIDTH}",
        ),
        **orders(
            {
                "from the left": ("N^2*d", left.forward),
                "from the right": ("N*d^2", right.forward),
                "stored in place of the weights": ("d^2", sympy.expand(right.state_bytes / 4)),
            }
        ),
        "FLOPs saved where $d \\ll N$": improves(
            "more efficient", {f"$N = {times} d$": fewer(times) for times in LONGER}, unit=" %"
        ),
    }
    return all_of(parts).noting(
        f"Heads are $d / H$ wide. With one head as wide as the layer the right order takes {show(HEAD.forward)} FLOPs "
        f"and stores {show(sympy.expand(HEAD.state_bytes / 4))} numbers. For a backward pass more is kept, "
        f"{show(kept())} numbers"
    )


def undivided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output as it is printed, phi(Q) phi(K)^T V, with the source's first map."""
    return kernel_weights(EluPlusOne(), q, k) @ v


@evidence("S2.2.1c", chapter=CHAPTER)
def without_normaliser() -> Finding:
    q, k, v = normal(3, TOKENS, WIDTH)
    exact = linear_attention_reference(q, k, v, feature_map=EluPlusOne())
    printed, sums = undivided(q, k, v), undivided(q, k, torch.ones_like(v))
    ones = [f"{float(x):.0f}" for x in sums.aminmax()]
    return mended(
        "$\\phi(Q) \\phi(K)^\\top V$ is linear attention",
        relative_error(printed, exact),
        {"divided by its row sums, $\\phi(Q)\\, \\phi(K)^\\top \\mathbf{1}$": relative_error(printed / sums, exact)},
        EXACT,
        at=f"{TOKENS} normal tokens of width {WIDTH}",
    ).noting(f"As printed, values of 1 become outputs from {ones[0]} to {ones[1]}. Section 3.2.4 has the division")


@evidence("S3.1a", chapter=CHAPTER)
def two_products() -> Finding:
    both = sympy.expand(H * associativity.flops(N, d / H, N, d / H).right)
    rows = {
        "$K^\\top V$": ("N*d^2", H * product_flops(d / H, N, d / H)),
        "$Q (K^\\top V)$": ("N*d^2", H * product_flops(N, d / H, d / H)),
        "both": ("N*d^2", both),
        "in $N$": ("N", both, "d", "H"),
    }
    return all_of(orders(rows)).noting(
        f"Heads are $d / H$ wide. With one head as wide as the layer the two take {show(PRODUCTS.right)}; the four "
        f"projections around them take {show(8 * N * d**2)}"
    )


def entry_operations(length: int) -> dict[str, int]:
    """Multiplications and additions of an inner product of this length."""
    one, other = (sympy.symbols(f"{name}:{length}") for name in "ab")
    ((entry,),) = product((one,), associativity.transpose((other,)))
    operations = sympy.count_ops(entry, visual=True)
    counts = {"multiplications": "MUL", "additions": "ADD"}
    return {name: int(operations.coeff(sympy.Symbol(symbol))) for name, symbol in counts.items()}


@evidence("S3.1c", chapter=CHAPTER)
def entries_of_the_products() -> Finding:
    q, k, v = normal(3, TOKENS, WIDTH)
    P = k.mT @ v
    by_tokens = {"multiplications": TOKENS, "additions": TOKENS - 1}
    by_width = {"multiplications": WIDTH, "additions": WIDTH - 1}
    parts = {
        "numbers in": counted(
            {"a column of $K$": TOKENS, "a row of $V$": TOKENS, "a row of $Q$": WIDTH, "a column of $P$": WIDTH},
            {
                "a column of $K$": k[:, 0].numel(),
                "a row of $V$": v[0].numel(),
                "a row of $Q$": q[0].numel(),
                "a column of $P$": P[:, 0].numel(),
            },
        ),
        "for an entry of $P$": counted(by_tokens, entry_operations(k[:, 0].numel())),
        "for an entry of $Q P$": counted(by_width, entry_operations(q[0].numel())),
        "entries": counted({"$P$": WIDTH**2, "$Q P$": TOKENS * WIDTH}, {"$P$": P.numel(), "$Q P$": (q @ P).numel()}),
    }
    return all_of(parts).noting(
        f"$n = {TOKENS}$, $d = {WIDTH}$. An entry of $P$ is the inner product of a column of $K$ and a column of $V$"
    )


@evidence("S3.1d", chapter=CHAPTER)
def standard_steps() -> Parts:
    return orders(
        {
            "$Q K^\\top$": ("N^2*d", product_flops(N, d, N)),
            "softmax": ("N^2", softmax()),
            "$A' V$": ("N^2*d", product_flops(N, N, d)),
            "both products": ("N^2*d", SOFTMAX.forward),
            "in $N$": ("N^2", SOFTMAX.forward, "d"),
        }
    )


def multiplied(scores: Tensor, mask: Tensor) -> Tensor:
    """The source's $A \\odot M$."""
    return scores * mask


@evidence("S3.1e", chapter=CHAPTER)
def multiplied_mask() -> Finding:
    q, k, _ = normal(3, TOKENS, WIDTH) / WIDTH**0.25  # scores of standard deviation 1
    mask = torch.ones(TOKENS, TOKENS, dtype=q.dtype).tril()
    left = float((multiplied(q @ k.mT, mask).softmax(-1) * (1 - mask)).sum(-1).mean())
    return holds("a key that the mask hides has no weight", left, EXACT, at=f"{TOKENS} normal tokens, causal").noting(
        f"A score of 0 is a score like others, with the weight $e^0 = 1$ before the division: {100 * left:.0f} % of "
        "all weight lies on hidden keys. A mask is added, as $-\\infty$"
    )


@evidence("S3.1f", chapter=CHAPTER)
def stored_matrix() -> Finding:
    # A column of ones beside the values, whose sums divide the rows, makes the widest tensor.
    pairs, widest = hardware.TOKENS**2, hardware.TOKENS * (hardware.WIDTH + 1)
    linear = hardware.largest_tensor(MECHANISMS["linear"].fast)
    parts = {
        "softmax attention must compute a score of each pair": growth("N^2*d", SOFTMAX.forward),
        "and store them: numbers of the largest tensor": region((pairs, inf), {"in tiles": hardware.largest("tiles")}),
        "linear attention, numbers of the largest tensor": region((0, widest), {"the form from the right": linear}),
    }
    return all_of(parts).noting(
        f"$n = {hardware.TOKENS:,}$, $d = {hardware.WIDTH}$, forward and backward. The definition of softmax attention "
        f"makes a tensor of {hardware.largest('reference'):,} numbers; tiles give the same outputs"
    )


@evidence("S3.1b", chapter=CHAPTER)
def twice_the_length() -> Finding:
    layers = {name: layer(1, N, d, H, attention=name).forward for name in ("softmax", "linear")}
    return counted(
        {"standard": 4, "linear": 2}, {"standard": doubling(SOFTMAX.forward), "linear": doubling(HEAD.forward)}
    ).noting(
        f"These are the products of the attention itself. With the projections a standard layer becomes "
        f"{show(doubling(layers['softmax']))} times as costly, between 2 for short sequences and 4 for long ones, "
        f"a linear one {show(doubling(layers['linear']))} times"
    )


@evidence("S3.2a", chapter=CHAPTER)
def same_outputs() -> Finding:
    found = reordering()
    parts = {
        **{name: counted(numbered(EXAMPLE[name]), numbered(entries)) for name, entries in worked_example().items()},
        "outputs that differ, in fractions": counted(
            {"": 0}, {"": differing(associativity.by_sums, associativity.by_states)}
        ),
    }
    return all_of(parts).noting(
        f"In floating point the two orders are {'not ' if found.changed else ''}the same numbers; in float64 they are "
        f"within {show(float(f'{found.bound:.0e}'))} of each other, relatively, at {TOKENS} tokens of width {WIDTH}"
    )


@evidence("S3.2b", chapter=CHAPTER)
def recurrence() -> Finding:
    first = sympy.solve(MECHANISMS["softmax"].cost(1, N, 1, d, d).decode - HEAD.decode, N)[0]
    parts = {
        "outputs that differ from the sums, in fractions": counted(
            {"": 0}, {"": differing(associativity.by_sums, associativity.by_states)}
        ),
        **orders(
            {
                "a step": ("d^2", HEAD.decode),
                "in all": ("N*d^2", N * HEAD.decode),
                "numbers kept, in $t$": ("1", HEAD.state_bytes / 4, "d"),
            }
        ),
    }
    return all_of(parts).noting(f"A step takes fewer FLOPs than one of softmax attention from $t >$ {show(first)} on")


def lower(left: Any, right: Any, *lengths: int) -> dict[str, tuple[int, int]]:
    """The second closed form beside the first, at these lengths and the width `NARROW`."""
    sizes = ({N: length, d: NARROW} for length in lengths)
    return {f"{at[N]:,} tokens": (int(right.subs(at)), int(left.subs(at))) for at in sizes}


@evidence("S3.2c", chapter=CHAPTER)
def fewer_steps() -> Parts:
    by_sum = product_flops(1, d, N) + product_flops(1, N, d)  # N is t: as many keys, and as many values
    state = HEAD.decode
    at = NARROW // 2, NARROW, 2 * NARROW, 16 * NARROW
    return {
        **orders({"by the sum": ("N*d", by_sum), "by the state": ("d^2", state)}),
        f"for one token, $d = {NARROW}$": saves("fewer FLOPs by the state", lower(by_sum, state, *at)),
        f"for all tokens, $d = {NARROW}$": saves("fewer FLOPs than $O(n^2 d)$", lower(SOFTMAX.forward, N * state, *at)),
    }


# --------------------------------------------------------------------------------------------------------- feature maps


def weights(feature_map: FeatureMap, size: float = 1.0) -> Tensor:
    """A map's weights for all pairs of tokens (N, N), not divided; tokens are normal with standard deviation `size`."""
    return kernel_weights(feature_map, *(size * normal(2, TOKENS, WIDTH)))


def negative(feature_map: FeatureMap, size: float) -> float:
    """The share of these weights that is below 0, in per cent."""
    return 100 * float((weights(feature_map, size) < 0).double().mean())


# Queries and keys of two pairs, each with the score 1.
SAME_SCORE = (torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def of_same_score(feature_map: FeatureMap) -> tuple[float, float]:
    """The weights of the two pairs of `SAME_SCORE`."""
    first, second = kernel_weights(feature_map, *(x[:, None] for x in SAME_SCORE)).flatten().tolist()
    return first, second


@evidence("S2.2.1b", chapter=CHAPTER)
def feature_maps() -> Finding:
    x = normal(1000)
    elu = (EluPlusOne().function(x) - (torch.nn.functional.elu(x) + 1)).abs().max()
    outer, entrywise = of_same_score(Taylor(2)), of_same_score(Powers(2))
    below = negative(Cosine(), 2), negative(CosFormer(TOKENS), 2)
    cosine, qin = (w / w.sum(-1, keepdim=True) for w in (weights(Cosine()), weights(CosFormer(TOKENS))))
    parts = {
        "elu": holds("$\\operatorname{elu}(x) + 1$ as it is defined", float(elu), EXACT),
        "cosine": holds(
            "$\\cos(x)$ gives the weights of Qin et al. (2022)",
            relative_error(cosine, qin),
            EXACT,
            at=f"{TOKENS} normal tokens",
        ),
        "powers": region(
            (0, EXACT),
            {
                "of each entry": abs(entrywise[0] - entrywise[1]),
                "as outer products": abs(outer[0] - outer[1]),
            },
        ),
    }
    return all_of(parts).noting(
        f"For entries of standard deviation 2, {below[0]:.0f} % of the weights of $\\cos(x)$ are negative, of "
        f"cosFormer's {below[1]:.0f} %. Of powers: how far apart the weights of two pairs of the same score are. A "
        f"polynomial kernel is a function of $q^\\top k$; powers of each entry give the pairs the weights "
        f"{show(entrywise[0])} and {show(entrywise[1])}"
    )


POINTS = 40


@evidence("S2.3.2a", chapter=CHAPTER)
def inner_products() -> Finding:
    points = normal(POINTS, 4)
    matrices = [kernels.gram(kernel, points) for kernel in kernels.KERNELS.values()]
    features = map(kernels.features_of, matrices)
    off = max(float((phi @ phi.T - matrix).abs().max()) for phi, matrix in zip(features, matrices, strict=True))
    rank = kernels.rank(kernels.gram(kernels.KERNELS["softmax"], points), 4)
    without = kernels.least_eigenvalue(kernels.gram(kernels.INDEFINITE["ReLU"], points))
    return holds(
        "$\\kappa(x, y) = \\phi(x)^\\top \\phi(y)$",
        off,
        kernels.rounding(POINTS, POINTS),
        at=f"{len(kernels.KERNELS)} kernels on {POINTS} points",
    ).noting(
        f"The features may be infinitely many: $e^{{x^\\top y}}$ needs {rank} on these {POINTS} points. A kernel that "
        f"is not positive semi-definite has none: ReLU of the score has an eigenvalue of {without:.1f} there"
    )


@evidence("S2.3.2b", chapter=CHAPTER)
def normalised() -> Finding:
    q, k, v = normal(3, TOKENS, WIDTH)
    weights = (q @ k.T).exp()
    D = weights.sum(-1).diag()
    return holds(
        "$\\operatorname{softmax}(Q K^\\top) V = D^{-1} \\exp(Q K^\\top) V$, $D$ the row sums",
        relative_error(D.inverse() @ weights @ v, softmax_attention_reference(q, k, v, scale=1.0)),
        EXACT,
        at=f"{TOKENS} normal tokens of width {WIDTH}",
    ).noting(
        f"As written the exponentials overflow beyond scores of {log(torch.finfo(torch.float32).max):.1f} in float32"
    )


@evidence("S2.3.2c", chapter=CHAPTER)
def by_sums() -> Finding:
    linear, favor = (MECHANISMS[name] for name in ("linear", "favor"))
    qkv = normal(3, TOKENS, WIDTH)
    plain, mapped = linear.cost(1, N, 1, d, d, m=m), favor.cost(1, N, H, d / H, d / H, m=m)
    parts = {
        "value": holds(
            "$O_i = \\phi(q_i)^\\top S / \\phi(q_i)^\\top z$",
            relative_error(linear.fast(*qkv), linear.reference(*qkv)),
            EXACT,
            at=f"{TOKENS} normal tokens",
        ),
        "numbers, one head": counted({"$S$ and $z$": "m*d + m"}, {"$S$ and $z$": sympy.expand(plain.state_bytes / 4)}),
        **orders({"all queries": ("N*m*d", mapped.forward), "one more": ("m*d", mapped.decode)}),
    }
    return all_of(parts).noting(f"With random features made as well; $S$ alone takes {show(product_flops(m, N, d))}")


# ---------------------------------------------------------------------------------------------- S2's list of references

# Title, venue and year, by the source.
CITED = "Efficient Attention: A Study of Linear Time Transformers", "ICLR", "2021"


def entry(key: str, field: str) -> str:
    """A field of an entry of the book's bibliography."""
    text = (Path(paper.__file__).parents[1] / "book" / "references.bib").read_text(encoding="utf-8")
    found = re.search(rf"@\w+{{{key},.*?^\s*{field}\s*=\s*{{(.*?)}},?$", text, flags=re.DOTALL | re.MULTILINE)
    assert found, f"{key}: no {field} in the bibliography"
    return found[1]


@evidence("S2.6a", chapter=CHAPTER)
def reference() -> Finding:
    title, venue, year = CITED
    published = {name: entry("shen2021efficient", name) for name in ("title", "booktitle", "year")}
    words = title.split()
    kept = sum(word in published["title"].split() for word in words)
    parts = {
        "words of the title": counted({"": len(words)}, {"": kept}),
        "the venue's name in the proceedings'": counted(
            {venue: 1}, {venue: int("Learning Representations" in published["booktitle"])}
        ),
        "the year of publication": counted({year: 1}, {year: int(year == published["year"])}),
    }
    return all_of(parts).noting(f'Published as "{published["title"]}", {published["booktitle"]}, {published["year"]}')


# ------------------------------------------------------------------------------- S1's formula, and what a head may lose

MAPS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {"ReLU": (Relu(), torch.relu), "exp": (Exp(), torch.exp)}
# What the sum under Q (K^T V) can be over, for features k (N, K), and what it then divides.
READINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "everything": lambda q, k, v: q @ (k.mT @ v) / k.sum(),
    "positions, dividing the outputs' columns": lambda q, k, v: q @ (k.mT @ v) / k.sum(-2),
    "positions, dividing features": lambda q, k, v: q @ (k.mT @ v / k.sum(-2)[:, None]),
}
# With the query beside the sum of the keys.
FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    **READINGS,
    "by queries": lambda q, k, v: q @ (k.mT @ v) / (q @ k.sum(-2))[:, None],
}


def operands(tokens: int = 64, width: int = 8) -> Tensor:
    """Normal q, k and v, together (3, N, K), float64."""
    return normal(3, tokens, width)


def away(formula: str) -> float:
    """How far one of `FORMULAS` is from linear attention, relatively, with the better of the source's two maps."""
    q, k, v = operands()
    return min(
        relative_error(FORMULAS[formula](of(q), of(k), v), linear_attention_reference(q, k, v, feature_map=feature_map))
        for feature_map, of in MAPS.values()
    )


def ones_become(reading: str) -> tuple[float, float]:
    """The least and the greatest output of the printed formula, with ReLU, for values that are all 1."""
    q, k, v = operands()
    low, high = READINGS[reading](q.relu(), k.relu(), torch.ones_like(v)).aminmax()
    return float(low), float(high)


@evidence("S1.2.2a", chapter=CHAPTER)
def printed_formula() -> Finding:
    nearest = min(READINGS, key=away)
    low, high = ones_become(nearest)
    core = MECHANISMS["linear"].cost(1, N, H, d / H, d / H)
    parts = {
        "value": mended(
            "$Q (K^\\top V) / \\sum(K^\\top)$ is linear attention",
            away(nearest),
            {"with what divides row $i$ made of its query, $\\phi(q_i)^\\top \\sum_j \\phi(k_j)$": away("by queries")},
            EXACT,
            at=f"normal tokens, with the sum over {nearest}",
        ),
        "time": growth("N*d^2", sympy.expand(core.forward)),
        "space": growth("N*d", sympy.expand(kept(d / H) * H), settings=IN_N),
    }
    return all_of(parts).noting(
        f"As printed, values of 1 become outputs from {low:.1f} to {high:.1f}; the other readings are further off"
    )


FEATURES = lookup.D_MODEL // lookup.HEADS
NEAR, FAR = FEATURES - 1, (15, 31, 63)  # tokens


@evidence("S1.2.2b", chapter=CHAPTER)
def power_lost() -> Finding:
    looked_up = 100 * lookup.low_rank_error(lookup.ENTRIES, FEATURES)
    copied = {f"{r} tokens back": 100 * kernels.least_error(r, FEATURES) for r in FAR}
    built = kernels.copying(kernels.tokens(NEAR, 20), NEAR, FEATURES)  # a head that copies from there
    nothing = kernels.copy_error(kernels.causal_weights(*built), NEAR) <= lookup.SOLVED
    parts = {
        "modelling power": region(SOME, {f"a lookup among {lookup.ENTRIES} entries": looked_up}, unit=" %"),
        "long range": region(SOME, copied, unit=" %"),
    }
    return all_of(parts).noting(
        f"These are the least shares of the target that a head with {FEATURES} features misses, whatever its weights. "
        f"Up to {NEAR} tokens back it {'need not' if nothing else 'must'} miss any"
    )


# ---------------------------------------------------------------------------------------------------- S4's printed code


def heads_of_8(tokens: int = 32) -> tuple[Tensor, ...]:
    """Normal q, k and v, each (1, N, 8)."""
    return normal(3, 1, tokens, 8).unbind()


def printed_code(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None, *, axes: str = "b") -> Tensor:
    """The source's function: q, k, v (B, N, K), kv_mask (B, N).

    Its mask is made for (B, H, N, K), its products for (B, N, K). With `axes` "bh" the products fit the mask.
    """
    if kv_mask is not None:
        lowest = -torch.finfo(q.dtype).max
        k = k.masked_fill(kv_mask[:, None, :, None] == 0, lowest)
    kv = torch.einsum(f"{axes}nd,{axes}ne->{axes}de", k, v)
    q = torch.softmax(q, dim=-1)
    return torch.einsum(f"{axes}nd,{axes}de->{axes}ne", q, kv)


class Printed(NamedTuple):
    """What the printed code does: whether it runs with a mask; without one, how far row sums are from 1, and how many
    weights are negative; with one, how far masking is from leaving the keys out, as printed and with the missing
    softmax."""

    runs: bool
    sums_off: float
    negative: int
    masked: float
    with_softmax: float


def run_printed_code(hidden: int = 8) -> Printed:
    """The printed code on normal tokens, the last `hidden` of which are padding."""
    q, k, v = heads_of_8()
    tokens = k.shape[1]
    mask = (torch.arange(tokens) < tokens - hidden)[None]
    try:
        printed_code(q, k, v, mask)
        runs = True
    except RuntimeError:
        runs = False
    weights = printed_code(q, k, torch.eye(tokens, dtype=q.dtype)[None])
    q, k, v = (x[:, None] for x in (q, k, v))  # one head
    short = [x[..., :-hidden, :] for x in (k, v)]
    return Printed(
        runs=runs,
        sums_off=float((weights.sum(-1) - 1).abs().max()),
        negative=int((weights < 0).sum()),
        masked=_difference(printed_code(q, k, v, mask, axes="bh"), printed_code(q, *short, axes="bh")),
        with_softmax=_difference(
            efficient_attention(q, k, v, attn_mask=mask[:, None, None]), efficient_attention(q, *short)
        ),
    )


@evidence("S4.2a", chapter=CHAPTER)
def without_softmax() -> Parts:
    lengths = NARROW // 4, NARROW, 4 * NARROW, 64 * NARROW
    return {
        **orders({"with softmax": ("N^2*d", PRODUCTS.left), "without": ("N*d^2", LINEAR_OF_HEADS.forward)}),
        f"lower, $d = {NARROW}$": saves("fewer FLOPs without", lower(PRODUCTS.left, HEAD.forward, *lengths)),
        "weights below 0": contradiction(
            ("non-negative activations in place of softmax", 0),
            ("q = torch.softmax(q, dim=-1), and k as it is", run_printed_code().negative),
        ),
    }


def _difference(one: Any, other: Any) -> float:
    """The relative difference; infinite if it is not a number."""
    found = relative_error(one, other)
    return found if found < inf else inf


@evidence("S4.2b", chapter=CHAPTER)
def linear_attn() -> Finding:
    found = run_printed_code()
    parts = {
        "without a mask": counted({"weights below 0": 0}, {"weights below 0": found.negative}),
        "their row sums": holds("1, as with softmax", found.sums_off, EXACT),
        "with a mask": holds("a hidden key is as good as absent", found.masked, EXACT),
    }
    return all_of(parts).noting(
        f"As printed the call with a mask {'runs' if found.runs else 'fails'}: the mask has one axis more than the "
        "products; here they have it too. With softmax over positions for the keys, as Shen et al. (2021) have it, "
        "all three hold"
    )


# ------------------------------------------------------------------------------------------------ S4: where it is used

CHANCE = 0.1  # of ten digits


@evidence("S4.2c", chapter=CHAPTER)
def on_images() -> Finding:
    records, gains = experiments.load("images"), {}
    for device in experiments.by_device(records):
        for arm, runs in images.by_arm(records, device).items():
            if arm in KERNELS:
                right = torch.tensor(runs.values["correct"], dtype=torch.float64)
                gains[f"{arm} on {device}"] = mean_interval(100 * (right - CHANCE))
    if not gains:
        return without_records("images are classified", "kernels on images")
    return improves("images are classified by such attention better than by chance", gains, unit=" % of the digits")


# ---------------------------------------------------------------------------- S4: without matrix products, by the clock

# Linear attention is run as its recurrence, one step per token, in the same library as the standard attention, which is
# fused and sees the same keys. "Can be slower" needs one setting where it is: the slowest on each device.
SLOW, IN_CHUNKS = "linear recurrent", "linear causal"


def slowest() -> dict[str, tuple[Row, Row]]:
    """By device the recurrence where its ratio to standard attention is largest, and the form in chunks there."""
    found = {}
    for device, curves in attention_rows.curves(experiments.load("attention-speed"), "recurrent").items():
        if {SLOW, IN_CHUNKS} <= curves.keys():
            pairs = [(row, other) for row in curves[SLOW] for other in curves[IN_CHUNKS] if row["N"] == other["N"]]
            found[device] = max(pairs, key=lambda pair: float(pair[0]["ratio_alike"][1]))
    return found


@evidence("S4.3a", chapter=CHAPTER)
def without_matrix_products() -> Finding:
    pairs = slowest()
    if not pairs:
        return untestable("slower than the standard attention", {f"`{SLOW}`": None}, lack="no record times")
    ratios, against = {}, []
    for device, (row, other) in pairs.items():
        ratios[f"$N = {row['N']:,}$ on {device}"] = round(row["ratio_alike"][1], 2)
        against.append(f"{row['seconds'][1] / other['seconds'][1]:.0f} times as long on {device}")
    return region((1, inf), ratios).noting(
        "Time of linear attention, a step a token, over that of fused softmax attention, both causal, forward and "
        f"backward. Against the same in chunks of matrix products it takes {', '.join(against)}"
    )
