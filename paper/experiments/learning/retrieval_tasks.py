"""What is to be retrieved, and by which heads: tasks of several lengths, and the arms of `retrieval`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ortho.checks import one_of
from paper.experiments.learning import ladder_arms
from paper.experiments.learning.ladder_arms import CONVOLUTION, Arm
from paper.tasks import copying, mqar, needle, ngrams
from paper.tasks.task import Task
from paper.tasks.text import VOCAB_SIZE

LENGTHS = (32, 64, 256, 1024)  # the first one serves to find out how a task is done
SUCCESS = 0.8  # of the right answers in the test
WIDE, NARROW = 64, 32  # d; by the law one untrained head serves all lengths at the first d, and few at the second
H = 4
ONE = UNTRAINED, LEARNED = "1 induction + 3 positional", "1 learned + 3 positional"
WITHOUT = (*ONE, "2 induction + 2 positional", "learned")  # arms that also run without the convolution


@dataclass(frozen=True)
class Setting:
    """A task for each length; and, if one token is to be matched, how many other tokens there are that differ."""

    make: Callable[[int], Task]
    others: Callable[[int], int] | None = None


# A symbol means the same at all lengths. In needles a mark and a key must be matched together, as most of the key's
# places are noise. In copies enough tokens must be matched to tell places apart: two, except in the shortest strings.
SETTINGS: Mapping[str, Setting] = {
    "mqar": Setting(lambda N: mqar.task(pairs=N // 8 - 1, length=N, vocab_size=VOCAB_SIZE), lambda N: N // 4 - 2),
    "ngrams": Setting(lambda N: ngrams.task(order=1, length=N, symbols=N // 4), lambda N: N // 4 - 1),
    "copying": Setting(lambda N: copying.task(length=N // 2, shortest=N // 4, symbols=VOCAB_SIZE - 2)),
    "needle": Setting(lambda N: needle.task(needles=2, length=N, symbols=16)),
}
ARMS: Mapping[str, Arm] = {
    UNTRAINED: ladder_arms.ARMS[UNTRAINED],
    LEARNED: ladder_arms.ARMS[LEARNED],
    "1 learned + 1 induction + 2 positional": ladder_arms.ARMS["1 learned + 1 induction + 2 positional"],
    "2 induction + 2 positional": ladder_arms.ARMS["2 induction + 2 positional"],
    "2 learned + 2 positional": Arm((("learned", 2), ("ends", 2))),
    "learned": ladder_arms.ARMS["learned"],
    "positional": ladder_arms.ARMS["positional"],
}
# The most informative first: the width of the convolution, d, tasks and arms. Narrow heads are there to test the law.
GROUPS: tuple[tuple[int, int, tuple[str, ...], tuple[str, ...]], ...] = (
    (CONVOLUTION, WIDE, tuple(SETTINGS), tuple(ARMS)),
    (CONVOLUTION, NARROW, tuple(name for name, one in SETTINGS.items() if one.others), ONE),
    (0, WIDE, tuple(SETTINGS), WITHOUT),
)


@cache
def task(name: str, N: int) -> Task:
    """The task of that name in sequences of N tokens. Raises ValueError for an unknown one."""
    return SETTINGS[one_of("task", name, SETTINGS)].make(N)


def part(N: int) -> str:
    """The name of the test at a length in a record."""
    return f"{N} tokens"


def is_learnt(tested: Mapping[str, Sequence[float]], case: Mapping[str, Any]) -> bool:
    """Whether a length is learnt, by a record's figures for its test."""
    return bool(tested["correct_fraction"][0] >= case["success_fraction"])
