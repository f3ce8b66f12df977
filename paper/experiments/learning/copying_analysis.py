"""When runs begin to copy, and the hypotheses on it: written, with every rule here, before the runs with looks.

Of the kinds `CONVOLVED`, `KV_SHIFT` and `SELECTIVE` seeds 1 to 3 had been run before, without looks (`known`); they
were run again for the looks. So three seeds of ten were known when the hypotheses on these kinds were written.

**The jump** of a run is the number of bytes that it had read at the first look from which on its bits on go-on bytes
stay below `JUMP`. Looks are those of the validation part in training (`copying.LOOKS`), and the last, cooled look at
the longest budget, which uses the test part. A run without such a look had not jumped by the end: it is censored there.

`HYPOTHESES` are one family: Holm's procedure over all of them at `LEVEL`. Runs of the same seed share data and batches,
so differences are paired by seed, and each test is exact: under the hypothesis of no effect every sign of every seed's
difference is equally likely (`sign_flips`). Comparisons with three seeds (the second text, the second size, convolution
and KV shift together) cannot reach that level: they are reported run by run, and called replicated if all runs of
heads that retrieve untrained jump before all runs of learned heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, log2
from typing import Any, NamedTuple

import numpy as np

from paper.experiments.engine.records import Record
from paper.experiments.learning import ladder, ladder_analysis
from paper.experiments.learning.copying import LEARNED, SELECTING, SHIFTED, WIRED
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.statistics import holm

WRITTEN = "2026-11-29T16:27:32"  # by UTC: when this file was first committed
JUMP = 0.7  # bits on bytes that go on as an earlier match does
LEVEL = 0.05  # of all hypotheses together
NO_WORSE = 0.02  # bits a byte
Kind = tuple[str, int]  # a variant, and the width of its convolution

CONVOLVED: Kind = (LEARNED, CONVOLUTION)
KV_SHIFT: Kind = (SHIFTED, 0)
SELECTIVE: Kind = (SELECTING, CONVOLUTION)
NGRAM: Kind = (WIRED, CONVOLUTION)
BOTH_HELPS: Kind = (SHIFTED, CONVOLUTION)
MIMETIC: Kind = ("learned, mimetic", CONVOLUTION)
ONE: Kind = (ladder_analysis.ONE, CONVOLUTION)
POSITIONAL: Kind = ("positional", CONVOLUTION)
INDUCTION: Kind = (ladder_analysis.INDUCTION, CONVOLUTION)
BOTH: Kind = (ladder_analysis.BOTH, CONVOLUTION)
PURE: Kind = (ladder_analysis.SELECTIVE, CONVOLUTION)  # selective heads without a learned one
PURE_NGRAM: Kind = (ladder_analysis.WIRED, CONVOLUTION)
BESIDE_SHIFTED: Kind = (ladder_analysis.BESIDE_SHIFTED, 0)


class Look(NamedTuple):
    """What the pages call a kind, and how they draw it. Where a name counts three heads, the fourth is positional."""

    name: str
    colour: str  # of `plots.PALETTE`
    dashes: str


# Vermilion: two or more heads whose one matrix is untrained, as in `plots.LOOKS`.
LOOKS: Mapping[Kind, Look] = {
    CONVOLVED: Look("learned + convolution", "black", "-"),
    KV_SHIFT: Look("learned + KV shift", "purple", "-."),
    SELECTIVE: Look("1 learned + 2 selective", "vermilion", "-"),
    MIMETIC: Look("learned, alike at first", "black", ":"),
    BOTH_HELPS: Look("learned + KV shift + convolution", "purple", ":"),
    POSITIONAL: Look("4 positional", "green", ":"),
    ONE: Look("1 learned + 3 positional", "green", "-"),
    INDUCTION: Look("2 induction + 2 positional", "vermilion", "--"),
    BOTH: Look("1 learned + 1 induction + 2 positional", "vermilion", "-."),
    PURE: Look("2 selective + 2 positional", "vermilion", ":"),
    PURE_NGRAM: Look("2 n-gram + 2 positional", "sky", "-."),
    NGRAM: Look("1 learned + 2 n-gram", "sky", "--"),
    BESIDE_SHIFTED: Look("1 with KV shift + 2 selective", "orange", ":"),
}


def jump(record: Record) -> float:
    """Bytes that a run had read when it began to copy for good; infinite if it had not by the end."""
    case = record["configuration"]
    size = case["B"] * case["N"]
    points = [(look["step"] * size, look["repeats_bits"]["goes on"]) for look in record["facts"]["looks"]]
    last = record["facts"]["validation"][-1]
    points.append((last["step"] * size, last["repeats_bits"]["goes on"]))
    found = inf
    for read, bits in reversed(points):
        if bits >= JUMP:
            break
        found = float(read)
    return found


def has_begun(record: Record, budget: int = ladder.LONGEST) -> bool:
    """Whether the cooled copy at a budget takes less than `JUMP` bits on bytes that go on as an earlier match does."""
    (look,) = (one for one in record["facts"]["validation"] if one["budget"] == budget)
    return bool(look["repeats_bits"]["goes on"] < JUMP)


def final_bits(record: Record) -> float:
    """Bits a byte on the test part at the run's longest budget."""
    return _bits(record, record["configuration"]["budget"])


def _bits(record: Record, budget: int) -> float:
    return float(np.mean(record["repetitions"][f"{budget} x"]["test_bits"]))


def bits_at(record: Record, budget: float) -> float:
    """Bits a byte on the test part at a budget between two that were tested, linearly in its logarithm; beyond the
    longest budget the bits of that one, which favours the rival of a run with dearer steps."""
    known = sorted(int(name.split()[0]) for name in record["repetitions"])
    return float(np.interp(log2(budget), [log2(n) for n in known], [_bits(record, n) for n in known]))


def sign_flips(differences: Sequence[float]) -> float:
    """The chance of a mean as low as that of these differences if each one's sign were a coin's: exact, over all
    signs. An infinite difference counts as the largest finite one of all, with its sign."""
    values = np.array(differences, dtype=float)
    if not len(values):
        return 1.0
    most = max((abs(value) for value in values if np.isfinite(value)), default=1.0)
    values = np.clip(np.nan_to_num(values, nan=0.0, posinf=most, neginf=-most), -most, most)
    sums = np.array(list(product((1, -1), repeat=len(values)))) @ np.abs(values)
    return float(np.mean(sums <= values.sum() + 1e-12))


def _jump_bytes(record: Record, _: Record) -> float:
    case = record["configuration"]
    return min(jump(record), float(case["budget"] * case["base"] * case["B"] * case["N"]))


def _equal_steps(record: Record, _: Record) -> float:
    return final_bits(record)


def _equal_flop(record: Record, other: Record) -> float:
    """Bits after as many FLOPs as the longest budget takes the dearer of the two."""
    return _within(record, *(ladder_analysis.step_flop(one["configuration"]) for one in (record, other)))


def _equal_time(record: Record, other: Record) -> float:
    """Bits after the processor time in which the dearer of the two reads less than the whole budget."""
    own, rival = (float(np.median([look["step_s"] for look in r["facts"]["validation"]])) for r in (record, other))
    return _within(record, own, rival)


def _within(record: Record, own: float, rival: float) -> float:
    """The cheaper run has spent at its longest budget what both may spend."""
    return bits_at(record, record["configuration"]["budget"] * min(1.0, rival / own))


def _deviation(record: Record, others: Sequence[Record]) -> float:
    return abs(final_bits(record) - float(np.median([final_bits(one) for one in others])))


@dataclass(frozen=True)
class Hypothesis:
    """On Python code, the kind `less` has a lower figure than `more` by `margin` or more, in the mean over seeds; a
    negative margin allows it to be as much higher. `figure` is one of `FIGURES`, or 'spread': the distance of a run's
    final bits from the median of its kind."""

    name: str
    less: Kind
    more: Kind
    figure: str
    margin: float = 0.0


FIGURES: Mapping[str, Callable[[Record, Record], float]] = {
    "jump": _jump_bytes,
    "bits at equal steps": _equal_steps,
    "bits at equal FLOPs": _equal_flop,
    "bits at equal time": _equal_time,
}

HYPOTHESES = (
    Hypothesis("selective before convolved", SELECTIVE, CONVOLVED, "jump"),
    Hypothesis("selective before KV shift", SELECTIVE, KV_SHIFT, "jump"),
    Hypothesis("KV shift before convolved", KV_SHIFT, CONVOLVED, "jump"),
    Hypothesis("n-gram before convolved", NGRAM, CONVOLVED, "jump"),
    Hypothesis("selective less spread than convolved", SELECTIVE, CONVOLVED, "spread"),
    Hypothesis("selective less spread than KV shift", SELECTIVE, KV_SHIFT, "spread"),
    *(
        Hypothesis(f"selective fewer {figure} than {word}", SELECTIVE, kind, figure)
        for figure in ("bits at equal steps", "bits at equal FLOPs", "bits at equal time")
        for word, kind in (("convolved", CONVOLVED), ("KV shift", KV_SHIFT))
    ),
    Hypothesis("n-gram no worse than selective", NGRAM, SELECTIVE, "bits at equal steps", -NO_WORSE),
)

# those of a lead of selective heads over the KV shift at the end
LEAD_AT_THE_END = frozenset(one.name for one in HYPOTHESES if one.more == KV_SHIFT and one.figure != "jump")


@dataclass(frozen=True)
class Tested:
    """Differences by seed, less the margin: their mean, and the chance of one as low without an effect."""

    by_seed: Mapping[int, float]
    mean: float
    chance: float


def runs(records: Sequence[Record], kind: Kind, *, text: str = "python", **settings: Any) -> dict[int, Record]:
    """Seed -> the run of a kind on a text to the longest budget, at its main rate and size, unless `settings` say
    otherwise."""
    wanted = {"text": text, "arm": kind[0], "convolution": kind[1], **settings}
    if "rate" not in settings and kind == CONVOLVED and "d" not in settings:
        wanted["rate"] = 0.0015
    if "d" not in settings:
        wanted["d"] = 64
    return {
        record["configuration"]["seed"]: record
        for record in records
        if wanted.items() <= record["configuration"].items()
    }


def known(records: Sequence[Record], kind: Kind) -> set[int]:
    """Seeds whose run of a kind to the longest budget had been made when the hypotheses were written."""
    found = runs(records, kind, budget=ladder.LONGEST)
    return {seed for seed, record in found.items() if record["provenance"]["date_utc"] < WRITTEN}


def tested(records: Sequence[Record], one: Hypothesis) -> Tested | None:
    """A hypothesis' figures; None if the kinds have no seed in common."""
    less, more = runs(records, one.less), runs(records, one.more)
    seeds = sorted(less.keys() & more.keys())
    if not seeds:
        return None
    ours, theirs = [less[seed] for seed in seeds], [more[seed] for seed in seeds]
    if one.figure == "spread":
        pairs = [(_deviation(a, ours), _deviation(b, theirs)) for a, b in zip(ours, theirs, strict=True)]
    else:
        figure = FIGURES[one.figure]
        pairs = [(figure(a, b), figure(b, a)) for a, b in zip(ours, theirs, strict=True)]
    differences = [a - b + one.margin for a, b in pairs]
    return Tested(dict(zip(seeds, differences, strict=True)), float(np.mean(differences)), sign_flips(differences))


def judged(records: Sequence[Record]) -> dict[str, tuple[Tested | None, bool]]:
    """Hypothesis -> what was found, and whether it is shown. One that was not measured counts in the family."""
    found = [tested(records, one) for one in HYPOTHESES]
    shown = holm([1.0 if each is None else each.chance for each in found], level=LEVEL)
    return {one.name: (each, held) for one, each, held in zip(HYPOTHESES, found, shown, strict=True)}
