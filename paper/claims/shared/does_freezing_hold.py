r"""Whether frozen queries and keys hold up: over tasks, over what they are drawn from, in expressiveness, in gradients.

S0, section 5.2; S2, sections 4.2, 4.3 and 5.3. Read from the records of the learning experiments: of each experiment
those of one device, a CPU if there is one (`judged_device`). Differences between arms are judged by the rule that the
records themselves hold (a `Decision`); on tasks that a run either learns or does not, by exact intervals of the success
rates.
"""

from paper.claims.evidence.does_freezing_hold import (
    BLEU,
    NAMES,
    _bytes,
    at_issue,
    compared,
    every_setting,
    frozen_lose_nothing,
    in_words,
    judged,
    lost,
    noting_idle,
    outcomes,
    settings,
)

__all__ = [
    "BLEU",
    "NAMES",
    "_bytes",
    "at_issue",
    "compared",
    "every_setting",
    "frozen_lose_nothing",
    "in_words",
    "judged",
    "lost",
    "noting_idle",
    "outcomes",
    "settings",
]
