"""S0, section 5.2: whether frozen queries and keys hold, over tasks and over what they are drawn from.

Read from the records of the learning experiments: of every device that has any, a CPU's first. What an arm has more
than another is judged by the rule that the records themselves hold (`paper.experiments.statistics.Decision`); of tasks
that a run learns or does not, by exact intervals of the rates at which it does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, Unit, loses_nothing
from paper.claims.rules import all_of, untestable
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.learning import (
    fine_tuning_rows,
    images_rows,
    language_rows,
    paired_rows,
    synthetic_rows,
    translating_rows,
)
from paper.experiments.learning.images import DATA
from paper.experiments.learning.paired_rows import Runs
from paper.experiments.learning.synthetic_rows import Learnt
from paper.experiments.statistics import Decision, Interval, decide, success_interval

CHAPTER = "28-does-freezing-hold"

RIGHT = Unit("% right", 100, 1)
RATE = Unit("rate of successes")
SCORES = {"bleu_fraction": Unit("BLEU", 100, 1), "faultless_fraction": Unit("% without a mistake", 100, 1)}

DRAWS = ("frozen Gaussian", "frozen low-rank", "frozen 4 x", "frozen 1/4 x")  # beside 'frozen', which is orthogonal
TRANSLATED = {"learned": "8 learned", "frozen": "8 frozen", "stopped": "8 stopped"}
IDLE = "identity"  # heads that see no other token
TUNED = {"learned": "all trained", "frozen": "QK redrawn"}
NAMES = (
    "bytes",
    "bytes-little",
    "bytes-budgets",
    "images",
    "fine-tuning",
    "translation",
    "transduction",
    "synthetic",
)


class Compared(NamedTuple):
    """What one arm has more than another, as stored: the mean, its interval; what the rule says, of how many runs each.

    `unit` is in what the numbers are told.
    """

    mean: float
    interval: Interval
    outcome: str
    runs: int
    unit: Unit


class Setting(NamedTuple):
    """A task at a size: its arms, by the names that they have among the bytes, and in what unit they are measured.

    `runs` are those of arms that are compared by a mean, with the `measure`; `learnt` those of which each has learnt
    the task or not.
    """

    runs: Mapping[str, Runs]
    measure: str
    unit: Unit
    learnt: Mapping[str, Learnt] = {}
    rule: Decision | None = None

    def compare(self, arm: str, other: str) -> Compared | None:
        """The arm against the other one; None where one of them is missing, or too few runs have a seed in common."""
        if self.rule is not None and arm in self.learnt and other in self.learnt:
            ours, theirs = self.learnt[arm], self.learnt[other]
            interval = rate_difference(ours, theirs, self.rule)
            mean = ours.successes / len(ours.seeds) - theirs.successes / len(theirs.seeds)
            runs = min(len(ours.seeds), len(theirs.seeds))
            return Compared(mean, interval, decide(interval, self.rule), runs, self.unit)
        if arm not in self.runs or other not in self.runs:
            return None
        found = paired_rows.judged(self.runs[arm], self.runs[other], self.measure)
        return None if found is None else Compared(*found.difference, found.outcome, found.pairs, self.unit)

    def at_stake(self, arm: str) -> bool:
        """Whether the arm has anything to lose: more than heads that see no other token, where those have run, else a
        share or a rate of successes above the margin of its rule."""
        if self.rule is not None and arm in self.learnt:
            one = self.learnt[arm]
            return one.successes / len(one.seeds) > self.rule.margin
        if (over_idle := self.compare(arm, IDLE)) is not None:
            return over_idle.outcome == "better"
        rule = Decision.of(self.runs[arm].configuration)
        return not rule.higher_is_better or self.runs[arm].mean(self.measure) > rule.margin


def rate_difference(ours: Learnt, theirs: Learnt, rule: Decision) -> Interval:
    """What our rate of successes has more than theirs; each end is wrong at most with the rule's level.

    The ends of the two exact intervals that lie furthest apart: either is wrong at most with half of the level.
    """
    (low, high), (other_low, other_high) = (
        success_interval(one.successes, len(one.seeds), confidence=1 - rule.level) for one in (ours, theirs)
    )
    return low - other_high, high - other_low


def settings(name: str, records: Sequence[Record]) -> dict[str, Setting]:
    """An experiment's settings by a few words, those of one device; none where nothing was measured."""
    where = experiments.judged_device(records)
    return _READ[name](records, where) if where else {}


def every_setting(names: Sequence[str] = NAMES) -> dict[str, Setting]:
    """The settings of all experiments that have records."""
    return {label: one for name in names for label, one in settings(name, experiments.load(name)).items()}


def missing(names: Sequence[str] = NAMES) -> list[str]:
    """The experiments of these that have no runs which count."""
    return [name for name in names if not settings(name, experiments.load(name))]


def compared(arm: str, other: str, found: Mapping[str, Setting]) -> dict[str, Compared]:
    """The arm against the other one in all settings that have both."""
    pairs = {label: one.compare(arm, other) for label, one in found.items()}
    return {label: pair for label, pair in pairs.items() if pair is not None}


def judged(pairs: Mapping[str, Compared]) -> dict[str, tuple[Interval, str]]:
    """The same for a rule of `paper.claims.outcomes`, in its unit, which stands at each label."""
    return {
        f"{label} ({one.unit.name})": (one.unit.interval(one.interval), one.outcome) for label, one in pairs.items()
    }


def lost(statement: str, arm: str, other: str, found: Mapping[str, Setting]) -> Finding:
    """Whether the arm loses nothing to the other one in these settings, but for the `idle` ones."""
    pairs = compared(arm, other, found)
    left_out = idle(pairs, other, found)
    have = {label: pair for label, pair in pairs.items() if label not in left_out}
    if not have:
        needs = {f"runs of {arm!r} and of {other!r} at the same seeds, where something can be lost": None}
        return untestable(statement, needs, lack="there are no")
    told = loses_nothing(statement, judged(have))
    if not left_out:
        return told
    return told.noting(
        f"Left out, as {other} heads have nothing to lose and no difference shows: {'; '.join(left_out)}"
    )


def idle(pairs: Mapping[str, Compared], other: str, found: Mapping[str, Setting]) -> list[str]:
    """The settings in which no difference shows, and could not well, as the other arm has nothing to lose."""
    unseen = [label for label, pair in pairs.items() if pair.outcome not in ("better", "worse")]
    return [label for label in unseen if not found[label].at_stake(other)]


def noting_missing(finding: Finding, names: Sequence[str] = NAMES) -> Finding:
    """The finding with a remark on the experiments of these that have no runs which count, if there are any."""
    lacking = missing(names)
    return finding.noting(f"No record yet of: {', '.join(lacking)}") if lacking else finding


def _bytes(records: Sequence[Record], where: str) -> dict[str, Setting]:
    arms = language_rows.by_arm(records, where)
    return {"bytes, the whole text": Setting(arms, "bits", BITS_A_BYTE)} if arms else {}


def _little(records: Sequence[Record], where: str) -> dict[str, Setting]:
    limits = sorted({record["configuration"]["limit"] for record in records if record["device"] == where})
    found = {limit: language_rows.by_arm(records, where, limit=limit, dropout=0.0) for limit in limits}
    return {f"bytes, {n:,} to train on": Setting(arms, "bits", BITS_A_BYTE) for n, arms in found.items() if arms}


def _budgets(records: Sequence[Record], where: str) -> dict[str, Setting]:
    """In the order of widths, then of steps."""
    found: dict[tuple[int, float], dict[str, Runs]] = {}
    for run in language_rows.runs(records, where):
        case = run.configuration
        found.setdefault((case["d"], language_rows.budget(case)), {})[run.arm] = run
    labels = {
        (d, share): f"bytes, d = {d}" + ("" if share == 1 else f", {share:g} times the steps") for d, share in found
    }
    return {labels[key]: Setting(found[key], "bits", BITS_A_BYTE) for key in sorted(found)}


def _images(records: Sequence[Record], where: str) -> dict[str, Setting]:
    found = {data: images_rows.by_arm(records, where, data) for data in DATA}
    return {f"images, {data}": Setting(arms, "correct", RIGHT) for data, arms in found.items() if arms}


def _tuned(records: Sequence[Record], where: str) -> dict[str, Setting]:
    arms = fine_tuning_rows.by_arm(records, where)
    named = {name: arms[own] for name, own in TUNED.items() if own in arms}
    return {"fine-tuning, QK drawn anew": Setting(named, "new", BITS_A_BYTE)} if named else {}


def _translated(records: Sequence[Record], where: str) -> dict[str, Setting]:
    found = {}
    for pairs, arms in translating_rows.by_pairs(records, where).items():
        named = {name: arms[own] for name, own in TRANSLATED.items() if own in arms}
        case = next(iter(arms.values())).configuration
        many = f"{pairs:,} pairs" if pairs else "new pairs"
        found[f"{case['task']}, {many}"] = Setting(named, "score", SCORES[case["decision_metric"]])
    return found


def _synthetic(records: Sequence[Record], where: str) -> dict[str, Setting]:
    margins = {record["configuration"]["task"]: record["configuration"]["margin_fraction"] for record in records}
    return {
        f"synthetic, {task}": Setting({}, "", RATE, arms, Decision(margins[task], level=0.05, higher_is_better=True))
        for task, arms in synthetic_rows.learnt(records, where).items()
    }


_READ: dict[str, Callable[[Sequence[Record], str], dict[str, Setting]]] = {
    "bytes": _bytes,
    "bytes-little": _little,
    "bytes-budgets": _budgets,
    "images": _images,
    "fine-tuning": _tuned,
    "translation": _translated,
    "transduction": _translated,
    "synthetic": _synthetic,
}


def draws_lose_nothing() -> Finding:
    """Whether other matrices than orthogonal ones, frozen, lose nothing to them, on the whole text."""
    statement = "other frozen matrices lose nothing to orthogonal ones"
    found = settings("bytes", experiments.load("bytes"))
    pairs = {draw: pair for draw in DRAWS for pair in compared(draw, "frozen", found).values()}
    if not pairs:
        return untestable(statement, {"runs of both at the same seeds": None}, lack="there are no")
    return loses_nothing(statement, judged(pairs))


@evidence("S0.5.2c", chapter=CHAPTER)
def tried() -> Finding:
    parts = {
        "tasks": lost("frozen heads lose nothing to learned ones", "frozen", "learned", every_setting()),
        "initialisation": draws_lose_nothing(),
    }
    finding = all_of(parts).noting(
        "An open question of the source's, answered by what was tried here. Of the theory, the chapter proves which "
        "scores frozen matrices can make"
    )
    return noting_missing(finding)
