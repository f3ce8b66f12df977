"""The command `python -m ortho experiments`."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch

from ortho.experiments import provenance, records, runner
from ortho.experiments.records import RecordError
from ortho.experiments.runner import Experiment

DEVICES = ("cpu", "cuda")


def main(argv: Sequence[str], experiments: Mapping[str, Experiment]) -> int:
    """Run, list or show experiments. Returns 0, or 1 if a case or a file of records failed; bad usage exits with 2."""
    arguments = _parse(argv, experiments)
    chosen = [experiments[name] for name in arguments.names or experiments]
    try:
        if arguments.show:
            return _show(chosen, arguments.results)
        if arguments.list:
            return _list(chosen, arguments.device, arguments.results)
        return _run(chosen, arguments)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was measured before this case is stored", file=sys.stderr)
        return 130


def find(name: str, experiments: Mapping[str, Experiment]) -> Experiment:
    """The experiment of that name, else ValueError that lists them."""
    if name not in experiments:
        near = get_close_matches(name, experiments, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"experiment: expected one of {', '.join(map(repr, experiments))}, got {name!r}{hint}")
    return experiments[name]


def _parse(argv: Sequence[str], experiments: Mapping[str, Experiment]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ortho experiments",
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
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="say what is stored, stale and missing; run nothing")
    action.add_argument("--show", action="store_true", help="print the stored results of every device; run nothing")
    arguments = parser.parse_args(argv)
    try:
        for name in arguments.names:
            find(name, experiments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu, got cuda, which this torch does not find here")
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.results = arguments.results or provenance.default_results()
    return arguments


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


def _run(chosen: Sequence[Experiment], arguments: argparse.Namespace) -> int:
    timing = arguments.device == "cpu" and any(experiment.quiet for experiment in chosen)
    if timing and not provenance.in_cpu_environment() and _is_own_process():
        provenance.restart_in_cpu_environment()
    report = runner.run(
        chosen,
        arguments.device,
        arguments.results,
        budget=arguments.budget,
        rerun=arguments.rerun,
        echo=partial(print, flush=True),  # a kill must not swallow what was said
    )
    print(f"{len(report.done)} measured, {len(report.left)} left, {len(report.errors)} failed; {arguments.results}")
    for label in report.left:
        print(f"left for want of time: {label}")
    for error in report.errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if report.errors else 0


def _is_own_process() -> bool:
    """Whether this process is the command itself, and not a test or a notebook that called it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "ortho.__main__"


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
    return 0
