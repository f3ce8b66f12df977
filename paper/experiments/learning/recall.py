"""Which memories recall many keys, each written once, or twice with the last value to count (`paper.tasks.recall`)."""

from collections.abc import Mapping
from typing import Any

from paper.experiments.learning.study import Study, experiment
from paper.tasks.recall import TASK

# Heads are 8 wide, narrower than there are keys. Softmax and linear attention see the order of writes in learned
# positions, the memories of the delta rule in their recurrence.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"attention": "softmax", "max_length": TASK.longest},
    "linear": {"attention": "linear", "max_length": None},
    "linear, positions": {"attention": "linear", "max_length": TASK.longest},
    "delta": {"attention": "delta", "max_length": None},
    "delta, 1 head": {"attention": "delta", "max_length": None, "num_heads": 1},
    "delta, 8 heads": {"attention": "delta", "max_length": None, "num_heads": 8},
    "gated-delta": {"attention": "gated-delta", "max_length": None},
}

STUDY = Study(
    name=TASK.name,
    title=TASK.title,
    task=TASK,
    arms=ARMS,
    H=4,
    steps=1200,
)
RECALL = experiment(STUDY)
