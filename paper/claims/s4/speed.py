"""S4, common mistakes: an implementation without optimised matrix operations, by the clock; read from `results/`.

Linear attention is taken as its recurrence reads, a step a token, in the same library as the standard attention, which
is fused and sees the same keys. "Can be slower" asks for one setting where it is: of each device, the slowest.
"""

from math import inf

from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import region, untestable
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows
from paper.experiments.speed.attention_analysis import Row

CHAPTER = "07-linear-attention"

SLOW, IN_CHUNKS = "linear recurrent", "linear causal"


def slowest() -> dict[str, tuple[Row, Row]]:
    """By device the recurrence where its ratio to standard attention is largest, and the form in chunks there."""
    found = {}
    for device, curves in attention_rows.curves(experiments.load("attention-speed"), "recurrent").items():
        if {SLOW, IN_CHUNKS} <= curves.keys():
            pairs = [(row, other) for row in curves[SLOW] for other in curves[IN_CHUNKS] if row["N"] == other["N"]]
            found[device] = max(pairs, key=lambda pair: float(pair[0]["ratio_alike"][1]))
    return found


@evidence("S4.3a", chapter=CHAPTER)
def without_matrix_products() -> Finding:
    pairs = slowest()
    if not pairs:
        return untestable("slower than the standard attention", {f"`{SLOW}`": None}, lack="no record times")
    ratios, against = {}, []
    for device, (row, other) in pairs.items():
        ratios[f"$N = {row['N']:,}$ on {device}"] = round(row["ratio_alike"][1], 2)
        against.append(f"{row['seconds'][1] / other['seconds'][1]:.0f} times as long on {device}")
    return region((1, inf), ratios).noting(
        "Time of linear attention, a step a token, over that of fused softmax attention, both causal, forward and "
        f"backward. Against the same in chunks of matrix products it takes {', '.join(against)}"
    )
