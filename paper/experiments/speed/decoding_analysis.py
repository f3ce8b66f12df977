"""What the records of `decode-speed` say: a step's time and a cache's bytes against the context, and how they grow."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from paper.experiments.engine.records import Record, by_device
from paper.experiments.speed.analysis import quartiles, seconds
from paper.experiments.speed.attention_analysis import exponent

Row = dict[str, Any]

YARDSTICK = "softmax 1024"


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm: `name`, `context`, `seconds` of a step and their `ratio` to the yardstick's within
    repetitions, (q1, median, q3) each; `tokens_per_s`, of all sequences; `held_bytes`."""
    found = []
    for record in records:
        case = record["configuration"]
        times = {arm: seconds(record, arm, "step") for arm in record["repetitions"]}
        for arm, own in times.items():
            name, context = arm.split()
            ratios = [a / b for a, b in zip(own, times[YARDSTICK], strict=True)]
            found.append(
                {**case, "device": record["device"], "name": name, "context": int(context), "repetitions": len(own)}
                | {"seconds": quartiles(own), "ratio": quartiles(ratios)}
                | {"tokens_per_s": case["B"] / statistics.median(own)}
                | {"held_bytes": record["facts"][arm].get("held_bytes")}
            )
    return found


def slopes(records: Iterable[Record]) -> list[Row]:
    """One row per record and mechanism with two contexts or more: the power of the context with which a step's time
    grows, fitted in each repetition, (q1, median, q3); and with which the bytes do."""
    found = []
    for record in records:
        groups: dict[str, dict[int, str]] = {}
        for arm in record["repetitions"]:
            name, context = arm.split()
            groups.setdefault(name, {})[int(context)] = arm
        for name, arms in groups.items():
            if len(arms) < 2:
                continue
            times = {context: seconds(record, arm, "step") for context, arm in arms.items()}
            fits = [exponent(dict(zip(times, each, strict=True))) for each in zip(*times.values(), strict=True)]
            held = {context: record["facts"][arm]["held_bytes"] for context, arm in arms.items()}
            found.append(
                {**record["configuration"], "device": record["device"], "name": name, "contexts": sorted(arms)}
                | {"time": quartiles(fits), "bytes": exponent(held)}
            )
    return found


def line(record: Record) -> str:
    """One case in a line: how each mechanism's step grows with the context."""
    return ", ".join(f"{row['name']} {row['time'][1]:+.2f}" for row in slopes([record]))


def table(records: Sequence[Record]) -> str:
    """The stored steps, a table per device and case."""
    texts = []
    for device, group in by_device(records).items():
        texts.append(f"\n{device} ({group[0]['provenance']['device_name']})")
        for record in group:
            found, case = rows([record]), record["configuration"]
            contexts = sorted({row["context"] for row in found})
            title = f"{case['family']} B={case['B']} {case['dtype']}"
            head = f"{title:24}" + "".join(f"{context:>10}" for context in contexts) + "  microseconds a step"
            texts += [head, "-" * len(head)]
            for name in dict.fromkeys(row["name"] for row in found):
                steps = {row["context"]: f"{1e6 * row['seconds'][1]:.0f}" for row in found if row["name"] == name}
                texts.append(f"{name:24}" + "".join(f"{steps.get(context, ''):>10}" for context in contexts))
    return "\n".join(texts)
