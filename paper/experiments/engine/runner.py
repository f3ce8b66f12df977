"""Experiments, and how their cases are run: here, in processes of their own, or as jobs of a cluster.

Whoever runs a case writes its record (`store`). A case that runs elsewhere is the command with `--case`, so that what
a pool or a cluster does can be typed by hand, and a killed head loses nothing.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paper._files import remove
from paper.experiments.engine import records
from paper.experiments.engine.provenance import CPU_ENVIRONMENT, device_slug, git_state, provenance
from paper.experiments.engine.records import Case, Record, RecordError

ENTRY = "paper.experiments"  # the module whose `main` is the command; a sweep of one's own names its own


@dataclass(frozen=True)
class Experiment:
    """An experiment. `cases(device)` lists the configurations for 'cpu' or 'cuda', the most informative first.

    `run(case)` measures one and returns the parts of a record that are its own: `seeds` and `repetitions`, and where
    there are any, `facts` and `failures` (see `records`). If what it measures is not correct, it raises and nothing is
    stored. `version` is raised by hand when the meaning of its results changes: records of another version are stale.
    `label(case)` is a case in a few words, which no other case has.
    `is_timing`: its cases run one at a time, each device has to measure its own, and no record is ever stale.
    If `run` takes the path of a `checkpoint` too, a file of its own for each case, it may keep there what it needs to
    go on after a kill. The file is removed when the record is stored.
    `smoke_case(case)` is a case that does all that `case` does, but within seconds, for golden runs.
    """

    name: str
    title: str
    cases: Callable[[str], list[Case]]
    run: Callable[..., dict[str, Any]]
    version: int = 1
    label: Callable[[Case], str] = lambda case: " ".join(f"{name}={value}" for name, value in case.items())
    is_timing: bool = False
    smoke_case: Callable[[Case], Case] | None = None

    @property
    def resumes(self) -> bool:
        """Whether a run that was killed goes on."""
        return "checkpoint" in signature(self.run).parameters

    def is_stale(self, record: Record) -> bool:
        """Whether the meaning of a record has changed since it was measured; a timing is only old."""
        return not self.is_timing and bool(record["version"] != self.version)


class UnwritableError(RuntimeError):
    """A record that cannot be written where it belongs, as on a full disk, or cases that cannot be handed out."""


@dataclass
class Report:
    """What a run did: labels of the cases stored and of those left for want of time, and what went wrong."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def measure(experiment: Experiment, case: Case, device: str, **options: Any) -> Record:
    """Run one case and return its whole record without storing it; `options` go to the experiment's `run`.

    Raises what `run` raises, and ValueError for an ill-formed result.
    """
    git_state()  # before anything runs
    began = time.monotonic()
    outcome = experiment.run(dict(case), **options)
    return records.check(
        {
            "experiment": experiment.name,
            "version": experiment.version,
            "device": device_slug(device),
            "configuration": case,
            "seeds": outcome["seeds"],
            "repetitions": outcome["repetitions"],
            "facts": outcome.get("facts", {}),
            "failures": outcome.get("failures", {}),
            "elapsed_s": round(time.monotonic() - began, 3),
            "provenance": provenance(device),
        }
    )


def store(experiment: Experiment, case: Case, device: str, results: Path) -> Record:
    """Run one case, going on from its checkpoint if there is one, and write its record.

    Raises what `measure` raises, and UnwritableError if the record cannot be written or would replace a damaged file.
    """
    file = records.path(results, experiment.name, device_slug(device), case, experiment.label(case))
    kept = checkpoint(results, experiment, case)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            records.read(file)
    except (OSError, RecordError) as error:
        raise UnwritableError(str(error)) from error
    record = measure(experiment, case, device, **({"checkpoint": kept} if experiment.resumes else {}))
    try:
        records.write(file, record)
    except OSError as error:
        raise UnwritableError(f"{file}: the record could not be written: {error.strerror}") from error
    remove(kept)
    return record


def checkpoint(results: Path, experiment: Experiment, case: Case) -> Path:
    """The file where a case may keep what it needs to go on after a kill; for this commit's code alone."""
    commit = (git_state()[0] or "no commit")[:12]
    return results.absolute() / ".checkpoints" / experiment.name / f"{records.mark(case)}-{commit}.pt"


def missing(experiment: Experiment, device: str, stored: Iterable[Record], own: str | None) -> list[Case]:
    """The cases for 'cpu' or 'cuda' without a record that holds. Any CPU, or any GPU, may have trained a model; timings
    have to be those of the device `own`, if it is given."""
    there = {
        records.key(record["configuration"])
        for record in stored
        if record["device"].startswith("cpu-") == (device == "cpu") and not experiment.is_stale(record)
        if own is None or not experiment.is_timing or record["device"] == own
    }
    return [case for case in experiment.cases(device) if records.key(case) not in there]


def run(
    experiments: Iterable[Experiment],
    device: str,
    results: Path,
    *,
    budget: float = math.inf,
    rerun: bool = False,
    jobs: int = 1,
    clock: Callable[[], float] = time.monotonic,
    echo: Callable[[str], None] = tqdm.write,
) -> Report:
    """Run the cases whose records are missing or stale, or with `rerun` all of them.

    They run in this process, or with several `jobs` each in a process of its own, but for timings, which run alone. No
    case starts after `budget` seconds. A case that fails is reported, and the others run; so is an experiment with a
    damaged file, which is not run. Raises UnwritableError. However this ends, its processes end with it.
    """
    end, own, session = clock() + budget, device_slug(device), _Session(echo)
    try:
        for experiment in experiments:
            try:
                stored = records.read_all(results, experiment.name)
            except RecordError as error:
                session.fail(experiment.name, str(error))
                continue
            cases = experiment.cases(device)
            todo = cases if rerun else missing(experiment, device, stored, own)
            echo(f"{experiment.name} on {own}: {len(todo)} of {len(cases)} cases to run")
            for case in tqdm(todo, desc=experiment.name, leave=False, disable=None):  # on a terminal alone
                session.wait_until_at_most(0 if experiment.is_timing else jobs - 1)
                if clock() > end:
                    session.report.left.append(f"{experiment.name}: {experiment.label(case)}")
                elif jobs > 1:
                    session.start(experiment, case, device, results)
                else:
                    session.run_here(experiment, case, device, results)
        session.wait_until_at_most(0)
    finally:
        for process in session.running:
            process.terminate()
    return session.report


@dataclass
class _Session:
    """A run: what it has done, and its processes with the names of their cases."""

    echo: Callable[[str], None]
    report: Report = field(default_factory=Report)
    running: "dict[subprocess.Popen[str], str]" = field(default_factory=dict)

    def fail(self, name: str, reason: str) -> None:
        self.report.errors.append(f"{name}: {reason}")
        self.echo(f"error: {self.report.errors[-1]}")

    def run_here(self, experiment: Experiment, case: Case, device: str, results: Path) -> None:
        name = f"{experiment.name}: {experiment.label(case)}"
        try:
            record = store(experiment, case, device, results)
        except UnwritableError:
            raise
        except Exception as error:  # one broken case must not cost the others
            self.fail(name, f"{type(error).__name__}: {error}")
        else:
            self.report.done.append(name)
            self.echo(f"{name}: {records.line(record)}")

    def start(self, experiment: Experiment, case: Case, device: str, results: Path) -> None:
        """Run a case in a process of its own."""
        code = f"import sys, {ENTRY} as entry; sys.exit(entry.main(sys.argv[1:]))"
        command = [sys.executable, "-P", "-c", code, *arguments(experiment, case, device, results)]
        more = {"PYTHONPATH": os.pathsep.join(sys.path)} | (CPU_ENVIRONMENT if device == "cpu" else {})
        process = subprocess.Popen(command, env=os.environ | more, stdout=subprocess.PIPE, text=True)
        self.running[process] = f"{experiment.name}: {experiment.label(case)}"

    def wait_until_at_most(self, count: int) -> None:
        while len(self.running) > count:
            time.sleep(0.02)
            for process in [process for process in self.running if process.poll() is not None]:
                name, said = self.running.pop(process), process.communicate()[0]
                if process.returncode:  # it has said why, unless it was killed
                    self.fail(name, f"its process ended with status {process.returncode}")
                else:
                    self.report.done.append(name)
                    self.echo(said.strip())


def arguments(experiment: Experiment, case: Case, device: str, results: Path) -> list[str]:
    """Those of the command that runs one case."""
    return [experiment.name, "--case", json.dumps(case), "--device", device, "--results", str(results.absolute())]


@dataclass(frozen=True)
class Job:
    """One case as a job of a cluster. If it is preempted or reaches its time limit, it is queued again and goes on from
    its checkpoint."""

    entry: str
    arguments: list[str]

    def __call__(self) -> None:
        if status := import_module(self.entry).main(self.arguments):
            raise RuntimeError(f"the case ended with status {status}")

    def checkpoint(self) -> Any:
        """Asked for by submitit: the job that takes over."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(cases: Sequence[tuple[Experiment, Case]], device: str, results: Path, logs: Path, **options: Any) -> str:
    """Hand cases to SLURM as an array of jobs, which write their own records, and return the array's number.

    `options` are those of submitit's SLURM executor, such as `partition`, `timeout_min`, `array_parallelism`.
    """
    import submitit  # an extra of its own

    setup = [f"export {name}={value}" for name, value in CPU_ENVIRONMENT.items() if device == "cpu"]
    options = {"name": "ortho", "timeout_min": 60, "setup": setup, "array_parallelism": len(cases)} | options
    executor = submitit.AutoExecutor(logs, cluster="slurm")
    executor.update_parameters(**{f"slurm_{name}": value for name, value in options.items()})
    with executor.batch():
        jobs = [executor.submit(Job(ENTRY, arguments(*case, device, results))) for case in cases]
    return str(jobs[0].job_id.partition("_")[0])
