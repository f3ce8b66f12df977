r"""S2, sections 4.2, 4.3, 5.3: what frozen orthogonal projections save, and layers with heads of several kinds."""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch

from ortho.cost import Cost, layer
from ortho.cost.layers import hybrid
from ortho.layers.block import TransformerBlock
from ortho.layers.multihead import MultiheadAttention
from ortho.models.language_model import LanguageModel
from ortho.projections import FrozenProjection
from ortho.projections.structured import factors
from paper import experiments
from paper.claims.evidence import one_learned_head
from paper.claims.evidence.frozen_layer import train_once
from paper.claims.ledger import evidence
from paper.claims.outcomes import loses_nothing, outperforms
from paper.claims.rules import all_of, counted, holds, improves, region
from paper.claims.shared.common import SOME, seeded
from paper.claims.verdicts import Finding, Parts
from paper.experiments.learning import language

STRUCTURED, KINDS = "25-structured-projections", "26-heads-of-several-kinds"

HEAD_DIM = 64
WIDTHS = (512, 768, 1024, 4096)  # of structured matrices
PRIME = 1009
# "Efficient": the source gives no figure. Any share from 15 % to 49 % would decide the same.
FAST = (0, 25)
D, HEADS, TRAINED = 768, 12, 64  # GPT-2 small; the width of the layer that is trained
LAYERS, NARROW = 4, 16
SAME = 2**-40  # the same operations, in the same order, on numbers below 1000


def general(d: int) -> float:
    """Multiplications that almost every orthogonal matrix needs at least, d (d - 1) / 2 (the dimension of their group),
    in per cent of its d^2 entries."""
    return 50 * (d - 1) / d


def structured(d: int, K: int | None = HEAD_DIM) -> float:
    """Multiplications of one round of sign flips and transforms, in per cent of d^2."""
    return 100 * sum(factors(d, K)) / d


def merged(heads: int) -> float:
    """Per cent of the products with W_Q and W_K that a d x d matrix W_Q W_K^T for each head saves."""
    return 100 * (1 - heads / 2)


@cache
def still_right(trained: bool) -> float:
    """Per cent of the numbers of q and k, computed in advance from embeddings, that a training step does not change."""
    kind: dict[str, Any] = {"generator": seeded(), "dtype": torch.float64}
    layer = MultiheadAttention(NARROW, 2, projection="frozen", **kind)
    embeddings = torch.randn(1, 8, NARROW, **kind).requires_grad_(trained)
    before = torch.cat(layer.projection(embeddings)).detach()
    optimiser = torch.optim.AdamW([*layer.parameters(), *([embeddings] if trained else [])])
    layer(embeddings).square().sum().backward()
    optimiser.step()
    return float(100 * (torch.cat(layer.projection(embeddings)) == before).double().mean())


@evidence("S2.4.2d", chapter=STRUCTURED)
def fast_products() -> Parts:
    shares = {f"rounds, $d = {d:,}$": round(structured(d), 1) for d in WIDTHS}
    shares[f"rounds, $d = {PRIME:,}$"] = round(structured(PRIME, None), 1)
    shares[f"almost any orthogonal matrix, $d = {D}$, at least"] = round(general(D), 1)
    moved = train_once("frozen", TRAINED).moved
    return {
        "multiplications, of the matrix's": region(FAST, shares, unit=" %"),
        "matrices": counted(
            {"entries that a training step changes": 0},
            {"entries that a training step changes": moved["Q"] + moved["K"]},
        ),
        "products that $W_Q W_K^\\top$ saves": region(
            SOME, {"one head": merged(1), f"{HEADS} heads": merged(HEADS)}, unit=" %"
        ),
        "queries and keys kept that a step leaves right": region(
            (100, 100),
            {"frozen embeddings": still_right(False), "trained embeddings": still_right(True)},
            unit=" %",
        ),
    }


@cache
def shared() -> tuple[int, float]:
    """(numbers of frozen matrices in a model whose blocks share one projection, the greatest difference of its logits
    and gradients from those of a model in which each block has a copy)."""
    projection = FrozenProjection(NARROW, 2, generator=seeded(), dtype=torch.float64)
    kind: dict[str, Any] = {"max_length": 8, "generator": seeded(1), "dtype": torch.float64}
    other = LanguageModel(11, NARROW, 2, LAYERS, projection=projection, **kind)  # each block has a copy
    one = copy.deepcopy(other)
    for block in cast(Iterable[TransformerBlock], one.blocks):
        block.attention.projection = projection
    tokens = torch.arange(8)[None]
    results = []
    for model in (one, other):
        logits = model(tokens)
        results.append(
            [logits, *torch.autograd.grad(logits.square().sum(), [p for p in model.parameters() if p.requires_grad])]
        )
    numbers = sum(p.numel() for p in one.parameters() if not p.requires_grad)
    return numbers, max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))


@evidence("S2.4.3c", chapter=STRUCTURED)
def nothing_stored() -> Finding:
    step, others = train_once("frozen", TRAINED), 8 * 2 * TRAINED**2  # bytes of W_V and W_O
    numbers, difference = shared()
    ours = {
        "gradients of $W_Q, W_K$": step.gradient_bytes - others,
        "AdamW's state": step.optimiser_bytes - 2 * others,
    }
    in_all = f"$W_Q, W_K$ of {LAYERS} layers, $d = {NARROW}$"
    parts = {
        "gradients": counted(dict.fromkeys(ours, 0), ours, unit=" bytes"),
        "shared": counted({in_all: 2 * NARROW**2}, {in_all: numbers}, unit=" numbers"),
        "a model that shares": holds("logits and gradients of one with copies", difference, SAME),
    }
    return all_of(parts).noting(
        "The gradients of $Q$ and $K$, which lead to those of $X$, are computed all the same, and $X$ is kept for $W_V$"
    )


# ------------------------------------------------------------ layers some of whose heads are frozen, and others learned

H = 12
LENGTHS = (512, 4096)
LEARNED = (1, 3, 6, 11)  # heads of the twelve


def mixed(N: int, learned: int, rest: str, *, causal: bool = False) -> Cost:
    """A layer with this many learned heads, whose other heads are of another kind."""
    return hybrid(1, N, D, H, heads={"learned": learned, rest: H - learned}, causal=causal)


def over_learned(quantity: str, N: int, learned: int, rest: str = "frozen") -> float:
    """The cost of such a layer over that of a layer with learned heads alone."""
    return float(getattr(mixed(N, learned, rest), quantity) / getattr(layer(1, N, D, H), quantity))


KIND = {"frozen": "frozen", "stopped": "structured-stopped"}  # orthogonal random heads: name here, name in `hybrid`


def spared(quantity: str, N: int, learned: int, kind: str) -> float:
    """How many per cent of the cost of learned heads alone such a layer saves."""
    return round(100 - 100 * over_learned(quantity, N, learned, KIND[kind]), 1)


def learning() -> dict[str, Finding]:
    """What layers with some frozen heads learn, by the records of language models of bytes."""
    records = experiments.load("bytes")
    device = experiments.judged_device(records)
    found = one_learned_head.whole(language.by_arm(records, device)) if device else {}
    heads = int(experiments.by_device(records)[device][0]["configuration"]["H"]) if device else 2
    mixed_arms = {one_learned_head.name(n, kind, heads): kind for kind in KIND for n in range(1, heads)}
    return {
        "against learned heads alone": one_learned_head.part(
            loses_nothing, "nothing is lost", found, {arm: (arm, one_learned_head.BASELINE) for arm in mixed_arms}
        ),
        "against such heads alone": one_learned_head.part(
            outperforms, "some learned heads help", found, {arm: (arm, kind) for arm, kind in mixed_arms.items()}
        ),
    }


@evidence("S2.5.3a", chapter=KINDS)
def some_heads_learned() -> Finding:
    work = {
        f"{n} of {H} learned, others {kind}, $N = {N:,}$": spared("step", N, n, kind)
        for N in LENGTHS
        for kind in KIND
        for n in LEARNED
    }
    trained = {f"{n} of {H} learned": spared("trained", LENGTHS[0], n, "frozen") for n in LEARNED}
    positional = [1 / over_learned("step", N, LEARNED[0], "positional") for N in LENGTHS]
    parts = {
        "FLOPs of the training step that go": improves("fewer", work, unit=" %"),
        "trained numbers that go": improves("fewer", trained, unit=" %"),
        **learning(),
    }
    return all_of(parts).noting(
        "An open question of the source's. With gradients through the frozen heads little is saved. A step of one "
        f"learned head beside positional ones takes {positional[0]:.2f} and {positional[1]:.2f} times fewer FLOPs at "
        f"$N = {LENGTHS[0]:,}$ and ${LENGTHS[1]:,}$"
    )
