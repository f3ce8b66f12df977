"""S2, sections 4.2, 4.3 and 5.3: what drawn projections can make, how they generalise, what gradients do, and tasks."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ortho import cost
from ortho.orthogonal import haar
from ortho.theory.frozen_scores import carrying, expected_missed, freedoms
from paper import experiments
from paper.claims import figures
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, outperforms
from paper.claims.rules import all_of, holds, region, untestable
from paper.claims.s0 import learning
from paper.claims.s0.learning import Compared, Setting
from paper.claims.s0.low_resource import gap
from paper.claims.s2 import depth
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.learning import paired_rows

CHAPTER = "28-does-freezing-hold"

WIDTHS = ((2, 1), (64, 16))  # d and K of the maps
APPROXIMATES = (0.0, 0.5)  # shares of a map's squared norm that may be missed: at most half of it
CARRIED = (64, 16)  # d and K at which score maps are reached
PAIRS = 20  # of drawn and wanted maps
TENFOLD = (0.0, 1.0)  # decades by which a gradient's length may change through the stack
GENERAL = ("bytes", "bytes-little", "images")


# ------------------------------------------------------------------------------------------------- expressiveness


@cache
def unreached() -> tuple[float, float]:
    """How far off the scores of one head behind the map P are from wanted ones, at worst, and what rounding allows.

    Products of matrices with norm c, the condition of the drawn columns, in d roundings each: 8 d eps c^2.
    """
    d, K = CARRIED
    g = torch.Generator().manual_seed(0)
    worst = allowed = 0.0
    for _ in range(PAIRS):
        q, k = (haar(d, K, generator=g, dtype=torch.float64) for _ in "qk")
        wanted_q, wanted_k = (torch.randn(d, K, generator=g, dtype=torch.float64) for _ in "qk")
        P, target = carrying(q, k, wanted_q, wanted_k), wanted_q @ wanted_k.T
        size = float(torch.linalg.matrix_norm(wanted_q, 2) * torch.linalg.matrix_norm(wanted_k, 2))
        condition = float(torch.linalg.cond(torch.cat([q, k], 1)))
        worst = max(worst, float((P.T @ q @ k.T @ P - target).abs().max()) / size)
        allowed = max(allowed, 8 * d * torch.finfo(torch.float64).eps * condition**2)
    return worst, allowed


@evidence("S2.4.2a", chapter=CHAPTER)
def expressiveness() -> Finding:
    error, allowed = unreached()
    reached = {"one head, a trained map of $x$ before it": 1.0 if error <= allowed else 0.0}
    for d, K in WIDTHS:
        learned, carried = freedoms(d, K)
        reached[f"all heads and one map, $d = {d}$"] = round(min(1.0, carried / learned), 3)
        reached[f"as drawn, $d = {d}$"] = 0.0
    share = "share of a map's squared norm that the best multiple of a drawn one misses, in the mean"
    return all_of(
        {
            share: region(APPROXIMATES, {f"$d = {d}$": round(expected_missed(d), 6) for d, _ in WIDTHS}),
            "dimensions of the score maps that are reached, of learned heads'": region((1.0, 1.0), reached),
        }
    ).noting("What a whole network with frozen heads can do is judged at S0.3.2d")


# ------------------------------------------------------------------------------------------------- generalisation


def gaps(records: list[Record]) -> dict[str, Setting]:
    """The settings of an experiment with bytes, measured by `gap`."""
    where, found = experiments.judged_device(records), {}
    for limit in sorted({record["configuration"]["limit"] for record in records if record["device"] == where}):
        arms = paired_rows.by_arm(records, where, {"gap": gap}, limit=limit, dropout=0.0)
        if arms:
            label = f"bytes, {limit:,} to train on" if limit else "bytes, the whole text"
            found[label] = Setting(arms, "gap", BITS_A_BYTE)
    return found


def every_gap() -> dict[str, Setting]:
    """By text: the whole one and those of few bytes."""
    names = ("bytes-little", "bytes")
    return {label: one for name in names for label, one in gaps(experiments.load(name)).items()}


def won(statement: str, found: dict[str, Compared]) -> Finding:
    """Whether a gain shows in these settings."""
    if not found:
        return untestable(statement, {"runs of frozen and learned heads at the same seeds": None}, lack="there are no")
    return outperforms(statement, learning.judged(found))


@evidence("S2.4.2c", chapter=CHAPTER)
def generalisation() -> Finding:
    made: dict[str, Callable[..., Any]] = {"attention": cost.layer, "a block": cost.block}
    trained = {
        name: round(one(1, 1, 768, 12, projection="frozen").trained / one(1, 1, 768, 12).trained, 3)
        for name, one in made.items()
    }
    tested = learning.compared("frozen", "learned", learning.every_setting(GENERAL))
    finding = all_of(
        {
            "trained weights over those of learned heads": region((0, 1), trained),
            "better on the test": won("frozen heads do better on the test than learned ones", tested),
            "less overfitting": won(
                "frozen heads have a smaller gap between training and validation",
                learning.compared("frozen", "learned", every_gap()),
            ),
        }
    ).noting("Gaussian matrices that are frozen leave as few weights to train: it is freezing that makes them fewer")
    return learning.noting_missing(finding, GENERAL)


# ------------------------------------------------------------------------------------------------------- gradients


@cache
def scale_changed() -> float:
    """The largest relative change of a token's length by the orthogonal W_Q and W_K, of random tokens."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1000, depth.D, generator=g, dtype=torch.float64)
    made = (x @ haar(depth.D, depth.D, generator=g, dtype=torch.float64) for _ in "qk")
    return max(float((y.norm(dim=1) / x.norm(dim=1) - 1).abs().max()) for y in made)


def places() -> dict[str, tuple[bool, str]]:
    """A few words -> residual sums or none, and the stage of training."""
    ways = (("residual sums", True), ("no residual sums", False))
    return {f"{way}, {stage}": (residual, stage) for stage in depth.STAGES for way, residual in ways}


def worst(arm: str, residual: bool, stage: str) -> float:
    """The most decades of any seed."""
    return max(depth.decades(arm, residual, stage, seed) for seed in depth.SEEDS)


@evidence("S2.4.3b", chapter=CHAPTER)
def stability() -> Finding:
    if not depth.measured():
        return untestable("frozen heads keep gradients stable", {"gradients of stacks": None}, lack="there are no")
    kept = holds(
        "$W_Q$ and $W_K$ keep the length of every token", scale_changed(), 8 * depth.D * torch.finfo(torch.float64).eps
    )
    found = {label: round(worst("frozen", *place), 1) for label, place in places().items()}
    theirs = figures.listing({label: f"{worst('learned', *place):.1f}" for label, place in places().items()})
    rules = figures.listing({label: depth.compared("frozen", *place)[1] for label, place in places().items()})
    return all_of(
        {
            "feature scale": kept,
            f"decades by which the gradient's length differs between the ends of {depth.L} frozen blocks": region(
                TENFOLD, found
            ),
        }
    ).noting(
        f"Decades with learned heads: {theirs}. Frozen against learned: {rules}. With the same matrices both pass the "
        "same gradient on, to the bit: freezing changes nothing about it"
    )


# ----------------------------------------------------------------------------------------------------------- tasks


@evidence("S2.5.3c", chapter=CHAPTER)
def tasks() -> Finding:
    found = learning.every_setting()
    finding = learning.lost("frozen heads lose nothing to learned ones", "frozen", "learned", found)
    said = []
    for other in ("learned", "frozen", "static random"):
        outcomes = Counter(pair.outcome for pair in learning.compared("stopped", other, found).values())
        words = ", ".join(f"{outcome} in {count}" for outcome, count in sorted(outcomes.items()))
        said += [f"against {other} {words}"] if words else []
    finding = finding.noting("An open question of the source's, answered by what was tried")
    return learning.noting_missing(finding.noting(f"Stopped heads: {'; '.join(said)}") if said else finding)
