"""The order of cases on a GPU, which may be at hand for half an hour only: the most informative first.

`python -m paper experiments` follows it on a GPU. It can be cut off anywhere; the next call goes on from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from paper.experiments.engine.runner import Experiment


class Stage(NamedTuple):
    """An experiment, and how many of its cases to run, the most informative first; None for all."""

    experiment: str
    first: int | None = None


# First of all whether the kernels are right; then layer and block, attention alone, decoding, whole models. What has to
# be compiled takes half a minute a case, so few of these come before the others.
FIRST = (
    Stage("agreement"),
    Stage("exchanged-speed", 4),
    Stage("heads-speed", 2),
    Stage("induction-speed", 2),
    Stage("training-step", 8),
    Stage("flash-speed", 2),
    Stage("attention-speed", 3),
    Stage("memory-speed", 3),
    Stage("pattern-speed", 1),
    Stage("recomputation-speed"),
    Stage("projection-speed", 4),
    Stage("inference"),
    Stage("whole-models", 2),
    Stage("decode-speed", 2),
    Stage("generation"),
    Stage("bytes-speed"),
    Stage("ladder-speed"),
)
# Then the remaining cases of the stages above, and what a CPU can do as well.
STAGES = (
    *FIRST,
    *(Stage(stage.experiment) for stage in FIRST if stage.first is not None),
    Stage("ladder"),
    Stage("retrieval"),
)


def staged(experiments: Mapping[str, Experiment], stages: Sequence[Stage] = STAGES) -> list[Experiment]:
    """The experiments of the stages, each with the cases that the stage has; then all others.

    A case that an earlier stage has measured has its record in a later one, and is not run again.
    """
    others = experiments.keys() - {stage.experiment for stage in stages}
    found = [_first(experiments[stage.experiment], stage.first) for stage in stages]
    return [*found, *(one for name, one in experiments.items() if name in others)]


def _first(experiment: Experiment, count: int | None) -> Experiment:
    return experiment if count is None else replace(experiment, cases=lambda device: experiment.cases(device)[:count])
