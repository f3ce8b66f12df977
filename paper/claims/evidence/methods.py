r"""S0, sections 3.1, 3.2 and 5.2b: the methods compared, by what they cost and by what they can do."""

from collections.abc import Sequence
from functools import cache, partial
from math import sqrt
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from ortho.attention import MECHANISMS, softmax_attention_reference
from ortho.attention.linear.favor import FEATURES, PositiveFeatures, orthogonal_features
from ortho.attention.linear.linear_attention import linear_attention
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.cost import layer, synthesizer
from ortho.cost.big_o import H, N, d, m
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.synthesizer import Random, SynthesizerAttention
from paper import experiments, memory
from paper.claims.evidence.does_freezing_hold import frozen_lose_nothing
from paper.claims.evidence.frozen_layer import linear_backward
from paper.claims.figures import show
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import CONFIGURATION, all_of, contradiction, counted, growth, growth_where, holds, region
from paper.claims.shared import lookup
from paper.claims.shared.common import (
    EXACT,
    IN_N,
    SOME,
    normal,
    relative_error,
    seeded,
    without_records,
)
from paper.claims.shared.linear_attention import reordering
from paper.claims.verdicts import Finding, Parts
from paper.experiments.learning import synthetic

CHAPTER = "03-the-methods-compared"

# ----------------------------------------------------------------------------------- the rows of the source's table

COSTS = {
    "learned": layer(1, N, d, H, form="reference"),
    "synthesizer": synthesizer(1, N, d, H),
    "favor": layer(1, N, d, H, attention="favor", m=m),
    "linear": layer(1, N, d, H, attention="linear"),
    "frozen": layer(1, N, d, H, projection="frozen", form="reference"),
    "stopped": layer(1, N, d, H, projection="stopped", form="reference"),
}
RANDOM = synthesizer(1, N, d, H, source="fixed-random")  # no projections of queries and keys, and no other weights
NAMES = {
    "learned": "standard",
    "synthesizer": "Synthesizer",
    "favor": "Performer",
    "linear": "linear attention",
    "frozen": "ORA (frozen)",
    "stopped": "frozen, gradient stopped",
}
# As the source prints them: time, space, trained parameters, backward. It has no row for the last layer.
SOURCE = {
    "learned": ("N^2*d + N*d^2", "N^2 + N*d", "4*d^2", "N^2*d + N*d^2"),
    "synthesizer": ("N^2*d + N*d^2", "N^2 + N*d", "4*d^2", "N^2*d + N*d^2"),
    "favor": ("N*d^2 + N*d*log(d)", "N*d", "4*d^2", "N*d^2 + N*d*log(d)"),
    "linear": ("N*d^2", "N*d", "4*d^2", "N*d^2"),
    "frozen": ("N^2*d + N*d^2", "N^2 + N*d", "2*d^2", "N*d^2"),
}


@cache
def kept(name: str) -> Any:
    """How many numbers a row's layer keeps from the forward to the backward pass."""
    terms = {"favor": (N * d, H * N, H * N * m, m * d, m * H, m * d / H), "linear": (N * d, H * N, d**2 / H, d)}
    return memory.kept(partial(build, name), *terms.get(name, ()))


def evaluate(formula: Any, length: int, d_model: int, heads: int, features: int = FEATURES) -> int:
    """A closed form at these sizes, exactly. ValueError if it is not an integer there."""
    sizes = {N: length, d: d_model, H: heads, m: features}
    value = sympy.sympify(formula).subs(sizes)
    if not value.is_integer:
        raise ValueError(f"formula: expected an integer at {sizes}, got {value} of {formula}")
    return int(value)


def build(name: str, N: int, d_model: int, num_heads: int, features: int = FEATURES) -> nn.Module:
    """The layer of a row, to be run on N tokens; the Performer with this number of features."""
    if name == "synthesizer":
        return SynthesizerAttention(d_model, num_heads, N)
    if name == "favor":
        attend = RandomFeatureAttention(d_model // num_heads, features)
        return MultiheadAttention(d_model, num_heads, attention=attend)
    if name == "linear":
        return MultiheadAttention(d_model, num_heads, attention=name)
    return MultiheadAttention(d_model, num_heads, projection=name, form="reference")


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


def _performer() -> Finding:
    """The row for a constant number of features, and for the number that its authors' theorem 4 asks for."""
    asked = d / H * sympy.log(d)  # the order K log K
    cost = COSTS["favor"]
    time, space, _, backward = SOURCE["favor"]
    sides = {"time": (time, cost.forward), "space": (space, kept("favor")), "backward": (backward, cost.backward)}
    found = {
        name: growth_where(
            claimed,
            {"constant $m$": sympy.expand(exact), "$m = K \\log K$": sympy.expand(exact.subs(m, asked))},
            settings=(*CONFIGURATION, "m"),
        )
        for name, (claimed, exact) in sides.items()
    }
    return _row("favor", **found)


evidence_table(
    CHAPTER,
    {
        "S0.3.1a": lambda: _row("learned"),
        "S0.3.1b": lambda: _row(
            "synthesizer",
            trained=counted(
                dict.fromkeys(("learned", "random"), SOURCE["synthesizer"][2]),
                {"learned": COSTS["synthesizer"].trained, "random": RANDOM.trained},
            ),
        ),
        "S0.3.1c": _performer,
        "S0.3.1d": lambda: _row("linear", space=growth(SOURCE["linear"][1], kept("linear"), settings=IN_N)).noting(
            f"The standard layer with a fused kernel keeps {show(memory.formula() / 4)}"
        ),
        "S0.3.1e": lambda: _row("frozen", backward=linear_backward()),
    },
)

# -------------------------------------------------------------------------------------------------- what they can do


def moved_logits(length: int = 8, d_model: int = 16, heads: int = 2) -> tuple[int, int]:
    """(entries of the attention logits that a step of training changes, entries) of a learned Synthesizer."""
    g = seeded()
    random = Random(d_model, heads, length, generator=g, dtype=torch.float64)
    module = SynthesizerAttention(d_model, heads, length, source=random, generator=g, dtype=torch.float64)
    before = random.matrix.detach().clone()
    module(torch.randn(2, length, d_model, generator=g, dtype=torch.float64)).square().sum().backward()
    torch.optim.AdamW(module.parameters()).step()
    return int((random.matrix != before).sum()), before.numel()


def standard_error() -> float:
    """The error of a standard layer that is built for the lookup."""
    embedding = lookup.apart()
    data = lookup.sequences(embedding)
    return lookup.error(lookup.standard_solution(embedding)(data.x), data.target)


@evidence("S0.3.2a", chapter=CHAPTER)
def synthesizer_properties() -> Parts:
    moved, entries = moved_logits()
    lost = 100 * (lookup.fixed_weights_error(lookup.ENTRIES) - standard_error())
    products = COSTS["synthesizer"].forward.coeff(d, 2) / (2 * N)
    return {
        "products with a $d \\times d$ matrix, of the standard layer's 4": counted({"": 2}, {"": products}),
        "logits that a training step changes": counted({"": entries}, {"": moved}),
        "expressiveness lost": region(
            SOME, {f"lookup of {lookup.ENTRIES} entries, share of the target": round(lost, 1)}, unit=" %"
        ),
    }


@evidence("S0.3.2e", chapter=CHAPTER)
def synthesizer_weights() -> Finding:
    return contradiction(
        ("it trains $4d^2$", 4), ("it needs no projections of queries and keys", RANDOM.trained / d**2), unit=" $d^2$"
    ).noting(f"A matrix of weights that is learned comes on top: {show(COSTS['synthesizer'].trained)}")


FAVOR_LENGTH, FAVOR_WIDTH, FAVOR_DRAWS = 128, 64, 5
FAVOR_COUNTS = tuple(2**i for i in range(5, 13))


@cache
def _scores(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, softmax weights) with normal q and k, whose scores have this standard deviation."""
    q, k = sqrt(spread) * normal(2, FAVOR_LENGTH, FAVOR_WIDTH)
    exact: Any = softmax_attention_reference(q, k, torch.eye(FAVOR_LENGTH, dtype=torch.float64))
    return q, k, exact


def misplaced(weights: Tensor, exact: Tensor) -> float:
    """The share of a row's weight, in per cent, that lies elsewhere than in the exact row; the mean over rows."""
    return 50 * float((weights - exact).abs().sum(-1).mean())


def uniform_misplaced(spread: float) -> float:
    """`misplaced` of equal weights, which do not depend on q and k."""
    exact = _scores(spread)[2]
    return misplaced(torch.full_like(exact, 1 / exact.shape[-1]), exact)


@cache
def _favor_rows(count: int) -> tuple[Tensor, ...]:
    """Some draws of `count` rows; not from the generator of q and k, as the rows would then be parallel to these."""
    generators = (seeded(1000 + draw) for draw in range(FAVOR_DRAWS))
    return tuple(orthogonal_features(count, FAVOR_WIDTH, generator=g, dtype=torch.float64) for g in generators)


@cache
def favor_misplaced(spread: float, count: int) -> Sequence[float]:
    """`misplaced` of FAVOR+ with `count` features, for some draws of them, in rising order."""
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
    parts = {
        f"weight misplaced at {at}": region(
            SOME, {f"$m = {count}$": round(favor_misplaced(spread, count)[0]) for count in (few, many)}, unit=" %"
        ),
        "time": growth("N", sympy.expand(core.forward), held=("d", "H", "m")),
        "what features bring": region(
            SOME, {f"less misplaced by {many} than by {few}, at least": round(best - worst)}, unit=" %"
        ),
        "what they cost": growth("m", sympy.expand(core.forward), held=("N", "d", "H")),
    }
    return all_of(parts).noting(f"Equal weights misplace {uniform_misplaced(spread):.0f} %")


@evidence("S1.2.2c", chapter=CHAPTER)
def lower_order() -> Finding:
    cores = {
        name: MECHANISMS[name].cost(1, N, H, d / H, d / H, form="reference" if name == "softmax" else "fast").forward
        for name in ("softmax", "linear")
    }
    ratio = sympy.cancel(cores["linear"] / cores["softmax"])
    heads = {d: 768, H: 12}
    shares = {f"$N = {length:,}$": float(100 * ratio.subs({N: length, **heads})) for length in (16, 32, 128, 1024)}
    return all_of(
        {
            "softmax": growth("N^2*d", cores["softmax"]),
            "linear": growth("N*d^2", sympy.expand(cores["linear"])),
            "lower: its FLOPs, of softmax attention's": region((0, 99), shares, unit=" %"),
        }
    ).noting(
        f"$d = {heads[d]}$, {heads[H]} heads. It is lower for $N$ above the width of a head; with one head, above $d$"
    )


@evidence("S0.3.2c", chapter=CHAPTER)
def linear_properties() -> Parts:
    width = lookup.D_MODEL // lookup.HEADS
    lost = 100 * lookup.low_rank_error(lookup.ENTRIES, width)
    return {
        "reordering": holds("$(QK^\\top)V = Q(K^\\top V)$", reordering().difference, EXACT),
        "expressiveness changed": region(
            SOME, {f"one head's lookup of {lookup.ENTRIES} entries, $K = {width}$": lost}, unit=" %"
        ),
        "initialisation": plain_initialisation(),
    }


def plain_initialisation() -> Finding:
    """Whether linear attention needs an initialisation other than Xavier's, by tasks that softmax heads learn with it
    in every run."""
    records = experiments.load("synthetic")
    found = synthetic.learnt(records, experiments.judged_device(records)) if records else {}
    shares = {
        task: 100 * arms["linear"].successes / len(arms["linear"].seeds)
        for task, arms in found.items()
        if {"learned", "linear"} <= arms.keys() and arms["learned"].successes == len(arms["learned"].seeds)
    }
    if not shares:
        return without_records("a special one is needed", "linear attention on tasks that softmax heads learn")
    return region((0, 50), shares, unit=" % of runs learn with a plain one").noting(
        "Where a plain one does not suffice, none that does was shown"
    )


@torch.no_grad()
def unlike_softmax() -> float:
    """Relative difference of a frozen layer's outputs and those of PyTorch's own layer with the same matrices."""
    module, x = lookup.attention_layer("frozen"), lookup.sequences(lookup.apart()).x
    return relative_error(module.to_torch()(x, x, x, need_weights=False)[0], module(x))


@evidence("S0.3.2d", chapter=CHAPTER)
def ora_properties() -> Finding:
    errors = lookup.frozen_errors()
    made, y = lookup.frozen_solution()
    task = f"the lookup of {lookup.ENTRIES} entries"
    parts = {
        "no approximation, no loss of precision": holds(
            "the outputs are those of softmax attention with the same matrices", unlike_softmax(), EXACT
        ),
        "expressiveness of the layer": holds(
            "what a standard layer computes, a frozen one computes too",
            max(0.0, errors[0] - standard_error()),
            lookup.SOLVED,
            at=f"{task}, best of {len(errors)} draws",
        ),
        "of a network with trained embeddings": holds(
            "the same", lookup.error(y, lookup.sequences(made).target), lookup.SOLVED, at=task
        ),
        "accuracy on tasks": frozen_lose_nothing(),
    }
    return all_of(parts).noting(
        f"Over the draws the least error is {100 * errors[0]:.0f} to {100 * errors[-1]:.0f} % of the target, "
        f"that of weights which ignore the input {100 * lookup.fixed_weights_error(lookup.ENTRIES):.0f} %"
    )


@cache
@torch.no_grad()
def combined(attention: str, length: int = 150, cut: int = 70) -> tuple[float, float, int]:
    """ORA with that attention, over several chunks: the relative difference between fast form and definition, and
    between a sequence in two parts and whole; and how many outputs before the cut change with what comes after it."""
    fast, definition = (
        MultiheadAttention(
            32, 4, projection="frozen", attention=attention, form=form, generator=seeded(2), dtype=torch.float64
        )
        for form in ("fast", "reference")
    )
    x, other = normal(2, 2, length, 32, seed=3)
    y = fast(x, is_causal=True)
    forms = max(relative_error(fast(x, is_causal=way), definition(x, is_causal=way)) for way in (False, True))
    head, state = fast(x[:, :cut], is_causal=True, return_state=True)
    parts = torch.cat([head, fast(x[:, cut:], is_causal=True, initial_state=state)], 1)
    changed = fast(torch.cat([x[:, :cut], other[:, cut:]], 1), is_causal=True)[:, :cut] != y[:, :cut]
    return forms, relative_error(parts, y), int(changed.sum())


def combination(attention: str) -> Finding:
    forms, parts, changed = combined(attention)
    cost = layer(1, N, d, H, projection="frozen", attention=attention)
    return all_of(
        {
            "fast form": holds("as its definition", forms, EXACT),
            "cut in two": holds("as the whole", parts, EXACT),
            "outputs changed by later tokens": counted({"": 0}, {"": changed}),
            "step": growth("N", sympy.expand(cost.step), held=("d", "H")),
            "trained": counted({"": "2*d^2"}, {"": cost.trained}),
        }
    )


evidence_table(CHAPTER, {"S0.5.2b": lambda: all_of({NAMES[name]: combination(name) for name in ("linear", "favor")})})
