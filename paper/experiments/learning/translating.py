"""Translation by small encoder-decoders: which heads of the encoder need to have learnt, and from how many pairs.

`translation` is German to English on Multi30k, judged by BLEU. It needs the extra of that name, and the data: a case
raises what their loader raises where they are not at hand. `transduction` is a made-up language that is always there,
judged by the sentences without a mistake; what has none, each token predicted after the right ones, is what greedy
decoding writes.

The arms differ in the encoder's self-attention, as in Raganato, Scherrer & Tiedemann 2020 (arXiv:2002.10260); the
decoder's and that to the source are learned, but for '8 frozen everywhere'. A model that is to learn within a minute of
a core has short texts and few arms: on a CPU pairs are of at most 60 characters a side, and the arms those of `FEW`.
On CUDA they are all there. Of the looks at the validation part the best one counts, for every arm. Learning rates are
chosen per arm and number of pairs (`rates`), and the arms of a seed see the same batches.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ortho._checks import one_of, positive_int
from ortho.models.encoder_decoder import EncoderDecoder
from paper.experiments.engine.records import Case
from paper.experiments.engine.runner import Experiment
from paper.experiments.learning import fitting, rates, translating_rows
from paper.experiments.learning.rates import TUNING
from paper.experiments.learning.translating_arms import H, arms, build, training_flop
from paper.experiments.statistics import Decision
from paper.tasks import transduction
from paper.tasks.pairs import START, STOP
from paper.tasks.task import Batch, Draw, Task
from paper.tasks.translation import Corpus, Translation, multi30k_corpus, translation

# By task and device. Texts have at most so many characters a side, and sentences so many clauses; tests have `tested`
# pairs, and `looked` of the validation part are looked at on the way.
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
# Steps by the number of pairs to train on; 0: they are drawn anew for every batch.
STEPS: dict[str, dict[str, dict[int, int]]] = {
    "translation": {"cpu": {10_000: 900, 1000: 500}, "cuda": {29_000: 5000, 5000: 2000, 1000: 1000}},
    "transduction": {"cpu": {0: 1000, 500: 400}, "cuda": {0: 3000, 500: 600}},
}
FEW = ("8 learned", "7 fixed + 1 learned", "1 learned", "8 frozen")
SEEDS = (1, 2, 3, 4, 5)
TRIED = (5e-3, 1e-2)  # for d = 64; a model that is n times as wide tries rates an n-th as high
REGULARISED = {"translation": 0.1, "transduction": 0.0}  # dropout, and smoothing of the answers
WEIGHT_DECAY = 0.1
LOOKS = 8
ALIKE = 8  # batches that are drawn for one of pairs about as long as each other
SHAPES = 100  # batches whose mean shape is recorded
CHECKED = 4  # pairs on which fast form and definition are compared
# By task: the metric by which arms are judged. A point of BLEU is what the source's comparisons are about.
METRICS = {"translation": "bleu_fraction", "transduction": "faultless_fraction"}
DECISIONS = {
    "translation": Decision(margin=0.01, level=0.05, higher_is_better=True),
    "transduction": Decision(margin=0.05, level=0.05, higher_is_better=True),
}


def case(
    task: str, arm: str, seed: int = TUNING, rate: float | None = None, *, pairs: int, device: str = "cpu", **sizes: int
) -> Case:
    """One run, on so many pairs; `sizes` are `steps` and those of `SIZES`, as they are there by default.

    Raises TypeError or ValueError for unknown names, for sizes below 1 or that are none, and for pairs of which
    `STEPS` says nothing.
    """
    known = SIZES[one_of("task", task, SIZES)][one_of("device", device, fitting.DEVICES)]
    steps = STEPS[task][device]
    if pairs not in steps:
        raise ValueError(f"pairs: expected one of {', '.join(map(str, steps))}, got {pairs}")
    size = {"steps": steps[pairs], **known, **sizes}
    if others := size.keys() - known.keys() - {"steps"}:
        raise TypeError(f"sizes: expected some of steps, {', '.join(known)}, got {', '.join(sorted(others))}")
    return {
        "device": device,
        "task": task,
        "pairs": pairs,
        "arm": one_of("arm", arm, arms(size["d"])),
        "seed": seed,
        "rate": rates.tried(TRIED, size["d"])[0] if rate is None else rate,
        "H": H,
        **{name: positive_int(name, value) for name, value in size.items()},
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
    own: dict[str, Any] = {"max_length": task.longest, "dropout": case["dropout"], "generator": draws["weights"]}
    model = build(case["arm"], task.vocab_size, case["d"], case["L"], **own).to(case["device"])
    recipe = fitting.recipe(case, weight_decay=WEIGHT_DECAY)
    looked = {**case, "tested": case["looked"]}
    learnt = fitting.fit(model, task, recipe, looked, draws, looks=LOOKS, keep_best=True, checkpoint=checkpoint)
    known = task if texts is None else texts.task  # whose pairs are of all lengths at once
    seen = fitting.evaluate(model, known.train, looked, draws["tests"])
    facts = {**learnt, "seen": {name: values[0] for name, values in seen.items()}, **shape(task, case["B"])}
    found = fitting.examine(model, task, case, draws)
    if texts is not None:
        bleu = texts.bleu("test", written(model, task, case))
        found["test"]["bleu_fraction"] = [round(bleu.score / 100, 6)]
        facts |= {"bleu_signature": bleu.signature, **texts.facts()}
    return {"seeds": seeds, "repetitions": found, "facts": facts}


def subject(case: Case) -> tuple[Translation | None, Task]:
    """What is translated: real texts, if it is these, and the task, of which training draws pairs of like lengths."""
    if case["task"] == "transduction":
        return None, transduction.task(clauses=case["clauses"], pairs=case["pairs"] or None)
    return _multi30k(case["pairs"], case["characters"], case["subwords"])


@cache
def _multi30k(pairs: int, characters: int, subwords: int) -> tuple[Translation, Task]:
    """The vocabulary and the tokens of so many pairs, made once."""
    parts = ([pair for pair in part if max(map(len, pair)) <= characters] for part in multi30k_corpus())
    title = f"German to English, {pairs:,} descriptions of photographs of at most {characters} characters"
    texts = translation(f"multi30k-{pairs}", title, Corpus(*parts).limited(pairs), subwords)
    return texts, replace(texts.task, train=alike(texts.task.train))


def alike(draw: Draw) -> Draw:
    """Batches of pairs about as long as each other, so that little of them is padding: one, by chance, of `ALIKE` into
    which as many times the pairs are parted in the order of their lengths. Each pair is as likely as any."""

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
    """What a training step costs beside the model's sizes: the numbers of tokens of batches, padding included, in the
    mean of `SHAPES` of them, and of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    drawn = [[x.shape[1] for x in task.train(B, generator).inputs[:2]] for _ in range(SHAPES)]
    source, target = (sum(column) / SHAPES for column in zip(*drawn, strict=True))
    return {"source_tokens": source, "target_tokens": target, "vocab_size": task.vocab_size}


def written(model: EncoderDecoder, task: Task, case: Case) -> torch.Tensor:
    """What greedy decoding makes of the first sources of the test, (tested, n)."""
    (source, _, mask), _ = task.tests["test"](case["tested"], torch.Generator()).to(case["device"])
    return model.generate(source, mask, start=START, stop=STOP, max_length=task.longest).cpu()


def seeds_of(case: Case) -> dict[str, int]:
    """Seeds of a run: hashes of what is drawn and of its seed; the arms of a seed share all but the weights."""
    return fitting.paired_seeds(case["arm"], case["task"], case["seed"])


def cases(task: str, device: str) -> list[Case]:
    """The runs that choose the rates; and of arms whose rate is chosen all seeds."""
    size = SIZES[task][device]
    names = FEW if device == "cpu" else tuple(arms(size["d"]))
    options: list[dict[str, Any]] = [
        {"task": task, "arm": arm, "pairs": pairs, "device": device} for pairs in STEPS[task][device] for arm in names
    ]
    tuning = [case(**one, seed=TUNING, rate=rate) for one in options for rate in rates.tried(TRIED, size["d"])]
    own = [case(**one, seed=seed) for seed in SEEDS for one in options]
    return [*tuning, *rates.with_chosen(task, own)]


def work(case: Case) -> float:
    """Seconds that a case takes, roughly: products, of a few tens of tokens a pair, and what a layer does besides."""
    rate, seconds = {"cpu": (3e10, 3e-3), "cuda": (1e14, 4e-3)}[case["device"]]
    M, N = (20, 24) if case["task"] == "translation" else (12, 18)
    tokens = case.get("subwords", 128)
    flop = training_flop(case["arm"], case["B"], M, N, case["d"], case["L"], vocab_size=tokens)
    return 4.0 + case["steps"] * (flop / rate + seconds * case["L"])


def label(case: Case) -> str:
    """A case in a few words."""
    return f"{case['arm']}, pairs={case['pairs']}, seed={case['seed']}, rate={case['rate']:g}"


def _experiment(task: str, title: str) -> Experiment:
    example = case(task, "8 learned", pairs=next(iter(STEPS[task]["cpu"])))
    facts = {**fitting.FACTS, "source_tokens": float, "target_tokens": float, "vocab_size": int}
    own: dict[str, Any] = {"cases": partial(cases, task), "run": run, "work": work, "label": label}
    tests = (translating_rows.TESTS[task],)
    return fitting.experiment(task, title, example, translating_rows, tests=tests, facts=facts, **own)


TRANSLATION = _experiment("translation", "German to English by small encoder-decoders, from few and from more pairs")
TRANSDUCTION = _experiment("transduction", "a made-up translation by small encoder-decoders")
EXPERIMENTS = (TRANSLATION, TRANSDUCTION)
