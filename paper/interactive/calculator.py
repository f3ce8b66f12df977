"""A calculator that ranks mechanisms by cost for sizes that the reader sets, and a table that needs no script."""

from functools import cache
from typing import Any, NamedTuple

from ortho import MECHANISMS
from ortho.cost import Cost, choose
from ortho.cost.attention import decoded
from paper.interactive.markup import attribute, cells

LENGTHS = tuple(2**k for k in range(9, 16))  # N, tokens; in decoding, those before the new one
WIDTHS = (512, 1024, 4096)  # d
HEAD = 64  # K, the width of a head
USES = {"training": ("GFLOP a step", "MiB kept"), "decoding": ("GFLOP a token", "MiB of cache")}
TYPICAL = (  # use, causal, N, d, in words
    ("training", True, 2048, 1024, "train a language model"),
    ("training", False, 8192, 1024, "train an encoder of long texts"),
    ("decoding", True, 32768, 4096, "generate after a long context"),
)
FAMILIES = list(dict.fromkeys(mechanism.family for mechanism in MECHANISMS.values()))


class Row(NamedTuple):
    """A mechanism and what a layer with it costs: 10^9 FLOPs, and MiB."""

    name: str
    work: float
    memory: float


@cache
def rows(use: str, causal: bool, N: int, d: int) -> list[Row]:
    """Every mechanism that fits a layer, with its cost for one sequence and heads of width `HEAD`; least work first."""
    heads = d // HEAD
    work = "step" if use == "training" else "decode"
    found = choose(N, d, {work: 1e300}, num_heads=heads, causal=causal)

    def memory(name: str, cost: Cost) -> float:
        return cost.saved_bytes if use == "training" else decoded(name, 1, N, heads, HEAD, HEAD).nbytes

    return [Row(name, getattr(cost, work) / 1e9, memory(name, cost) / 2**20) for name, cost in found]


def calculator() -> str:
    """Settings and the mechanisms that fit them; without scripts, and in print, a table of three typical settings."""
    settings = [(use, causal) for use in USES for causal in (True, False) if causal or use == "training"]
    data = {
        "mechanisms": {name: [m.family, m.exact] for name, m in MECHANISMS.items()},
        "uses": USES,
        "costs": {
            f"{use} {causal} {N} {d}".lower(): [
                [name, *map(_short, figures)] for name, *figures in rows(use, causal, N, d)
            ]
            for use, causal in settings
            for N in LENGTHS
            for d in WIDTHS
        },
    }
    lengths = _options([(N, f"{N:,}") for N in LENGTHS], chosen=8192)
    widths = _options([(d, f"{d:,}") for d in WIDTHS], chosen=1024)
    uses = _options([(use, use) for use in USES], chosen="training")
    return (
        f'<div class="calculator" data-costs="{attribute(data)}">'
        f'<form class="setting" hidden><label>tokens N <select name="N">{lengths}</select></label> '
        f'<label>width d <select name="d">{widths}</select></label> '
        f'<label>for <select name="use">{uses}</select></label> '
        '<label><input type="checkbox" name="causal" checked> causal</label> '
        '<label><input type="checkbox" name="exact"> exactly softmax attention</label></form>'
        '<output class="chosen" hidden></output><table class="chosen" hidden><thead></thead><tbody></tbody></table>'
        f"{_typical()}</div>"
    )


def _typical() -> str:
    """A table of the cheapest mechanism of each family, for each typical setting."""
    body = ""
    for use, causal, N, d, words in TYPICAL:
        found = rows(use, causal, N, d)
        softmax = next(row for row in found if row.name == "softmax")
        work, memory = USES[use]
        said = f"{words}: N = {N:,}, d = {d:,}{'' if causal else ', not causal'}"
        body += f'<tr><th colspan="2" scope="rowgroup">{said}</th>{cells("th", (work, memory, "of softmax"))}</tr>'
        for row in _cheapest_of_families(found):
            share = f"{100 * row.work / softmax.work:.3g} %"
            figures = (f"{_short(row.work):,}", f"{_short(row.memory):,}", share)
            texts = (f"<code>{row.name}</code>", MECHANISMS[row.name].family, *figures)
            body += f"<tr>{cells('td', texts)}</tr>"
    return f'<table class="fixed"><caption>The cheapest mechanism of each family, one layer</caption>{body}</table>'


def _cheapest_of_families(found: list[Row]) -> list[Row]:
    """The cheapest mechanism of each family, by rising work; softmax attention in its fused form."""
    first: dict[str, Row] = {}
    for row in found:
        if row.name != "flash":
            first.setdefault(MECHANISMS[row.name].family, row)
    return list(first.values())


def _short(figure: float) -> float:
    """A figure rounded to three digits; from 100 on, to a whole number."""
    return round(figure) if figure >= 100 else float(f"{figure:.3g}")


def _options(values: list[tuple[Any, str]], chosen: Any) -> str:
    return "".join(
        f'<option value="{value}"{" selected" * (value == chosen)}>{text}</option>' for value, text in values
    )
