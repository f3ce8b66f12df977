"""S2, section 1: the seven positional patterns, the two that it prints, and what it says of trained heads."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import Any

import sympy
import torch
from torch import Tensor

from ortho.attention.positional.positional_attention import SEVEN, positional_attention
from ortho.layers.positional import PositionalHeads, sinusoidal_positions
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, region, untestable
from paper.claims.verdicts import Finding
from paper.experiments.devices import of_judged_devices
from paper.experiments.learning import positional_heads, pruning, translation_budgets

CHAPTER = "17-positional-patterns"

# The distances j - i of the keys that the source names, first and last. The patterns of both ends have all keys.
NAMED = {
    "current": (0, 0),
    "previous": (-1, -1),
    "next": (1, 1),
    "left": (-inf, -2),
    "right": (2, inf),
    "end": (-inf, inf),
    "start": (-inf, inf),
}
TOKENS = 24  # up to which all lengths are tried
ROUNDED = 2**-50  # a weight of at most 1 is a quotient of integers below 2^53, a few roundings of 2^-53 each
WIDTH, FURTHEST = 64, 4095  # of positions
# Against sin and cos at 50 digits: an angle's frequency is exp of up to ln 10^4 = 9.2, rounded to 2^-53, and then some.
ANGLE = FURTHEST * 13 * 2**-52


def weights(name: str, n: int, *, is_causal: bool = False) -> Tensor:
    """The weights of a pattern (n, n): the fast form's output for unit vectors as values."""
    return positional_attention(torch.eye(n, dtype=torch.float64)[None], [name], is_causal=is_causal)[0]


def off(name: str) -> int:
    """How many pairs have weight without being named, or are named without weight, over all lengths up to `TOKENS`."""
    first, last = NAMED[name]
    wrong = 0
    for n in range(1, TOKENS + 1):
        distance = torch.arange(n) - torch.arange(n)[:, None]
        wrong += int(((weights(name, n) > 0) != ((distance >= first) & (distance <= last))).sum())
    return wrong


def trained(patterns: Sequence[str]) -> int:
    """The parameters of a layer of such heads, beside W_V and W_O."""
    layer = PositionalHeads(4 * len(patterns), len(patterns), patterns=patterns)
    return sum(p.numel() for p in layer.parameters()) - layer.weight_v.numel() - layer.weight_o.numel()


def empty_rows(n: int) -> dict[str, list[int]]:
    """The rows of each pattern that have no weight, for n tokens."""
    sums = {name: weights(name, n).sum(-1) for name in NAMED}
    return {name: (total == 0).nonzero().flatten().tolist() for name, total in sums.items() if (total == 0).any()}


@evidence("S2.1.1a", chapter=CHAPTER)
def seven() -> Finding:
    empty = "; ".join(f"{name}: {', '.join(map(str, rows))}" for name, rows in empty_rows(TOKENS).items())
    lengths = range(1, TOKENS + 1)
    ends = [("start", n, 0) for n in lengths] + [("end", n, n - 1) for n in lengths]
    elsewhere = sum(int((weights(name, n).argmax(-1) != place).sum()) for name, n, place in ends)
    parts = {
        "patterns": counted({"": 7}, {"": len(SEVEN)}),
        f"pairs that differ from the named ones, lengths up to {TOKENS}": counted({"": 0}, {"": sum(map(off, NAMED))}),
        "rows of the two ends that are heaviest elsewhere": counted({"": 0}, {"": elsewhere}),
        "trained parameters": counted({"": 0}, {"": trained(list(NAMED))}),
    }
    return all_of(parts).noting(f"The last token is $n - 1$. Rows without a key, of {TOKENS} tokens: {empty}")


def printed_previous(i: int, j: int) -> Fraction:
    return Fraction(j == i - 1)


def printed_left(i: int, j: int) -> Fraction:
    return Fraction((j + 1) ** 3, sum((m + 1) ** 3 for m in range(i - 1))) if j <= i - 2 else Fraction(0)


def furthest(name: str, printed: Callable[[int, int], Fraction]) -> float:
    """The largest difference between a pattern's weights and printed ones, bidirectional and causal."""
    return max(
        float(abs(Fraction(float(found[i, j])) - printed(i, j)))
        for is_causal in (False, True)
        for found in (weights(name, TOKENS, is_causal=is_causal),)
        for i in range(TOKENS)
        for j in range(TOKENS)
    )


def row_sums(name: str) -> str:
    empty = ", ".join(map(str, empty_rows(TOKENS).get(name, [])))
    return f"Rows that sum to 0 as printed: {empty}. The formula does not say what they hold"


@evidence("S2.1.1b", chapter=CHAPTER)
def previous() -> Finding:
    error = furthest("previous", printed_previous)
    return holds("weight 1 on the previous token", error, ROUNDED, at=f"$N = {TOKENS}$").noting(row_sums("previous"))


@evidence("S2.1.1c", chapter=CHAPTER)
def left() -> Finding:
    error = furthest("left", printed_left)
    return holds("cubes, over their sum, up to $i - 2$", error, ROUNDED, at=f"$N = {TOKENS}$").noting(row_sums("left"))


MOST = (50, 100)  # per cent of the heads
MANY = (25, 100)  # the source gives no figure; any share from 1 % to 31 % would decide the same
STANDARD = "8 learned"  # the encoder that the source speaks of


def encoders() -> dict[str, list[dict[str, Any]]]:
    """The heads of the standard encoders that were trained to translate, by the pairs to train on."""
    records = of_judged_devices(experiments.load("translation-budgets"))
    groups = translation_budgets.grouped(records)
    return {
        f"encoders of {len(layers)} layers, {pairs:,} pairs": [head for layer in layers for head in layer]
        for pairs, arms in groups.items()
        if translation_budgets.complete(arms.get(STANDARD, []))
        for layers in (translation_budgets.heads_by_layer(arms[STANDARD]),)
    }


def heads_of_encoders() -> Finding:
    """Whether most heads of trained encoders are positional, by the records of their weights."""
    found = encoders()
    if not found:
        maps = {"the attention maps of a trained encoder": None}
        return untestable("most heads are positional", maps, lack="there are no records of")
    shares = {label: 100 * positional_heads.positional(heads) / len(heads) for label, heads in found.items()}
    finding = region(MOST, {label: round(share, 1) for label, share in shares.items()}, unit=" % of the heads")
    return finding.noting("They were trained to translate German to English")


def pruned() -> Finding:
    """Whether many heads of an encoder can be removed together, by the records of encoders that were pruned."""
    records = experiments.load("pruning")
    device = experiments.judged_device(records)
    shares = {
        f"run {case['seed']}": round(100 * pruning.removable(record) / (case["H"] * case["L"]), 1)
        for record in records
        if record["device"] == device
        for case in (record["configuration"],)
    }
    if not shares:
        return untestable("many heads can be pruned", {"pruned encoders": None}, lack="there are no records of")
    return region(MANY, shares, unit=" %")


@evidence("S2.1.2a", chapter=CHAPTER)
def heads() -> Finding:
    records = experiments.load("positional-heads")
    device = experiments.judged_device(records)
    found: dict[str, list[positional_heads.Row]] = {}  # the trained heads of each task
    for (task, _), stages in positional_heads.arms(records, device).items() if device else ():
        found.setdefault(task, []).extend(stages["trained"])
    parts = {
        "positional": heads_of_encoders(),
        "heads of an encoder that go before a sentence in a hundred is lost": pruned(),
    }
    if not found:
        return all_of(parts)
    unnoticed = {
        task: sum(row["correct"] - row["correct_without"] <= 0.01 for row in rows) for task, rows in found.items()
    }
    counts = (
        f"{task} {positional_heads.positional(rows)} and {unnoticed[task]} of {len(rows)}"
        for task, rows in found.items()
    )
    return all_of(parts).noting(
        "Two counts of heads in causal models: those whose positions explain more than half of their variation, and "
        f"those whose removal alone loses at most 1 % of the answers: {', '.join(counts)} ({device})"
    )


def printed_position(p: int, c: int, d: int) -> float:
    """Channel c of position p as printed, to 50 digits and then rounded."""
    angle = p / sympy.Integer(10000) ** sympy.Rational(c - c % 2, d)
    return float((sympy.cos if c % 2 else sympy.sin)(angle).evalf(50))


@evidence("S2.1.2b", chapter=CHAPTER)
def sinusoids() -> Finding:
    rows = {
        p: sinusoidal_positions(1, WIDTH, start=p, dtype=torch.float64)[0].tolist() for p in (0, 1, 2, 77, FURTHEST)
    }
    error = max(abs(x - printed_position(p, c, WIDTH)) for p, row in rows.items() for c, x in enumerate(row))
    return holds("sines in even channels, cosines in odd ones", error, ANGLE, at=f"$d = {WIDTH}$")
