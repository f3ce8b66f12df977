"""Runs what is missing or stale of some experiments within a time budget, a record at a time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortho.experiments import records
from ortho.experiments.provenance import device_slug, digest, now, provenance
from ortho.experiments.records import NOTHING, Case, Needs, Record, RecordError


def _equal_work(_: Case) -> float:
    return 1.0


def _label(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


def _line(record: Record) -> str:
    return f"{record['elapsed_s']:.1f} s"


@dataclass(frozen=True)
class Experiment:
    """What is measured. `cases(device)` lists the configurations for 'cpu' or 'cuda', most informative first.

    `run(case)` measures one and returns the parts of a record that are its own: `seeds` and `repetitions`, and where
    there are any, `facts` and `failures` (see `records`). It raises, and nothing is stored, if what it is to measure
    is not correct. `sources` are the package's files on which the results depend. `work(case)` is how many seconds a
    case should take, roughly; what like cases took corrects it. `needs` is what the readers of its records rely on.
    `quiet` marks an experiment whose CPU timings need a process with `provenance.CPU_ENVIRONMENT`.
    """

    name: str
    title: str
    cases: Callable[[str], list[Case]]
    run: Callable[..., dict[str, Any]]
    sources: tuple[str, ...]
    work: Callable[[Case], float] = _equal_work
    label: Callable[[Case], str] = _label
    line: Callable[[Record], str] = _line
    show: Callable[[Sequence[Record]], str] | None = None
    needs: Needs = NOTHING
    quiet: bool = False


@dataclass
class Report:
    """What a run did: labels of the cases measured and of those left for want of time, and what went wrong."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def state(experiment: Experiment, device: str, stored: Sequence[Record]) -> tuple[list[Case], list[Case], list[Case]]:
    """The cases of an experiment as (fresh, stale, missing), given the records stored for this device."""
    current = digest(experiment.sources)
    digests = {records.key(record["configuration"]): record["provenance"]["digest"] for record in stored}
    fresh: list[Case] = []
    stale: list[Case] = []
    missing: list[Case] = []
    for case in experiment.cases(device):
        found = digests.get(records.key(case))
        (missing if found is None else fresh if found == current else stale).append(case)
    return fresh, stale, missing


def estimate(experiment: Experiment, case: Case, measured: Sequence[tuple[float, float]]) -> float:
    """Seconds that a case may take, from (work, elapsed seconds) of others; its own work if there are none.

    The case nearest in work is scaled up in proportion, and never down: a small case has costs that do not shrink.
    """
    work = experiment.work(case)
    if not measured:
        return work
    near, elapsed = min(measured, key=lambda pair: abs(math.log(pair[0] / work)))
    return elapsed * max(1.0, work / near)


def measure(
    experiment: Experiment,
    case: Case,
    device: str,
    *,
    origin: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Record:
    """Run one case and return its whole record, stored nowhere; `options` go to the experiment's `run`.

    `origin` is the provenance, where it was taken before. Raises what `run` raises, and ValueError for an ill-formed
    result.
    """
    began = clock()
    outcome = experiment.run(dict(case), **options)
    return records.check(
        {
            "schema": records.SCHEMA,
            "experiment": experiment.name,
            "device": device_slug(device),
            "configuration": case,
            "seeds": outcome["seeds"],
            "repetitions": outcome["repetitions"],
            "facts": outcome.get("facts", {}),
            "failures": outcome.get("failures", {}),
            "elapsed_s": round(clock() - began, 3),
            "provenance": (origin or provenance(device, experiment.sources)) | {"date_utc": now()},
        },
        experiment.needs,
    )


def run(
    experiments: Sequence[Experiment],
    device: str,
    results: Path,
    *,
    budget: float | None = None,
    rerun: bool = False,
    clock: Callable[[], float] = time.monotonic,
    echo: Callable[[str], None] = print,
) -> Report:
    """Measure the missing and stale cases, or with `rerun` all of them, and store each record when it is made.

    A case that by estimate does not fit into what is left of `budget` seconds is left, and a smaller one after it is
    still taken. A case that raises is reported and the next one is run. A damaged file of records is reported and
    its experiment is not run. Raises RecordError if another run holds `results`.
    """
    report = Report()
    end = math.inf if budget is None else clock() + budget
    with records.lock(results):
        for experiment in experiments:
            try:
                _run_one(experiment, device, results, end, rerun, clock, echo, report)
            except RecordError as error:
                report.errors.append(str(error))
                echo(f"error: {error}")
    return report


def _run_one(
    experiment: Experiment,
    device: str,
    results: Path,
    end: float,
    rerun: bool,
    clock: Callable[[], float],
    echo: Callable[[str], None],
    report: Report,
) -> None:
    slug = device_slug(device)
    origin = provenance(device, experiment.sources)
    file = records.path(results, experiment.name, slug)
    stored = {records.key(record["configuration"]): record for record in records.read(file, experiment.needs)}
    fresh, stale, missing = state(experiment, device, list(stored.values()))
    echo(f"{experiment.name} on {slug}: {len(fresh)} fresh, {len(stale)} stale, {len(missing)} missing")
    cases = experiment.cases(device)
    pending = [case for case in cases if rerun or case not in fresh]
    # (work, seconds) of what was measured before, for the estimates; cases no longer in the list may not have a work.
    measured = [(experiment.work(c), stored[records.key(c)]["elapsed_s"]) for c in cases if records.key(c) in stored]
    for index, case in enumerate(pending, 1):
        label = experiment.label(case)
        left = end - clock()
        if left <= 0 or estimate(experiment, case, measured) > left:
            report.left.append(f"{experiment.name}: {label}")
            continue
        try:
            record = measure(experiment, case, device, origin=origin, clock=clock)
        except Exception as error:  # one broken case must not cost the others
            report.errors.append(f"{experiment.name}: {label}: {type(error).__name__}: {error}")
            echo(f"[{index}/{len(pending)}] error: {report.errors[-1]}")
            continue
        stored[records.key(case)] = record
        records.write(file, list(stored.values()))
        measured.append((experiment.work(case), record["elapsed_s"]))
        report.done.append(f"{experiment.name}: {label}")
        echo(f"[{index}/{len(pending)}] {label}: {experiment.line(record)}")
