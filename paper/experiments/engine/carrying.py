"""Carry records over to the present code by proof: some cases drawn at random are run again, and give the same bits.

What a run can reach may change without changing what it computes: a helper is split, a check is added. Then a sample of
an experiment's records stands for all. Timings are never the same twice, and are measured anew.
"""

import math
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paper.experiments.engine import provenance, records
from paper.experiments.engine.records import Case, Record, RecordError
from paper.experiments.engine.runner import Experiment, Launcher, run, state

LEAST = 3  # cases of an experiment, however few it has


def carry(
    experiment: Experiment,
    device: str,
    results: Path,
    *,
    share: float = 0.05,
    launcher: Launcher | None = None,
    echo: Callable[[str], None] = print,
) -> int:
    """Run a sample of the stale cases again, and carry the others over if all of it gives what is stored, to the bit.

    The sample is a `share` of the cases, and no fewer than `LEAST`; the cases are drawn by the code's digest, so that a
    run that was stopped goes on with the same ones. Returns how many records were carried over. The new records of the
    sample are stored in either case. Raises RecordError where a case fails or differs, for timings, and in a tree with
    changes that are not committed, which no record could name.
    """
    if experiment.quiet:
        raise RecordError(f"{experiment.name}: timings cannot be carried over; measure them anew")
    if provenance.git_state()[1] is False:
        raise RecordError("expected a tree without uncommitted changes: a record that is carried over names a commit")
    file = records.path(results, experiment.name, provenance.device_slug(device))
    known = records.by_case(records.read(file, experiment.needs))
    fresh, *_ = state(experiment, device, list(known.values()))
    stale = [case for case in experiment.cases(device) if records.key(case) in known and case not in fresh]
    if not stale:
        return 0
    sample = draw(experiment, stale, share)
    echo(f"{experiment.name}: {len(sample)} of {len(stale)} stale cases are run again")

    again = results / ".carrying"
    report = run([replace(experiment, cases=lambda _: sample)], device, again, launcher=launcher, echo=echo)
    if report.errors:
        raise RecordError(f"{experiment.name}: nothing is carried over, as cases failed: {'; '.join(report.errors)}")
    made = records.by_case(records.read(records.path(again, experiment.name, file.stem), experiment.needs))
    other = [record["configuration"] for case, record in made.items() if not same(record, known[case])]
    before = [known[case]["provenance"].get("capability") for case in made]
    known |= made
    rest = [case for case in stale if case not in sample]
    if not other:
        origin = provenance.provenance(device, experiment.run)
        proof = {name: origin[name] for name in ("commit", "clean", "code")}
        proof |= {"date_utc": provenance.now(), "reproduced": len(sample), "of": len(stale)}
        known |= {records.key(case): known[records.key(case)] | {"carried": proof} for case in rest}
    with records.lock(results):
        for record in known.values():
            records.check(record, experiment.needs)
        records.write(file, list(known.values()))
    shutil.rmtree(again / experiment.name)
    if other:
        names = ", ".join(map(experiment.label, other))
        raise RecordError(
            f"{experiment.name}: nothing is carried over: {len(other)} of {len(sample)} differ: {names}"
            + _other_instructions(before)
        )
    return len(rest)


def _other_instructions(before: list[str | None]) -> str:
    """A reason why results may differ that is none of the code's: sums are rounded in another order."""
    here = torch.backends.cpu.get_cpu_capability()
    others = sorted({name for name in before if name and name != here})
    return f" (measured with {', '.join(others)} instructions; this processor has {here})" if others else ""


def draw(experiment: Experiment, cases: list[Case], share: float) -> list[Case]:
    """Some of the cases, the same ones whenever they are asked for with this code."""
    count = min(len(cases), max(LEAST, math.ceil(share * len(cases))))
    seed = repr((experiment.name, sorted(provenance.code_of(experiment.run).values())))
    return random.Random(seed).sample(cases, count)


def same(one: Record, other: Record) -> bool:
    """Whether two records of a case have the same results, to the bit; times, whose names end in `_s`, aside."""
    return all(_timeless(one[part]) == _timeless(other[part]) for part in ("seeds", "repetitions", "facts", "failures"))


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _timeless(part) for name, part in value.items() if not name.endswith("_s")}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
