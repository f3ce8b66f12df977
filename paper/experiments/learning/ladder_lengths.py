"""The ladder's models with windows of 256 to 2,048 bytes: a text repeats itself the more often, the more is seen of it.

Every step draws as many bytes, whatever a window's length, and every model is tested on nearly the same bytes. The
rates are those that the ladder chose for twice as much text, in windows of the text's own length. Learned heads, the
rival, have twice and four times that rate as well; the best of the three counts, length by length. So have positional
heads alone, the control: they retrieve nothing, so what they gain by longer windows is not retrieval.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from statistics import mean

from ortho.checks import one_of, positive_int
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import ladder, ladder_analysis, rates
from paper.experiments.learning.ladder_analysis import RIVAL, SELECTIVE, Tested

LENGTHS = (2048, 256, 1024, 512)
BYTES = 2048  # of a step, twice as many as the ladder's
BUDGET = 4
CONTROL = "positional"
# With the experiment that chose their rates.
ARMS = {RIVAL: "ladder", SELECTIVE: "ladder-selective", CONTROL: "ladder-others"}
SEEN = BUDGET * ladder.BASE * BYTES  # bytes that a model has read in the end
SEEDS = ladder.SEEDS[2:]
TIMES = {RIVAL: (1, 2, 4), SELECTIVE: (1,), CONTROL: (1, 2, 4)}  # the rate chosen there

run, smoke_case, work, line = ladder.run, ladder.smoke_case, ladder.work, ladder.line


def case(
    text: str, arm: str, N: int, *, seed: int = rates.TUNING, rate: float | None = None, device: str = "cpu"
) -> Case:
    """One run with windows of N bytes. Raises TypeError or ValueError as `ladder.case` does."""
    usual = ladder.SIZES[one_of("text", text, ladder.TEXTS)]
    tested, validated = (count * usual["N"] // positive_int("N", N) for count in (usual["tested"], ladder.VALIDATED))
    sizes = {"N": N, "B": max(1, BYTES // N), "tested": tested}
    found = ladder.case(text, arm, seed=seed, rate=rate, budget=BUDGET, device=device, **sizes)
    return found | {"validated": validated}


def cases(device: str) -> list[Case]:
    """The runs whose rates are chosen: seed by seed, the longest and the shortest windows first."""
    found = []
    for seed, N, text in product(SEEDS, LENGTHS, ("novels", "python")):
        for arm, experiment in ARMS.items():
            rate = rates.chosen(experiment, ladder.case(text, arm, budget=ladder.LONG, device=device))
            if rate is not None:
                found += [case(text, arm, N, seed=seed, rate=times * rate, device=device) for times in TIMES[arm]]
    return found


def best(records: Iterable[Record], text: str, arm: str, N: int, budget: int = BUDGET) -> list[Record]:
    """The runs of an arm at the rate of the fewest bits on the validation part, of the rates that most seeds have.

    Runs that do not pass the budget are left out.
    """

    def rate(record: Record) -> float:
        return float(record["configuration"]["rate"])

    at, wanted = f"{budget} x", {"text": text, "arm": arm, "N": N}
    passed = (one for one in records if at in one["repetitions"] and wanted.items() <= one["configuration"].items())
    groups = [list(group) for _, group in groupby(sorted(passed, key=rate), key=rate)]
    most = max(map(len, groups), default=0)

    def bits(group: Sequence[Record]) -> float:
        return mean(mean(one["repetitions"][at]["validation_bits"]) for one in group)

    return min((group for group in groups if len(group) == most), key=bits, default=[])


def compared(
    records: Sequence[Record],
    text: str,
    N: int,
    budget: int = BUDGET,
    *,
    arm: str = SELECTIVE,
    against: str = RIVAL,
) -> Tested | None:
    """An arm's bits a byte less another's, both with windows of N bytes; None of fewer than two seeds."""
    own = [record for one in (arm, against) for record in best(records, text, one, N, budget)]
    return ladder_analysis.compared(own, text, arm, budget, against=against)


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{ladder.label(case)}, N={case['N']}"
