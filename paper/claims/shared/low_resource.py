"""Learning from little data: a larger batch, the risk of overfitting, fixed and frozen heads.

S0, section 5.1: overfitting is read from the records of language models that had little text to train on. For each run,
the loss on its training text in the last twentieth of the steps is compared with that on the validation part after the
last step. S2, sections 1.3 and 5.2: read from the records of small models that translate German to English and a
made-up language from few pairs, or learn from few bytes of text. Differences are judged by the rule that each record
holds. They are given as gains: bits a byte saved, points of BLEU, or points of sentences without a mistake.
"""

from collections.abc import Iterable
from typing import NamedTuple

from paper.experiments import Record
from paper.experiments.devices import of_judged_devices
from paper.experiments.learning import translation_budgets
from paper.experiments.learning.analysis import Runs
from paper.experiments.learning.language import BITS


def seen(record: Record) -> float:
    """Bits a byte on the training text, over the last twentieth of the steps, with dropout on."""
    return float(record["facts"]["loss"][-1]) * BITS


def unseen(record: Record) -> float:
    """Bits a byte of the validation part after the last step."""
    return float(record["facts"]["validation"][-1]["loss_nats"]) * BITS


def gap(record: Record) -> float:
    """The generalisation gap at the end of training, in bits a byte: validation part minus training text."""
    return unseen(record) - seen(record)


def lost(record: Record) -> float:
    """How far the last validation look lies above the best one, in bits a byte: what overfitting has cost."""
    return unseen(record) - min(float(look["loss_nats"]) for look in record["facts"]["validation"]) * BITS


class Amount(NamedTuple):
    """How many pairs there are to train on, 0 if they are drawn anew, and how often the long runs go through them at
    most; 0 for the short runs of the first experiment."""

    pairs: int
    passes: int = 0

    def __str__(self) -> str:
        return f"{self.pairs:,} pairs" + (f", up to {self.passes} passes" if self.passes else "")


Pairs = dict[Amount, dict[str, Runs]]


def long_runs(records: Iterable[Record]) -> Pairs:
    """The runs of `translation-budgets`, each arm at the budget that counts for it."""
    found = translation_budgets.by_pairs(of_judged_devices(records))
    return {
        Amount(pairs, round(translation_budgets.passes(next(iter(arms.values())).configuration))): arms
        for pairs, arms in found.items()
    }
