"""Softmax attention in tiles: which tiles there are, and what is kept of those that have been read."""

from matplotlib.figure import Figure

from ortho.attention.softmax.flash import tiles
from paper.plots import BLACK, BLUE, GREEN, ORANGE
from paper.schematics.drawing import arrow, box, canvas, cells, label

__all__ = ["attention_by_tiles", "tile_states"]

COUNT = 5  # tiles of queries, and of keys
NOW = (3, 2)  # the tile in progress: its row (queries) and its column (keys)
TINTS = {"done": (BLUE, 0.45), "now": (ORANGE, 0.9), "to come": (BLUE, 0.12), "never": None}

KEPT = (
    "of these queries, so far:\n$m$, the largest score\n$l$, the sum of $e^{S - m}$\n$a$, the sum of $e^{S - m}\\, v$"
)


def tile_states(count: int, now: tuple[int, int]) -> list[list[str]]:
    """The state of each tile of a causal call, queries by keys: 'done', 'now', 'to come', or 'never' (not computed)."""
    order = [(queries.start, keys.start) for queries, read in tiles(count, count, True, (1, 1)) for keys, _ in read]
    where = {tile: place for place, tile in enumerate(order)}
    states = [["never"] * count for _ in range(count)]
    for (row, column), place in where.items():
        states[row][column] = "done" if place < where[now] else "to come"
    states[now[0]][now[1]] = "now"
    return states


def attention_by_tiles() -> Figure:
    """Queries to the left, keys and values above, the tiles of scores between them, and what goes from tile to tile."""
    figure, axes = canvas(16, 7.6)
    states = tile_states(COUNT, NOW)
    grid = [[TINTS[state] for state in row] for row in states]
    cells(axes, (2.6, 5.6), grid, side=1.0)
    cells(axes, (2.6, 6.9), [[(GREEN, 0.6 if j == NOW[1] else 0.15) for j in range(COUNT)]], side=1.0)
    cells(axes, (1.3, 5.6), [[(GREEN, 0.6 if i == NOW[0] else 0.15)] for i in range(COUNT)], side=1.0)
    label(axes, (5.1, 7.25), "tiles of keys and values, $K$ and $V$", colour=GREEN)
    label(axes, (0.9, 3.1), "tiles of\nqueries, $Q$", colour=GREEN, align="right")
    label(axes, (5.1, 0.25), "tiles of scores: computed, used, forgotten")
    label(axes, (6.6, 4.6), "never\ncomputed", size=8)
    row = 5.6 - NOW[0] - 0.5
    arrow(axes, (5.7, row), (8.9, row), colour=ORANGE)
    box(axes, (11.0, row), KEPT, width=4.1, height=2.6, colour=ORANGE)
    label(axes, (11.0, row + 1.75), "fast memory", colour=ORANGE)
    arrow(axes, (13.2, row), (14.2, row))
    label(axes, (13.7, row + 0.45), "$a / l$")
    cells(axes, (14.3, 5.6), [[(BLACK, 0.35) if i < NOW[0] else None] for i in range(COUNT)], side=1.0)
    label(axes, (14.8, 6.0), "output")
    return figure
