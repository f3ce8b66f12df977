"""S2, sections 1.3 and 5.2: fixed and frozen heads where there is little to learn from.

Read from the records of small models: translation of German to English and of a made-up language from few pairs, and
text of which there are few bytes. Differences are judged by the rule that each record holds. They are given as gains:
bits a byte that are saved, points of BLEU, points of sentences without a mistake.
"""

from collections.abc import Mapping
from typing import Any

from paper import experiments
from paper.claims import figures
from paper.claims.ledger import evidence
from paper.claims.outcomes import Told, Unit, outperforms
from paper.claims.rules import all_of, improves, untestable
from paper.claims.s0.low_resource import FROZEN, against_base, by_bytes, is_little, more_than, text_records, turned
from paper.claims.verdicts import Finding
from paper.experiments import judged_device
from paper.experiments.learning import translating_rows
from paper.experiments.learning.paired_rows import Judged, Runs

CHAPTER = "30-low-resource"

LEARNED, FIXED, SINGLE = "8 learned", "7 fixed + 1 learned", "1 learned"
FROZEN_ENCODERS = ("8 frozen", "8 stopped", "8 frozen everywhere")  # those that there are records of
TASKS = {"translation": "German to English", "transduction": "made-up language"}
UNITS = {"translation": "BLEU", "transduction": "points"}
POINTS = 100  # in a share of 1
SCORE = Unit("points", POINTS, 1)
RANGE = (5_000, 165_000)  # the source's numbers of pairs
MOST = 3  # points of BLEU that the source says are gained with so many, at most
# BLEU as printed, German to English and back
PRINTED = {LEARNED: (40.5, 38.2), "7 fixed (token) + 1": (40.4, 38.1), "7 fixed (word) + 1": (40.3, 38.0)}
PRINTED |= {SINGLE: (39.1, 37.0)}

Pairs = dict[int, dict[str, Runs]]


# ------------------------------------------------------------------------------------------- what is read from records


def by_pairs(task: str) -> Pairs:
    """Number of pairs to train on -> arm -> runs, of the device whose records are judged; 0 for pairs drawn anew."""
    records = experiments.load(task)
    return translating_rows.by_pairs(records, judged_device(records))


def few_pairs(task: str) -> Pairs:
    """The same where there is a number of pairs, the fewest first."""
    return {pairs: arms for pairs, arms in sorted(by_pairs(task).items()) if pairs}


def gains(found: Mapping[int, Mapping[str, Runs]], task: str, arm: str, base: str = LEARNED) -> dict[str, Judged]:
    """By setting, in words: an arm against another; nothing where there are no two seeds of both."""
    told = {}
    for pairs, arms in found.items():
        one = against_base(arms, base, "score").get(arm)
        if one is not None:
            told[f"{arm} ({TASKS[task]}, {pairs:,} pairs, {UNITS[task]})"] = one
    return told


def in_points(found: Mapping[str, Judged]) -> dict[str, Told]:
    """As the rules want it, shares in points."""
    return {label: (SCORE.interval(one.difference.interval), one.outcome) for label, one in found.items()}


def of_text() -> dict[str, Told]:
    """What frozen heads save on little text, in bits a byte, by setting."""
    records, told = text_records(), {}
    for size, arms in by_bytes(records, judged_device(records)).items():
        for name, one in against_base(arms).items():
            if is_little(arms) and name in FROZEN:
                told[f"{name} ({size:,} bytes, bits)"] = (turned(one.difference.interval), one.outcome)
    return told


def both(arm: str, base: str) -> dict[str, Judged]:
    """An arm against another in both tasks, real pairs first."""
    return {label: one for task in TASKS for label, one in gains(few_pairs(task), task, arm, base).items()}


def missing(statement: str, what: str) -> Finding:
    needs: dict[str, Any] = {what: None}
    return untestable(statement, needs, lack="there are no records of")


def level(comparisons: int) -> str:
    """How often such comparisons err."""
    return f"{comparisons} comparisons; each errs at most once in 20 in either direction"


# ---------------------------------------------------------------------------------------------------- fixed patterns


@evidence("S2.1.3a", chapter=CHAPTER)
def translation_table() -> Finding:
    needs = {
        "models of the source's size on its data": None,
        "English to German": None,
        "patterns of whole words": None,
    }
    said = ", ".join(f"{arm} {there}/{back}" for arm, (there, back) in PRINTED.items())
    found = untestable(f"BLEU: {said}", needs, lack="there are no records of")
    pairs = few_pairs("translation")
    if not pairs:
        return found
    most = max(pairs)
    told = gains({most: pairs[most]}, "translation", FIXED) | gains({most: pairs[most]}, "translation", SINGLE)
    listed = "; ".join(f"{label} {POINTS * one.difference.mean:+.1f} ({one.outcome})" for label, one in told.items())
    means = ", ".join(f"{arm} {POINTS * one.mean('score'):.1f}" for arm, one in pairs[most].items())
    return found.noting(
        f"Of small models, {most:,} pairs of Multi30k, BLEU: {means}. Against {LEARNED}: {listed}. The printed table "
        f"has {PRINTED[SINGLE][0] - PRINTED[LEARNED][0]:+.1f} for one learned head"
    )


def in_range() -> Pairs:
    """Translation with numbers of pairs of which the source speaks."""
    return {pairs: arms for pairs, arms in few_pairs("translation").items() if RANGE[0] <= pairs <= RANGE[1]}


def fixed_against(base: str, does: str) -> Finding:
    """Fixed patterns against other heads, by translation from as many pairs as the source has."""
    pairs = f"from {RANGE[0]:,} to {RANGE[1]:,} pairs"
    statement, found = f"{FIXED} {does} {base} {pairs}", gains(in_range(), "translation", FIXED, base)
    if not found:
        return missing(statement, f"translation {pairs} by {FIXED} and {base} at two seeds in common")
    return outperforms(statement, in_points(found))


def beside_most() -> str:
    """How the gains over learned heads compare with the source's most, in words; '' without any."""
    where: dict[str, list[str]] = {}
    for pairs, arms in in_range().items():
        for (low, high), _ in in_points(gains({pairs: arms}, "translation", FIXED)).values():
            place = "above" if low > MOST else "below" if high < MOST else "around"
            where.setdefault(place, []).append(f"{pairs:,}")
    return ", ".join(f"{place} that from {' and '.join(numbers)} pairs" for place, numbers in where.items())


def fixed_gain() -> Finding:
    found, told = fixed_against(LEARNED, "gains over"), beside_most()
    if not told:
        return found
    return found.noting(
        f"The source's gain is {MOST} BLEU at most, which models of another size do not judge; here the interval "
        f"is {told}"
    )


def fixed_beats_single() -> Finding:
    return fixed_against(SINGLE, "beats")


@evidence("S2.1.3b", chapter=CHAPTER)
def from_few_pairs() -> Finding:
    found = all_of({"against learned heads": fixed_gain(), "against a single one": fixed_beats_single()})
    within = [f"{pairs:,}" for pairs in in_range()]
    others = [
        f"against {base}, {label.removeprefix(f'{FIXED} ')[1:-1]}: {figures.span(interval)} ({outcome})"
        for base in (LEARNED, SINGLE)
        for label, (interval, outcome) in in_points(both(FIXED, base)).items()
        if label not in gains(in_range(), "translation", FIXED, base)
    ]
    if within:
        found = found.noting(f"Of small models, from {' and '.join(within)} pairs")
    if others:
        found = found.noting(f"Not of the source's range, or no translation: {'; '.join(others)}")
    return found


@evidence("S2.1.3c", chapter=CHAPTER)
def causes() -> Finding:
    statement = "fewer trained parameters, better generalisation and steadier gradients make the gain"
    if not any(map(few_pairs, TASKS)):
        return missing(statement, "translation from few pairs")
    gaining = {
        (task, pairs): arms
        for task in TASKS
        for pairs, arms in few_pairs(task).items()
        if (one := against_base(arms, LEARNED, "score").get(FIXED)) is not None and one.outcome == "better"
    }
    if not gaining:
        needs: dict[str, Any] = {"a gain of fixed patterns over learned heads, to be explained": None}
        found, told = untestable(statement, needs, lack="the records have not"), _measured()
        return found.noting(told) if told else found
    fewer: dict[str, Judged] = {}
    gaps = {}
    for (task, pairs), arms in gaining.items():
        for arm in (SINGLE, *FROZEN_ENCODERS):
            fewer |= gains({pairs: arms}, task, arm)
        difference = more_than(with_gap(arms[FIXED]), with_gap(arms[LEARNED]), "gap", len(gaining))
        assert difference is not None  # they were judged
        gaps[f"{TASKS[task]}, {pairs:,} pairs"] = turned(difference.interval)
    alone: dict[str, Any] = {"arms that differ in nothing else": None}
    enough = "; ".join(f"{label} {one.outcome}" for label, one in fewer.items()) or "none"
    return all_of(
        {
            "fewer parameters": untestable("it is their number", alone, lack="there are no records of").noting(
                f"Others with fewer, against {LEARNED}: {enough}"
            ),
            "generalisation": improves("what unseen pairs take more than seen ones, in nats, is smaller", gaps),
            "gradients": untestable("they are steadier", {"measure of steadiness": None}, lack="the source has no"),
        }
    ).noting(_measured())


def with_gap(one: Runs) -> Runs:
    """With the measure 'gap': nats a token that pairs of the test take more than pairs that were trained on."""
    more = zip(one.values["loss"], one.values["seen"], strict=True)
    values = {**one.values, "gap": tuple(unseen - seen for unseen, seen in more)}
    return Runs(**{**one._asdict(), "values": values})


def _measured() -> str:
    """Parameters, gaps and spreads of the three arms with the fewest pairs; '' without records."""
    texts = []
    for task in TASKS:
        for pairs, arms in list(few_pairs(task).items())[:1]:
            there = {name: with_gap(arms[name]) for name in (LEARNED, FIXED, SINGLE, *FROZEN_ENCODERS) if name in arms}
            told = "; ".join(
                f"{name}: {one.parameters:,} trained, gap {one.mean('gap'):.2f} nats, scores within "
                f"{POINTS * (max(one.values['score']) - min(one.values['score'])):.1f} {UNITS[task]}"
                for name, one in there.items()
            )
            texts.append(f"{TASKS[task]}, {pairs:,} pairs: {told}")
    return ". ".join(texts)


# ------------------------------------------------------------------------------------------------------- frozen heads


@evidence("S2.5.2a", chapter=CHAPTER)
def advantage() -> Finding:
    statement = "frozen heads learn more from little than learned heads do"
    found = of_text()
    for arm in FROZEN_ENCODERS:
        found |= in_points(both(arm, LEARNED))
    if not found:
        return missing(statement, "frozen and learned heads with little to learn from")
    return outperforms(statement, found).noting(level(len(found)))
