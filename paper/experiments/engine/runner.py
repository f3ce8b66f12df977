"""Runs the missing and stale cases of experiments within a time budget, one record at a time."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paper.experiments.engine import records
from paper.experiments.engine.provenance import (
    changes,
    code_of,
    device_slug,
    edited,
    now,
    provenance,
)
from paper.experiments.engine.records import NOTHING, Case, Needs, Record, RecordError
from paper.experiments.engine.storage import Measured, Store


def _equal_work(_: Case) -> float:
    return 1.0


def _label(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


def _line(record: Record) -> str:
    return f"{record['elapsed_s']:.1f} s"


@dataclass(frozen=True)
class Experiment:
    """An experiment. `cases(device)` lists the configurations for 'cpu' or 'cuda', the most informative first.

    `run(case)` measures one and returns the parts of a record that are its own: `seeds` and `repetitions`, and where
    there are any, `facts` and `failures` (see `records`). If what it measures is not correct, it raises and nothing is
    stored. `work(case)` is roughly how many seconds a case should take; the times of similar cases correct it.
    `needs` is what the readers of its records rely on.
    `quiet` marks timings: their cases run one at a time, and on a CPU in a process with `provenance.CPU_ENVIRONMENT`.
    `resumes` says that `run` takes the path of a `checkpoint` too, a file of its own for each case: it may keep there
    what it needs to go on after a kill. The file is removed when the record is stored.
    `short(case)` is a case that does all that `case` does, but within seconds; it serves to compare two codes.
    """

    name: str
    title: str
    cases: Callable[[str], list[Case]]
    run: Callable[..., dict[str, Any]]
    work: Callable[[Case], float] = _equal_work
    label: Callable[[Case], str] = _label
    line: Callable[[Record], str] = _line
    show: Callable[[Sequence[Record]], str] | None = None
    needs: Needs = NOTHING
    quiet: bool = False
    resumes: bool = False
    short: Callable[[Case], Case] | None = None


@runtime_checkable
class Parts(Protocol):
    """A module with a measurement `run`; `cases`, `short`, `work`, `label`, `line` and `table` are optional."""

    @property
    def run(self) -> Callable[..., dict[str, Any]]: ...


def parts(module: Parts) -> dict[str, Any]:
    """The fields of an `Experiment` that a module has; its `table` is what is shown."""
    names = {name: name for name in ("cases", "run", "short", "work", "label", "line")} | {"show": "table"}
    return {field: getattr(module, name) for field, name in names.items() if hasattr(module, name)}


@dataclass
class Report:
    """What a run did: labels of the cases stored and of those left for want of time, and what went wrong."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def state(experiment: Experiment, device: str, stored: Sequence[Record]) -> tuple[list[Case], list[Case], list[Case]]:
    """The cases of an experiment as (fresh, stale, missing), given the records stored for this device.

    A record from a tree with changes that were not committed counts as missing: its code cannot be had again.
    """
    known = records.by_case(stored)
    fresh: list[Case] = []
    stale: list[Case] = []
    missing: list[Case] = []
    for case in experiment.cases(device):
        found = known.get(records.key(case))
        if found is None or not records.is_clean(found):
            missing.append(case)
        else:
            (stale if changes(found, experiment.run) else fresh).append(case)
    return fresh, stale, missing


def estimate(experiment: Experiment, case: Case, measured: Sequence[tuple[float, float]]) -> float:
    """Seconds that a case may take, from (work, elapsed seconds) of others; its own work if there are none.

    The time of the case nearest in work is scaled up in proportion, never down: some costs of a small case do not
    shrink.
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
    """Run one case and return its whole record without storing it; `options` go to the experiment's `run`.

    `origin` is the provenance, where it was taken before. Raises what `run` raises, ValueError for an ill-formed
    result, and RecordError if the code has changed on disk since this process started: nobody could say then what ran.
    """
    origin = origin or provenance(device, experiment.run)
    began = clock()
    outcome = experiment.run(dict(case), **options)
    elapsed = clock() - began
    if changed := edited(experiment.run):
        raise RecordError(f"nothing is stored, as {named(changed)} changed on disk after this process had started")
    return records.check(
        {
            "experiment": experiment.name,
            "device": device_slug(device),
            "configuration": case,
            "seeds": outcome["seeds"],
            "repetitions": outcome["repetitions"],
            "facts": outcome.get("facts", {}),
            "failures": outcome.get("failures", {}),
            "elapsed_s": round(elapsed, 3),
            "provenance": origin | {"date_utc": now()},
        },
        experiment.needs,
    )


def named(definitions: Sequence[str], most: int = 3) -> str:
    """The first `most` of some definitions as text, and how many more there are."""
    more = len(definitions) - most
    return ", ".join(definitions[:most]) + (f" and {more} more" if more > 0 else "")


Outcome = Record | str  # the record of a case, or the reason why there is none


@runtime_checkable
class Job(Protocol):
    """A case that was handed out. Its result raises if the process that ran it was lost."""

    def result(self) -> Outcome: ...


@runtime_checkable
class Launcher(Protocol):
    """Where cases run, and how many at once: `Here`, or one of `launchers`."""

    @property
    def slots(self) -> float:
        """How many cases are handed out at once."""

    def device_slug(self, device: str) -> str:
        """The name for files of the device that the cases will run on."""

    def submit(self, experiment: Experiment, case: Case, device: str, options: dict[str, Any]) -> Job:
        """Hand out one case; `options` go to the experiment's `run`."""

    def wait(self, jobs: Collection[Any]) -> Collection[Any]:
        """The jobs whose results are ready, at least one; empty if there are no jobs."""


class Here:
    """Runs each case in this process, when its result is asked for."""

    slots = 1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._origins: dict[str, dict[str, Any]] = {}  # by experiment: this process's code does not change

    def device_slug(self, device: str) -> str:
        return device_slug(device)

    def submit(self, experiment: Experiment, case: Case, device: str, options: dict[str, Any]) -> Job:
        return _Deferred(partial(self.outcome, experiment, case, device, options))

    def wait(self, jobs: Collection[Any]) -> Collection[Any]:
        return list(jobs)

    def outcome(self, experiment: Experiment, case: Case, device: str, options: dict[str, Any]) -> Outcome:
        """Run a case now."""
        try:
            if experiment.name not in self._origins:
                self._origins[experiment.name] = provenance(device, experiment.run)
            origin = self._origins[experiment.name]
            return measure(experiment, case, device, origin=origin, clock=self._clock, **options)
        except Exception as error:  # one broken case must not cost the others
            return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, eq=False)
class _Deferred:
    result: Callable[[], Outcome]


Progress = Callable[[int, int, Sequence[str]], None]  # cases ended, cases in all, labels of those that run


def unseen(ended: int, total: int, running: Sequence[str]) -> None:
    """Shows no progress."""


def run(
    experiments: Sequence[Experiment],
    device: str,
    results: Path,
    *,
    budget: float | None = None,
    rerun: bool = False,
    launcher: Launcher | None = None,
    clock: Callable[[], float] = time.monotonic,
    echo: Callable[[str], None] = print,
    progress: Progress = unseen,
) -> Report:
    """Measure the missing and stale cases, or with `rerun` all of them, and store each record when it is made.

    The `launcher` says where; by default in this process, one after the other. A case that by estimate does not fit
    into the rest of the `budget` seconds is left out; a smaller one after it may still run. A case that raises is
    reported and the next one is run. A damaged file of records is reported and its experiment is not run.

    A record that cannot be stored is kept and tried again: after each case that still runs, and when the run ends,
    however it does. Meanwhile no further case of its experiment begins, or only one if space may be freed. Cases of
    other experiments begin only if the folder takes records. What is lost in the end is reported. Raises RecordError if
    another run holds `results`, or no record can be stored there.
    """
    end = math.inf if budget is None else clock() + budget
    with records.lock(results) as held:
        store = Store(results, held)
        session = _Session(device, store, end, rerun, launcher or Here(clock), clock, echo, progress)
        try:
            session.run_all(experiments)
        finally:
            session.close()
    return session.report


@dataclass
class _Session:
    """What is common to the experiments of one run."""

    device: str
    store: Store
    end: float
    rerun: bool
    launcher: Launcher
    clock: Callable[[], float]
    echo: Callable[[str], None]
    progress: Progress
    report: Report = field(default_factory=Report)
    unbegun: Counter[str] = field(default_factory=Counter)  # cases, by experiment, for which there was no room

    def run_all(self, experiments: Sequence[Experiment]) -> None:
        for experiment in experiments:
            try:
                self.store.check()
            except RecordError as error:
                if not self.store.pending:  # else `close` says it
                    self.fail(str(error))
                return
            try:
                self.run(experiment)
            except RecordError as error:
                self.fail(str(error))

    def fail(self, error: str, count: str = "") -> None:
        self.report.errors.append(error)
        self.echo(f"{count}error: {error}")

    def close(self) -> None:
        """Try a last time to store what is not stored, and report."""
        lost = self.store.close()
        self.report.done = [one.label for one in self.store.measured if one.stored]
        for name in dict.fromkeys(one.experiment for one in lost):
            reasons = [one.reason for one in lost if one.experiment == name]
            rest = f", {self.unbegun[name]} not begun" if self.unbegun[name] else ""
            self.fail(f"{name}: {len(reasons)} measured and not stored ({reasons[0]}){rest}")

    def run(self, experiment: Experiment) -> None:
        slug = self.launcher.device_slug(self.device)
        file = records.path(self.store.results, experiment.name, slug)
        found = records.read(file, experiment.needs)
        fresh, stale, missing = state(experiment, self.device, found)
        self.echo(f"{experiment.name} on {slug}: {len(fresh)} fresh, {len(stale)} stale, {len(missing)} missing")
        slots = 1 if experiment.quiet else self.launcher.slots
        if slots < self.launcher.slots:
            self.echo(f"{experiment.name}: one case at a time, as these are timings")
        cases = experiment.cases(self.device)
        pending = [case for case in cases if self.rerun or case not in fresh]
        if pending:
            self.store.check(file)
            if experiment.resumes:  # this makes the folder, too
                self.store.check(self._checkpoint(experiment, pending[0]))
        stored = records.by_case(found)
        # (work, seconds) of what was measured before, for the estimates; cases no longer in the list may have no work.
        there = [(case, stored.get(records.key(case))) for case in cases]
        measured = [(experiment.work(case), record["elapsed_s"]) for case, record in there if record]
        waiting = deque(enumerate(pending, 1))
        running: dict[Job, tuple[int, Case]] = {}
        ended = 0
        while running or (waiting and self.store.takes_more(experiment.name)):
            while waiting and len(running) < slots and self.store.takes_more(experiment.name):
                index, case = waiting.popleft()
                left = self.end - self.clock()
                if left <= 0 or estimate(experiment, case, measured) > left:
                    self.report.left.append(f"{experiment.name}: {experiment.label(case)}")
                    continue
                running[self._submit(experiment, case)] = index, case
            self.progress(ended, len(pending), [experiment.label(case) for _, case in running.values()])
            for job in self.launcher.wait(running):
                index, case = running.pop(job)
                ended += 1
                record = self._take(experiment, case, job, f"[{index}/{len(pending)}]")
                if record is not None:
                    measured.append((experiment.work(case), record["elapsed_s"]))
        self.unbegun[experiment.name] = len(waiting)

    def _submit(self, experiment: Experiment, case: Case) -> Job:
        options = {}
        if experiment.resumes:
            options["checkpoint"] = self._checkpoint(experiment, case)
        return self.launcher.submit(experiment, case, self.device, options)

    def _checkpoint(self, experiment: Experiment, case: Case) -> Path:
        return records.checkpoint(self.store.results, experiment.name, case, code_of(experiment.run))

    def _take(self, experiment: Experiment, case: Case, job: Job, count: str) -> Record | None:
        """Store and report what came of a case."""
        label = experiment.label(case)
        try:
            outcome = job.result()
        except Exception as error:  # the process was killed, or its job timed out
            outcome = f"{type(error).__name__}: {error}"
        if isinstance(outcome, str):
            self.fail(f"{experiment.name}: {label}: {outcome}", f"{count} ")
            return None
        one = Measured(f"{experiment.name}: {label}", outcome, experiment.needs, experiment.cases(self.device))
        self.store.add(one)
        kept = "" if one.stored else f"; not stored yet ({one.reason}), kept for another try"
        self.echo(f"{count} {label}: {experiment.line(outcome)}{kept}")
        return outcome
