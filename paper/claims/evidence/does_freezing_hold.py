"""Whether frozen queries and keys hold up: over tasks, over what they are drawn from, in expressiveness, in gradients.

S0, section 5.2; S2, sections 4.2, 4.3 and 5.3. Read from the records of the learning experiments: of each experiment
those of one device, a CPU if there is one (`judged_device`). Differences between arms are judged by the rule that the
records themselves hold (a `Decision`); on tasks that a run either learns or does not, by exact intervals of the success
rates.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ortho import cost
from ortho.orthogonal import haar
from paper import experiments
from paper.claims import figures
from paper.claims.evidence import gradient_depth as depth
from paper.claims.evidence.low_resource import gap, long_runs
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, Unit, loses_nothing, outperforms
from paper.claims.rules import all_of, holds, improves, region, untestable
from paper.claims.shared.common import IDLE, SHOWN, Arms, noting_each, seeded
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.learning import analysis, fine_tuning, images, language, synthetic, translating
from paper.experiments.learning.analysis import Measures, Runs
from paper.experiments.learning.images import DATA
from paper.experiments.learning.synthetic import Learnt
from paper.experiments.statistics import Decision, Interval, decide, success_interval
from paper.theory.scores import carrying, expected_missed, freedoms

CHAPTER = "28-does-freezing-hold"

RIGHT = Unit("% right", 100, 1)
RATE = Unit("rate of successes")
BLEU = Unit("BLEU", 100, 1)
SCORES = {"bleu_fraction": BLEU, "faultless_fraction": Unit("% without a mistake", 100, 1)}
DRAWS = ("frozen Gaussian", "frozen low-rank", "frozen 4 x", "frozen 1/4 x")  # beside 'frozen', which is orthogonal
TRANSLATED = {"learned": "8 learned", "frozen": "8 frozen", "stopped": "8 stopped"}
TUNED = {"learned": "all trained", "frozen": "QK redrawn"}
NAMES = (
    "bytes",
    "bytes-little",
    "bytes-budgets",
    "images",
    "fine-tuning",
    "translation",
    "translation-budgets",
    "transduction",
    "synthetic",
)


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


def every_setting(names: Sequence[str] = NAMES) -> dict[str, Setting]:
    """The settings of all experiments that have records."""
    return {label: one for name in names for label, one in settings(name, experiments.load(name)).items()}


def missing(names: Sequence[str] = NAMES) -> list[str]:
    """Those of the experiments that have no runs that count."""
    return [name for name in names if not settings(name, experiments.load(name))]


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


def noting_missing(finding: Finding, names: Sequence[str] = NAMES) -> Finding:
    """The finding, with a remark on those of the experiments that have no runs that count, if there are any."""
    lacking = missing(names)
    return finding.noting(f"No record yet of: {', '.join(lacking)}") if lacking else finding


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
    found: dict[tuple[int, float], dict[str, Runs]] = {}
    for run in language.runs(records, where):
        case = run.configuration
        found.setdefault((case["d"], language.budget(case)), {})[run.arm] = run
    labels = {
        (d, share): f"bytes, d = {d}" + ("" if share == 1 else f", {share:g} times the steps") for d, share in found
    }
    return {labels[key]: Setting(Arms(found[key], "bits", BITS_A_BYTE)) for key in sorted(found)}


def _images(records: Sequence[Record], where: str) -> dict[str, Setting]:
    found = {data: images.by_arm(records, where, data) for data in DATA}
    return {f"images, {data}": Setting(Arms(arms, "correct", RIGHT)) for data, arms in found.items() if arms}


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


def draws_lose_nothing() -> Finding:
    """Whether other frozen matrices lose nothing to frozen orthogonal ones, on the whole text."""
    statement = "other frozen matrices lose nothing to orthogonal ones"
    found = settings("bytes", experiments.load("bytes"))
    pairs = {draw: pair for draw in DRAWS for pair in compared(draw, "frozen", found).values()}
    if not pairs:
        return untestable(statement, {"runs of both at the same seeds": None}, lack="there are no")
    return loses_nothing(statement, judged(pairs))


def frozen_lose_nothing() -> Finding:
    """Whether frozen heads lose nothing to learned ones, in all settings that say something about it."""
    found = every_setting()
    counts = outcomes("frozen", "learned", found)
    told = lost("frozen heads lose nothing to learned ones", "frozen", "learned", found)
    return told.noting(f"Of {counts.total()} settings {in_words(counts.most_common())}") if counts else told


@evidence("S0.5.2c", chapter=CHAPTER)
def tried() -> Finding:
    finding = all_of({"tasks": frozen_lose_nothing(), "initialisation": draws_lose_nothing()}).noting(
        "An open question of the source's, answered by what was tried here. Of the theory, the chapter proves which "
        "scores frozen matrices can make"
    )
    return noting_missing(finding)


WIDTHS = ((2, 1), (64, 16))  # d and K of the maps
APPROXIMATES = (0.0, 0.5)  # shares of a map's squared norm that may be missed: at most half of it
CARRIED = (64, 16)  # d and K at which score maps are reached
PAIRS = 20  # of drawn and wanted maps
DECADES = Unit("decades", digits=2)
GENERAL = ("bytes", "bytes-little", "images")


# ------------------------------------------------------------------------------------------------------- expressiveness


@cache
def unreached() -> tuple[float, float]:
    """How far the scores of one head after the map P are from wanted ones, at worst, and what rounding allows.

    Products of matrices with norm c, the condition of the drawn columns, in d roundings each: 8 d eps c^2.
    """
    d, K = CARRIED
    g = seeded()
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
    reached = {}
    for d, K in WIDTHS:
        learned, carried = freedoms(d, K)
        reached[f"all heads and one map, $d = {d}$"] = round(min(1.0, carried / learned), 3)
    share = "share of a map's squared norm that the best multiple of a drawn one misses, in the mean"
    parts = {
        share: region(APPROXIMATES, {f"$d = {d}$": round(expected_missed(d), 6) for d, _ in WIDTHS}),
        "the score maps of one head, a trained map of $x$ before it": holds("all are reached", error, allowed),
        "dimensions of the score maps that are reached, of learned heads'": region((1.0, 1.0), reached),
    }
    return all_of(parts).noting("What a whole network with frozen heads can do is judged at S0.3.2d")


# ------------------------------------------------------------------------------------------------------- generalisation


def gaps(records: list[Record]) -> dict[str, Setting]:
    """The settings of an experiment with bytes, measured by `gap`."""
    return _bytes(records, experiments.judged_device(records), "gap", {"gap": gap})


def won(statement: str, found: dict[str, Compared]) -> Finding:
    """Whether a gain shows in these settings."""
    if not found:
        return untestable(statement, {"runs of frozen and learned heads at the same seeds": None}, lack="there are no")
    return outperforms(statement, judged(found))


@evidence("S2.4.2c", chapter=CHAPTER)
def generalisation() -> Finding:
    made: dict[str, Callable[..., Any]] = {"attention": cost.layer, "a block": cost.block}
    fewer = {
        name: 100 - round(100 * one(1, 1, 768, 12, projection="frozen").trained / one(1, 1, 768, 12).trained, 1)
        for name, one in made.items()
    }
    tested = every_setting(GENERAL)
    every_gap = gaps(experiments.load("bytes-little")) | gaps(experiments.load("bytes"))
    finding = all_of(
        {
            "trained weights that go": improves("fewer", fewer, unit=" %"),
            "better on the test": won(
                "frozen heads do better on the test than learned ones", at_issue("frozen", "learned", tested)
            ),
            "less overfitting": won(
                "frozen heads have a smaller gap between training and validation",
                compared("frozen", "learned", every_gap),
            ),
        }
    ).noting(
        "Gaussian matrices that are frozen leave as few weights to train: it is freezing that makes them fewer. A gap "
        "is smaller also where less was learnt. A starting point matters to what is trained, and these are not"
    )
    return noting_missing(noting_idle(finding, "frozen", "learned", tested), GENERAL)


# ------------------------------------------------------------------------------------------------------------ gradients


def places() -> dict[str, tuple[bool, str]]:
    """A few words -> residual sums or none, and the stage of training."""
    ways = (("residual sums", True), ("no residual sums", False))
    return {f"{way}, {stage}": (residual, stage) for stage in depth.STAGES for way, residual in ways}


@evidence("S2.4.3b", chapter=CHAPTER)
def stability() -> Finding:
    if not depth.measured():
        return untestable("frozen heads keep gradients stable", {"gradients of stacks": None}, lack="there are no")
    g = seeded(1)
    x = torch.randn(1000, depth.D, generator=g, dtype=torch.float64)
    made = (x @ haar(depth.D, depth.D, generator=g, dtype=torch.float64) for _ in "qk")
    changed = max(float((y.norm(dim=1) / x.norm(dim=1) - 1).abs().max()) for y in made)
    tolerance = 8 * depth.D * torch.finfo(torch.float64).eps
    beside = {label: depth.compared("frozen", *place) for label, place in places().items()}
    told = {label: (DECADES.interval(interval), outcome) for label, ((_, interval), outcome) in beside.items()}
    most = {
        arm: figures.listing(
            {
                label: f"{max(depth.decades(arm, *place, seed) for seed in depth.SEEDS):.1f}"
                for label, place in places().items()
            }
        )
        for arm in ("frozen", "learned")
    }
    parts = {
        "feature scale": holds("$W_Q$ and $W_K$ keep the length of every token", changed, tolerance),
        f"decades lost or gained by gradients in {depth.L} blocks, frozen minus learned": outperforms(
            "freezing avoids what learned heads suffer", told
        ),
    }
    return all_of(parts).noting(
        f"The most decades of any seed, frozen: {most['frozen']}; learned: {most['learned']}. With the same matrices "
        "both pass the same gradient on, to the bit: freezing changes nothing about it"
    )


# ---------------------------------------------------------------------------------------------------------------- tasks


# Language: text, and sentences of two languages. Images, synthetic tasks and a made-up language do not count.
OF_LANGUAGE = ("bytes", "bytes-little", "bytes-budgets", "fine-tuning", "translation", "translation-budgets")


@evidence("S2.5.3c", chapter=CHAPTER)
def tasks() -> Finding:
    found = every_setting(OF_LANGUAGE)
    stopped = {other: outcomes("stopped", other, found) for other in ("learned", "frozen", "static random")}
    said = "; ".join(f"against {other} {in_words(sorted(n.items()))}" for other, n in stopped.items() if n)
    counts = outcomes("frozen", "learned", found)
    words = f": {in_words(sorted(counts.items()))} of {counts.total()} settings" if counts else ""
    finding = lost("frozen heads lose nothing to learned ones", "frozen", "learned", found).noting(
        f"An open question of the source's, answered by what was tried{words}"
    )
    return noting_missing(finding.noting(f"Stopped heads: {said}") if said else finding, OF_LANGUAGE)
