"""Which positions and memories keep a bit through whatever comes between (`paper.tasks.flip_flop`)."""

from collections.abc import Mapping
from typing import Any

from paper.experiments.learning.study import Study, experiment
from paper.tasks.flip_flop import TASK

ARMS: Mapping[str, Mapping[str, Any]] = {
    name: {"attention": name, "max_length": None}
    for name in ("softmax", "rotary", "alibi", "fox", "path", "position-delta", "delta", "gated-delta")
}

STUDY = Study(
    name=TASK.name,
    title=TASK.title,
    task=TASK,
    arms=ARMS,
    steps=500,
    tested=128,
)
FLIP_FLOP = experiment(STUDY)
