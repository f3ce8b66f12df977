"""The chance that an untrained head finds the right token again, by its width and the number of tokens.

The figure and a table have every number. A script lets a reader choose a width and a number of tokens, by two sliders
or by dragging the point of the figure.
"""

import math
from typing import NamedTuple

from ortho.theory.retrieval import found_chance
from paper.interactive.markup import attribute, cells

D_MODEL = 96
WIDTHS = (4, 8, 12, 16, 20, 24, 32)
TOKENS = [2**power for power in range(1, 25)]
SHOWN = (4, 8, 12, 16, 20)  # powers of two whose tokens the table has
START = (WIDTHS.index(16), TOKENS.index(1024))  # what the script begins with
LEFT, RIGHT, TOP, BOTTOM = 42, 410, 46, 236  # of the axes, in a picture of WIDTH x HEIGHT
WIDTH, HEIGHT = 420, 276
TENS = (10, 1000, 100_000, 10_000_000)  # ticks


class Words(NamedTuple):
    """What the figure says, for which tokens, and where it starts. In `said`, `{width}` and `{tokens}` are chosen,
    `{one}` and `{two}` follow from them; there `more` and `fewer` stand for > and <."""

    described: str
    one: str
    width: str
    tokens: str
    chance: str
    two: str
    said: str
    more: str
    fewer: str
    caption: str
    tied: str
    apart: str
    cosine: float = 1.0  # of the token that asks and the stored one
    start: tuple[int, int] = START


ENGLISH = Words(
    "Chance to find the right token over the number of tokens. With one matrix each width has a curve that stays at "
    "one and then falls, the wider the head the later. With two matrices the chance falls from the first token on.",
    f"one matrix, widths {WIDTHS[0]} to {WIDTHS[-1]}",
    "width of the head",
    "number of tokens",
    "chance to find the right one",
    "two matrices",
    "{width} numbers a key, {tokens} tokens, no training: with one matrix the head finds the right token in {one} of "
    "all cases, with two matrices in {two}.",
    "more than",
    "fewer than",
    "Chance to find the right one of so many tokens, nothing trained",
    "one matrix, width",
    "two matrices, any width",
)
UNLIKE = ENGLISH._replace(
    described=f"{ENGLISH.described} The two tokens have the cosine 0.8, so the curves fall earlier.",
    said=ENGLISH.said.replace("no training", "cosine 0.8, no training"),
    caption="Chance to find the right one of so many tokens, nothing trained, cosine 0.8",
    cosine=0.8,
    start=(WIDTHS.index(16), TOKENS.index(16_384)),
)
CHINESE = Words(
    "找对词元的概率与词元数的关系。用一个矩阵时，每种宽度有一条曲线，先保持为一，再下降；头越宽，下降越晚。"
    "用两个矩阵时，从一开始就下降。",
    f"一个矩阵，宽度 {WIDTHS[0]} 至 {WIDTHS[-1]}",
    "头的宽度",
    "词元数",
    "找对的概率",
    "两个矩阵",
    "每个键 {width} 个数，{tokens} 个词元，不训练：头找对词元的机会，用一个矩阵：{one}；用两个矩阵：{two}。",
    "超过",
    "不到",
    "在这么多词元中找对的概率，不训练",
    "一个矩阵，宽度",
    "两个矩阵，任意宽度",
)


def chances(cosine: float = 1.0) -> dict[int, list[float]]:
    """Width -> the chance that one frozen orthogonal matrix finds the right one, by the number of tokens."""
    return {width: [found_chance(tokens - 1, width, D_MODEL, cosine=cosine) for tokens in TOKENS] for width in WIDTHS}


def spelt(chance: float) -> str:
    """A chance in per cent, never rounded to certainty or to nothing."""
    percent = 100 * chance
    if percent >= 99.9:
        return "> 99.9 %"
    if percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.0f} %" if 10 <= percent < 99 else f"{percent:.1f} %"


def in_words(text: str, words: Words) -> str:
    """What `spelt` gives, as a sentence says it: 'fewer than 0.1 %'."""
    return text.replace(">", words.more).replace("<", words.fewer)


def lookup_chance(words: Words = ENGLISH) -> str:
    """The figure with its table; where scripts run, two sliders and a point to drag take the table's place."""
    found = chances(words.cosine)
    apart = [1 / tokens for tokens in TOKENS]
    data = {
        "widths": WIDTHS,
        "tokens": TOKENS,
        "chances": [[round(chance, 5) for chance in row] for row in found.values()],
        "spelt": [[in_words(spelt(chance), words) for chance in row] for row in found.values()],
        "two": [in_words(spelt(chance), words) for chance in apart],
        "x": list(map(_x, TOKENS)),
        "axis": [TOP, BOTTOM],
        "start": words.start,
        "words": {"width": words.width, "tokens": words.tokens, "said": words.said},
    }
    heads = cells("th", (words.tied, *(f"{TOKENS[power - 1]:,}" for power in SHOWN)))
    rows = [(str(width), [row[power - 1] for power in SHOWN]) for width, row in found.items()]
    rows.append((words.apart, [apart[power - 1] for power in SHOWN]))
    body = "".join(f'<tr><th scope="row">{name}</th>{cells("td", map(spelt, row))}</tr>' for name, row in rows)
    return (
        f'<div class="lookup" data-figures="{attribute(data)}">{_picture(found, apart, words)}<table class="fixed">'
        f"<caption>{words.caption}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _x(tokens: float) -> float:
    """Where a number of tokens stands: logarithmic, from the first to the last of `TOKENS`."""
    first, last = math.log2(TOKENS[0]), math.log2(TOKENS[-1])
    return round(LEFT + (RIGHT - LEFT) * (math.log2(tokens) - first) / (last - first), 2)


def _y(chance: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * chance, 2)


def _curve(kind: str, row: list[float]) -> str:
    points = " ".join(f"{_x(tokens)},{_y(chance)}" for tokens, chance in zip(TOKENS, row, strict=True))
    return f'<polyline class="{kind}" points="{points}"/>'


def _on(row: list[float]) -> str:
    """Where a curve's name stands: on the curve, where it passes one half, or at its end."""
    at = next((i for i, chance in enumerate(row) if chance < 0.5), 0)
    if not at:
        return f'x="{RIGHT}" y="{_y(row[-1]) + 4}" text-anchor="end"'
    left, right = _x(TOKENS[at - 1]), _x(TOKENS[at])
    x = left + (right - left) * (row[at - 1] - 0.5) / (row[at - 1] - row[at])
    return f'x="{round(x, 2)}" y="{_y(0.5) + 4}" text-anchor="middle"'


def _picture(found: dict[int, list[float]], apart: list[float], words: Words) -> str:
    """Axes, a curve for each width with its name on it, and that of two matrices. One matrix and two have the colours
    that figures give them (`plots.LOOKS`), by the style sheet."""
    ticks = "".join(
        f'<text class="tick" x="{LEFT - 6}" y="{_y(share / 100) + 4}" text-anchor="end">{share} %</text>'
        f'<path class="grid" d="M {LEFT} {_y(share / 100)} H {RIGHT}"/>'
        for share in (0, 50, 100)
    ) + "".join(
        f'<text class="tick" x="{min(_x(ten), RIGHT - 28)}" y="{BOTTOM + 16}" text-anchor="middle">{ten:,}</text>'
        for ten in TENS
    )
    curves, names = _curve("two", apart), ""
    for width, row in found.items():
        curves += _curve("one", row)
        names += f'<text class="name" {_on(row)}>{width}</text>'
    names += (
        f'<path class="one chosen" d="M {LEFT} 28 h 20"/>'
        f'<text class="name one" x="{LEFT + 26}" y="32">{words.one}</text>'
        f'<path class="two" d="M {RIGHT - 122} 28 h 20"/>'
        f'<text class="name two" x="{RIGHT - 96}" y="32">{words.two}</text>'
    )
    axes = (
        f'<text class="tick" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{words.tokens}</text>'
        f'<text class="tick" x="4" y="12">{words.chance}</text>'
        f'<path class="axis" d="M {LEFT} {TOP} V {BOTTOM} H {RIGHT}"/>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words.described}">{ticks}{axes}{curves}{names}'
        '<circle class="point" r="7" hidden/></svg>'
    )
