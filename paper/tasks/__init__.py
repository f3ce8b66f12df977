"""Tasks that models are to learn; `task.py` says what a task is, `TASKS` are the synthetic ones in their usual sizes.

Tasks on data, and tasks for models with other inputs than one sequence, are made by functions in the other files.
"""

from paper.tasks import copying, flip_flop, induction, modular_addition, mqar, needle, ngrams, recall, state_tracking
from paper.tasks.task import NONE, Batch, Draw, Task, check_answers

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        recall.TASK,
        flip_flop.TASK,
        state_tracking.PARITY,
        state_tracking.PERMUTATIONS,
        mqar.task(),
        induction.task(),
        copying.task(),
        needle.task(),
        ngrams.task(),
        modular_addition.task(),
    )
}

__all__ = ["NONE", "TASKS", "Batch", "Draw", "Task", "check_answers"]
