"""Learning from little data: a larger batch, the risk of overfitting, fixed and frozen heads.

S0, section 5.1: overfitting is read from the records of language models that had little text to train on. For each run,
the loss on its training text in the last twentieth of the steps is compared with that on the validation part after the
last step. S2, sections 1.3 and 5.2: read from the records of small models that translate German to English and a
made-up language from few pairs, or learn from few bytes of text. Differences are judged by the rule that each record
holds. They are given as gains: bits a byte saved, points of BLEU, or points of sentences without a mistake.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch

from ortho.cost.configurations import CONFIGURATIONS
from paper import experiments
from paper.claims import figures
from paper.claims.evidence.printed_models import PRECISIONS, SCENARIOS
from paper.claims.figures import Interval
from paper.claims.ledger import evidence
from paper.claims.outcomes import BITS_A_BYTE, Told, Unit, loses_nothing, outperforms
from paper.claims.rules import all_of, improves, region, untestable
from paper.claims.shared.common import as_much_as, reported, without_records
from paper.claims.verdicts import Finding, Parts
from paper.experiments import Record
from paper.experiments.devices import judged_device, of_judged_devices
from paper.experiments.learning import analysis, language, translating, translation_budgets
from paper.experiments.learning.analysis import Judged, Measures, Runs
from paper.experiments.learning.language import BITS
from paper.experiments.resampling import Difference
from paper.experiments.statistics import Decision
from paper.memory import model_bytes

CHAPTER = "30-low-resource"

BASE = "learned"
FROZEN = ("frozen", "stopped")  # orthogonal random attention, with the gradient through queries and keys and without
TRAINED_BY = ("FP32", "mixed")  # precisions, of `PRECISIONS`


# ----------------------------------------------------------------------------------------------------- the larger batch


def one_sequence(name: str, precision: str) -> int:
    """Bytes that a published model keeps of one sequence of full length for the backward pass, with fused kernels.

    They are the same with frozen matrices. What does not depend on the batch is left out.
    """
    dtype = torch.float32 if PRECISIONS[precision].weight == 4 else torch.float16
    one, two = (model_bytes(SCENARIOS[name].published, B, dtype=dtype) for B in (1, 2))
    return two - one


def freed(name: str, precision: str) -> int:
    """Bytes of gradients and optimiser state that freezing W_Q and W_K saves in a published model."""
    at, size = CONFIGURATIONS[SCENARIOS[name].published], PRECISIONS[precision]
    standard, ours = (at.cost(1, projection=projection).trained for projection in ("learned", "frozen"))
    return int((size.gradient + size.optimiser) * (standard - ours))


def held(name: str, precision: str) -> int:
    """Bytes of the standard model's parameters, gradients and optimiser state."""
    at, size = CONFIGURATIONS[SCENARIOS[name].published], PRECISIONS[precision]
    return int((size.weight + size.gradient + size.optimiser) * at.cost(1).trained)


def more_sequences(name: str, precision: str) -> float:
    """How many sequences fit in what freezing saves. In any memory, at least that many more fit, rounded down."""
    return freed(name, precision) / one_sequence(name, precision)


def batch(name: str, precision: str, memory: float, *, frozen: bool = False) -> int:
    """The most sequences whose training step fits in `memory` bytes; 0 if the model alone does not fit."""
    spared = freed(name, precision) if frozen else 0
    return max(0, int((memory - held(name, precision) + spared) // one_sequence(name, precision)))


# -------------------------------------------------------------------------------------------- what is read from records


def seen(record: Record) -> float:
    """Bits a byte on the training text, over the last twentieth of the steps, with dropout on."""
    return float(record["facts"]["loss"][-1]) * BITS


def unseen(record: Record) -> float:
    """Bits a byte of the validation part after the last step."""
    return float(record["facts"]["validation"][-1]["loss_nats"]) * BITS


def gap(record: Record) -> float:
    """The generalisation gap at the end of training, in bits a byte: validation part minus training text."""
    return unseen(record) - seen(record)


def lost(record: Record) -> float:
    """How far the last validation look lies above the best one, in bits a byte."""
    return unseen(record) - min(float(look["loss_nats"]) for look in record["facts"]["validation"]) * BITS


MEASURES: Measures = {**language.MEASURES, "seen": seen, "unseen": unseen, "gap": gap, "lost": lost}


def by_bytes(records: Iterable[Record], device: str) -> dict[int, dict[str, Runs]]:
    """Bytes to train on -> arm -> the runs that count on one device, in rising order.

    For `bytes-little`, and for `bytes`, which has no limit and trains on all bytes. Arms with dropout have it in their
    names.
    """
    groups: dict[tuple[int, float], list[Record]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device:
            groups.setdefault((record["facts"]["text"]["train"]["bytes"], case["dropout"]), []).append(record)
    found: dict[int, dict[str, Runs]] = {}
    for (size, dropout), group in sorted(groups.items()):
        for name, one in analysis.by_arm(group, device, MEASURES, flop=language.flop).items():
            name = f"{name}, dropout {dropout:g}" if dropout else name
            found.setdefault(size, {})[name] = Runs(**{**one._asdict(), "arm": name})
    return {size: arms for size, arms in found.items() if arms}


def is_little(arms: Mapping[str, Runs]) -> bool:
    """Whether the runs had only a part of the text to train on."""
    return any(one.configuration["limit"] for one in arms.values())


def passes(one: Runs, size: int) -> float:
    """How often a run's steps go through a text of `size` bytes."""
    told = one.configuration
    return float(told["steps"] * told["B"] * told["N"] / size)


def against_base(arms: Mapping[str, Runs], base: str = BASE, measure: str = "bits") -> dict[str, Judged]:
    """Each arm against the base, by the rule of the records, if they have at least two seeds in common."""
    if base not in arms:
        return {}
    found = {name: analysis.judged(one, arms[base], measure) for name, one in arms.items() if name != base}
    return {name: one for name, one in found.items() if one is not None}


def more_than(one: Runs, base: Runs, measure: str, comparisons: int = 1) -> Difference | None:
    """The difference from the base at the seeds of both, with an interval for this many comparisons at once; None for
    fewer than two seeds. For measures that the records' rule does not cover."""
    return analysis.paired(one, base, measure, Decision.of(one.configuration).confidence(comparisons))


def turned(ends: Interval) -> Interval:
    """The interval of the opposite difference."""
    return -ends[1], -ends[0]


def text_records() -> list[Record]:
    """The records of language models, on little text and on all."""
    return [
        *experiments.load("bytes-little"),
        *(record for record in experiments.load("bytes") if record["configuration"]["matched"] == "flop"),
    ]


def on_least_text() -> tuple[int, dict[str, Runs]]:
    """The least number of bytes that the baseline and frozen arms were trained on, and the runs there; 0 without any.

    The least text is gone through most often, and is the easiest to overfit."""
    records = text_records()
    for size, arms in by_bytes(records, judged_device(records)).items():
        if is_little(arms) and BASE in arms and any(name in arms for name in FROZEN):
            return size, arms
    return 0, {}


def larger_batch() -> Finding:
    found = {f"{name} ({by})": round(more_sequences(name, by), 3) for name in SCENARIOS for by in TRAINED_BY}
    return region((1, inf), found)


# Heads that train half of the attention's weights: the source's, and a control that is not random.
FEWER = ("frozen", "positional")


def smaller_gap(size: int, arms: Mapping[str, Runs]) -> Finding:
    there = [name for name in FEWER if name in arms]
    gains = {}
    for name in there:
        found = more_than(arms[name], arms[BASE], "gap", len(there))
        if found is not None:
            gains[f"{name} ({arms[name].parameters:,} trained)"] = turned(found.interval)
    statement = (
        "with fewer trained weights the gap, in bits a byte on other text less those on the text trained on, is smaller"
    )
    if not gains:
        return without_records(statement, "learned heads and such with fewer weights on little text")
    return improves(statement, gains).noting(
        f"The text of {size:,} bytes was gone through {passes(arms[BASE], size):.0f} times. Positional heads train as "
        "few weights, and attend by fixed patterns. A gain is positive here, and the intervals hold together. A gap is "
        "smaller also where less was learnt"
    )


def better_on_the_test(arms: Mapping[str, Runs]) -> Finding:
    statement = "with fewer trained weights the test takes fewer bits a byte"
    found = {name: one for name, one in against_base(arms).items() if name in FEWER}
    if not found:
        return without_records(statement, "the same")
    last = max(arms[name].mean("lost") for name in (BASE, *found))
    dropped = {name: one for name, one in against_base(arms).items() if "dropout" in name}
    beside = "; ".join(f"{name} {one.difference.mean:+.3f} ({one.outcome})" for name, one in dropped.items())
    told = f"After the last step the validation part takes {last:.3f} bits more at most than at its best"
    return outperforms(statement, {name: reported(one, BITS_A_BYTE) for name, one in found.items()}).noting(
        f"{told}. Beside these, {beside}" if beside else told
    )


@evidence("S0.5.1a", chapter=CHAPTER)
def batch_and_overfitting() -> Parts:
    size, arms = on_least_text()
    return {
        "sequences that take what freezing saves": larger_batch(),
        "the gap": smaller_gap(size, arms),
        "the test": better_on_the_test(arms),
    }


# ----------------------------------------------------------------------------------------------- fixed and frozen heads

LEARNED, FIXED, SINGLE = "8 learned", "7 fixed + 1 learned", "1 learned"
FROZEN_ENCODERS = ("8 frozen", "8 stopped", "8 frozen everywhere")  # those that there are records of
TASKS = {"translation": "German to English", "transduction": "made-up language"}
UNITS = {"translation": "BLEU", "transduction": "points"}
POINTS = 100  # in a share of 1
SCORE = Unit("points", POINTS, 1)
RANGE = (5_000, 165_000)  # the source's numbers of pairs
MOSTLY = 50  # per cent of a gain: what accounts for less is not its cause
MOST = 3  # the most points of BLEU that the source says are gained with so many pairs
PRINTED = {
    LEARNED: (40.5, 38.2),
    "7 fixed (token) + 1": (40.4, 38.1),
    "7 fixed (word) + 1": (40.3, 38.0),
    SINGLE: (39.1, 37.0),
}  # BLEU, German to English and back


class Amount(NamedTuple):
    """How many pairs there are to train on, 0 if they are drawn anew, and how often the long runs go through them at
    most; 0 for the short runs of the first experiment."""

    pairs: int
    passes: int = 0

    def __str__(self) -> str:
        return f"{self.pairs:,} pairs" + (f", up to {self.passes} passes" if self.passes else "")


Pairs = dict[Amount, dict[str, Runs]]


def by_pairs(task: str) -> dict[int, dict[str, Runs]]:
    """Number of pairs to train on -> arm -> short runs, of the device whose records are judged; 0 for pairs drawn
    anew."""
    records = experiments.load(task)
    return translating.by_pairs(records, judged_device(records))


def long_runs(records: Iterable[Record]) -> Pairs:
    """The runs of `translation-budgets`, each arm at the budget that counts for it."""
    found = translation_budgets.by_pairs(of_judged_devices(records))
    return {
        Amount(pairs, round(translation_budgets.passes(next(iter(arms.values())).configuration))): arms
        for pairs, arms in found.items()
    }


def few_pairs(task: str) -> Pairs:
    """Short and long runs without the pairs drawn anew, the fewest pairs first."""
    found = {Amount(pairs): arms for pairs, arms in by_pairs(task).items() if pairs}
    if task == "translation":
        found |= long_runs(experiments.load("translation-budgets"))
    return dict(sorted(found.items()))


def gains(found: Mapping[Amount, Mapping[str, Runs]], task: str, arm: str, base: str = LEARNED) -> dict[str, Judged]:
    """By setting, in words: an arm against another; nothing without two seeds of both."""
    told = {}
    for amount, arms in found.items():
        one = against_base(arms, base, "score").get(arm)
        if one is not None:
            told[f"{arm} ({TASKS[task]}, {amount}, {UNITS[task]})"] = one
    return told


def in_points(found: Mapping[str, Judged]) -> dict[str, Told]:
    """The comparisons as the rules take them, with shares in points."""
    return {label: reported(one, SCORE) for label, one in found.items()}


def of_text(kinds: Collection[str] = FROZEN) -> dict[str, Told]:
    """What heads of these kinds, by default frozen ones, save on little text, in bits a byte, by setting."""
    records = text_records()
    return {
        f"{name} ({size:,} bytes, bits)": (turned(one.difference.interval), one.outcome)
        for size, arms in by_bytes(records, judged_device(records)).items()
        if is_little(arms)
        for name, one in against_base(arms).items()
        if name in kinds
    }


def both(arm: str, base: str) -> dict[str, Judged]:
    """An arm against another in both tasks, real pairs first."""
    return {label: one for task in TASKS for label, one in gains(few_pairs(task), task, arm, base).items()}


STANDARD = 2_900_000  # pairs of the source's standard scenario
NEAR = 1  # point of BLEU, by which runs of the same size may differ from the printed figures
PRINTED_ARMS = {LEARNED: LEARNED, "7 fixed (token) + 1": FIXED, SINGLE: SINGLE}


def as_large() -> dict[str, Runs]:
    """The runs of translation that had as many pairs as the source's standard scenario."""
    found = {amount: arms for amount, arms in few_pairs("translation").items() if amount.pairs >= STANDARD}
    return found[max(found)] if found else {}


def standard_lacks(statement: str) -> Finding:
    return without_records(statement, f"translation from {STANDARD:,} pairs, by models of the source's size")


@evidence("S2.1.3a", chapter=CHAPTER)
def translation_table() -> Finding:
    said = ", ".join(f"{arm} {there}/{back}" for arm, (there, back) in PRINTED.items())
    large, small = as_large(), few_pairs("translation")
    means = {label: POINTS * large[arm].mean("score") for label, arm in PRINTED_ARMS.items() if arm in large}
    ranges = {label: (PRINTED[label][0] - NEAR, PRINTED[label][0] + NEAR) for label in means}
    found = region(ranges, means, unit=" BLEU") if means else standard_lacks(f"BLEU: {said}")
    scores = {amount: arms[LEARNED].mean("score") for amount, arms in small.items() if LEARNED in arms}
    if not scores:
        return found
    most = max(scores, key=scores.__getitem__)
    told = {arm: against_base(small[most], LEARNED, "score").get(arm) for arm in (FIXED, SINGLE)}
    listed = "; ".join(f"{arm} {POINTS * one.difference.mean:+.1f} ({one.outcome})" for arm, one in told.items() if one)
    ours = ", ".join(f"{arm} {POINTS * one.mean('score'):.1f}" for arm, one in small[most].items())
    return found.noting(
        f"Of small models, Multi30k, {most}, BLEU: {ours}. Against {LEARNED}: {listed}. The printed table "
        f"has {PRINTED[SINGLE][0] - PRINTED[LEARNED][0]:+.1f} for one learned head. There are no runs from English to "
        "German, and none with patterns of whole words"
    )


@evidence("S2.1.3d", chapter=CHAPTER)
def parity() -> Finding:
    statement, large = "fixed patterns lose nothing to learned heads in the standard scenario", as_large()
    one = against_base(large, LEARNED, "score").get(FIXED) if large else None
    found = standard_lacks(statement) if one is None else loses_nothing(statement, in_points({"": one}))
    printed = min(PRINTED[arm][i] - PRINTED[LEARNED][i] for arm in PRINTED if "fixed" in arm for i in (0, 1))
    anew = gains({Amount(n): arms for n, arms in by_pairs("transduction").items() if not n}, "transduction", FIXED)
    told = [f"{POINTS * judged.difference.mean:+.1f} points ({judged.outcome})" for judged in anew.values()]
    more = f". In the made-up language, where pairs never run out, they have {told[0]}" if told else ""
    return found.noting(f"The source's table has {printed:+.1f} BLEU at worst{more}")


def in_range() -> Pairs:
    """Translation with the numbers of pairs that the source speaks of."""
    return {amount: arms for amount, arms in few_pairs("translation").items() if RANGE[0] <= amount.pairs <= RANGE[1]}


def fixed_against(base: str, does: str, of: Pairs, pairs: str = "") -> Finding:
    """Fixed patterns against other heads, by translation from these numbers of pairs."""
    statement, found = f"{FIXED} {does} {base}{pairs}", gains(of, "translation", FIXED, base)
    if not found:
        return without_records(statement, f"translation{pairs} by {FIXED} and {base} at two seeds in common")
    return outperforms(statement, in_points(found))


def points_gained() -> Finding:
    """The most that fixed patterns are shown to gain over learned heads, against 'up to 3 points'."""
    found = in_points(gains(in_range(), "translation", FIXED))
    if not found:
        return without_records(f"up to {MOST} points of BLEU", "a gain in the source's range")
    return as_much_as(MOST, max(low for (low, _), _ in found.values()), unit=" BLEU")


def fixed_gain() -> Finding:
    gain = fixed_against(LEARNED, "gains over", in_range(), f" from {RANGE[0]:,} to {RANGE[1]:,} pairs")
    return all_of({"a gain": gain, "its size, at least": points_gained()}).noting("The models are small")


def fixed_beats_single() -> Finding:
    return fixed_against(SINGLE, "always beats", few_pairs("translation"))


def went_through(short: Runs, pairs: int) -> float:
    """How often short runs go through their pairs."""
    return float(short.configuration["steps"] * short.configuration["B"] / pairs)


@evidence("S2.1.3b", chapter=CHAPTER)
def from_few_pairs() -> Finding:
    found = all_of({"against learned heads": fixed_gain(), "against a single one": fixed_beats_single()})
    within = in_range()
    others = [
        f"against {base}, {label.removeprefix(f'{FIXED} ')[1:-1]}: {figures.span(interval)} ({outcome})"
        for base, judged in ((LEARNED, within), (SINGLE, few_pairs("translation")))
        for label, (interval, outcome) in in_points(both(FIXED, base)).items()
        if label not in gains(judged, "translation", FIXED, base)
    ]
    if within:
        went = ", ".join(
            f"{amount.pairs:,} pairs {amount.passes or round(went_through(arms[LEARNED], amount.pairs), 1)} times"
            for amount, arms in within.items()
            if LEARNED in arms
        )
        found = found.noting(f"Of the source's range the models went through {went}")
    return found.noting(f"Not of its range, or no translation: {'; '.join(others)}") if others else found


def in_favour(gaining: Mapping[tuple[str, Amount], Mapping[str, Runs]]) -> dict[str, float]:
    """The part of the fixed patterns' gain that other arms reach with no more trained weights: at most, in per cent."""
    shares: dict[str, float] = {}
    for (task, amount), arms in gaining.items():
        ours = against_base(arms, LEARNED, "score")
        for arm in (SINGLE, *FROZEN_ENCODERS):
            if arm in ours and arms[arm].parameters <= arms[FIXED].parameters:
                most, least = ours[arm].difference.interval[1], ours[FIXED].difference.interval[0]
                shares[f"{arm} ({TASKS[task]}, {amount})"] = round(100 * most / least)
    return shares


@evidence("S2.1.3c", chapter=CHAPTER)
def causes() -> Finding:
    statement = "fewer trained parameters, better generalisation and steadier gradients make the gain"
    if not any(map(few_pairs, TASKS)):
        return without_records(statement, "translation from few pairs")
    gaining = {
        (task, amount): arms
        for task in TASKS
        for amount, arms in few_pairs(task).items()
        if (one := against_base(arms, LEARNED, "score").get(FIXED)) is not None and one.outcome == "better"
    }
    if not gaining:
        needs: dict[str, Any] = {"a gain of fixed patterns over learned heads, to be explained": None}
        found, told = untestable(statement, needs, lack="the records have not"), _measured()
        return found.noting(told) if told else found
    gaps = {}
    for (task, amount), arms in gaining.items():
        difference = more_than(with_gap(arms[FIXED]), with_gap(arms[LEARNED]), "gap", len(gaining))
        assert difference is not None  # they were judged
        gaps[f"{TASKS[task]}, {amount}"] = turned(difference.interval)
    shares = in_favour(gaining)
    steady = [record for task in TASKS for record in experiments.load(task) if "gradients" in record["facts"]]
    gradients = {"the gradients of translating models": steady or None}
    parts = {
        "share of the gain that variants with as few parameters make, at most": region((MOSTLY, inf), shares, unit=" %")
        if shares
        else without_records("fewer parameters", "other arms with no more of them"),
        "generalisation": improves("the gap between unseen and seen pairs, in nats, is smaller", gaps),
        "gradients": untestable("they are steadier", gradients, lack="there are no records of"),
    }
    return all_of(parts).noting(_measured())


def with_gap(one: Runs) -> Runs:
    """The runs with the measure 'gap' as well: nats a token on pairs of the test minus those on training pairs."""
    more = zip(one.values["loss"], one.values["seen"], strict=True)
    values = {**one.values, "gap": tuple(unseen - seen for unseen, seen in more)}
    return Runs(**{**one._asdict(), "values": values})


def _measured() -> str:
    """Parameters, gaps and spreads of the three arms with the fewest pairs; '' without records."""
    texts = []
    for task in TASKS:
        for amount, arms in list(few_pairs(task).items())[:1]:
            there = {name: with_gap(arms[name]) for name in (LEARNED, FIXED, SINGLE, *FROZEN_ENCODERS) if name in arms}
            told = "; ".join(
                f"{name}: {one.parameters:,} trained, gap {one.mean('gap'):.2f} nats, scores within "
                f"{POINTS * (max(one.values['score']) - min(one.values['score'])):.1f} {UNITS[task]}"
                for name, one in there.items()
            )
            texts.append(f"{TASKS[task]}, {amount}: {told}")
    return ". ".join(texts)


@evidence("S2.5.2a", chapter=CHAPTER)
def advantage() -> Finding:
    statement = "frozen heads learn more from little than learned heads do"
    found = of_text()
    for arm in FROZEN_ENCODERS:
        found |= in_points(both(arm, LEARNED))
    if not found:
        return without_records(statement, "frozen and learned heads with little to learn from")
    return outperforms(statement, found).noting(
        f"{len(found)} comparisons; each errs at most once in 20 in either direction"
    )
