"""The command `python -m paper experiments`."""

import argparse
import json
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ortho.checks import unknown
from paper.experiments.engine import provenance, records, runner
from paper.experiments.engine.records import Case, Record, RecordError
from paper.experiments.engine.runner import Experiment, UnwritableError

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str], experiments: Mapping[str, Experiment]) -> int:
    """Run, list, show or compare cases of experiments.

    Returns 0; 1 if a case failed, a file of records is damaged or a record cannot be written; 130 for Ctrl-C and
    SIGTERM. Bad usage raises SystemExit with 2.
    """
    options = _parse(argv, experiments)
    chosen = [experiments[name] for name in options.names] or list(experiments.values())
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a cluster's jobs have a handler of their own
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.list or options.show:
            (_list if options.list else _show)(chosen, options)
            return 0
        if options.device == "cpu" and options.launcher == "local":
            provenance.restart_in_cpu_environment()
        if options.case is not None:
            return _one(chosen[0], options)
        return _submit(chosen, options) if options.launcher == "slurm" else _run(chosen, options)
    except (RecordError, UnwritableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the cases that were running are lost, all others are stored", file=sys.stderr)
        return 130


def find(name: str, experiments: Mapping[str, Experiment]) -> Experiment:
    """The experiment of that name, else ValueError that lists them."""
    if name not in experiments:
        raise ValueError(unknown("experiment", name, experiments))
    return experiments[name]


def _parse(argv: Sequence[str], experiments: Mapping[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paper experiments",
        description="Run the cases that have no record, and store one under results/ for each.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(experiments)} (default: all)")
    add("--list", action="store_true", help="say which cases have a record, of which devices; run nothing")
    add("--show", action="store_true", help="print the stored results of every device, a line each; run nothing")
    add("--case", metavar="LABEL", help="run this case alone, stored or not: its label in --list, or its configuration")
    add("--compare", action="store_true", help="with --case: store nothing, but say how the stored records differ")
    add("--rerun", action="store_true", help="run again what is stored, too")
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no case after them")
    add("--device", choices=DEVICES, help="default: cuda where there is one, else cpu")
    add("--results", type=Path, default=provenance.RESULTS, metavar="DIR", help="default: results/")
    add("--jobs", type=int, metavar="N", help="up to N cases at once, but for timings (default: 1; with slurm all)")
    add("--launcher", choices=("local", "slurm"), default="local", help="slurm: hand each case to the cluster as a job")
    add("--slurm", type=lambda text: text.split("=", 1), action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for name in options.names:
            find(name, experiments)
        if options.case is not None and len(options.names) != 1:
            raise ValueError(f"--case: expected the name of one experiment with it, got {len(options.names)} names")
        if options.compare and options.case is None:
            raise ValueError("--compare: expected --case LABEL with it")
        for name, value in (("--budget", options.budget), ("--jobs", 1 if options.jobs is None else options.jobs)):
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        if wrong := [words for words in options.slurm if len(words) < 2]:
            raise ValueError(f"--slurm: expected KEY=VALUE, got {wrong[0][0]!r}")
        if options.slurm and options.launcher != "slurm":
            raise ValueError("--slurm: expected --launcher slurm with it")
        runs_here = options.launcher == "local" and not (options.list or options.show)
        if options.device == "cuda" and runs_here and not torch.cuda.is_available():
            raise ValueError("--device: expected cpu, got cuda, which this torch does not find here")
    except ValueError as error:
        parser.error(str(error))
    return options


def _run(chosen: Sequence[Experiment], options: argparse.Namespace) -> int:
    limits = {"budget": options.budget, "rerun": options.rerun, "jobs": options.jobs or 1}
    report = runner.run(chosen, options.device, options.results, **limits)
    print(f"{len(report.done)} run, {len(report.left)} left, {len(report.errors)} failed; {options.results}")
    print(*(f"error: {error}\n" for error in report.errors), sep="", end="", file=sys.stderr)
    return 1 if report.errors else 0


def _submit(chosen: Sequence[Experiment], options: argparse.Namespace) -> int:
    todo: list[tuple[Experiment, Case]] = []
    for experiment in chosen:
        stored = [] if options.rerun else records.read_all(options.results, experiment.name)
        todo += [(experiment, case) for case in runner.missing(experiment, options.device, stored, None)]
    most = 1 if any(experiment.is_timing for experiment, _ in todo) else options.jobs or len(todo)
    if not todo:
        return 0
    logs = options.results.absolute().parent / ".slurm"
    given = {name: int(value) if value.isdecimal() else value for name, value in options.slurm}
    try:
        number = runner.submit(todo, options.device, options.results, logs, **{"array_parallelism": most, **given})
    except (ImportError, NameError, OSError, RuntimeError, TypeError, ValueError) as error:  # submitit's
        raise UnwritableError(f"slurm: {error}") from error
    print(f"{len(todo)} cases are the jobs of array {number}: see squeue, {logs}, and --list for what is stored")
    return 0


def _one(experiment: Experiment, options: argparse.Namespace) -> int:
    stored = records.read_all(options.results, experiment.name)
    case = json.loads(options.case) if options.case.startswith("{") else _labelled(experiment, options, stored)
    name = f"{experiment.name}: {experiment.label(case)}"
    try:
        if options.compare:
            record = runner.measure(experiment, case, options.device)
            _compare(record, [one for one in stored if one["configuration"] == case])
        else:
            record = runner.store(experiment, case, options.device, options.results)
            print(f"{name}: {records.line(record)}", flush=True)
    except (UnwritableError, RecordError):
        raise
    except Exception as error:
        print(f"error: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _labelled(experiment: Experiment, options: argparse.Namespace, stored: Sequence[Record]) -> Case:
    known = [*experiment.cases(options.device), *(record["configuration"] for record in stored)]
    found = {records.key(case): case for case in known if experiment.label(case) == options.case}
    wanted = [case for case in found.values() if case.get("device", options.device) == options.device]
    if len(wanted) != 1:
        said = f"the label of one case of {experiment.name} for {options.device}, as --list has them"
        raise RecordError(f"--case: expected {said}, got {options.case!r}, the label of {len(wanted)}")
    return wanted[0]


def _compare(record: Record, stored: Sequence[Record]) -> None:
    """Say by how much stored records of a case differ from one that was just measured."""
    print(f"now, on {record['device']}: {records.line(record)}")
    for other in stored:
        found = records.differences(record, other)
        origin = other["provenance"]
        when = f"{origin['date_utc'][:10]}, commit {(origin['commit'] or 'unknown')[:8]}"
        print(f"{other['device']}, {when}: {records.line(other)}")
        print("\n".join(f"  {name}: differs by {share:.2g}" for name, share in found.items()) or "  equal to the bit")
    if not stored:
        print("no record of it is stored")


def _list(chosen: Sequence[Experiment], options: argparse.Namespace) -> None:
    for experiment in chosen:
        print(f"{experiment.name}: {experiment.title}")
        stored = records.read_all(options.results, experiment.name)
        known = {records.key(case): case for case in experiment.cases(options.device)}
        known |= {records.key(record["configuration"]): record["configuration"] for record in stored}
        for key, case in known.items():
            found = [record for record in stored if records.key(record["configuration"]) == key]
            word = "missing" if not found else "stale" if all(map(experiment.is_stale, found)) else "stored"
            print(f"  {word:8}{experiment.label(case)}  {' '.join(record['device'] for record in found)}".rstrip())


def _show(chosen: Sequence[Experiment], options: argparse.Namespace) -> None:
    for experiment in chosen:
        stored = records.read_all(options.results, experiment.name, experiment.cases("cpu") + experiment.cases("cuda"))
        print(f"{experiment.name}: {experiment.title}")
        if not stored:
            print(f"no records in {options.results / experiment.name}")
        else:
            for one in stored:
                print(f"{one['device']}, {experiment.label(one['configuration'])}: {records.line(one)}")
        if stale := sum(map(experiment.is_stale, stored)):
            print(f"{stale} of {len(stored)} records are of another version of the study")
