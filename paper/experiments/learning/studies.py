"""The studies of synthetic tasks by one layer: which memories recall, keep a bit, and follow a state."""

from collections.abc import Mapping
from typing import Any

from ortho.gates import ReflectingWriteStrength
from paper.experiments.learning.study import SEEDS, Study
from paper.tasks import flip_flop, recall, state_tracking
from paper.tasks.task import Task


def _study(task: Task, arms: Mapping[str, Mapping[str, Any]], **budget: Any) -> Study:
    return Study(task.name, task.title, task, arms, **budget)


# Which memories recall many keys, each written once, or twice, where the last value counts.
# Heads are 8 wide, narrower than there are keys. Softmax and linear attention see the order of writes in learned
# positions, the memories of the delta rule in their recurrence.
RECALL_ARMS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"attention": "softmax", "max_length": recall.TASK.longest},
    "linear": {"attention": "linear", "max_length": None},
    "linear, positions": {"attention": "linear", "max_length": recall.TASK.longest},
    "delta": {"attention": "delta", "max_length": None},
    "delta, 1 head": {"attention": "delta", "max_length": None, "num_heads": 1},
    "delta, 8 heads": {"attention": "delta", "max_length": None, "num_heads": 8},
    "gated-delta": {"attention": "gated-delta", "max_length": None},
}
RECALL_STUDY = _study(recall.TASK, RECALL_ARMS, H=4, steps=1200)

# Which positional encodings and memories keep a bit through whatever comes between.
FLIP_FLOP_ARMS: Mapping[str, Mapping[str, Any]] = {
    name: {"attention": name, "max_length": None}
    for name in ("softmax", "rotary", "alibi", "fox", "path", "position-delta", "delta", "gated-delta")
}
FLIP_FLOP_STUDY = _study(flip_flop.TASK, FLIP_FLOP_ARMS, steps=500, tested=128)

# Which forms follow a state: parity, and the permutations of three things.
_TO_2 = {"gates": {"beta": ReflectingWriteStrength}}
STATE_ARMS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"attention": "softmax", "max_length": None},
    "linear": {"attention": "linear", "max_length": None},
    "delta": {"attention": "delta", "max_length": None},
    "delta, beta to 2": {"attention": "delta", "max_length": None, **_TO_2},
    "gated-delta": {"attention": "gated-delta", "max_length": None},
    "gated-delta, beta to 2": {"attention": "gated-delta", "max_length": None, **_TO_2},
    "delta-product": {"attention": "delta-product", "max_length": None},  # two steps a token, beta to 2
}
_FOR_PERMUTATIONS = ("softmax", "delta", "delta, beta to 2", "gated-delta, beta to 2", "delta-product")
PARITY_STUDY = _study(state_tracking.PARITY, STATE_ARMS, steps=500)
PERMUTATIONS_STUDY = _study(
    state_tracking.PERMUTATIONS,
    {arm: STATE_ARMS[arm] for arm in _FOR_PERMUTATIONS},
    steps=1500,
    seeds=(*SEEDS, 6, 7, 8, 9),  # some runs do not learn this task at all
)
