"""Translation by small encoder-decoders: which heads of the encoder need to have learnt, and from how many pairs.

`translation` is German to English on Multi30k, judged by BLEU. It needs the extra of that name, and the data: a case
raises what their loader raises if they are missing. `transduction` is a made-up language that is always available,
judged by the share of sentences without a mistake. A sentence has no mistake if each token is predicted correctly after
the right ones; greedy decoding writes exactly such a sentence.

The arms differ in the encoder's self-attention, as in Raganato, Scherrer & Tiedemann 2020 (arXiv:2002.10260); the
decoder's self-attention and its attention to the source are learned. On a CPU a model is to learn within a minute of a
core, so pairs have at most 60 characters a side. For every arm the best look at the validation part counts. Learning
rates are chosen per arm and number of pairs (`rates`), and the arms of a seed see the same batches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ortho import cost
from ortho.attention.positional.positional_attention import SEVEN
from ortho.checks import one_of, positive_int
from ortho.layers.hybrid import HybridAttention
from ortho.layers.positional import PositionalHeads
from ortho.models.encoder_decoder import EncoderDecoder
from paper.experiments.engine.records import Case, Record
from paper.experiments.learning import analysis, fitting, rates
from paper.experiments.learning.analysis import Measures, Runs
from paper.experiments.learning.rates import TUNING
from paper.experiments.statistics import Decision
from paper.tasks import transduction
from paper.tasks.pairs import START, STOP
from paper.tasks.task import Batch, Draw, Task
from paper.tasks.translation import Corpus, Translation, multi30k_corpus, translation

H = len(SEVEN) + 1  # heads of a layer: one beside the fixed ones
# By task and device. Texts have at most `characters` a side, and sentences at most `clauses`; tests have `tested`
# pairs, and looks on the way use `looked` pairs of the validation part.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "translation": {
        "cpu": {"B": 32, "d": 64, "L": 2, "characters": 60, "subwords": 1000, "tested": 399, "looked": 200},
        "cuda": {"B": 64, "d": 256, "L": 4, "characters": 1000, "subwords": 4000, "tested": 1000, "looked": 500},
    },
    "transduction": {
        "cpu": {"B": 16, "d": 64, "L": 2, "clauses": 1, "tested": 500, "looked": 200},
        "cuda": {"B": 64, "d": 128, "L": 4, "clauses": 2, "tested": 1000, "looked": 500},
    },
}
# Steps for each number of pairs to train on; 0: pairs are drawn anew for every batch.
STEPS: dict[str, dict[str, dict[int, int]]] = {
    "translation": {"cpu": {10_000: 900, 1000: 500}, "cuda": {29_000: 5000, 5000: 2000, 1000: 1000}},
    "transduction": {"cpu": {0: 1000, 500: 400}, "cuda": {0: 3000, 500: 600}},
}
SEEDS = (1, 2, 3, 4, 5)
TRIED = (5e-3, 1e-2)  # for d = 64; a model that is n times as wide tries rates an n-th as high
REGULARISED = {"translation": 0.1, "transduction": 0.0}  # dropout, and smoothing of the answers
LOOKS = 8
ALIKE = 8  # batches that are drawn to make one with pairs of similar lengths
SHAPES = 100  # batches whose mean shape is recorded
# By task: the test and the metric by which arms are judged. The source's comparisons are about one point of BLEU.
TESTS = {"translation": "test", "transduction": "like training"}
METRICS = {"translation": "bleu_fraction", "transduction": "faultless_fraction"}
DECISIONS = {
    "translation": Decision(margin=0.01, level=0.05, higher_is_better=True),
    "transduction": Decision(margin=0.05, level=0.05, higher_is_better=True),
}


def arms(d: int) -> dict[str, Mapping[str, Any]]:
    """Arm -> the encoder's arguments of `EncoderDecoder` that say what its attention is, at width d.

    'fixed' heads have the patterns `SEVEN`, and 'frozen' ones are orthogonal random attention. '1 learned' is as wide
    as one of 8 heads.
    """
    fixed = partial(PositionalHeads, patterns=SEVEN)
    return {
        "8 learned": {},
        "7 fixed + 1 learned": {"layer": HybridAttention, "heads": [("learned", 1), (fixed, H - 1)]},
        "1 learned": {"num_heads": 1, "head_dim": positive_int("d", d) // H},
        "8 frozen": {"projection": "frozen"},
    }


def build(
    arm: str, vocab_size: int, d: int, L: int, *, max_length: int, dropout: float, generator: torch.Generator
) -> EncoderDecoder:
    """The untrained model, with sinusoidal positions; its weights are drawn on the CPU.

    Raises ValueError for an unknown arm, and what `EncoderDecoder` raises.
    """
    known = arms(d)
    own: dict[str, Any] = {"dropout": dropout, "generator": generator, "encoder": known[one_of("arm", arm, known)]}
    return EncoderDecoder(vocab_size, d, H, L, max_length=max_length, positions="sinusoidal", **own)


def model_of(case: Case, task: Task, draws: Mapping[str, torch.Generator]) -> EncoderDecoder:
    """The untrained model of a case, on its device."""
    own: dict[str, Any] = {"max_length": task.longest, "dropout": case["dropout"], "generator": draws["weights"]}
    return build(case["arm"], task.vocab_size, case["d"], case["L"], **own).to(case["device"])


@cache
def training_flop(arm: str, B: int, M: int, N: int, d: int, L: int, *, vocab_size: int) -> int:
    """FLOPs of the matrix products of a training step on sources (B, M) and targets (B, N), without the loss.

    Counted on one pair: products grow with the number of pairs. Raises TypeError or ValueError for sizes below 1, and
    ValueError for an unknown arm.
    """
    model = build(arm, vocab_size, d, L, max_length=max(M, N), dropout=0.0, generator=torch.Generator())
    return B * cost.of(model, *(torch.zeros(1, length, dtype=torch.long) for length in (M, N))).step


def case(
    task: str, arm: str, seed: int = TUNING, rate: float | None = None, *, pairs: int, device: str = "cpu", **sizes: int
) -> Case:
    """One run on a number of pairs; `sizes` are `steps` and those of `SIZES`, by default as they are there.

    Raises TypeError or ValueError for unknown names, for sizes that are not integers above 0, and for a number of pairs
    that is not in `STEPS`.
    """
    known = SIZES[one_of("task", task, SIZES)][one_of("device", device, fitting.DEVICES)]
    steps = STEPS[task][device]
    if pairs not in steps:
        raise ValueError(f"pairs: expected one of {', '.join(map(str, steps))}, got {pairs}")
    size = fitting.sizes({"steps": steps[pairs], **known}, sizes)
    return {
        "device": device,
        "task": task,
        "pairs": pairs,
        "arm": one_of("arm", arm, arms(size["d"])),
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        "H": H,
        **size,
        "dropout": REGULARISED[task],
        "smoothing": REGULARISED[task],
        "decision_metric": METRICS[task],
        **DECISIONS[task].settings(),
    }


def run(case: Case, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train and test one model; a run that was killed goes on from its `checkpoint`.

    Raises AssertionError if the trained model's fast form does not compute what its definition does, and for
    `translation` what `multi30k_corpus` and `paper.tasks.translation.translation` raise.
    """
    seeds = seeds_of(case)
    draws = fitting.generators(seeds)
    texts, task = subject(case)
    model = model_of(case, task, draws)
    recipe = fitting.recipe(case)
    looked = {**case, "tested": case["looked"]}
    learnt = fitting.fit(model, task, recipe, looked, draws, looks=LOOKS, keep_best=True, checkpoint=checkpoint)
    known = task if texts is None else texts.task  # the task whose batches mix pairs of all lengths
    seen = fitting.evaluate(model, known.train, looked, draws["tests"])
    facts = {**learnt, "seen": {name: values[0] for name, values in seen.items()}, **shape(task, case["B"])}
    found = fitting.examine(model, task, case, draws)
    if texts is not None:
        bleu = texts.bleu("test", written(model, task, case))
        found["test"]["bleu_fraction"] = [round(bleu.score / 100, 6)]
        facts |= {"bleu_signature": bleu.signature, **texts.facts()}
    return {"seeds": seeds, "repetitions": found, "facts": facts}


def subject(case: Case) -> tuple[Translation | None, Task]:
    """What is translated: the real texts, if any, and the task, which for these trains on pairs of similar lengths."""
    if case["task"] == "transduction":
        return None, transduction.task(clauses=case["clauses"], pairs=case["pairs"] or None)
    return _multi30k(case["pairs"], case["characters"], case["subwords"])


@cache
def _multi30k(pairs: int, characters: int, subwords: int) -> tuple[Translation, Task]:
    """The vocabulary and the tokens of a number of pairs, made once."""
    parts = ([pair for pair in part if max(map(len, pair)) <= characters] for part in multi30k_corpus())
    title = f"German to English, {pairs:,} descriptions of photographs of at most {characters} characters"
    texts = translation(f"multi30k-{pairs}", title, Corpus(*parts).limited(pairs), subwords)
    return texts, replace(texts.task, train=alike(texts.task.train))


def alike(draw: Draw) -> Draw:
    """Batches of pairs of similar lengths, so that little of them is padding: `ALIKE` times as many pairs are drawn,
    sorted by length and cut into `ALIKE` batches, and one of these is taken at random. All pairs are equally likely."""

    def one(count: int, generator: torch.Generator) -> Batch:
        (source, target, mask), answers = whole = draw(count * ALIKE, generator)
        read, said = mask.sum(1), whole.asked.sum(1)
        order = (read * (1 + answers.shape[1]) + said).argsort(stable=True)
        place = int(torch.randint(ALIKE, (1,), generator=generator)) * count
        rows = order[place : place + count]
        M, N = int(read[rows].max()), int(said[rows].max())
        return Batch((source[rows, :M], target[rows, :N], mask[rows, :M]), answers[rows, :N])

    return one


def shape(task: Task, B: int) -> dict[str, float | int]:
    """What the cost of a training step depends on besides the model's sizes: the lengths of sources and targets in
    tokens, padding included, averaged over `SHAPES` batches, and the number of tokens in the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    drawn = [[x.shape[1] for x in task.train(B, generator).inputs[:2]] for _ in range(SHAPES)]
    source, target = (sum(column) / SHAPES for column in zip(*drawn, strict=True))
    return {"source_tokens": source, "target_tokens": target, "vocab_size": task.vocab_size}


def written(model: EncoderDecoder, task: Task, case: Case) -> torch.Tensor:
    """What greedy decoding writes for the first sources of the test, (tested, n)."""
    (source, _, mask), _ = task.tests["test"](case["tested"], torch.Generator()).to(case["device"])
    return model.generate(source, mask, start=START, stop=STOP, max_length=task.longest).cpu()


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], case["task"], case["seed"])


def cases(task: str, device: str) -> list[Case]:
    """The runs that choose the rates; then all seeds of arms whose rate is chosen."""
    options: list[dict[str, Any]] = [
        {"task": task, "arm": arm, "pairs": pairs, "device": device}
        for pairs in STEPS[task][device]
        for arm in arms(SIZES[task][device]["d"])
    ]
    return fitting.cases(task, case, options, partial(rates.tried, TRIED), SEEDS)


label = "{arm}, pairs={pairs}, seed={seed}, rate={rate:g}".format_map


def _tested(record: Record, quantity: str) -> float:
    return analysis.tested(record, TESTS[record["configuration"]["task"]], quantity)


# In the test: the metric that the configuration names, from 0 to 1, nats a token, and the share of right tokens after
# right ones. On pairs that were trained on: nats a token.
MEASURES: Measures = {
    "score": lambda record: _tested(record, record["configuration"]["decision_metric"]),
    "loss": partial(_tested, quantity="loss_nats"),
    "seen": lambda record: float(record["facts"]["seen"]["loss_nats"]),
    "correct": partial(_tested, quantity="correct_fraction"),
}
judged = partial(analysis.judged, measure="score")


def flop(record: Record) -> int:
    """FLOPs of the matrix products of a run's training, without the loss.

    Computed for batches of the mean shape that the run recorded, padding included, in whole tokens. Products grow with
    the lengths, and only attention's with their squares, so this is near the mean over batches.
    """
    case, facts = record["configuration"], record["facts"]
    shape = (case["B"], round(facts["source_tokens"]), round(facts["target_tokens"]))
    step = training_flop(case["arm"], *shape, case["d"], case["L"], vocab_size=facts["vocab_size"])
    return int(case["steps"]) * step


def by_pairs(records: Iterable[Record], device: str, **wanted: Any) -> dict[int, dict[str, Runs]]:
    """Number of pairs -> arm -> the runs that count, of one device, with the measures of `MEASURES`.

    Raises ValueError if an arm's runs on a number of pairs differ in more than the seed: then `wanted` must say more.
    """
    records = list(records)
    numbers = dict.fromkeys(record["configuration"]["pairs"] for record in records)
    found = {n: analysis.by_arm(records, device, MEASURES, flop=flop, pairs=n, **wanted) for n in numbers}
    return {n: arms for n, arms in found.items() if arms}
