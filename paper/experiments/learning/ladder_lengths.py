"""The ladder's models with windows of 256 to 2,048 bytes: a text repeats itself the more often, the more is seen of it.

Every step draws as many bytes, whatever a window's length, and every model is tested on nearly the same bytes. The
rates are those that the ladder chose for twice as much text, in windows of the text's own length.
"""

from collections.abc import Sequence
from itertools import product

from ortho._checks import one_of, positive_int
from paper.experiments.engine.records import Case, Record, pooled
from paper.experiments.engine.tables import by_devices
from paper.experiments.learning import ladder, ladder_analysis, rates
from paper.experiments.learning.ladder_analysis import RIVAL, SELECTIVE, Tested

LENGTHS = (2048, 256, 1024, 512)
BYTES = 2048  # of a step, twice as many as the ladder's
BUDGET = 4
ARMS = {RIVAL: "ladder", SELECTIVE: "ladder-selective"}  # and where their rates were chosen
SEEDS = ladder.SEEDS[2:]

run, short, work, line = ladder.run, ladder.short, ladder.work, ladder.line


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
                found.append(case(text, arm, N, seed=seed, rate=rate, device=device))
    return found


def compared(records: Sequence[Record], text: str, N: int, budget: int = BUDGET) -> Tested | None:
    """Selective heads' bits a byte less learned heads', both with windows of N bytes; None of fewer than two seeds."""
    own = [record for record in records if record["configuration"]["N"] == N]
    return ladder_analysis.compared(own, text, SELECTIVE, budget)


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{ladder.label(case)}, N={case['N']}"


@by_devices(note=": bits a byte of selective heads less those of learned heads", groups=pooled)
def table(records: Sequence[Record]) -> list[str]:
    """The stored figures: for each text and length of windows the difference of the two kinds, with its interval."""
    lines = []
    for text, N in product(ladder.TEXTS, sorted(LENGTHS)):
        if found := compared(records, text, N):
            low, high = found.interval
            lines.append(f"{text:8} N = {N:<5} {found.mean:+.4f} [{low:+.4f}, {high:+.4f}], {len(found.seeds)} seeds")
    return lines
