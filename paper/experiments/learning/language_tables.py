"""Tables of the last bytes beside the language models of bytes: counted on as much of their text as a model sees."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from paper.experiments.engine.records import Record
from paper.experiments.learning import language
from paper.tasks import ngrams, text
from paper.tasks.task import Batch, Task

LONGEST = 5  # bytes before the next one


def same_text(records: Iterable[Record]) -> bool:
    """Whether the text here, which is that of one version of Python, is the one of all these records."""
    facts = text.python_parts().facts()
    return all(record["facts"]["text"] == facts for record in records)


@cache
def held_out(device: str = "cpu") -> Tensor:
    """The windows on which the models are tested, (count, N + 1)."""
    return _windows(_task(device).tests["test"](language.SIZES[device]["tested"], torch.Generator()))


@cache
def table_bits(steps: int, device: str = "cpu") -> tuple[float, ...]:
    """Bits a byte of tables of the last 1, ..., `LONGEST` bytes, counted on the windows of so many steps of training.

    The windows are drawn as those of the models are, and tests are the same.
    """
    drawn = _task(device).train(steps * language.SIZES[device]["B"], torch.Generator().manual_seed(0))
    return ngrams.table_bits(_windows(drawn), held_out(device), LONGEST)


def best(steps: int, device: str = "cpu") -> tuple[int, float]:
    """How many of the last bytes the best of these tables has, and its bits a byte."""
    found = table_bits(steps, device)
    return found.index(min(found)) + 1, min(found)


def least_bits_of_pairs(device: str = "cpu") -> float:
    """Bits a byte below which no function of the last byte alone gets on these very windows.

    The conditional entropy of the next byte by their own counts, which is what models of identity heads are bound by.
    """
    windows = held_out(device)
    pairs = (
        torch.bincount((256 * windows[:, :-1] + windows[:, 1:]).flatten(), minlength=256**2).reshape(256, 256).double()
    )
    seen = pairs > 0
    ratios = (pairs.sum(1, keepdim=True) / pairs)[seen]
    return float((pairs[seen] * ratios.log2()).sum()) / int(pairs.sum())


def _task(device: str) -> Task:
    return text.language_modelling("python-sources", "the next byte", text.python_parts(), language.SIZES[device]["N"])


def _windows(batch: Batch) -> Tensor:
    return torch.cat([batch.inputs[0], batch.answers[:, -1:]], 1)
