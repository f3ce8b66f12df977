"""Experiments that take a while: measured by `python -m paper experiments`, stored under `results/`, read by the pages.

Needs only torch, numpy, tqdm and pooch, and runs from a bare source tree.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from paper.experiments.catalogue import EXPERIMENTS
from paper.experiments.devices import by_device, judged_device, on_cpu, shown_name
from paper.experiments.engine import cli, records
from paper.experiments.engine.provenance import RESULTS
from paper.experiments.engine.records import Case, NoRecordsError, Record, RecordError
from paper.experiments.engine.runner import Experiment, Report, measure, run
from paper.experiments.learning import rates
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
    "judged_device",
    "load",
    "main",
    "measure",
    "memory",
    "on_cpu",
    "run",
    "shown_name",
    "speedups",
]


def load(experiment: str, results: Path | str | None = None) -> list[Record]:
    """The stored records of an experiment on every device; empty if it was not measured yet.

    Raises ValueError for an unknown name, RecordError, naming file and reason, for a damaged file, and NoRecordsError
    if no folder is given and the default one holds no records of any experiment, as away from the source tree.
    """
    cli.find(experiment, EXPERIMENTS)
    folder = RESULTS if results is None else Path(results)
    if results is None and not any((folder / name).is_dir() for name in EXPERIMENTS):
        raise NoRecordsError(f"results: expected a folder with records of experiments, got {folder} without any")
    return records.read_all(folder, experiment, _cases(experiment, tuple(rates.table().get(experiment, {}).items())))


@cache
def _cases(experiment: str, _: tuple[tuple[str, float], ...]) -> list[Case]:
    """All cases of an experiment with these rates, kept, as counting the costs that match arms takes a while."""
    return [case for device in cli.DEVICES for case in EXPERIMENTS[experiment].cases(device)]


def main(argv: Sequence[str]) -> int:
    """`python -m paper experiments`, with the arguments after that word. Returns the exit status."""
    return cli.main(argv, EXPERIMENTS)
