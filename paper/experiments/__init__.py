"""Experiments that take a while: measured by `python -m paper experiments`, stored under `results/`, read by the pages.

Needs only torch and numpy, and runs from a bare source tree.
"""

from collections.abc import Sequence
from pathlib import Path

from paper.experiments.campaign import staged
from paper.experiments.catalogue import EXPERIMENTS
from paper.experiments.engine import cli, records
from paper.experiments.engine.provenance import changes, default_results
from paper.experiments.engine.records import (
    Case,
    NoRecordsError,
    Record,
    RecordError,
    by_device,
    judged_device,
    latest,
    on_cpu,
)
from paper.experiments.engine.runner import Experiment, Report, measure, run
from paper.experiments.speed.inference import gains
from paper.experiments.speed.training_step import memory, speedups

__all__ = [
    "EXPERIMENTS",
    "Case",
    "Experiment",
    "NoRecordsError",
    "Record",
    "RecordError",
    "Report",
    "by_device",
    "gains",
    "is_stale",
    "judged_device",
    "latest",
    "load",
    "main",
    "measure",
    "memory",
    "on_cpu",
    "run",
    "speedups",
]


def load(experiment: str, results: Path | str | None = None) -> list[Record]:
    """The stored records of an experiment on every device; empty if it was not measured yet.

    Raises ValueError for an unknown name, RecordError, naming file and reason, for a damaged file, and NoRecordsError
    if no folder is given and the default one holds no records of any experiment, as away from the source tree.
    """
    needs = cli.find(experiment, EXPERIMENTS).needs
    folder = default_results() if results is None else Path(results)
    if results is None and not any((folder / name).is_dir() for name in EXPERIMENTS):
        raise NoRecordsError(f"results: expected a folder with records of experiments, got {folder} without any")
    return records.read_all(folder, experiment, needs)


def is_stale(record: Record) -> bool:
    """Whether the code that a record depends on has changed since it was measured, or its experiment is gone."""
    experiment = EXPERIMENTS.get(record["experiment"])
    return experiment is None or bool(changes(record, experiment.run))


def main(argv: Sequence[str]) -> int:
    """`python -m paper experiments`, with the arguments after that word. Returns the exit status."""
    return cli.main(argv, EXPERIMENTS, campaign=staged(EXPERIMENTS))
