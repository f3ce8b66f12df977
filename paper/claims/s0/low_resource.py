"""S0, section 5.1: a larger batch in the memory that freezing saves, and the risk of overfitting.

What overfits is read from the records of language models that had little text to train on: of each run the loss on the
text that it was trained on, in the last twentieth of its steps, beside that on the validation part after the last step.
"""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from ortho.cost.configurations import CONFIGURATIONS
from paper import experiments
from paper.claims.figures import Interval
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, improves, region, untestable
from paper.claims.s0.memory import PRECISIONS
from paper.claims.s0.scenarios import SCENARIOS
from paper.claims.verdicts import Finding
from paper.experiments import Record
from paper.experiments.engine.records import judged_device
from paper.experiments.learning import language_rows, paired_rows
from paper.experiments.learning.language_rows import BITS
from paper.experiments.learning.paired_rows import Judged, Measures, Runs
from paper.experiments.resampling import Difference
from paper.experiments.statistics import Decision

CHAPTER = "30-low-resource"

BASE = "learned"
FROZEN = ("frozen", "stopped")  # orthogonal random attention, with the gradient through queries and keys and without
TRAINED_BY = ("FP32", "mixed")  # precisions, of `PRECISIONS`


# ---------------------------------------------------------------------------------------------------- the larger batch


def one_sequence(name: str, precision: str) -> int:
    """Bytes that a published model keeps of one sequence, of its longest, for the backward pass, by fused kernels.

    They are the same with frozen matrices. What does not depend on the batch is left out.
    """
    at, size = CONFIGURATIONS[SCENARIOS[name].published], PRECISIONS[precision].weight
    one, two = (at.cost(B, itemsize=size).saved_bytes for B in (1, 2))
    return int(two - one)


def freed(name: str, precision: str) -> int:
    """Bytes of gradients and optimiser state that freezing W_Q and W_K spares a published model."""
    at, size = CONFIGURATIONS[SCENARIOS[name].published], PRECISIONS[precision]
    standard, ours = (at.cost(1, projection=projection).trained for projection in ("learned", "frozen"))
    return int((size.gradient + size.optimiser) * (standard - ours))


def held(name: str, precision: str) -> int:
    """Bytes of the standard model's parameters, gradients and optimiser state."""
    at, size = CONFIGURATIONS[SCENARIOS[name].published], PRECISIONS[precision]
    return int((size.weight + size.gradient + size.optimiser) * at.cost(1).trained)


def more_sequences(name: str, precision: str) -> float:
    """How many sequences take what freezing saves. In every memory at least that many more fit, cut off."""
    return freed(name, precision) / one_sequence(name, precision)


def batch(name: str, precision: str, memory: float, *, frozen: bool = False) -> int:
    """The most sequences whose training step fits in so many bytes; 0 where the model alone does not fit."""
    spared = freed(name, precision) if frozen else 0
    return max(0, int((memory - held(name, precision) + spared) // one_sequence(name, precision)))


# ------------------------------------------------------------------------------------------- what is read from records


def seen(record: Record) -> float:
    """Bits a byte of the text that was trained on, in the last twentieth of the steps, as training had them: with what
    dropout leaves out."""
    return float(record["facts"]["loss"][-1]) * BITS


def unseen(record: Record) -> float:
    """Bits a byte of the validation part after the last step."""
    return float(record["facts"]["validation"][-1]["loss_nats"]) * BITS


def gap(record: Record) -> float:
    """What other text takes more, in bits a byte, at the end of training."""
    return unseen(record) - seen(record)


def lost(record: Record) -> float:
    """How far the validation part's bits a byte are above their lowest, at the end of training."""
    return unseen(record) - min(float(look["loss_nats"]) for look in record["facts"]["validation"]) * BITS


MEASURES: Measures = {**language_rows.MEASURES, "seen": seen, "unseen": unseen, "gap": gap, "lost": lost}


def by_bytes(records: Iterable[Record], device: str) -> dict[int, dict[str, Runs]]:
    """Bytes to train on -> arm -> the runs that count, of one device, in rising order.

    Of `bytes-little`, and of `bytes`, whose limit is none: all that there are. Arms with dropout are named by it.
    """
    groups: dict[tuple[int, float], list[Record]] = {}
    for record in records:
        case = record["configuration"]
        if record["device"] == device:
            groups.setdefault((record["facts"]["text"]["train"]["bytes"], case["dropout"]), []).append(record)
    found: dict[int, dict[str, Runs]] = {}
    for (size, dropout), group in sorted(groups.items()):
        for name, one in paired_rows.by_arm(group, device, MEASURES, flop=language_rows.flop).items():
            name = f"{name}, dropout {dropout:g}" if dropout else name
            found.setdefault(size, {})[name] = Runs(**{**one._asdict(), "arm": name})
    return {size: arms for size, arms in found.items() if arms}


def is_little(arms: Mapping[str, Runs]) -> bool:
    """Whether the runs on a text had only a part of what there is."""
    return any(one.configuration["limit"] for one in arms.values())


def passes(one: Runs, size: int) -> float:
    """How often a run's steps go through a text of so many bytes."""
    told = one.configuration
    return float(told["steps"] * told["B"] * told["N"] / size)


def against_base(arms: Mapping[str, Runs], base: str = BASE, measure: str = "bits") -> dict[str, Judged]:
    """Each arm against the base, by the rule of the records, where they have two seeds in common at least."""
    if base not in arms:
        return {}
    found = {name: paired_rows.judged(one, arms[base], measure) for name, one in arms.items() if name != base}
    return {name: one for name, one in found.items() if one is not None}


def more_than(one: Runs, base: Runs, measure: str, comparisons: int = 1) -> Difference | None:
    """What an arm has more than the base at the seeds of both, with an interval that so many hold at once; None for
    fewer than two seeds. For measures of which the records' rule does not speak."""
    return paired_rows.paired(one, base, measure, Decision.of(one.configuration).confidence(comparisons))


def turned(ends: Interval) -> Interval:
    """The interval of what is less, from that of what is more."""
    return -ends[1], -ends[0]


def text_records() -> list[Record]:
    """Of language models, on little text and on all."""
    return [
        *experiments.load("bytes-little"),
        *(record for record in experiments.load("bytes") if record["configuration"]["matched"] == "flop"),
    ]


def on_least_text() -> tuple[int, dict[str, Runs]]:
    """The least number of bytes that the baseline and frozen arms were trained on, and the runs there; 0 without any.

    Where text is least, it is gone through most often, and there is the most to overfit."""
    records = text_records()
    for size, arms in by_bytes(records, judged_device(records)).items():
        if is_little(arms) and BASE in arms and any(name in arms for name in FROZEN):
            return size, arms
    return 0, {}


def beside_dropout(size: int, arms: Mapping[str, Runs]) -> str:
    """What freezing and what dropout gain on learned heads alone, on a text of so many bytes, in words; '' where one of
    the three is missing."""
    found = against_base(arms)
    frozen = [name for name in FROZEN if name in found]
    dropped = [name for name in found if name.startswith(f"{BASE}, dropout")]
    if not frozen or not dropped:
        return ""
    by_freezing, by_dropout = (any(found[name].outcome == "better" for name in names) for names in (frozen, dropped))
    sentence = {
        (False, False): "Neither freezing nor dropout is better than learned heads alone.",
        (False, True): "Dropout is better than learned heads alone, and freezing is not.",
        (True, False): "Freezing is better than learned heads alone, and dropout is not.",
        (True, True): "Both freezing and dropout are better than learned heads alone.",
    }[by_freezing, by_dropout]
    each = (f"{name} {found[name].difference.mean:+.3f} ({found[name].outcome})" for name in (*frozen, *dropped))
    told = f"{sentence} Bits a byte more than these, with {size:,} bytes: {'; '.join(each)}."
    one, other = (min(names, key=lambda name: arms[name].mean("bits")) for names in (frozen, dropped))
    direct = paired_rows.judged(arms[one], arms[other], "bits")
    if direct is None:
        return told
    return (
        f"{told} The best of the frozen ({one}) has {direct.difference.mean:+.3f} bits a byte more than the best with "
        f"dropout ({other}): {direct.outcome}."
    )


# ------------------------------------------------------------------------------------------------------------ the claim


def larger_batch() -> Finding:
    found = {f"{name} ({by})": round(more_sequences(name, by), 3) for name in SCENARIOS for by in TRAINED_BY}
    return region((1, inf), found)


def smaller_gap() -> Finding:
    statement = "what other text takes more than the text trained on, in bits a byte, is smaller when frozen"
    size, arms = on_least_text()
    there = [name for name in FROZEN if name in arms]
    gains = {}
    for name in there:
        found = more_than(arms[name], arms[BASE], "gap", len(there))
        if found is not None:
            gains[f"{name} ({size:,} bytes)"] = turned(found.interval)
    if not gains:
        needs: dict[str, Any] = {"learned and frozen heads on little text, at two seeds in common": None}
        return untestable(statement, needs, lack="there are no records of")
    told = "; ".join(
        f"{name} {one.difference.mean:+.3f} ({one.outcome})"
        for name, one in against_base(arms).items()
        if name in FROZEN
    )
    went = passes(arms[BASE], size)
    return improves(statement, gains).noting(
        f"The text was gone through {went:.0f} times. A gap is smaller also where less was learnt. In the test, bits a "
        f"byte against learned heads: {told}"
    )


@evidence("S0.5.1a", chapter=CHAPTER)
def batch_and_overfitting() -> Finding:
    return all_of(
        {
            "sequences that take what freezing saves": larger_batch(),
            "overfitting": smaller_gap(),
        }
    )
