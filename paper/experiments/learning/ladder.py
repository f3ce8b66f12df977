"""The ladder: small language models of bytes along budgets of 1 to 64 times the least, on a text that repeats itself
and on one that does not. Heads that retrieve untrained are compared with learned heads with a short convolution.

One run serves all budgets up to its own (`budgets`). So one run of each arm is enough to compare all arms at equal
steps, FLOPs and seconds: FLOPs by closed form, seconds as the processor's time of the copy's steps.

The arms of a seed see the same batches, and are tested on the same windows, nearly all that the test part has. Rates
are chosen by the validation part with `rates.TUNING`, a seed that does not count: at `TUNED` from four rates a factor
of two apart, and at `LONG` from the best of these and its half. The longest runs take the rate chosen at `LONG`.
'ladder' has the main arms, 'ladder-selective' heads that read nothing where nothing matches, and 'ladder-others' the
other arms.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ortho.checks import one_of
from paper.experiments.engine.records import Case
from paper.experiments.learning import budgets, fitting, ladder_analysis, rates
from paper.experiments.learning.budgets import WARM_UP
from paper.experiments.learning.ladder_arms import ARMS, CONVOLUTION, Arm
from paper.experiments.learning.rates import TUNING
from paper.tasks import novels, text
from paper.tasks.counting import repeats
from paper.tasks.task import Batch, Task
from paper.tasks.text import Parts

# Looked up when a run reads it: golden runs put other sources in the place of Python's own library.
TEXTS: Mapping[str, Callable[[], Parts]] = {"python": lambda: text.python_parts(), "novels": novels.novels_parts}
SIZES: Mapping[str, Mapping[str, int]] = {
    "python": {"B": 2, "N": 512, "tested": 750},
    "novels": {"B": 4, "N": 256, "tested": 1500},
}
# The smallest model in which a head of one layer reads what a head of an earlier layer wrote.
MODEL = {"d": 64, "H": 4, "L": 2}
BASE = 300  # steps, 307,200 bytes; 64 times as many are one pass through the novels
TUNED, LONG, LONGEST = 4, 16, 64  # budgets
SEEDS = (1, 2, 3, 4, 5)
TRIED = (6e-3, 3e-3, 1.2e-2, 1.5e-3)  # the likeliest first
BLOCKS = 40  # consecutive parts of the test, each with a figure of its own
VALIDATED = 200  # windows
ROWS = 16  # windows of a test batch
PLACES = (16, 64, 128, 256, 512)  # ends of the parts of a window
MATCHED = 4  # the least length, in bytes, of a match that counts

# These arms run with the convolution; those listed in `WITHOUT` run without it.
MAIN = (ladder_analysis.RIVAL, ladder_analysis.INDUCTION, ladder_analysis.ONE, ladder_analysis.BOTH)
READING_NOTHING = (  # where nothing matches
    ladder_analysis.SELECTIVE,
    ladder_analysis.WIRED,
    ladder_analysis.BESIDE,
)
WITHOUT = (
    ladder_analysis.RIVAL,
    ladder_analysis.SHIFTED,
    ladder_analysis.BESIDE_SHIFTED,
    ladder_analysis.INDUCTION,
    ladder_analysis.ONE,
)
LEARNED_RIVALS = (ladder_analysis.SHIFTED, "learned, mimetic")  # rivals of all arms, as `RIVAL` is
TO_THE_LONGEST = (*LEARNED_RIVALS, ladder_analysis.BESIDE_SHIFTED)  # of the other arms

Pairs = Sequence[tuple[str, str, int]]  # a text, an arm, the width of its convolution


def case(
    text: str,
    arm: str,
    *,
    convolution: int = CONVOLUTION,
    seed: int = TUNING,
    rate: float | None = None,
    budget: int = TUNED,
    device: str = "cpu",
    **sizes: int,
) -> Case:
    """One run up to a budget; `sizes` (B, N, tested, d, H, L, base) are by default those above.

    Raises TypeError or ValueError for unknown names, for sizes that are not integers above 0, for an H other than the
    number of the arm's heads, and for a budget that is not a power of two.
    """
    size = fitting.sizes({**SIZES[one_of("text", text, TEXTS)], **MODEL, "base": BASE}, sizes)
    if (heads := ARMS[one_of("arm", arm, ARMS)].num_heads) != size["H"]:
        raise ValueError(f"H: expected {heads}, the heads of the arm {arm!r}, got {size['H']}")
    return {
        "device": one_of("device", device, fitting.DEVICES),
        "text": text,
        "arm": arm,
        "convolution": convolution,
        "budget": budgets.checked_budget(budget),
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        **size,
        "d_ff": 4 * size["d"],
        "validated": VALIDATED,
        "blocks": BLOCKS,
    }


def smoke_case(case: Case) -> Case:
    """The case at the least budget, with as few windows as the test has parts, and short ones, for golden runs."""
    return case | {"budget": 1, "base": WARM_UP + 10, "N": 128, "tested": BLOCKS, "validated": ROWS}


def cases(device: str) -> list[Case]:
    """The main arms' runs, the most informative first: those that choose rates; then those that count, by seed."""
    return _to_the_longest("ladder", MAIN, device)


def selective_cases(device: str) -> list[Case]:
    """Like `cases`, for heads that read nothing where nothing matches: induction heads with a sink, alone and beside a
    learned head, and n-gram heads."""
    return _to_the_longest("ladder-selective", READING_NOTHING, device)


def other_cases(device: str) -> list[Case]:
    """Like `cases`, for the other arms, and for some arms without the convolution.

    The KV shift, which hands on the last token as the convolution does, takes the place of the convolution. The rivals
    go on to the longest budget, and so do selective heads beside a head with the KV shift.
    """
    elsewhere = {*MAIN, *READING_NOTHING, *WITHOUT}
    others = [arm for arm in ARMS if arm not in elsewhere]
    arms = [*((arm, CONVOLUTION) for arm in others), *((arm, 0) for arm in WITHOUT)]
    pairs = [(name, arm, width) for arm, width in arms for name in TEXTS]
    return [
        *_tuned(pairs, device),
        *_tuned_long("ladder-others", pairs, device),
        *_counted("ladder-others", pairs, SEEDS[:3], LONG, device),
        *_counted("ladder-others", [pair for pair in pairs if pair[1] in TO_THE_LONGEST], SEEDS[:3], LONGEST, device),
    ]


def _to_the_longest(experiment: str, arms: Sequence[str], device: str) -> list[Case]:
    """The runs of arms with the convolution: those that choose rates, then those that count, up to `LONGEST`."""
    pairs = [(name, arm, CONVOLUTION) for arm in arms for name in TEXTS]
    return [
        *_tuned(pairs, device),
        *_tuned_long(experiment, pairs, device),
        *_counted(experiment, pairs, SEEDS[2:], LONG, device),
        *_counted(experiment, pairs, SEEDS[:3], LONGEST, device),  # they pass the shorter budgets
    ]


def _tuned(pairs: Pairs, device: str) -> Iterator[Case]:
    """The runs that choose one of the rates, all arms at the likeliest rate first."""
    for rate in rates.tried(TRIED, MODEL["d"]):
        for name, arm, width in pairs:
            yield case(name, arm, convolution=width, rate=rate, device=device)


def _tuned_long(experiment: str, pairs: Pairs, device: str) -> Iterator[Case]:
    """The runs that choose between the rate of the shorter runs and its half; the rivals may also double it."""
    for name, arm, width in pairs:
        rate = rates.chosen(experiment, case(name, arm, convolution=width, device=device))
        if rate is not None:
            for times in (1, 0.5, 2) if arm in LEARNED_RIVALS else (1, 0.5):
                yield case(name, arm, convolution=width, rate=times * rate, budget=LONG, device=device)


def _counted(experiment: str, pairs: Pairs, seeds: Sequence[int], budget: int, device: str) -> Iterator[Case]:
    """The runs that count, if their rate was chosen at the budget `LONG`."""
    for seed in seeds:
        for name, arm, width in pairs:
            own: dict[str, Any] = {"convolution": width, "device": device}
            rate = rates.chosen(experiment, case(name, arm, budget=LONG, **own))
            if rate is not None:
                yield case(name, arm, seed=seed, rate=rate, budget=budget, **own)


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train one model up to its budget, and test it at each; a run that was killed goes on from its `checkpoint`.

    Raises AssertionError if the trained model's fast form does not compute what its definition does.
    """
    return run_of(case, ARMS[case["arm"]], TEXTS[case["text"]](), checkpoint=checkpoint)


def run_of(
    case: Case, arm: Arm, parts: Parts, *, looks: Collection[int] = (), checkpoint: Path | None = None
) -> dict[str, Any]:
    """As `run`, of any arm on any text; the facts have what `_looked` finds after each of the steps `looks`, if any."""
    seeds = fitting.paired_seeds(f"{case['arm']}, {case['convolution']}", "ladder", case["text"], case["seed"])
    draws = fitting.generators(seeds)
    task = text.language_modelling(case["text"], "the next byte", parts, case["N"])
    model = arm.build(case, draws["weights"]).to(case["device"])

    def examined(copied: nn.Module) -> dict[str, Any]:
        return _examined(copied, task, case)

    def looked(trained: nn.Module) -> dict[str, Any]:
        return _looked(trained, task, case)

    learnt = budgets.fit(
        model, task, case, draws, examined, looks=looks, looked=looked if looks else None, checkpoint=checkpoint
    )
    tested = learnt["validation"]
    repetitions = {
        f"{look['budget']} x": {f"{part}_bits": look["blocks"][part] for part in look["blocks"]} for look in tested
    }
    kept = [{name: value for name, value in look.items() if name != "blocks"} for look in tested]
    return {"seeds": seeds, "repetitions": repetitions, "facts": {**learnt, "validation": kept, "text": parts.facts()}}


@torch.no_grad()
def _looked(model: nn.Module, task: Task, case: Case) -> dict[str, Any]:
    """Bits a byte of a model in training on the validation part, in all and by what a byte repeats."""
    windows = _drawn(task.validation, case["validated"])
    bits = _bits(model, windows, case["device"])
    return {"bits": round(float(bits.mean()), 5), "repeats_bits": _by_repeats(bits, windows)["repeats_bits"]}


@torch.no_grad()
def _examined(model: nn.Module, task: Task, case: Case) -> dict[str, Any]:
    """Bits a byte on the validation part, and on the test part if the run counts; also by place and kind of byte."""
    device, chosen_by = case["device"], _drawn(task.validation, case["validated"])
    validation = _bits(model, chosen_by, device)
    nats = float(validation.mean()) * log(2)
    found: dict[str, Any] = {"loss_nats": round(nats, 6), "blocks": {"validation": _blocks(validation, case["blocks"])}}
    if case["seed"] == TUNING:
        return found | _by_repeats(validation, chosen_by)
    tested = _drawn(task.tests["test"], case["tested"])
    bits = _bits(model, tested, device)
    found["blocks"]["test"] = _blocks(bits, case["blocks"])
    return found | _by_repeats(bits, tested)


def _drawn(draw: Callable[[int, torch.Generator], Batch], count: int) -> Batch:
    return draw(count, torch.Generator().manual_seed(0))  # at even distances, whatever the generator


def _bits(model: nn.Module, batch: Batch, device: str) -> Tensor:
    """Bits of each byte, (count, N)."""
    found = []
    for start in range(0, len(batch.answers), ROWS):
        tokens, answers = (x[start : start + ROWS].to(device) for x in (batch.inputs[0], batch.answers))
        logits = model(tokens).double().flatten(0, 1)
        nats = cross_entropy(logits, answers.flatten(), reduction="none")
        found.append((nats / log(2)).reshape(answers.shape).cpu())
    return torch.cat(found)


def _blocks(bits: Tensor, count: int) -> list[float]:
    """Means over `count` equal parts of the windows, in their order."""
    return [round(float(part.mean()), 6) for part in bits.tensor_split(min(count, len(bits)))]


def _by_repeats(bits: Tensor, batch: Batch) -> dict[str, Any]:
    """Bits a byte by the place in the window, and by what the byte repeats: it follows no match, or it goes on as the
    latest longest match does, or it does not; and the share of the bytes of each sort."""
    edges = [0, *(end for end in PLACES if end < bits.shape[1]), bits.shape[1]]
    places = {f"to {b}": round(float(bits[:, a:b].mean()), 5) for a, b in pairwise(edges)}
    matched, right = _repeats(batch)
    sorts = {"no match": ~matched, "goes on": matched & right, "does not": matched & ~right}
    there = {name: mask for name, mask in sorts.items() if mask.any()}
    return {
        "places_bits": places,
        "repeats_bits": {name: round(float(bits[mask].mean()), 5) for name, mask in there.items()},
        "repeats_fraction": {name: round(float(mask.double().mean()), 5) for name, mask in there.items()},
    }


_KNOWN: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def _repeats(batch: Batch) -> tuple[Tensor, Tensor]:
    """Masks of the bytes that follow a match of `MATCHED` bytes or more, and of all that go on as a match does."""
    windows = torch.cat([batch.inputs[0], batch.answers[:, -1:]], 1)
    key = (int(windows.sum()), windows.numel())
    if key not in _KNOWN:
        found = repeats(windows)
        _KNOWN[key] = found.length >= MATCHED, found.right
    return _KNOWN[key]


def label(case: Case) -> str:
    """A case in a few words."""
    convolved = " + convolution" if case["convolution"] else ""
    return f"{case['text']}, {case['arm']}{convolved}, {case['budget']} x, seed={case['seed']}, rate={case['rate']:g}"
