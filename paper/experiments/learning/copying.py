"""Copying without a transition: when do heads begin to copy what a text repeats, and does the time depend on the seed?

Small language models of bytes read a text that repeats itself, up to 64 times the least budget. Bits are counted on
the bytes that *go on as an earlier match does* (the latest longest match of four bytes or more in the window). Three
seeds suggested that learned heads begin to copy late and all at once, at a time that differs from seed to seed, and
that heads which retrieve untrained copy from the first step. These runs test it: `copying_analysis` has the hypotheses
and the rule for the jump, which were written before them.

The runs are those of the ladder, seed by seed: the same data, draws, schedule and tests. They also look at the model
while it trains, at a fixed schedule (`LOOKS`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ortho.checks import one_of
from paper.experiments.engine.records import Case
from paper.experiments.learning import budgets, fitting, ladder
from paper.experiments.learning.ladder_arms import ARMS, CONVOLUTION, Arm
from paper.tasks import wheels

VERSION = 1  # to be raised when the meaning of the runs' results changes
TEXTS = {"python": ladder.TEXTS["python"], "wheels": wheels.wheels_parts}
SIZES = {**ladder.SIZES["python"], **ladder.MODEL, "base": ladder.BASE}
LARGER = {"d": 128, "L": 4}
# The trained model is looked at after each of these multiples of the least budget's steps, 24 times from 4 on.
LOOKS = (1, *range(2, 51, 2))
SEEDS = tuple(range(1, 11))

LEARNED, SHIFTED = "learned", "learned, KV shift"
SELECTING = "1 learned + 2 selective induction + 1 positional"
WIRED = "1 learned + 2 n-gram + 1 positional"
SHORT_MATCH, LONG_MATCH = "1 learned + 2 matches of 2 + 1 positional", "1 learned + 2 matches of 4 + 1 positional"

VARIANTS: Mapping[str, Arm] = {
    **{name: ARMS[name] for name in (LEARNED, SHIFTED, SELECTING)},
    WIRED: Arm((("learned", 1), ("n-gram", 2), ("previous", 1))),
    SHORT_MATCH: Arm((("learned", 1), ("match of 2", 2), ("previous", 1))),
    LONG_MATCH: Arm((("learned", 1), ("match of 4", 2), ("previous", 1))),
}
# A variant with the convolution (its width) or without it (0), and the rate that the ladder chose for it on sources at
# 16 times the least budget; the two new ones take that of their relatives.
MAIN = ((LEARNED, CONVOLUTION, 0.0015), (SHIFTED, 0, 0.0015), (SELECTING, CONVOLUTION, 0.003))
MISSING = ((WIRED, CONVOLUTION, 0.003), (SHIFTED, CONVOLUTION, 0.0015))
ABLATED = ((SHORT_MATCH, CONVOLUTION, 0.003), (LONG_MATCH, CONVOLUTION, 0.003))


def case(
    text: str,
    arm: str,
    *,
    convolution: int = CONVOLUTION,
    seed: int = 1,
    rate: float = 0.0015,
    budget: int = ladder.LONGEST,
    device: str = "cpu",
    **sizes: int,
) -> Case:
    """One run up to a budget; `sizes` (B, N, tested, d, H, L, base) are by default the ladder's.

    Raises TypeError or ValueError for unknown names and for a budget that is not a power of two.
    """
    size = fitting.sizes(SIZES, sizes)
    return {
        "device": one_of("device", device, fitting.DEVICES),
        "text": one_of("text", text, TEXTS),
        "arm": one_of("arm", arm, VARIANTS),
        "convolution": convolution,
        "budget": budgets.checked_budget(budget),
        "seed": seed,
        "rate": rate,
        **size,
        "d_ff": 4 * size["d"],
        "validated": ladder.VALIDATED,
        "blocks": ladder.BLOCKS,
    }


def cases(device: str) -> list[Case]:
    """The runs in the order of the plan: new seeds of the main kinds; the missing kinds; the main kinds' first seeds
    again, with looks; another rate; a second text; a second size; other matches."""
    of = partial(case, device=device)

    def runs(text: str, kinds: tuple[tuple[str, int, float], ...], seeds: range, **own: Any) -> list[Case]:
        return [
            of(text, arm, convolution=width, seed=seed, rate=rate, **own)
            for seed in seeds
            for arm, width, rate in kinds
        ]

    halved = tuple((arm, width, rate / 2) for arm, width, rate in MAIN)  # in inverse proportion to the width
    return [
        *runs("python", MAIN, range(4, 11)),
        *runs("python", MISSING[:1], range(1, 8)),
        *runs("python", MISSING[1:], range(1, 4)),
        *runs("python", MAIN, range(1, 4)),
        *runs("python", ((LEARNED, CONVOLUTION, 0.003),), range(1, 4)),
        *runs("wheels", MAIN, range(1, 4)),
        *runs("python", halved, range(1, 4), budget=ladder.LONG, **LARGER),
        *runs("python", ABLATED, range(1, 4)),
    ]


def smoke_case(case: Case) -> Case:
    """The case at twice the least budget, with a look on the way and few windows, for golden runs."""
    return ladder.smoke_case(case) | {"budget": 2}


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train one model up to its budget, look at it on the way, and test it at each budget, as the ladder does; a run
    that was killed goes on from its `checkpoint`.

    Raises AssertionError if the trained model's fast form does not compute what its definition does.
    """
    looks = [case["base"] * times for times in LOOKS]
    return ladder.run_of(case, VARIANTS[case["arm"]], TEXTS[case["text"]](), looks=looks, checkpoint=checkpoint)


def label(case: Case) -> str:
    """A case in a few words."""
    size = f", d={case['d']}, L={case['L']}" if case["d"] != SIZES["d"] else ""
    return ladder.label(case) + size
