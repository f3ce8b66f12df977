"""S0, section 5.2: whether frozen matrices need to be orthogonal, by models that were trained with others as well."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ortho.orthogonal import haar, svd
from paper import experiments
from paper.claims import figures
from paper.claims.evidence.common import IDLE, SHOWN, Arms, noting_each, reported, seeded
from paper.claims.ledger import evidence
from paper.claims.outcomes import Unit, outperforms
from paper.claims.rules import all_of, holds, untestable
from paper.claims.verdicts import Finding
from paper.experiments.learning import images, language
from paper.experiments.learning.analysis import Judged, Runs

CHAPTER = "31-orthogonal-or-gaussian"

Pair = tuple[str, str, str]  # the experiment, an arm of it, and the arm it is compared with
SEEDS = {"bytes": language.SEEDS, "images": images.SEEDS}
MEASURES = {"bytes": "bits", "images": "correct"}
# Matrices of one scale, orthogonal against Gaussian: where the claim says that the former are required.
SAME_SCALE: dict[str, Pair] = {
    "frozen on bytes": ("bytes", "frozen", "frozen Gaussian"),
    "stopped on bytes": ("bytes", "stopped", "stopped Gaussian"),
    "frozen on digits": ("images", "frozen", "frozen Gaussian"),
}
WAYS = ("low-rank", "4 x", "1/4 x")
# Orthogonal matrices of that scale against matrices of a low rank, or of another scale. The latter are orthogonal up to
# a factor: they show what the scale does, and say nothing of other laws.
OTHER_MATRICES: dict[str, Pair] = {
    f"{kind} {way}": ("bytes", kind, f"{kind} {way}") for kind in ("frozen", "stopped") for way in WAYS
}
LOW_RANK = {label: pair for label, pair in OTHER_MATRICES.items() if label.endswith(WAYS[0])}
# The same matrices as the initial weights of trained ones.
LEARNED: dict[str, Pair] = {f"learned {way}": ("bytes", "learned", f"learned {way}") for way in WAYS[:2]}
# To see whether heads of one scale add anything, they are compared with heads that see no other token.
ADDED: dict[str, Pair] = {
    arm: (name, arm, IDLE) for name, *both in SAME_SCALE.values() if name == "bytes" for arm in both
}
AS_STORED = Unit("", digits=4)  # bits a byte, or shares of right answers
D = 64


def raw_qr(d: int, *, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """The orthogonal factor of a Gaussian matrix (d, d), with the signs that LAPACK gives it."""
    q: Tensor = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=dtype)).Q
    return q


WAYS_TO_DRAW: dict[str, Callable[..., Tensor]] = {"QR": raw_qr, "SVD": svd, "Haar's law": haar}


def trained(name: str, device: str | None = None) -> dict[str, Runs]:
    """Arm -> its runs that count in the experiment `bytes` or `images` (the digits), on the preferred device unless
    another is named."""
    records = experiments.load(name)
    device = experiments.judged_device(records) if device is None else device
    return (language if name == "bytes" else images).by_arm(records, device)


def compared(pairs: Mapping[str, Pair], *, every_seed: bool = True, device: str | None = None) -> dict[str, Judged]:
    """The first arm minus the other, for each pair that has run: all seeds of both, or two at least."""
    runs = {name: trained(name, device) for name in dict.fromkeys(name for name, _, _ in pairs.values())}
    found = {}
    for label, (name, arm, other) in pairs.items():
        arms = {one: run for one, run in runs[name].items() if not every_seed or run.seeds == SEEDS[name]}
        judged = Arms(arms, MEASURES[name], AS_STORED).judged(arm, other)
        if judged is not None:
            found[label] = judged
    return found


def part(statement: str, pairs: Mapping[str, Pair]) -> Finding:
    """Whether the first arms outperform the second ones; untestable until all seeds of all have run.

    Pairs of which neither arm is better than heads that see no other token say something only if a difference shows.
    """
    found = compared(pairs)
    if lacking := dict.fromkeys(label for label in pairs if label not in found):
        return untestable(statement, lacking, lack="there are not yet all runs of")
    kept = {label: one for label, one in found.items() if one.outcome in SHOWN or needed(pairs[label])}
    if not kept:
        needs = {"difference that shows, nor an arm that is better than heads which see no other token": None}
        return untestable(statement, needs, lack="there is no")
    told = outperforms(statement, {label: reported(one, AS_STORED) for label, one in kept.items()})
    why = "Left out, as no difference shows and neither is shown to be better than heads that see no other token"
    return noting_each(told, {why: [label for label in pairs if label not in kept]})


def needed(pair: Pair) -> bool:
    """Whether one of the two arms is better than heads that see no other token."""
    name, *arms = pair
    return any(one.outcome == "better" for one in compared({arm: (name, arm, IDLE) for arm in arms}).values())


def residual(way: str) -> float:
    """The largest entry of W^T W - I, of a square matrix made in one of `WAYS_TO_DRAW`, float64."""
    w = WAYS_TO_DRAW[way](D, generator=seeded(), dtype=torch.float64)
    return float((w.T @ w - torch.eye(D, dtype=torch.float64)).abs().max())


@evidence("S0.5.2d", chapter=CHAPTER)
def orthogonal_is_required() -> Finding:
    # Householder's QR leaves a residual of this order in d and eps (Higham 2002, theorem 19.4).
    tolerance = D**1.5 * torch.finfo(torch.float64).eps
    drawn = max(map(residual, WAYS_TO_DRAW))
    found = all_of(
        {
            "frozen orthogonal matrices against Gaussian ones of the same scale": part(
                "orthogonal initialisation is required, and does better", SAME_SCALE
            ),
            "against others of a low rank": part("others may work badly", LOW_RANK),
            "QR, SVD, Haar": holds("make orthogonal matrices", drawn, tolerance, at=f"$d = {D}$"),
        }
    )
    return found.noting(remarks())


def remarks() -> str:
    """The units, the results for trained matrices that begin so, and what heads of one scale add at all."""
    learned, added = in_words(LEARNED), in_words(ADDED)
    learned = f". Of trained matrices, Xavier's against others at the start: {learned}" if learned else ""
    added = f". More bits a byte than heads that see no other token: {added}" if added else ""
    return (
        "Intervals are of the bits a byte that the first has more; less is better. A difference matters from "
        f"{language.DECISION.margin:g} bits a byte on. QR without a choice of signs does not follow Haar's law"
        f"{learned}{added}"
    )


def in_words(pairs: Mapping[str, Pair]) -> str:
    """The intervals of the pairs that have run and their outcomes; nothing if none has."""
    found = {label: reported(one, AS_STORED) for label, one in compared(pairs).items()}
    return figures.listing({label: f"{figures.span(ends)} ({outcome})" for label, (ends, outcome) in found.items()})
