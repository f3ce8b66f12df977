"""How positional the heads of the learning experiments are, before and after training.

The runs are those of the experiments themselves: the same seeds draw the same weights and batches. Each head is
measured by `paper.theory.positionalness`, on sequences that were not trained on. The measure is tried out, too: the
model answers with the head's weights replaced by their mean over other sequences, which is fixed; with the head
removed; and with those means in all heads of the layer.

The order of the heads means nothing from one run to the next, so the heads of all runs of an arm are taken together.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ortho.attention import MECHANISMS
from ortho.checks import one_of, positive_int
from ortho.layers.block import TransformerBlock
from ortho.layers.multihead import MultiheadAttention
from ortho.models.language_model import LanguageModel
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import fitting, studies
from paper.experiments.learning import study as learning
from paper.experiments.learning.study import Study
from paper.experiments.speed.benchmark import assert_close
from paper.tasks.task import Batch, check_answers
from paper.theory.positionalness import head_weights, nearest_pattern, positionalness

INPUTS = 128  # sequences on which weights are measured; others, as many as a test has, are drawn for the answers
STAGES = ("untrained", "trained")
SECONDS_PER_WEIGHT = 2e-7
Row = dict[str, Any]


class Measured(NamedTuple):
    """A study, its arms whose weights are a softmax, and the test from which inputs are drawn."""

    study: Study
    arms: tuple[str, ...]
    test: str


# The tests are the longest ones no longer than the training sequences: all positions have been seen.
MEASURED: Mapping[str, Measured] = {
    measured.study.name: measured
    for measured in (
        Measured(studies.RECALL_STUDY, ("softmax",), "16 keys twice"),
        Measured(
            studies.FLIP_FLOP_STUDY,
            ("softmax", "rotary", "alibi", "fox", "path", "position-delta"),
            "dense, tokens 1 to 64",
        ),
        Measured(studies.PARITY_STUDY, ("softmax",), "tokens 1 to 40"),
        Measured(studies.PERMUTATIONS_STUDY, ("softmax",), "tokens 1 to 16"),
    )
}


def case(task: str, arm: str, seed: int, *, inputs: int = INPUTS, **sizes: Any) -> Case:
    """One run of a learning experiment, and on how many inputs its heads are measured; `sizes` as in `study.case`.

    Raises TypeError or ValueError for unknown names and for what `study.case` refuses.
    """
    measured = MEASURED[one_of("task", task, MEASURED)]
    one_of("arm", arm, measured.arms)
    run = learning.case(measured.study, arm, seed, learning.chosen_rate(measured.study, arm), **sizes)
    return {"task": task, **run, "inputs": positive_int("inputs", inputs)}


def cases(device: str) -> list[Case]:
    """The runs of all arms whose rate is chosen, seed by seed."""
    return [
        case(task, arm, seed, device=device)
        for seed in learning.SEEDS
        for task, measured in MEASURED.items()
        for arm in measured.arms
        if learning.chosen_rate(measured.study, arm) is not None
    ]


smoke_case = fitting.smoke_case


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train one model as its experiment does, and measure its heads before and after.

    Raises AssertionError if a drawn answer is wrong, or if a layer does not compute what its measured weights give.
    """
    study, _, test = MEASURED[case["task"]]
    seeds = learning.seeds_of(study, case)
    seeds |= fitting.seeds_of({"heads": (study.name, case["arm"], case["seed"], case["rate"])})
    draws = fitting.generators(seeds)
    model = learning.build(study, case, draws["weights"]).to(case["device"])
    check_answers(study.task, draws["checks"])
    (inputs,), _ = study.task.tests[test](case["inputs"], draws["heads"]).to(case["device"])
    batch = study.task.tests[test](case["tested"], draws["heads"])
    found: dict[str, dict[str, list[float]]] = {}
    nearest: dict[str, str] = {}
    trained: dict[str, Any] = {}
    for stage in STAGES:
        if stage == "trained":
            recipe = fitting.recipe(case, weight_decay=study.weight_decay)
            trained = fitting.fit(model, study.task, recipe, case, draws, checkpoint=checkpoint)
        for name, quantities, pattern in heads(model, inputs, case, batch):
            found[f"{stage}, {name}"], nearest[f"{stage}, {name}"] = quantities, pattern
    return {"seeds": seeds, "repetitions": found, "facts": {"nearest": nearest, **trained}}


@torch.no_grad()
def heads(
    model: LanguageModel, inputs: Tensor, case: Case, batch: Batch
) -> list[tuple[str, dict[str, list[float]], str]]:
    """The name, the figures and the nearest pattern of each head, on inputs (S, N) and answers to other sequences."""

    def correct(other: nn.Module) -> float:
        (share,) = fitting.evaluate(other, lambda *_: batch, case, torch.Generator())["correct_fraction"]
        return share

    found = []
    whole, x = correct(model), embed(model, inputs)
    for level, block in enumerate(blocks(model)):
        weights = head_weights(block.attention, block.norm_attention(x), is_causal=True)  # (S, H, N, N)
        means = weights.mean(0)
        all_means = correct(replaced(model, level, slice(None), means))
        for head, own in enumerate(weights.unbind(1)):
            absolute, relative = (positionalness(own, by=by, is_causal=True) for by in ("absolute", "relative"))
            fit = nearest_pattern(own, is_causal=True)
            figures = {
                "correct": whole,
                "correct_means": all_means,
                "correct_mean": correct(replaced(model, level, head, means[head])),
                "correct_without": correct(replaced(model, level, head, torch.zeros_like(own[0]))),
                "peak": peak(own),
            }
            for name, estimate in (
                ("absolute", absolute), ("relative", relative), ("weight", fit.weight), ("share", fit.share)
            ):  # fmt: skip
                figures |= {name: estimate.value, f"{name}_error": estimate.standard_error}
            quantities = {f"{name}_fraction": [round(value, 5)] for name, value in figures.items()}
            found.append((f"layer {level + 1}, head {head + 1}", quantities, fit.pattern.name))
        y = block(x, is_causal=True)
        check_weights(block.attention, block.norm_attention(x), weights)
        x = y
    return found


def blocks(model: LanguageModel) -> list[TransformerBlock]:
    """The model's blocks, from the first."""
    return [block for block in model.blocks if isinstance(block, TransformerBlock)]


def embed(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The input of the first block, (B, N, d)."""
    x = embedding(tokens, model.embed_tokens)
    return x if model.embed_positions is None else x + model.embed_positions[: tokens.shape[1]]


def peak(weights: Tensor) -> float:
    """How far causal weights (S, N, N) are from even: the mean over rows of their squared length, scaled to 0 if all
    keys have the same weight and to 1 if one key has all. The first row has only one key and does not count."""
    even = 1 / torch.arange(2, weights.shape[-1] + 1, dtype=torch.float64, device=weights.device)
    squares = weights[:, 1:].double().square().sum(-1)
    return float(((squares - even) / (1 - even)).mean())


class _Replaced(nn.Module):
    """A mechanism with fixed weights in one head or a slice of heads."""

    def __init__(self, layer: MultiheadAttention, head: int | slice, weights: Tensor) -> None:
        super().__init__()
        assert isinstance(layer.attention, str)
        self.attend, self.head, self.weights = MECHANISMS[layer.attention].fast, head, weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        o: Tensor = self.attend(q, k, v, **kwargs).clone()
        o[:, self.head] = self.weights.to(v) @ v[:, self.head]
        return o


def replaced(model: LanguageModel, level: int, head: int | slice, weights: Tensor) -> LanguageModel:
    """A copy of the model in which one head of a layer has these weights (N, N) on every input, or a slice of its heads
    has weights (h, N, N)."""
    other = copy.deepcopy(model)
    layer = blocks(other)[level].attention
    layer.attention = _Replaced(layer, head, weights)
    return other


def check_weights(layer: MultiheadAttention, x: Tensor, weights: Tensor) -> None:
    """Raise AssertionError unless the layer's fast form gives what these weights give with the layer's values."""
    v = (x @ layer.weight_v.T).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    want = (weights @ v).transpose(1, 2).flatten(2) @ layer.weight_o.T
    # Either form rounds each of a head's sums over N keys to eps sqrt(N) or so; the bound is a hundred times that.
    assert_close("weights", layer(x, is_causal=True), want, 100 * torch.finfo(x.dtype).eps * x.shape[1] ** 0.5)


label = "{task}: {arm} seed={seed} rate={rate:g}".format_map


def work(case: Case) -> float:
    """Seconds that a case takes, roughly."""
    variants = len(STAGES) * (1 + (1 + 2 * case["H"]) * case["L"])
    return learning.work(case) + SECONDS_PER_WEIGHT * variants * case["tested"] * case["H"] * case["N"] ** 2


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per device, run, stage and head: the configuration, `stage`, `name` of layer and head, `nearest` pattern
    (None where the record does not say), and the figures by their names without `_fraction`."""
    return [
        {**record["configuration"], "device": record["device"], "stage": stage, "name": name}
        | {"nearest": record["facts"].get("nearest", {}).get(arm)}
        | {figure.removesuffix("_fraction"): float(values[0]) for figure, values in figures.items()}
        for record in records
        for arm, figures in record["repetitions"].items()
        for stage, _, name in (arm.partition(", "),)
    ]


def arms(records: Iterable[Record], device: str) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """(task, arm) -> stage -> the rows of all runs' heads, on one device."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows(record for record in records if record["device"] == device):
        found.setdefault((row["task"], row["arm"]), {}).setdefault(row["stage"], []).append(row)
    return found


def positional(rows: Sequence[Row], by: str = "absolute", share: float = 0.5) -> int:
    """The number of heads in which positions explain more than this share of the weights' variation."""
    return sum(row[by] > share for row in rows)


def line(record: Record) -> str:
    """One run in a line: how positional each head became."""
    return "; ".join(
        f"{row['name']} {row['absolute']:.3f} ± {row['absolute_error']:.3f}, near {row['nearest']!r}"
        for row in rows([record])
        if row["stage"] == "trained"
    )
