"""What takes a while: measured by `python -m paper experiments`, stored under `results/`, read by the pages.

Needs torch and numpy alone, and runs from a bare source tree.
"""

from collections.abc import Sequence
from pathlib import Path

from paper.experiments.campaign import staged
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
)
from paper.experiments.engine.runner import Experiment, Report, measure, run
from paper.experiments.learning import ladder, language, synthetic, translating
from paper.experiments.learning.depth import DEPTH
from paper.experiments.learning.fine_tuning import FINE_TUNING
from paper.experiments.learning.images import IMAGES
from paper.experiments.learning.ladder_tables import LADDER_TABLES
from paper.experiments.learning.positional_heads import POSITIONAL_HEADS
from paper.experiments.learning.pruning import PRUNING
from paper.experiments.learning.retrieval import RETRIEVAL
from paper.experiments.learning.studies import FLIP_FLOP, PARITY, PERMUTATIONS, RECALL
from paper.experiments.speed.agreement import AGREEMENT
from paper.experiments.speed.attention import ATTENTION_SPEED, FLASH_SPEED, MEMORY_SPEED, PATTERN_SPEED
from paper.experiments.speed.decoding import DECODE_SPEED
from paper.experiments.speed.generation import GENERATION
from paper.experiments.speed.heads import HEADS_SPEED, INDUCTION_SPEED
from paper.experiments.speed.inference import INFERENCE, gains
from paper.experiments.speed.ladder_models import LADDER_SPEED
from paper.experiments.speed.language_models import BYTES_SPEED
from paper.experiments.speed.projections import PROJECTION_SPEED
from paper.experiments.speed.recomputation import RECOMPUTATION_SPEED
from paper.experiments.speed.training_step import TRAINING_STEP, memory, speedups
from paper.experiments.speed.value_gradient import EXCHANGED_SPEED
from paper.experiments.speed.whole_models import WHOLE_MODELS

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TRAINING_STEP,
        INFERENCE,
        ATTENTION_SPEED,
        MEMORY_SPEED,
        PATTERN_SPEED,
        FLASH_SPEED,
        DECODE_SPEED,
        WHOLE_MODELS,
        GENERATION,
        RECOMPUTATION_SPEED,
        EXCHANGED_SPEED,
        PROJECTION_SPEED,
        HEADS_SPEED,
        INDUCTION_SPEED,
        RECALL,
        PARITY,
        PERMUTATIONS,
        FLIP_FLOP,
        POSITIONAL_HEADS,
        DEPTH,
        *language.EXPERIMENTS,
        *ladder.EXPERIMENTS,
        LADDER_TABLES,
        RETRIEVAL,
        BYTES_SPEED,
        LADDER_SPEED,
        synthetic.SYNTHETIC,
        IMAGES,
        FINE_TUNING,
        *translating.EXPERIMENTS,
        PRUNING,
        AGREEMENT,
    )
}

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
    "run",
    "speedups",
]


def load(experiment: str, results: Path | str | None = None) -> list[Record]:
    """The stored records of an experiment on every device; none if nothing of it was measured yet.

    Raises ValueError for an unknown name, RecordError, naming file and reason, for a damaged file, and NoRecordsError
    where the folder was not given and has records of no experiment: away from the source tree there is none.
    """
    needs = cli.find(experiment, EXPERIMENTS).needs
    folder = default_results() if results is None else Path(results)
    if results is None and not any((folder / name).is_dir() for name in EXPERIMENTS):
        raise NoRecordsError(f"results: expected a folder with records of experiments, got {folder} without any")
    return records.read_all(folder, experiment, needs)


def is_stale(record: Record) -> bool:
    """Whether the code that a record depends on has changed since it was measured, or nothing measures it any more."""
    experiment = EXPERIMENTS.get(record["experiment"])
    return experiment is None or bool(changes(record, experiment.run))


def main(argv: Sequence[str]) -> int:
    """`python -m paper experiments`, with the arguments after that word. Returns the exit status."""
    return cli.main(argv, EXPERIMENTS, campaign=staged(EXPERIMENTS))
