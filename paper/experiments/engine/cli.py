"""The command `python -m paper experiments`."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ortho._checks import unknown
from paper.experiments.engine import (
    carrying,
    cluster,
    launchers,
    progress,
    provenance,
    records,
    runner,
    signals,
)
from paper.experiments.engine.launchers import LaunchError
from paper.experiments.engine.records import RecordError
from paper.experiments.engine.runner import Experiment, Launcher

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str], experiments: Mapping[str, Experiment], campaign: Sequence[Experiment] = ()) -> int:
    """Run, list or show experiments; with `--campaign` those of the `campaign`, in its order.

    Returns 0; 1 if a case or a file of records failed, records could not be stored, or a launch was impossible; 130
    for Ctrl-C and 143 for SIGTERM, both of which end the jobs that were handed out. Bad usage raises SystemExit with 2.
    """
    arguments = _parse(argv, experiments)
    chosen = list(campaign) if arguments.campaign else [experiments[name] for name in arguments.names or experiments]
    try:
        if arguments.show:
            return _show(chosen, arguments.results)
        if arguments.list:
            return _list(chosen, arguments.device, arguments.results)
        if arguments.carry:
            return _carry([one for one in chosen if arguments.names or not one.quiet], arguments)
        return _run(chosen, arguments, experiments)
    except (LaunchError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was measured before is stored", file=sys.stderr)
        return 130
    except signals.TerminatedError:
        print("terminated; what was measured before is stored", file=sys.stderr)
        return 143


def find(name: str, experiments: Mapping[str, Experiment]) -> Experiment:
    """The experiment of that name, else ValueError that lists them."""
    if name not in experiments:
        raise ValueError(unknown("experiment", name, experiments))
    return experiments[name]


def _parse(argv: Sequence[str], experiments: Mapping[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paper experiments",
        description="Measure what is missing or stale and store it under results/; needs torch and numpy alone.",
        epilog="CPU timings need "
        + " ".join(f"{name}={value}" for name, value in provenance.CPU_ENVIRONMENT.items())
        + "; where they are not set, the command starts itself over with them.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(experiments)} (default: all)")
    parser.add_argument("--budget", type=_seconds, metavar="SECONDS", help="start no case that would end later")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda where there is one, else cpu")
    parser.add_argument("--results", type=_folder, metavar="DIR", help="default: results/ beside the package")
    parser.add_argument("--rerun", action="store_true", help="measure again what is stored and fresh, too")
    places = (
        "by default here, one after the other; the processes of `torchrun -m paper experiments NAME` share each case"
    )
    _add_places(parser.add_argument_group("where cases run", places))
    parser.add_argument(
        "--campaign",
        action="store_true",
        help="what tells most on a GPU that is at hand for a short while, in this order; each call goes on",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="say what is stored, stale and missing; run nothing")
    action.add_argument("--show", action="store_true", help="print the stored results of every device; run nothing")
    action.add_argument(
        "--carry",
        action="store_true",
        help="run a short case of each kind by the code of the stale records and by this one; if all bits are alike, "
        "these records hold for this code, too",
    )
    arguments = parser.parse_args(argv)
    try:
        for name in arguments.names:
            find(name, experiments)
        if arguments.campaign and arguments.names:
            raise ValueError(f"--campaign: expected no names with it, got {' '.join(arguments.names)}")
        _check_places(arguments, [name for name in arguments.names or experiments if experiments[name].quiet])
    except ValueError as error:
        parser.error(str(error))
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.results = arguments.results or provenance.default_results()
    return arguments


def _add_places(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        help="up to N cases at once, each in a process of its own, but for timings (default: 1; with slurm all)",
    )
    group.add_argument("--launcher", choices=("local", "slurm"), default="local", help="slurm: a job of a cluster each")
    group.add_argument(
        "--slurm",
        type=_option,
        action="append",
        metavar="KEY=VALUE",
        help="an option of the jobs, such as partition=gpu, gpus_per_node=1, timeout_min=60; may be repeated",
    )
    group.add_argument(
        "--logs", type=_folder, metavar="DIR", help="of SLURM's jobs; default: .slurm/ beside the results"
    )


def _check_places(arguments: argparse.Namespace, quiet: Sequence[str]) -> None:
    """ValueError for options that do not go together; `quiet` names the timings that were asked for."""
    slurm = arguments.launcher == "slurm"
    if arguments.device == "cuda" and not slurm and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu, got cuda, which this torch does not find here")
    for option in ("slurm", "logs"):
        if getattr(arguments, option) is not None and not slurm:
            raise ValueError(f"--{option}: expected --launcher slurm with it, got --launcher {arguments.launcher}")
    if launchers.under_torchrun():
        if slurm or arguments.jobs is not None:
            raise ValueError("torchrun: expected neither --jobs nor --launcher slurm, as its processes share each case")
        if arguments.list or arguments.show:
            raise ValueError("torchrun: expected cases to run, got --list or --show")
        if quiet:
            raise ValueError(
                f"torchrun: expected no timings, which its processes would disturb, got {', '.join(quiet)}"
            )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number of cases, got {text!r}")
    return int(text)


def _option(text: str) -> tuple[str, Any]:
    """A name and its value, which is JSON where it can be (`1`, `true`), else text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _folder(text: str) -> Path:
    if (path := Path(text)).exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text!r}")
    return path


def _run(chosen: Sequence[Experiment], arguments: argparse.Namespace, experiments: Mapping[str, Experiment]) -> int:
    timing = arguments.device == "cpu" and any(experiment.quiet for experiment in chosen)
    if timing and not provenance.in_cpu_environment() and _is_own_process():
        provenance.restart_in_cpu_environment()
    # The processes of torchrun may wait for each other, where no handler runs: SIGTERM must end them at once.
    terminable = nullcontext() if launchers.under_torchrun() else signals.terminable()
    with terminable, launchers.process_group(arguments.device), _launcher(arguments) as launcher:
        if isinstance(launcher, launchers.Ranks) and launcher.rank > 0:
            launcher.follow(experiments)
            return 0
        with progress.shown() as (echo, show):
            report = runner.run(
                chosen,
                arguments.device,
                arguments.results,
                budget=arguments.budget,
                rerun=arguments.rerun,
                launcher=launcher,
                echo=echo,
                progress=show,
            )
    print(f"{len(report.done)} measured, {len(report.left)} left, {len(report.errors)} failed; {arguments.results}")
    for label in report.left:
        print(f"left for want of time: {label}")
    for error in report.errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if report.errors else 0


def _carry(chosen: Sequence[Experiment], arguments: argparse.Namespace) -> int:
    failed = 0
    for experiment in chosen:
        try:
            count = carrying.carry(experiment, arguments.results)
            print(f"{experiment.name}: {count} records carried over")
        except RecordError as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def _launcher(arguments: argparse.Namespace) -> AbstractContextManager[Launcher]:
    if launchers.under_torchrun():
        return launchers.Ranks()
    if arguments.launcher == "slurm":
        folder = arguments.logs or arguments.results.absolute().parent / ".slurm"
        return cluster.Slurm(arguments.jobs, launchers.registered, folder, dict(arguments.slurm or ()))
    if (arguments.jobs or 1) > 1:
        return launchers.Processes(arguments.jobs, launchers.registered)
    return nullcontext(runner.Here())


def _is_own_process() -> bool:
    """Whether this process is the command itself, and not a test or a notebook that called it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "paper.__main__"


def _list(chosen: Sequence[Experiment], device: str, results: Path) -> int:
    slug = provenance.device_slug(device)
    for experiment in chosen:
        stored = records.read(records.path(results, experiment.name, slug), experiment.needs)
        print(f"{experiment.name}: {experiment.title}")
        for word, cases in zip(("fresh", "stale", "missing"), runner.state(experiment, device, stored), strict=True):
            for case in cases:
                print(f"  {word:8}{experiment.label(case)}")
    return 0


def _show(chosen: Sequence[Experiment], results: Path) -> int:
    for experiment in chosen:
        stored = records.read_all(results, experiment.name, experiment.needs)
        print(f"{experiment.name}: {experiment.title}")
        if not stored:
            print(f"no records in {results / experiment.name}")
        elif experiment.show is not None:
            print(experiment.show(stored))
        else:
            print("\n".join(f"{experiment.label(r['configuration'])}: {experiment.line(r)}" for r in stored))
        for device, group in records.by_device(stored).items():
            if stale := sum(bool(provenance.changes(record, experiment.run)) for record in group):
                print(f"{device}: {stale} of {len(group)} records were measured with an earlier state of the code")
    return 0
