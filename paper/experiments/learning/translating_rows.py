"""What the records of translation say: quality over seeds, by arm and number of pairs, and arms compared."""

from collections.abc import Iterable, Sequence
from typing import Any

from paper.experiments.engine.records import Record, by_device
from paper.experiments.learning import paired_rows
from paper.experiments.learning.paired_rows import Judged, Measures, Runs
from paper.experiments.learning.translating_arms import training_flop

TESTS = {"translation": "test", "transduction": "like training"}  # the test by which arms are judged


def score(record: Record) -> float:
    """A share of 1 in the test, of the metric that the configuration names."""
    return _tested(record, record["configuration"]["decision_metric"])


def nats(record: Record) -> float:
    """Nats a token in the test."""
    return _tested(record, "loss_nats")


def seen(record: Record) -> float:
    """Nats a token on pairs that were trained on."""
    return float(record["facts"]["seen"]["loss_nats"])


def correct(record: Record) -> float:
    """The share of right tokens in the test, after right ones."""
    return _tested(record, "correct_fraction")


MEASURES: Measures = {"score": score, "loss": nats, "seen": seen, "correct": correct}


def flop(record: Record) -> int:
    """FLOPs of the matrix products of a run's training, by closed forms, without the loss.

    Of batches of the mean shape that the run recorded, padding included, in whole tokens: products grow with the
    lengths, and only attention's with their squares, so that this is near the mean over batches.
    """
    case, facts = record["configuration"], record["facts"]
    shape = (case["B"], round(facts["source_tokens"]), round(facts["target_tokens"]))
    step = training_flop(case["arm"], *shape, case["d"], case["L"], vocab_size=facts["vocab_size"])
    return int(case["steps"]) * step


def by_pairs(records: Iterable[Record], device: str, **wanted: Any) -> dict[int, dict[str, Runs]]:
    """Number of pairs -> arm -> the runs that count, of one device, with the measures of `MEASURES`.

    Raises ValueError if an arm's runs on so many pairs differ in more than the seed: `wanted` is to say more.
    """
    records = list(records)
    numbers = dict.fromkeys(record["configuration"]["pairs"] for record in records)
    found = {n: paired_rows.by_arm(records, device, MEASURES, flop=flop, pairs=n, **wanted) for n in numbers}
    return {n: arms for n, arms in found.items() if arms}


def judged(arm: Runs, other: Runs) -> Judged | None:
    """The arm against the other by their scores, at the seeds that both have; None for fewer than two in common."""
    return paired_rows.judged(arm, other, "score")


def line(record: Record) -> str:
    """One run in a line."""
    return f"{_named(record)} {score(record):.3f}, {nats(record):.3f} nats a token, {record['facts']['train_s']:.0f} s"


def table(records: Sequence[Record]) -> str:
    """The stored figures, a table per device: mean and range over seeds, and the rates chosen."""
    texts = []
    for device, group in by_device(records).items():
        name = group[0]["provenance"]["device_name"]
        texts.append(f"\n{device} ({name}): {_named(group[0])}, mean [lowest, highest]")
        for pairs, arms in sorted(by_pairs(group, device).items()):
            for one in sorted(arms.values(), key=lambda one: -one.mean("score")):
                told = one.configuration
                texts.append(
                    f"{pairs:6} pairs  {one.arm:22}{one.span('score')}, "
                    f"{one.mean('loss'):.3f} nats a token, {one.mean('seen'):.3f} of those seen, "
                    f"{told['steps']} steps, {one.parameters} parameters, rate {told['rate']:g}"
                )
        texts.append(paired_rows.closing(group))
    return "\n".join(texts)


def _tested(record: Record, quantity: str) -> float:
    return float(record["repetitions"][TESTS[record["configuration"]["task"]]][quantity][0])


def _named(record: Record) -> str:
    return str(record["configuration"]["decision_metric"]).removesuffix("_fraction")
