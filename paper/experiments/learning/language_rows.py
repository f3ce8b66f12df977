"""What the records of the language models say: bits a byte over seeds, and each arm against another, pair by pair."""

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import paired_rows
from paper.experiments.learning.arms import Arm, arms, baseline, matched_steps, training_flop
from paper.experiments.learning.paired_rows import Judged, Measures, Runs
from paper.tasks.text import VOCAB_SIZE

BITS = 1 / log(2)  # in a nat


def bits(record: Record) -> float:
    """Bits a byte on the test part."""
    return float(record["repetitions"]["test"]["loss_nats"][0]) * BITS


MEASURES: Measures = {"bits": bits}


def step_flop(case: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products of a run's training step, by closed forms."""
    arm = arms(case["H"], case["N"])[case["arm"]]
    sizes = (case["B"], case["N"], case["d"], case["L"])
    return training_flop(arm, *sizes, vocab_size=VOCAB_SIZE, d_ff=case["d_ff"])


def flop(record: Record) -> int:
    """FLOPs of the matrix products of a run's training."""
    return int(record["configuration"]["steps"]) * step_flop(record["configuration"])


def budget(configuration: Mapping[str, Any]) -> float:
    """Which of the budgets of steps a run has, as a multiple of the middle one, where all arms take equal FLOPs.

    Raises ValueError if it has none of them.
    """
    from paper.experiments.learning import language  # which imports this module

    c, like = configuration, baseline(configuration["H"], configuration["N"])
    arm: Arm = arms(c["H"], c["N"])[c["arm"]]
    for multiple in language.BUDGETS:
        steps = round(language.SIZES[c["device"]]["steps"] * multiple)
        if c["steps"] == matched_steps(arm, like, steps, c["B"], c["N"], c["d"], c["L"], vocab_size=VOCAB_SIZE):
            return multiple
    raise ValueError(f"steps: expected those of a budget in {language.BUDGETS} for {c['arm']!r}, got {c['steps']}")


def runs(records: Iterable[Record], device: str, **wanted: Any) -> list[Runs]:
    """The runs of one device that count, with the measure 'bits' a byte (`paired_rows.runs`)."""
    return paired_rows.runs(records, device, MEASURES, flop=flop, **wanted)


def by_arm(records: Iterable[Record], device: str, **wanted: Any) -> dict[str, Runs]:
    """The same by arm. Raises ValueError if an arm's runs differ in more than the seed: `wanted` is to say more."""
    return paired_rows.by_arm(records, device, MEASURES, flop=flop, **wanted)


def judged(arm: Runs, other: Runs) -> Judged | None:
    """The arm against the other at the seeds that both have; None if they have fewer than two in common."""
    return paired_rows.judged(arm, other, "bits")


def line(record: Record) -> str:
    """One run in a line."""
    return f"{bits(record):.4f} bits a byte, {record['facts']['train_s']:.0f} s"


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device: mean and range over seeds, and the rates chosen."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']}): bits a byte, mean [lowest, highest]")
        for one in sorted(runs(group, device), key=lambda one: one.mean("bits")):
            told = one.configuration
            texts.append(
                f"{one.arm:28}{one.span('bits')}, "
                f"matched {told['matched']}, d={told['d']}, {told['steps']} steps, d_ff={told['d_ff']}, "
                f"limit={told['limit']}, dropout={told['dropout']:g}, rate {told['rate']:g}"
            )
        texts.append(paired_rows.closing(group))
    return "\n".join(texts)
