"""Translation until the validation loss no longer falls: the encoder-decoders of `translating` on Multi30k, from few
and from many pairs, along budgets.

How much an arm gains depends on how long all are trained: fixed patterns need not be learnt, and so lead at first. One
run serves all budgets up to its own (`budgets`). What BLEU is made of is kept for each part of the test. So the
intervals include, besides the error of the seeds, that of the choice of the test's sentences.

The rules, written before the runs. The budget that counts for an arm is the one with the lowest validation loss,
averaged over the seeds. Arms are compared in pairs of seeds, by the decision that the records hold.

The intervals are Student's, of the seeds and the test together. The first ones, a bootstrap of seeds and parts of the
test, were replaced when the runs on 5,000 pairs were known: three seeds are too few to resample, so those intervals
were too narrow.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ortho.checks import one_of
from ortho.layers.block import TransformerBlock
from ortho.layers.multihead import MultiheadAttention
from ortho.models.encoder_decoder import EncoderDecoder
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import analysis, budgets, fitting, rates, translating
from paper.experiments.learning.analysis import Runs
from paper.experiments.learning.rates import TUNING
from paper.tasks.task import Draw, Task
from paper.tasks.translation import Translation
from paper.theory.positionalness import head_weights, nearest_pattern, positionalness

TASK = "translation"
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"base": 100, "B": 64, "d": 64, "L": 2, "characters": 80, "subwords": 1000, "tested": 720, "looked": 400},
    "cuda": {"base": 200, "B": 64, "d": 256, "L": 4, "characters": 999, "subwords": 4000, "tested": 999, "looked": 500},
}
# The longest budget for each number of pairs to train on, the most informative first.
BUDGETS = {"cpu": {5000: 32, 20_000: 64, 1000: 16}, "cuda": {5000: 32, 29_000: 64, 1000: 16}}
TUNED, TUNED_PAIRS = 8, 5000  # budget and pairs at which rates are chosen, for all numbers of pairs
TRIED = (5e-3, 2.5e-3)
SEEDS = (1, 2, 3)
BLOCKS = 36  # parts of the test
INPUTS = 64  # sentences at most, on which heads are measured
ORDERS = 4  # of n-grams
# Counts of a part of the test: n-grams written that the reference has, all n-grams written; words written, asked for.
COUNTS = (
    *(f"{kind}_{n}_count" for n in range(1, ORDERS + 1) for kind in ("right", "all")),
    "words_count",
    "asked_count",
)
Array = np.ndarray[Any, np.dtype[np.float64]]


def case(
    arm: str,
    seed: int = TUNING,
    rate: float | None = None,
    *,
    pairs: int,
    budget: int,
    device: str = "cpu",
    **sizes: int,
) -> Case:
    """One run on a number of pairs, up to a budget; `sizes` are by default those of `SIZES`.

    Raises ValueError for an unknown arm or device, for a size below 1, and for a budget that is not a power of two;
    TypeError for a size that is not an integer or has an unknown name.
    """
    known = SIZES[one_of("device", device, SIZES)]
    size = fitting.sizes({**known, "pairs": pairs, "budget": budgets.checked_budget(budget)}, sizes)
    like = translating.case(TASK, arm, seed, rate, pairs=next(iter(translating.STEPS[TASK][device])), device=device)
    kept = {name: value for name, value in like.items() if name not in ("steps", *size)}
    return {**kept, **size, "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate}


def smoke_case(case: Case) -> Case:
    """The case at the least budget, for golden runs."""
    return case | {"budget": 1, "base": budgets.WARM_UP + 10, "tested": BLOCKS, "looked": 16}


def cases(device: str) -> list[Case]:
    """The runs that choose the rates; then all numbers of pairs for arms whose rate is chosen, seed by seed."""
    tuned = partial(case, pairs=TUNED_PAIRS, budget=TUNED, device=device)
    d = SIZES[device]["d"]
    arms, options = translating.arms(d), rates.tried(TRIED, d)
    chosen = {arm: rates.chosen("translation-budgets", tuned(arm)) for arm in arms}
    counted = [
        case(arm, seed, rate, pairs=pairs, budget=budget, device=device)
        for seed in SEEDS
        for pairs, budget in BUDGETS[device].items()
        for arm, rate in chosen.items()
        if rate is not None
    ]
    return [*(tuned(arm, rate=rate) for rate in options for arm in arms), *counted]


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train one model up to its budget, and test it at each; a run that was killed goes on from its `checkpoint`.

    Raises AssertionError if the trained model's fast form does not compute what its definition does, and what
    `translating.run` raises for the texts.
    """
    seeds = translating.seeds_of(case)
    draws = fitting.generators(seeds)
    texts, task = translating.subject(case)
    assert texts is not None  # of this task
    model = translating.model_of(case, task, draws)

    def examined(copied: nn.Module) -> dict[str, Any]:
        return _examined(copied, task, texts, case)

    learnt = budgets.fit(model, task, case, draws, examined, checkpoint=checkpoint)
    repetitions = {f"{look['budget']} x": look.pop("counts") for look in learnt["validation"]}
    facts = {**learnt, **translating.shape(task, case["B"]), **texts.facts()}
    return {"seeds": seeds, "repetitions": repetitions, "facts": facts}


def _examined(model: nn.Module, task: Task, texts: Translation, case: Case) -> dict[str, Any]:
    """Losses on the validation part and on as many pairs of the training part; for a run that counts, also the loss on
    the test, what its BLEU is made of, and how positional the heads are."""
    model.eval()
    looked = {**case, "tested": case["looked"]}

    def loss(draw: Draw, size: Case) -> float:
        return fitting.evaluate(model, draw, size, torch.Generator().manual_seed(0))["loss_nats"][0]

    found: dict[str, Any] = {"loss_nats": loss(task.validation, looked), "seen_nats": loss(texts.task.train, looked)}
    if case["seed"] == TUNING:
        return found | {"counts": {"loss_nats": [found["loss_nats"]]}}
    assert isinstance(model, EncoderDecoder)
    counts = texts.counts("test", translating.written(model, task, case), BLOCKS)
    bleu = score(_table(counts).sum(0))
    found |= {"test_nats": loss(task.tests["test"], case), "bleu_fraction": round(bleu, 6)}
    return found | {"counts": counts, "heads": heads(model, task, case)}


@torch.no_grad()
def heads(model: EncoderDecoder, task: Task, case: Case) -> list[list[dict[str, Any]]]:
    """For each learned head, by layer of the encoder: the share of its weights' variation that positions explain, and
    the nearest pattern with its share; [] for a layer whose heads are not all of one kind.

    Measured on sentences of one length, the most frequent one of the validation part.
    """
    (source, _, mask), _ = task.validation(case["looked"], torch.Generator().manual_seed(0))
    lengths = mask.sum(1)
    N = int(lengths.mode().values)
    tokens = source[lengths == N][:INPUTS, :N].to(case["device"])
    inputs: dict[nn.Module, Tensor] = {}
    layers = [block.attention for block in model.encoder if isinstance(block, TransformerBlock)]
    hooks = [layer.register_forward_pre_hook(lambda layer, given: inputs.update({layer: given[0]})) for layer in layers]
    model.encode(tokens)
    for hook in hooks:
        hook.remove()
    return [[_positional(own) for own in _weights(layer, inputs[layer])] for layer in layers]


def _weights(layer: nn.Module, x: Tensor) -> Sequence[Tensor]:
    """The weights of each head, (S, N, N)."""
    return head_weights(layer, x).unbind(1) if isinstance(layer, MultiheadAttention) and len(x) > 2 else ()


def _positional(weights: Tensor) -> dict[str, Any]:
    fit = nearest_pattern(weights)
    shares = {"absolute": positionalness(weights).value, "pattern_share": fit.share.value}
    return {"pattern": fit.pattern.name, **{name: round(value, 5) for name, value in shares.items()}}


def score(counts: Array) -> float:
    """BLEU, from 0 to 1, from counts in the order of `COUNTS`, for one text or summed over several.

    The geometric mean of the shares of n-grams that are right, times exp(1 - asked / words) if that is less than 1
    (Papineni et al. 2002); 0 if no n-gram of an order is right, where sacrebleu smooths.
    """
    right, every = counts[: 2 * ORDERS : 2], counts[1 : 2 * ORDERS : 2]
    words, asked = counts[-2:]
    if not right.all():
        return 0.0
    return float(np.exp(np.log(right / every).mean()) * exp(min(0.0, 1 - asked / words)))


def grouped(records: Iterable[Record]) -> dict[int, dict[str, list[Record]]]:
    """Number of pairs -> arm -> the runs that count, by seed."""
    found: dict[int, dict[str, list[Record]]] = {}
    groups = analysis.grouped(records, lambda one: (one["configuration"]["pairs"], one["configuration"]["arm"]))
    for (pairs, arm), runs in groups.items():
        found.setdefault(pairs, {})[arm] = runs
    return dict(sorted(found.items()))


def by_pairs(records: Iterable[Record]) -> dict[int, dict[str, Runs]]:
    """Number of pairs -> arm -> its runs, of the arms that all `SEEDS` have run, at the budget that counts.

    The measures are those of `translating` without 'correct'. BLEU is also left out part by part, so that intervals
    have the error of the choice of the test's sentences.
    """
    found = {
        pairs: {arm: _judged(runs, best(runs)) for arm, runs in arms.items() if complete(runs)}
        for pairs, arms in grouped(records).items()
    }
    return {pairs: arms for pairs, arms in found.items() if arms}


def complete(runs: Sequence[Record]) -> bool:
    """Whether an arm has been run with all `SEEDS`."""
    return {analysis.seed(run) for run in runs} == set(SEEDS)


def _judged(runs: Sequence[Record], budget: int) -> Runs:
    """The runs of one arm at a budget."""

    def without_parts(run: Record) -> tuple[float, ...]:
        table = _at(run, budget)
        return tuple(map(score, table.sum(0) - table))

    measures = {
        "score": lambda run: score(_at(run, budget).sum(0)),
        "loss": lambda run: float(_look(run, budget)["test_nats"]),
        "seen": lambda run: float(_look(run, budget)["seen_nats"]),
    }
    return analysis.joined(runs, measures)._replace(left_out={"score": tuple(map(without_parts, runs))})


def passes(case: Case) -> float:
    """How often a run's budget goes through its pairs."""
    return float(case["base"] * case["budget"] * case["B"] / case["pairs"])


def losses(runs: Sequence[Record]) -> dict[int, float]:
    """Budget -> loss on the validation part, in nats a token, averaged over the seeds."""
    looks = [{look["budget"]: float(look["loss_nats"]) for look in run["facts"]["validation"]} for run in runs]
    return {budget: float(np.mean([one[budget] for one in looks])) for budget in looks[0]}


def best(runs: Sequence[Record]) -> int:
    """The budget that counts."""
    found = losses(runs)
    return min(found, key=lambda budget: found[budget])


def heads_by_layer(runs: Sequence[Record], budget: int | None = None) -> list[list[dict[str, Any]]]:
    """The figures of `heads` for each head of all runs, layer by layer, at a budget, by default the one that counts."""
    at = best(runs) if budget is None else budget
    layers = zip(*(_look(run, at)["heads"] for run in runs), strict=True)
    return [[head for heads in layer for head in heads] for layer in layers]


def positional(heads: Iterable[Mapping[str, Any]], share: float = 0.5) -> int:
    """The number of heads in which positions explain more than this share of the weights' variation."""
    return sum(head["absolute"] > share for head in heads)


def _look(run: Record, budget: int) -> dict[str, Any]:
    """What was found of a run at a budget, but for the counts of the test."""
    found: dict[str, Any] = next(look for look in run["facts"]["validation"] if look["budget"] == budget)
    return found


def _at(run: Record, budget: int) -> Array:
    """The counts of the parts of the test at a budget, (parts, len(COUNTS))."""
    return _table(run["repetitions"][f"{budget} x"])


def _table(counts: Mapping[str, Sequence[float]]) -> Array:
    return np.array([counts[name] for name in COUNTS], dtype=np.float64).T


label = "{arm}, pairs={pairs}, {budget} x, seed={seed}, rate={rate:g}".format_map
