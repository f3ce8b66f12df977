"""Which forms follow a state: parity, and the permutations of three things (`paper.tasks.state_tracking`)."""

from collections.abc import Mapping
from typing import Any

from ortho.gates import ReflectingWriteStrength
from paper.experiments.learning.study import SEEDS, Study, experiment
from paper.tasks import state_tracking

_TO_2 = {"gates": {"beta": ReflectingWriteStrength}}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"attention": "softmax", "max_length": None},
    "linear": {"attention": "linear", "max_length": None},
    "delta": {"attention": "delta", "max_length": None},
    "delta, beta to 2": {"attention": "delta", "max_length": None, **_TO_2},
    "gated-delta": {"attention": "gated-delta", "max_length": None},
    "gated-delta, beta to 2": {"attention": "gated-delta", "max_length": None, **_TO_2},
    "delta-product": {"attention": "delta-product", "max_length": None},  # two steps a token, beta to 2
}
_FOR_PERMUTATIONS = ("softmax", "delta", "delta, beta to 2", "gated-delta, beta to 2", "delta-product")

PARITY_STUDY = Study(
    name=state_tracking.PARITY.name,
    title=state_tracking.PARITY.title,
    task=state_tracking.PARITY,
    arms=ARMS,
    steps=500,
)
PERMUTATIONS_STUDY = Study(
    name=state_tracking.PERMUTATIONS.name,
    title=state_tracking.PERMUTATIONS.title,
    task=state_tracking.PERMUTATIONS,
    arms={arm: ARMS[arm] for arm in _FOR_PERMUTATIONS},
    steps=1500,
    seeds=(*SEEDS, 6, 7, 8, 9),  # some runs do not learn this task at all
)

PARITY = experiment(PARITY_STUDY)
PERMUTATIONS = experiment(PERMUTATIONS_STUDY)
