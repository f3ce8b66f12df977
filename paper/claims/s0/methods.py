r"""S0, sections 3.1, 3.2 and 5.2b: the methods compared, by what they cost and by what they can do."""

from collections.abc import Sequence
from functools import cache
from math import sqrt
from typing import Any

import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.linear_attention import linear_attention
from ortho.attention.linear.random_features import orthogonal_features
from ortho.cost import layer, synthesizer
from ortho.cost.big_o import H, N, d, m
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.synthesizer import Random, SynthesizerAttention
from paper.claims.figures import show
from paper.claims.ledger import evidence
from paper.claims.rules import CONFIGURATION, all_of, counted, growth, holds, region, untestable
from paper.claims.s0 import lookup
from paper.claims.s0.ora import LEANEST
from paper.claims.s0.rows import COSTS, NAMES, SOURCE, kept
from paper.claims.verdicts import Finding

CHAPTER = "03-the-methods-compared"
SOME = (1, 100)  # per cent: where the source says that there is a loss or a gain, but not how large it is
# Two float64 computations of sums of some 1e3 terms in different orders, magnified by the exponentials of scores.
EXACT = 1e-10
K = sympy.Symbol("K", positive=True)  # d / H


def _row(name: str, **instead: Finding) -> Finding:
    time, space, trained, backward = SOURCE[name]
    cost = COSTS[name]
    settings = (*CONFIGURATION, "m")  # the number of features is chosen once, as the number of heads is
    parts = {
        "time": growth(time, sympy.expand(cost.forward), settings=settings),
        "space": growth(space, kept(name), settings=settings),
        "trained": counted({"": trained}, {"": cost.trained}),
        "backward": growth(backward, sympy.expand(cost.backward), settings=settings),
    }
    return all_of({**parts, **instead})


@evidence("S0.3.1a", chapter=CHAPTER)
def standard_row() -> Finding:
    return _row("learned")


@evidence("S0.3.1b", chapter=CHAPTER)
def synthesizer_row() -> Finding:
    random = synthesizer(1, N, d, H, source="fixed-random")
    both = {"learned": COSTS["synthesizer"].trained, "random": random.trained}
    return _row("synthesizer", trained=counted(dict.fromkeys(both, SOURCE["synthesizer"][2]), both))


@evidence("S0.3.1c", chapter=CHAPTER)
def performer_row() -> Finding:
    leading = sympy.expand(COSTS["favor"].forward).coeff(m).coeff(d) * d  # of m
    return _row("favor").noting(
        f"With the order of $m$ that its authors' theorem 4 asks for, $K \\log K$, the term of $m$ grows like "
        f"{show(leading / 8 * K * sympy.log(K))}, not $N d \\log d$"
    )


@evidence("S0.3.1d", chapter=CHAPTER)
def linear_row() -> Finding:
    # The state, d^2/H numbers, is K d: the width of a head is the setting here, and the number of heads grows with d.
    state = growth(SOURCE["linear"][1], sympy.expand(kept("linear").subs(H, d / K)), settings=(*CONFIGURATION, "K"))
    fused = layer(1, N, d, H)
    return _row("linear", space=state).noting(
        f"The standard layer with a fused kernel keeps {show(sympy.expand(fused.saved_bytes / fused.itemsize))}"
    )


@evidence("S0.3.1e", chapter=CHAPTER)
def ora_row() -> Finding:
    return _row("frozen", backward=growth(SOURCE["frozen"][3], LEANEST.backward)).noting(
        f"This backward pass is the least of any variant's; that of ORA as it is defined takes "
        f"{show(COSTS['frozen'].backward)}"
    )


def moved_logits(length: int = 8, d_model: int = 16, heads: int = 2) -> tuple[int, int]:
    """(entries of the attention logits that a step of training changes, entries) of a learned Synthesizer."""
    g = torch.Generator().manual_seed(0)
    random = Random(d_model, heads, length, generator=g, dtype=torch.float64)
    module = SynthesizerAttention(d_model, heads, length, source=random, generator=g, dtype=torch.float64)
    before = random.matrix.detach().clone()
    module(torch.randn(2, length, d_model, generator=g, dtype=torch.float64)).square().sum().backward()
    torch.optim.AdamW(module.parameters()).step()
    return int((random.matrix != before).sum()), before.numel()


@evidence("S0.3.2a", chapter=CHAPTER)
def synthesizer_properties() -> Finding:
    moved, entries = moved_logits()
    embedding = lookup.apart()
    data = lookup.sequences(embedding)
    solved = lookup.error(lookup.standard_solution(embedding)(data.x), data.target)
    lost = 100 * (lookup.fixed_weights_error(lookup.ENTRIES) - solved)
    products = COSTS["synthesizer"].forward.coeff(d, 2) / (2 * N)
    return all_of(
        {
            "products with a $d \\times d$ matrix, of the standard layer's 4": counted({"": 2}, {"": products}),
            "logits that a training step changes": counted({"": entries}, {"": moved}),
            "expressiveness lost": region(
                SOME, {f"lookup of {lookup.ENTRIES} entries, share of the target": round(lost, 1)}, unit=" %"
            ),
        }
    )


FAVOR_LENGTH, FAVOR_WIDTH, FAVOR_DRAWS = 128, 64, 5
FAVOR_COUNTS = tuple(2**i for i in range(5, 13))


@cache
def _scores(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, softmax weights) with normal q and k, whose scores have this standard deviation."""
    g = torch.Generator().manual_seed(0)
    shape = (2, FAVOR_LENGTH, FAVOR_WIDTH)
    q, k = sqrt(spread) * torch.randn(shape, generator=g, dtype=torch.float64)
    exact: Any = softmax_attention_reference(q, k, torch.eye(FAVOR_LENGTH, dtype=torch.float64))
    return q, k, exact


def misplaced(weights: Tensor, exact: Tensor) -> float:
    """The share of a row's weight, in per cent, that lies elsewhere than in the exact row; the mean over rows."""
    return 50 * float((weights - exact).abs().sum(-1).mean())


def uniform_misplaced(spread: float) -> float:
    """`misplaced` of equal weights, which ask nothing of q and k."""
    exact = _scores(spread)[2]
    return misplaced(torch.full_like(exact, 1 / exact.shape[-1]), exact)


@cache
def _favor_rows(count: int) -> tuple[Tensor, ...]:
    """Some draws of that many rows; not from the generator of q and k, to which the rows would be parallel."""
    generators = (torch.Generator().manual_seed(1000 + draw) for draw in range(FAVOR_DRAWS))
    return tuple(orthogonal_features(count, FAVOR_WIDTH, generator=g, dtype=torch.float64) for g in generators)


@cache
def favor_misplaced(spread: float, count: int) -> Sequence[float]:
    """`misplaced` of FAVOR+ with that many features, for some draws of them, in rising order."""
    q, k, exact = _scores(spread)
    values = torch.eye(FAVOR_LENGTH, dtype=torch.float64)  # so that the outputs are the weights
    found = []
    for omega in _favor_rows(count):
        weights: Any = linear_attention(q, k, values, feature_map=PositiveFeatures(omega))
        found.append(misplaced(weights, exact))
    return sorted(found)


@evidence("S0.3.2b", chapter=CHAPTER)
def performer_properties() -> Finding:
    spread, few, many = 0.25, 64, 1024
    core = MECHANISMS["favor"].cost(1, N, H, d / H, d / H, m=m)
    worst, best = favor_misplaced(spread, many)[-1], favor_misplaced(spread, few)[0]
    at = f"scores of standard deviation {spread:g}, $K = {FAVOR_WIDTH}$"
    return all_of(
        {
            f"weight misplaced at {at}": region(
                SOME, {f"$m = {count}$": round(favor_misplaced(spread, count)[0]) for count in (few, many)}, unit=" %"
            ),
            "time": growth("N", sympy.expand(core.forward), held=("d", "H", "m")),
            "what features bring": region(
                SOME, {f"less misplaced by {many} than by {few}, at least": round(best - worst)}, unit=" %"
            ),
            "what they cost": growth("m", sympy.expand(core.forward), held=("N", "d", "H")),
        }
    ).noting(f"Equal weights misplace {uniform_misplaced(spread):.0f} %")


def reordered(length: int = 64, width: int = 16) -> float:
    """Relative difference of (Q K^T) V and Q (K^T V) for normal matrices."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, length, width, generator=g, dtype=torch.float64)
    one, other = (q @ k.T) @ v, q @ (k.T @ v)
    return float((one - other).norm() / one.norm())


@evidence("S0.3.2c", chapter=CHAPTER)
def linear_properties() -> Finding:
    width = lookup.D_MODEL // lookup.HEADS
    lost = 100 * lookup.low_rank_error(lookup.ENTRIES, width)
    return all_of(
        {
            "reordering": holds("$(QK^\\top)V = Q(K^\\top V)$", reordered(), EXACT),
            "expressiveness changed": region(
                SOME, {f"one head's lookup of {lookup.ENTRIES} entries, $K = {width}$": lost}, unit=" %"
            ),
            "initialisation": untestable(
                "it must be special", {"which initialisation": None, "what goes wrong with another": None}
            ),
        }
    )


@torch.no_grad()
def unlike_softmax() -> float:
    """Relative difference of a frozen layer's outputs and those of PyTorch's own layer with the same matrices."""
    module, x = lookup.attention_layer("frozen"), lookup.sequences(lookup.apart()).x
    ours, (theirs, _) = module(x), module.to_torch()(x, x, x, need_weights=False)
    return float((ours - theirs).norm() / ours.norm())


@evidence("S0.3.2d", chapter=CHAPTER)
def ora_properties() -> Finding:
    embedding = lookup.apart()
    data = lookup.sequences(embedding)
    solved = lookup.error(lookup.standard_solution(embedding)(data.x), data.target)
    errors = lookup.frozen_errors()
    made, y = lookup.frozen_solution()
    task = f"the lookup of {lookup.ENTRIES} entries"
    return all_of(
        {
            "no approximation": holds(
                "the outputs are those of softmax attention with the same matrices", unlike_softmax(), EXACT
            ),
            "expressiveness of the layer": holds(
                "what a standard layer computes, a frozen one computes too",
                max(0.0, errors[0] - solved),
                lookup.SOLVED,
                at=f"{task}, best of {len(errors)} draws",
            ),
            "of a network with trained embeddings": holds(
                "the same", lookup.error(y, lookup.sequences(made).target), lookup.SOLVED, at=task
            ),
            "accuracy": untestable("none is lost", {"a task": None, "a model": None, "a measure": None}),
        }
    ).noting(
        f"Over the draws the least error is {100 * errors[0]:.0f} to {100 * errors[-1]:.0f} % of the target, "
        f"that of weights which ignore the input {100 * lookup.fixed_weights_error(lookup.ENTRIES):.0f} %"
    )


@cache
@torch.no_grad()
def combined(attention: str, length: int = 150, cut: int = 70) -> tuple[float, float, int]:
    """ORA with that attention, over several chunks: the relative differences of its fast form and its definition, and
    of a sequence in two parts and whole; and how many outputs before the cut change with what comes after it."""

    def made(form: str) -> MultiheadAttention:
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(2), "dtype": torch.float64}
        return MultiheadAttention(32, 4, projection="frozen", attention=attention, form=form, **options)

    def difference(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / b.norm())

    fast, definition = made("fast"), made("reference")
    x, other = torch.randn(2, 2, length, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = fast(x, is_causal=True)
    forms = max(difference(fast(x, is_causal=causal), definition(x, is_causal=causal)) for causal in (False, True))
    head, state = fast(x[:, :cut], is_causal=True, return_state=True)
    parts = torch.cat([head, fast(x[:, cut:], is_causal=True, initial_state=state)], 1)
    changed = fast(torch.cat([x[:, :cut], other[:, cut:]], 1), is_causal=True)[:, :cut] != y[:, :cut]
    return forms, difference(parts, y), int(changed.sum())


@evidence("S0.5.2b", chapter=CHAPTER)
def combinations() -> Finding:
    found = {}
    for attention in ("linear", "favor"):
        forms, parts, changed = combined(attention)
        cost = layer(1, N, d, H, projection="frozen", attention=attention)
        found[NAMES[attention]] = all_of(
            {
                "fast form": holds("as its definition", forms, EXACT),
                "cut in two": holds("as the whole", parts, EXACT),
                "outputs changed by later tokens": counted({"": 0}, {"": changed}),
                "step": growth("N", sympy.expand(cost.step), held=("d", "H")),
                "trained": counted({"": "2*d^2"}, {"": cost.trained}),
            }
        )
    return all_of(found)
