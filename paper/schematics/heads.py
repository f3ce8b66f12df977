"""A layer with heads of several kinds: where each takes its weights from, and how the kinds are added up."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from paper.plots import BLACK, GREEN, GREY, VERMILION, WIDTH
from paper.schematics.drawing import arrow, box, canvas, cells, label

__all__ = ["heads_of_several_kinds", "induction_pairs", "lookup"]

TOKENS = "abcabc"
LEARNED = (1.0, 0.3, 0.7, 0.6, 0.2, 0.2, 0.1, 0.3, 0.1, 0.5, 0.3, 0.1, 0.1, 0.3, 0.2, 0.1, 0.4, 0.1, 0.2, 0.1, 0.2)
ROWS = {  # kind: its height, its colour, where its weights come from, whether that is trained
    "learned": (7.6, BLACK, "$q = W_Q\\, x,\\;\\; k = W_K\\, x$\ntrained", True),
    "positional": (4.6, GREEN, "no queries, no keys:\na pattern of places", False),
    "induction": (1.6, VERMILION, "$q_t = R\\, x_t,\\;\\; k_s = R\\, x_{s-1}$\none frozen $R$", False),
}


def induction_pairs(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """(query, key) for each key, at or before the query, that follows a token equal to the query's."""
    return [(i, j) for i in range(len(tokens)) for j in range(1, i + 1) if tokens[j - 1] == tokens[i]]


def heads_of_several_kinds() -> Figure:
    """The layer's input, a row for each kind of head with the weights it gives six tokens, and the sum."""
    figure, axes = canvas(16, 9.6)
    box(axes, (1, 4.6), "$X$", width=1.3, height=1.0, colour=BLACK)
    box(axes, (15, 4.6), "sum: $Y$", width=1.7, height=1.0, colour=BLACK)
    for kind, (height, colour, source, trained) in ROWS.items():
        arrow(axes, (1.7, 4.6), (2.4, height))
        label(axes, (4.6, height + 1.15), f"{kind} heads", colour=colour)
        box(axes, (4.6, height), source, width=4.1, height=1.4, colour=colour, dashed=not trained)
        arrow(axes, (6.7, height), (7.5, height))
        cells(axes, (7.6, height + 1.2), _weights(kind, colour), side=0.4)
        arrow(axes, (10.1, height), (10.9, height))
        box(axes, (12.1, height), "$W_V,\\; W_O$\ntrained", width=2.3, height=1.4, colour=colour)
        arrow(axes, (13.3, height), (14.0, 4.6))
        for place, token in enumerate(TOKENS):
            label(axes, (7.8 + 0.4 * place, height + 1.4), token, size=8)
    return figure


def _weights(kind: str, colour: str) -> list[list[tuple[str, float] | None]]:
    """The cells of a head's causal weights, tinted by size."""
    pairs = [(i, j) for i in range(len(TOKENS)) for j in range(i + 1)]
    if kind == "learned":
        sizes = dict(zip(pairs, LEARNED, strict=True))
    elif kind == "positional":
        sizes = {(i, j): 1.0 for i, j in pairs if i - j == 1}
    else:
        sizes = dict.fromkeys(induction_pairs(TOKENS), 1.0)
    grid = range(len(TOKENS))
    return [[(colour, 0.15 + 0.75 * sizes[i, j]) if (i, j) in sizes else None for j in grid] for i in grid]


def lookup() -> Figure:
    """How an untrained head finds what followed: the last token's query equals the key that was made from the same
    token, one place before."""
    figure, axes = canvas(12, 7.4, inches=WIDTH)
    places = (1.8, 5.0, 8.2, 11.0)
    for x, token in zip(places, "abca", strict=True):
        box(axes, (x, 0.7), f"${token}$", width=1.0, height=0.9, colour=BLACK, size=12)
    for x, before, token in zip(places[1:], places, "abc", strict=False):
        colour = VERMILION if token == "a" else GREY
        arrow(axes, (before, 1.2), (x - 0.2, 2.8), colour=colour)
        box(axes, (x, 3.3), f"$x_{token} W$", width=1.7, height=0.9, colour=colour, size=11)
        arrow(axes, (10.6, 5.7), (x + 0.2, 3.9), colour=colour, dashed=token != "a")
    box(axes, (11.0, 6.2), "$x_a W$", width=1.7, height=0.9, colour=VERMILION, size=11)
    label(axes, (10.0, 6.2), "query of the last $a$", align="right", size=10)
    label(axes, (7.2, 5.15), "equal", align="right", colour=VERMILION, size=10)
    label(axes, (0.1, 3.3), "keys, each from\nthe token before", align="left", size=10)
    arrow(axes, (5.0, 2.8), (5.0, 1.2), colour=VERMILION)
    label(axes, (4.8, 1.55), "reads $b$", align="right", colour=VERMILION, size=10)
    return figure
