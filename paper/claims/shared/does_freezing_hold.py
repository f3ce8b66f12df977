"""Whether frozen queries and keys hold up: over tasks, over what they are drawn from, in expressiveness, in gradients.

S0, section 5.2; S2, sections 4.2, 4.3 and 5.3. Read from the records of the learning experiments: of each experiment
those of one device, a CPU if there is one (`judged_device`). Differences between arms are judged by the rule that the
records themselves hold (a `Decision`); on tasks that a run either learns or does not, by exact intervals of the success
rates.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from paper import experiments
from paper.claims.outcomes import BITS_A_BYTE, Unit, loses_nothing
from paper.claims.rules import untestable
from paper.claims.shared.common import IDLE, SHOWN, Arms, noting_each
from paper.claims.shared.low_resource import long_runs
from paper.claims.shared.one_learned_head import along_budgets
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.learning import analysis, fine_tuning, images, language, synthetic, translating
from paper.experiments.learning.analysis import Measures, Runs
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import Decision, Interval, decide, success_interval

RIGHT = Unit("% right", 100, 1)
RATE = Unit("rate of successes")
BLEU = Unit("BLEU", 100, 1)
SCORES = {"bleu_fraction": BLEU, "faultless_fraction": Unit("% without a mistake", 100, 1)}
TRANSLATED = {"learned": "8 learned", "frozen": "8 frozen"}
TUNED = {"learned": "all trained", "frozen": "QK redrawn"}


class Compared(NamedTuple):
    """One arm against another, as stored: mean difference, its interval, the rule's outcome, and the runs of each.

    `unit` is the unit to report the numbers in.
    """

    mean: float
    interval: Interval
    outcome: str
    runs: int
    unit: Unit


class Setting(NamedTuple):
    """A task at a size: its arms, under the names that they have in `bytes`.

    `arms` are compared by a mean. Each run in `learnt` has learnt the task or not, and `rule` compares the rates.
    """

    arms: Arms
    learnt: Mapping[str, Learnt] = {}
    rule: Decision | None = None

    def compare(self, arm: str, other: str) -> Compared | None:
        """The arm against the other one; None where one of them is missing, or too few runs have a seed in common."""
        if self.rule is not None and arm in self.learnt and other in self.learnt:
            ours, theirs = self.learnt[arm], self.learnt[other]
            interval = rate_difference(ours, theirs, self.rule)
            mean = ours.successes / len(ours.seeds) - theirs.successes / len(theirs.seeds)
            runs = min(len(ours.seeds), len(theirs.seeds))
            return Compared(mean, interval, decide(interval, self.rule), runs, self.arms.unit)
        found = self.arms.judged(arm, other)
        return None if found is None else Compared(*found.difference, found.outcome, found.pairs, self.arms.unit)

    def at_stake(self, arm: str) -> bool:
        """Whether the arm has anything to lose: it is better than heads that see no other token, if those have run;
        else its share or rate of successes is above the margin of its rule."""
        if self.rule is not None and arm in self.learnt:
            one = self.learnt[arm]
            return one.successes / len(one.seeds) > self.rule.margin
        if (over_idle := self.compare(arm, IDLE)) is not None:
            return over_idle.outcome == "better"
        runs = self.arms.runs[arm]
        rule = Decision.of(runs.configuration)
        return not rule.higher_is_better or runs.mean(self.arms.measure) > rule.margin


def rate_difference(ours: Learnt, theirs: Learnt, rule: Decision) -> Interval:
    """The interval of our rate of successes minus theirs; each end is wrong with at most the rule's level.

    It uses the ends of the two exact intervals that lie furthest apart; either is wrong with at most half the level.
    """
    (low, high), (other_low, other_high) = (
        success_interval(one.successes, len(one.seeds), confidence=1 - rule.level) for one in (ours, theirs)
    )
    return low - other_high, high - other_low


def settings(name: str, records: Sequence[Record]) -> dict[str, Setting]:
    """An experiment's settings on one device, by a few words; none if nothing was measured."""
    where = experiments.judged_device(records)
    return _READ[name](records, where) if where else {}


def every_setting(names: Iterable[str] = ()) -> dict[str, Setting]:
    """The settings of these experiments, by default of all, that have records."""
    return {label: one for name in names or _READ for label, one in settings(name, experiments.load(name)).items()}


def compared(arm: str, other: str, found: Mapping[str, Setting]) -> dict[str, Compared]:
    """The arm against the other one in all settings that have both."""
    pairs = {label: one.compare(arm, other) for label, one in found.items()}
    return {label: pair for label, pair in pairs.items() if pair is not None}


def at_issue(arm: str, other: str, found: Mapping[str, Setting]) -> dict[str, Compared]:
    """The comparisons of the two arms that say something.

    If the other arm has nothing to lose, the absence of a difference says nothing; a difference that shows is kept.
    """
    pairs = compared(arm, other, found)
    return {label: one for label, one in pairs.items() if one.outcome in SHOWN or found[label].at_stake(other)}


def outcomes(arm: str, other: str, found: Mapping[str, Setting]) -> Counter[str]:
    """How often the rule gives each outcome for the arm against the other one, where they say something."""
    return Counter(pair.outcome for pair in at_issue(arm, other, found).values())


def in_words(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{outcome} in {count}" for outcome, count in counts)


def judged(pairs: Mapping[str, Compared]) -> dict[str, tuple[Interval, str]]:
    """The comparisons as a rule of `paper.claims.outcomes` takes them, in their units, which the labels show."""
    return {
        f"{label} ({one.unit.name})": (one.unit.interval(one.interval), one.outcome) for label, one in pairs.items()
    }


def lost(statement: str, arm: str, other: str, found: Mapping[str, Setting]) -> Finding:
    """Whether the arm loses nothing to the other one in these settings, by the comparisons that say something."""
    have = at_issue(arm, other, found)
    if not have:
        needs = {f"runs of {arm!r} and of {other!r} at the same seeds, where something can be lost": None}
        return untestable(statement, needs, lack="there are no")
    return noting_idle(loses_nothing(statement, judged(have)), arm, other, found)


def noting_idle(finding: Finding, arm: str, other: str, found: Mapping[str, Setting]) -> Finding:
    """The finding, with a remark on the settings in which the other arm has nothing to lose, if there are any."""
    have = at_issue(arm, other, found)
    left_out = f"Left out, as no difference shows by what is judged, and {other} heads have nothing to lose by it"
    kept = f"Kept, as a difference shows, though {other} heads have nothing to lose"
    return noting_each(
        finding,
        {
            left_out: [label for label in compared(arm, other, found) if label not in have],
            kept: [label for label in have if not found[label].at_stake(other)],
        },
    )


def _bytes(
    records: Sequence[Record], where: str, measure: str = "bits", measures: Measures = language.MEASURES
) -> dict[str, Setting]:
    """The settings by text: all of it, or a number of bytes."""
    limits = sorted({record["configuration"]["limit"] for record in records if record["device"] == where})
    found = {limit: analysis.by_arm(records, where, measures, limit=limit, dropout=0.0) for limit in limits}
    return {
        f"bytes, {f'{limit:,} to train on' if limit else 'the whole text'}": Setting(Arms(arms, measure, BITS_A_BYTE))
        for limit, arms in found.items()
        if arms
    }


def _budgets(records: Sequence[Record], where: str) -> dict[str, Setting]:
    """The settings in the order of widths, then of steps."""
    return {
        f"bytes, d = {d}" + ("" if share == 1 else f", {share:g} times the steps"): Setting(
            Arms(arms, "bits", BITS_A_BYTE)
        )
        for (d, share), arms in along_budgets(records, where, {}).items()
    }


def _images(records: Sequence[Record], where: str) -> dict[str, Setting]:
    arms = images.by_arm(records, where)
    return {f"images, {images.DATA}": Setting(Arms(arms, "correct", RIGHT))} if arms else {}


def _tuned(records: Sequence[Record], where: str) -> dict[str, Setting]:
    arms = fine_tuning.by_arm(records, where)
    named = {name: arms[own] for name, own in TUNED.items() if own in arms}
    return {"fine-tuning, QK drawn anew": Setting(Arms(named, "new", BITS_A_BYTE))} if named else {}


def _translated(records: Sequence[Record], where: str) -> dict[str, Setting]:
    found = {}
    for pairs, arms in translating.by_pairs(records, where).items():
        case = next(iter(arms.values())).configuration
        many = f"{pairs:,} pairs" if pairs else "new pairs"
        found[f"{case['task']}, {many}"] = _encoders(arms, SCORES[case["decision_metric"]])
    return found


def _translated_long(records: Sequence[Record], _where: str) -> dict[str, Setting]:
    """The long runs of translation, each arm at the budget that counts for it."""
    return {f"translation, {amount}": _encoders(arms, BLEU) for amount, arms in long_runs(records).items()}


def _encoders(arms: Mapping[str, Runs], unit: Unit) -> Setting:
    """The arms whose encoders have heads of one kind, under the names of these kinds."""
    return Setting(Arms({name: arms[own] for name, own in TRANSLATED.items() if own in arms}, "score", unit))


def _synthetic(records: Sequence[Record], where: str) -> dict[str, Setting]:
    margins = {record["configuration"]["task"]: record["configuration"]["margin_fraction"] for record in records}
    rules = {task: Decision(margin, level=0.05, higher_is_better=True) for task, margin in margins.items()}
    found, none = synthetic.learnt(records, where), Arms({}, "", RATE)
    return {f"synthetic, {task}": Setting(none, arms, rules[task]) for task, arms in found.items()}


_READ: dict[str, Callable[[Sequence[Record], str], dict[str, Setting]]] = {
    "bytes": _bytes,
    "bytes-little": _bytes,
    "bytes-budgets": _budgets,
    "images": _images,
    "fine-tuning": _tuned,
    "translation": _translated,
    "translation-budgets": _translated_long,
    "transduction": _translated,
    "synthetic": _synthetic,
}


def frozen_lose_nothing() -> Finding:
    """Whether frozen heads lose nothing to learned ones, in all settings that say something about it."""
    found = every_setting()
    counts = outcomes("frozen", "learned", found)
    told = lost("frozen heads lose nothing to learned ones", "frozen", "learned", found)
    return told.noting(f"Of {counts.total()} settings {in_words(counts.most_common())}") if counts else told
