"""Tables of the last bytes beside the ladder: counted on as much of a text as a model of that budget sees."""

from functools import cache

import torch
from torch import Tensor

from paper.experiments.learning import ladder
from paper.tasks import ngrams, text
from paper.tasks.task import Batch

LONGEST = 5  # bytes before the next one


@cache
def table_bits(name: str, budget: int) -> tuple[float, ...]:
    """Bits a byte of tables of the last 1, ..., `LONGEST` bytes, by Witten and Bell's rule, on the windows on which the
    models of a text are tested; counted on as many windows as a run of that budget draws."""
    sizes = ladder.SIZES[name]
    task = text.language_modelling(name, "the next byte", ladder.TEXTS[name](), sizes["N"])
    drawn = task.train(budget * ladder.BASE * sizes["B"], torch.Generator().manual_seed(0))
    return ngrams.table_bits(_windows(drawn), _windows(task.tests["test"](sizes["tested"], torch.Generator())), LONGEST)


def _windows(batch: Batch) -> Tensor:
    return torch.cat([batch.inputs[0], batch.answers[:, -1:]], 1)
