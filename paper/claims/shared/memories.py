"""What recurrent memories cost: FLOPs, the state that they carry, and how long they took where there is a record."""

from collections.abc import Iterable, Mapping

from ortho import MECHANISMS
from paper.claims.report import Shown, table
from paper.experiments.devices import on_cpu
from paper.experiments.engine.records import Record
from paper.experiments.speed.attention_analysis import rows

__all__ = ["costs"]

N, K = 4096, 64  # tokens, and the width of a head


def costs(recurrences: Mapping[str, str], records: Iterable[Record]) -> Shown:
    """A table of memories and their recurrences (mechanism -> LaTeX).

    FLOPs of matrix products, in thousands, are for one causal head, forward, per token, and for one more token; the
    state's numbers are in thousands, too. The time is that of eight heads on the CPU, forward and backward. The first
    row is softmax attention, in its fused form.
    """
    times: dict[str, float] = {}
    for row in rows(records):
        if on_cpu(row["device"]) and (row["N"], row["K"], row["compiled"]) == (N, K, False):
            times.setdefault(row["arm"], 1e3 * row["seconds"][1])
    cells = []
    for name, recurrence in [("softmax", ""), *recurrences.items()]:
        cost = MECHANISMS[name].cost(1, N, 1, K, K, causal=True)
        took = times.get(f"{'sdpa' if name == 'softmax' else name} causal")
        figures = f"{cost.forward / N / 1e3:,.0f}", f"{cost.decode / 1e3:,.0f}", f"{cost.state_bytes / 4e3:,.1f}"
        cells.append((f"`{name}`", recurrence and f"${recurrence}$", *figures, took and f"{took:,.0f}"))
    return table(cells, ("memory", "$S$ becomes", "kFLOPs", "one more", "state", "ms"))
