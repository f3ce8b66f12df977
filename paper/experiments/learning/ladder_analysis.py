"""Analysis of the records of the ladder, by rules that were written here before the runs.

`HYPOTHESES` are one family: each is tested at a level that holds for all together (Holm 1979). A difference is one of
bits a byte on the test part, averaged over the seeds that both arms have. Its error has two parts: that of the seeds,
and that of the choice of the test's text, which is estimated from consecutive parts of it. The intervals include both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import Any, NamedTuple

import numpy as np

from ortho.cost import Cost
from ortho.cost import model as model_cost
from ortho.cost.layers import added
from paper.experiments.devices import of_judged_devices
from paper.experiments.engine.records import Record
from paper.experiments.learning.ladder_arms import ARMS, CONVOLUTION, KINDS
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Interval, holm, student, student_below
from paper.tasks.text import VOCAB_SIZE

LEVEL = 0.05  # of all hypotheses together
NO_WORSE = 0.02  # bits a byte
BETTER = 0.05
RIVAL = "learned"  # with the convolution
SHIFTED = "learned, KV shift"  # without the convolution: at 16 times the least budget ahead of the other learned heads
INDUCTION, ONE, BOTH = (
    "2 induction + 2 positional",
    "1 learned + 3 positional",
    "1 learned + 1 induction + 2 positional",
)
EXPERIMENTS = ("ladder", "ladder-selective", "ladder-others")  # their arms are compared with one another
Key = tuple[str, str, int]  # text, arm, convolution
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Hypothesis:
    """An arm takes less than `margin` bits a byte more than another, learned heads by default, at one budget and equal
    steps; a negative margin says how many fewer it must take. Both have the convolution, or neither."""

    name: str
    text: str
    arm: str
    budget: int
    margin: float
    against: str = RIVAL
    convolution: int = CONVOLUTION


HYPOTHESES: tuple[Hypothesis, ...] = (
    *(
        Hypothesis(f"a: {text}, {budget} x", text, ONE, budget, NO_WORSE)
        for text in ("python", "novels")
        for budget in (16, 64)
    ),
    *(Hypothesis(f"b: python, {n} x", "python", INDUCTION, n, -BETTER) for n in (16, 64)),
    *(Hypothesis(f"b: novels, {n} x", "novels", INDUCTION, n, NO_WORSE) for n in (16, 64)),
)

# A family of its own, for heads that read nothing where nothing matches: they are compared with learned heads, and with
# heads whose matches are wired to the bytes themselves.
SELECTIVE, WIRED = "2 selective induction + 2 positional", "2 n-gram + 2 positional"
SELECTIVE_HYPOTHESES: tuple[Hypothesis, ...] = (
    *(Hypothesis(f"c: python, {n} x", "python", SELECTIVE, n, -BETTER) for n in (16, 64)),
    *(Hypothesis(f"c: novels, {n} x", "novels", SELECTIVE, n, NO_WORSE) for n in (16, 64)),
    *(
        Hypothesis(f"d: {text}, {n} x", text, SELECTIVE, n, NO_WORSE, WIRED)
        for text in ("python", "novels")
        for n in (16, 64)
    ),
)

# A third family, for one learned head beside two selective ones. It was written when sources were measured up to 16
# times the base budget, before any of the runs that it is about.
BESIDE = "1 learned + 2 selective induction + 1 positional"
BESIDE_HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis("e: python, 64 x", "python", BESIDE, 64, -BETTER),
    *(Hypothesis(f"e: novels, {n} x", "novels", BESIDE, n, NO_WORSE) for n in (16, 64)),
    Hypothesis("f: python, 64 x", "python", BESIDE, 64, -BETTER, WIRED),
)

# A fourth family: whether selective heads still help where the learned head has the strongest rival's help, the KV
# shift, in place of the convolution. It was written before any of the runs that it is about.
BESIDE_SHIFTED = "1 learned, KV shift + 2 selective induction + 1 positional"
SHIFTED_HYPOTHESES: tuple[Hypothesis, ...] = tuple(
    Hypothesis(f"g: python, {n} x", "python", BESIDE_SHIFTED, n, -BETTER, SHIFTED, convolution=0) for n in (16, 64)
)

FAMILIES = (HYPOTHESES, SELECTIVE_HYPOTHESES, BESIDE_HYPOTHESES, SHIFTED_HYPOTHESES)


class Tested(NamedTuple):
    """A difference of bits a byte, its interval by Student, the chance of a difference as low as this if the margin
    were reached, and the seeds."""

    mean: float
    interval: Interval
    chance: float
    seeds: tuple[int, ...]


def counts(record: Record) -> bool:
    """Whether a run is a result, and not one that chooses a rate."""
    return bool(record["configuration"]["seed"] != TUNING)


def standing(records: Iterable[Record]) -> list[Record]:
    """The runs that count, from the devices whose records claims are judged by."""
    return of_judged_devices(filter(counts, records))


def key(record: Record) -> Key:
    """What a run shares with those of other seeds and budgets."""
    case = record["configuration"]
    return case["text"], case["arm"], case["convolution"]


def blocks(records: Iterable[Record], of: Key, budget: int) -> dict[int, Array]:
    """Seed -> bits a byte of the test's parts, at a budget; if several runs pass it, those of the shortest run."""
    found: dict[int, Array] = {}
    for record in sorted(records, key=lambda record: -int(record["configuration"]["budget"])):
        part = record["repetitions"].get(f"{budget} x", {})
        if counts(record) and key(record) == of and "test_bits" in part:
            found[int(record["configuration"]["seed"])] = np.array(part["test_bits"])
    return found


def blocks_between(records: Sequence[Record], of: Key, budget: float) -> dict[int, Array]:
    """`blocks` at any budget, between powers of two linearly in the logarithm; none beyond what runs have passed."""
    below = 2 ** int(log2(budget))
    share = log2(budget / below)
    low = blocks(records, of, below)
    if not share:
        return low
    high = blocks(records, of, 2 * below)
    return {seed: low[seed] + share * (high[seed] - low[seed]) for seed in low.keys() & high.keys()}


def tested(ours: Mapping[int, Array], theirs: Mapping[int, Array], margin: float) -> Tested | None:
    """The first arm's bits minus the other's; None if they have fewer than two seeds in common."""
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if len(seeds) < 2:
        return None
    table = np.stack([ours[seed] - theirs[seed] for seed in seeds])  # (seeds, parts)
    mean, freedom = float(table.mean()), len(seeds) - 1
    of_seeds = float(table.mean(1).var(ddof=1)) / len(seeds)
    of_text = float(table.mean(0).var(ddof=1)) / table.shape[1]
    error = sqrt(of_seeds + of_text)
    reach = student(1 - 2 * LEVEL, freedom) * error  # each end is wrong with probability `LEVEL`
    interval = mean - reach, mean + reach
    return Tested(mean, interval, student_below((mean - margin) / error, freedom), seeds)


def compared(records: Sequence[Record], text: str, arm: str, budget: int) -> Tested | None:
    """The bits on a text of an arm with the convolution minus those of learned heads; None if they have fewer than two
    seeds in common."""
    return _tested(records, Hypothesis("", text, arm, budget, margin=0.0))


def _tested(records: Sequence[Record], one: Hypothesis) -> Tested | None:
    ours, theirs = (blocks(records, (one.text, arm, one.convolution), one.budget) for arm in (one.arm, one.against))
    return tested(ours, theirs, one.margin)


def judged(
    records: Sequence[Record], family: Sequence[Hypothesis] = HYPOTHESES
) -> dict[str, tuple[Tested | None, bool]]:
    """Hypothesis -> what was found, and whether it is shown. Hypotheses that were not measured count in the family."""
    found = {one.name: _tested(records, one) for one in family}
    shown = holm([1.0 if each is None else each.chance for each in found.values()], level=LEVEL)
    return {name: (each, held) for (name, each), held in zip(found.items(), shown, strict=True)}


def layer_cost(B: int, N: int, d: int, H: int, *, arm: str, **kwargs: Any) -> Cost:
    """The closed form of an arm's attention layer, without the sums over heads of several kinds."""
    return added(*(KINDS[kind].cost(B, N, d, count, head_dim=d // H, **kwargs) for kind, count in ARMS[arm].heads))


def step_flop(case: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products of a case's training step, by closed forms; the convolution has none."""
    own: dict[str, Any] = {"layer": layer_cost, "arm": case["arm"]}
    sizes = (case["B"], case["N"], case["d"], case["H"], case["L"])
    return int(model_cost(*sizes, vocab_size=VOCAB_SIZE, max_length=None, d_ff=case["d_ff"], **own).step)
