"""Tables of the last few bytes, beside the language models of the ladder: counted on as much text, tested on the same.

Their figures are stored, so that readers of the pages do not need the novels.
"""

from collections.abc import Iterable
from typing import Any

from ortho.checks import one_of, positive_int
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting
from paper.experiments.learning.ladder import BASE, LONGEST, SIZES, TEXTS
from paper.tasks import counting, text

BYTES = 5  # before the next one, at the most
BUDGETS = tuple(2**i for i in range(LONGEST.bit_length()))


def case(name: str, budget: int, *, device: str = "cpu") -> Case:
    """Tables of a text, counted on as many windows as a run of that budget draws; the device does not matter.

    Raises TypeError or ValueError for an unknown text or device, and for a budget below 1.
    """
    sizes = SIZES[one_of("name", name, TEXTS)]
    windows = positive_int("budget", budget) * BASE * sizes["B"]
    device = one_of("device", device, fitting.DEVICES)
    return {"device": device, "text": name, "budget": budget, "windows": windows, "bytes": BYTES, **sizes}


def smoke_case(case: Case) -> Case:
    """The case with few windows, for golden runs."""
    return case | {"budget": 1, "windows": 64, "tested": 64}


def cases(device: str) -> list[Case]:
    """All budgets of both texts."""
    return [case(name, budget, device=device) for budget in BUDGETS for name in TEXTS]


def run(case: Case) -> dict[str, Any]:
    """Bits a byte of the tables of the last 1, 2, ... bytes, by Witten and Bell's rule."""
    parts = TEXTS[case["text"]]()
    task = text.language_modelling(case["text"], "the next byte", parts, case["N"])
    found = counting.task_bits(task, case["windows"], case["tested"], case["bytes"])
    repetitions = {"tables": {"test_bits": [round(bits, 6) for bits in found]}}
    return {"seeds": {"training": 0}, "repetitions": repetitions, "facts": {"text": parts.facts()}}


def bits(records: Iterable[Record], name: str) -> dict[int, tuple[float, ...]]:
    """Budget -> bits a byte of the tables of the last 1, 2, ... bytes of a text."""
    own = [record for record in records if record["configuration"]["text"] == name]
    own.sort(key=lambda record: int(record["configuration"]["budget"]))
    return {r["configuration"]["budget"]: tuple(r["repetitions"]["tables"]["test_bits"]) for r in own}


label = "{text}, {budget} x".format_map
