"""Small language models of bytes, of every arm, in four comparisons: what attention needs to have learnt.

The text is the Python standard library's own sources. A case is one model. The arms of a seed see the same batches and
are tested on the same windows, so that they are compared pair by pair. Every arm is tested with the weights of its best
look at the validation part. Rates are chosen per arm by the validation part; every arm tries the same number of them
(`rates`).
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from math import log
from pathlib import Path
from typing import Any

import torch

from ortho.checks import one_of
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import analysis, fitting, rates
from paper.experiments.learning.analysis import Measures
from paper.experiments.learning.arms import BESIDE, arms, baseline, matched_steps, matched_width, training_flop
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Decision
from paper.tasks import counting, text
from paper.tasks.task import Task

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"B": 8, "N": 128, "d": 64, "H": 4, "L": 2, "steps": 600, "tested": 128},
    "cuda": {"B": 64, "N": 256, "d": 128, "H": 4, "L": 4, "steps": 1500, "tested": 512},
}
SEEDS = (1, 2, 3, 4, 5)
TRIED = (5e-3, 1e-2)  # for d = 64; a model that is n times as wide tries rates an n-th as high
LOOKS = 8
# Bits a byte. A fiftieth of what these models take, and the difference that an eighth more or fewer steps make.
DECISION = Decision(margin=0.05, level=0.05, higher_is_better=False)

MATCHED = ("flop", "parameters", "steps")
LIMITS = (50_000, 200_000, 1_000_000)  # bytes to train on; 0 is all there are
BUDGETS = (0.25, 1.0, 4.0)  # of the steps
FEW = ("learned", "frozen", "stopped", "1 learned + 3 positional", "positional")
BITS = 1 / log(2)  # in a nat
LONGEST = 5  # bytes before the next one, of tables


def case(
    arm: str,
    seed: int = TUNING,
    rate: float | None = None,
    *,
    device: str = "cpu",
    matched: str = "flop",
    limit: int = 0,
    dropout: float = 0.0,
    **sizes: int,
) -> Case:
    """One run. `matched` says in what it equals the baseline with the `sizes` (by default those of `SIZES`): training
    FLOPs, by more or fewer steps; trained parameters, by wider feed-forward networks; or steps. `limit` is the number
    of bytes to train on, 0 for all.

    Raises TypeError or ValueError for unknown names, and for sizes that are not integers above 0.
    """
    B, N, d, H, L, steps, tested = fitting.sizes(SIZES[one_of("device", device, SIZES)], sizes).values()
    known = arms(H, N)
    chosen, like, width = known[one_of("arm", arm, known)], baseline(H, N), 4 * d
    if one_of("matched", matched, MATCHED) == "flop":
        steps = matched_steps(chosen, like, steps, B, N, d, L, vocab_size=text.VOCAB_SIZE)
    if matched == "parameters":
        width = matched_width(chosen, like, d, L)
    return {
        "device": device,
        "matched": matched,
        "arm": arm,
        "seed": seed,
        "rate": rates.tried(TRIED, d)[0] if rate is None else rate,
        "steps": steps,
        "B": B,
        "N": N,
        "d": d,
        "H": H,
        "L": L,
        "d_ff": width,
        "limit": limit,
        "dropout": dropout,
        "tested": tested,
        **DECISION.settings(),
    }


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model (`fitting.run`); a run that was killed goes on from its `checkpoint`."""
    parts = text.python_parts().limited(case["limit"] or None)
    task = text.language_modelling("python-sources", "the next byte of the standard library", parts, case["N"])
    arm = arms(case["H"], case["N"])[case["arm"]]
    sizes: dict[str, Any] = {"d_ff": case["d_ff"], "dropout": case["dropout"]}

    def build(generator: torch.Generator) -> LanguageModel:
        return arm.build(text.VOCAB_SIZE, case["d"], case["L"], generator=generator, **sizes)

    facts = {"kinds": arm.describe(), "text": parts.facts()}
    return fitting.run(
        case, seeds_of(case), task, build, looks=LOOKS, keep_best=True, checkpoint=checkpoint, facts=facts
    )


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], "bytes", case["seed"])


def compared(name: str, device: str, choices: Iterable[dict[str, Any]]) -> list[Case]:
    """The runs of an experiment, for each choice of `case`'s arguments."""
    options = [{**choice, "device": device} for choice in choices]
    return fitting.cases(name, case, options, partial(rates.tried, TRIED), SEEDS)


def of_equal_flop(device: str) -> list[Case]:
    """All arms at the training FLOPs of the baseline."""
    sizes = SIZES[device]
    return compared("bytes", device, [{"arm": arm} for arm in arms(sizes["H"], sizes["N"])])


def of_equal_parameters(device: str) -> list[Case]:
    """Heads of each kind with one learned head or none, at the trained parameters and the steps of the baseline."""
    H = SIZES[device]["H"]
    names = [name for k in (1, 0) for kind in BESIDE for name in (f"{k} learned + {H - k} {kind}" if k else kind,)]
    choices = [{"arm": name, "matched": "parameters"} for name in ("learned", *names, "1 learned, wider")]
    return compared("bytes-parameters", device, choices)


def of_budgets(device: str) -> list[Case]:
    """Some arms at fewer and more steps, and one size up, where an early lead may vanish."""
    sizes = SIZES[device]
    names = few(sizes["H"])
    steps = [round(sizes["steps"] * budget) for budget in BUDGETS]
    choices: list[dict[str, Any]] = [{"arm": name, "steps": n} for n in steps if n != sizes["steps"] for name in names]
    larger = {"d": 2 * sizes["d"], "H": sizes["H"]}
    return compared("bytes-budgets", device, [*choices, *({"arm": name, **larger} for name in names)])


def of_little_text(device: str) -> list[Case]:
    """Some arms with few bytes to train on, which they then see again and again."""
    names = few(SIZES[device]["H"])
    choices: list[dict[str, Any]] = [{"arm": name, "limit": limit} for limit in LIMITS for name in names]
    choices += [{"arm": "learned", "limit": LIMITS[0], "dropout": dropout} for dropout in (0.1, 0.3)]
    return compared("bytes-little", device, choices)


def few(H: int) -> tuple[str, ...]:
    """The arms that are followed along budgets and texts, for H heads."""
    return tuple(name.replace("3 positional", f"{H - 1} positional") for name in FEW)


def step_flop(case: Mapping[str, Any]) -> int:
    """FLOPs of the matrix products of a run's training step, by closed forms."""
    arm = arms(case["H"], case["N"])[case["arm"]]
    sizes = (case["B"], case["N"], case["d"], case["L"])
    return training_flop(arm, *sizes, vocab_size=text.VOCAB_SIZE, d_ff=case["d_ff"])


label = (
    "{arm}, matched {matched}, steps={steps}, d={d}, limit={limit}, dropout={dropout:g}, seed={seed}, rate={rate:g}"
).format_map


def bits(record: Record) -> float:
    """Bits a byte on the test part."""
    return analysis.tested(record, "test", "loss_nats") * BITS


def flop(record: Record) -> int:
    """FLOPs of the matrix products of a run's training."""
    return int(record["configuration"]["steps"]) * step_flop(record["configuration"])


MEASURES: Measures = {"bits": bits}
runs = partial(analysis.runs, measures=MEASURES, flop=flop)
by_arm = partial(analysis.by_arm, measures=MEASURES, flop=flop)
judged = partial(analysis.judged, measure="bits")


def budget(configuration: Mapping[str, Any]) -> float:
    """The budget of steps that a run has, as a multiple of the middle one; at a budget all arms take equal FLOPs.

    Raises ValueError if the run has none of the budgets.
    """
    c, like = configuration, baseline(configuration["H"], configuration["N"])
    arm = arms(c["H"], c["N"])[c["arm"]]
    for multiple in BUDGETS:
        steps = round(SIZES[c["device"]]["steps"] * multiple)
        if c["steps"] == matched_steps(arm, like, steps, c["B"], c["N"], c["d"], c["L"], vocab_size=text.VOCAB_SIZE):
            return multiple
    raise ValueError(f"steps: expected those of a budget in {BUDGETS} for {c['arm']!r}, got {c['steps']}")


# Tables of the last bytes beside the models, counted on as much of their text as a model sees.


@cache
def table_bits(steps: int, device: str = "cpu") -> tuple[float, ...]:
    """Bits a byte of tables of the last 1, ..., `LONGEST` bytes, counted on the windows of `steps` steps of training.

    The windows are drawn as for the models, and the tests are the same.
    """
    sizes = SIZES[device]
    return counting.task_bits(_task(device), steps * sizes["B"], sizes["tested"], LONGEST)


def best(steps: int, device: str = "cpu") -> tuple[int, float]:
    """The number of last bytes that the best of these tables reads, and its bits a byte."""
    found = table_bits(steps, device)
    return found.index(min(found)) + 1, min(found)


def least_bits_of_pairs(device: str = "cpu") -> float:
    """The lowest bits a byte that any function of the last byte alone can reach on these very windows.

    This is the conditional entropy of the next byte by the windows' own counts. It bounds models of identity heads.
    """
    batch = _task(device).tests["test"](SIZES[device]["tested"], torch.Generator())
    codes = (256 * batch.inputs[0] + batch.answers).flatten()
    pairs = torch.bincount(codes, minlength=256**2).reshape(256, 256).double()
    seen = pairs > 0
    ratios = (pairs.sum(1, keepdim=True) / pairs)[seen]
    return float((pairs[seen] * ratios.log2()).sum()) / int(pairs.sum())


def _task(device: str) -> Task:
    return text.language_modelling("python-sources", "the next byte", text.python_parts(), SIZES[device]["N"])
