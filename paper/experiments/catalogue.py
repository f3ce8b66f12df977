"""All experiments, each a module's measurement (`runner.Parts`), and what the readers of its records rely on."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from paper.experiments.engine.benchmark import PASSES, PHASES
from paper.experiments.engine.records import Case, Needs
from paper.experiments.engine.runner import Experiment, Parts, parts
from paper.experiments.learning import (
    copying,
    depth,
    fine_tuning,
    fitting,
    images,
    ladder,
    ladder_lengths,
    ladder_tables,
    language,
    positional_heads,
    pruning,
    retrieval,
    studies,
    study,
    synthetic,
    translating,
    translation_budgets,
)
from paper.experiments.speed import (
    agreement,
    attention,
    decoding,
    generation,
    heads,
    inference,
    ladder_models,
    language_models,
    projections,
    recomputation,
    training_step,
    value_gradient,
    whole_models,
)
from paper.experiments.speed.attention_variants import YARDSTICK

TITLES = {
    "training-step": "forward, backward and optimiser of the layer and the block, learned, frozen and stopped q and k",
    "inference": "forward passes without gradients, learned, frozen, and learned once more as a control",
    "attention-speed": "time and memory of attention alone, forward and backward, beside the fused softmax attention",
    "memory-speed": "time and memory of memories that erase, forward and backward, beside the fused softmax attention",
    "pattern-speed": "time and memory of sparse attention, forward and backward, beside the fused softmax attention",
    "flash-speed": "time and memory of softmax attention, materialised, in tiles and fused, forward and backward",
    "decode-speed": "a decoded token behind contexts of many lengths: time, and what the cache holds",
    "whole-models": "the training step of published models, learned, frozen and stopped q and k",
    "generation": "tokens a second that GPT-2 medium decodes, by its attention and cache",
    "recomputation-speed": "a row of blocks, forward and backward, activations kept or computed again",
    "exchanged-speed": "the gradient of the values alone, by a forward pass with q and k exchanged",
    "projection-speed": "queries and keys by dense and structured frozen matrices",
    "heads-speed": "the training step of layers with stopped heads and with heads of several kinds",
    "induction-speed": "the training step of layers with heads that retrieve untrained",
    "positional-heads": "how positional the heads of the trained models are",
    "depth": "how large gradients are through the depth of a stack",
    "bytes": "language models of bytes, all arms at equal training FLOPs",
    "bytes-parameters": "language models of bytes at equal trained parameters",
    "bytes-budgets": "language models of bytes along budgets",
    "bytes-little": "language models of few bytes",
    "ladder": "language models of bytes along budgets, with heads that retrieve untrained",
    "ladder-selective": "language models of bytes along budgets, whose untrained heads read nothing without a match",
    "ladder-others": "language models of bytes along budgets: other arms",
    "ladder-lengths": "language models of bytes, whose windows are short or long",
    "ladder-large": "larger language models of bytes, on a GPU",
    "ladder-tables": "tables of the last bytes, beside the language models of bytes along budgets",
    "copying": "when language models of bytes begin to copy what a text repeats, seed by seed",
    "retrieval": "how long sequences may be in which heads find what is asked for, learned or untrained",
    "bytes-speed": "the training step of the language models of bytes, all arms in turn",
    "ladder-speed": "the training step of the ladder's models, all arms in turn",
    "synthetic": "small models on synthetic tasks: which arms learn which",
    "images": "vision transformers of small images, all kinds of heads",
    "fine-tuning": "a model of one text goes on with another, parts of its attention frozen",
    "translation": "German to English by small encoder-decoders, from few and from more pairs",
    "transduction": "a made-up translation by small encoder-decoders",
    "translation-budgets": "German to English by small encoder-decoders, until the validation loss no longer falls",
    "pruning": "how many heads of a trained encoder can be removed",
    "agreement": "fast forms beside their definitions on a GPU, in each precision",
}


def _experiment(name: str, module: Parts, needs: Needs, **own: Any) -> Experiment:
    """An experiment from a module's measurement; the fields in `own` replace those of the module."""
    return Experiment(name, TITLES[name], **{**parts(module), "needs": needs, **own})


def _timing(name: str, module: Parts, like: Case, arms: Iterable[str], *phases: str, **own: Any) -> Experiment:
    """An experiment of timings; its records have cases like this one and these variants, with seconds of each phase."""
    needs = Needs.like(like, arms=tuple(arms), quantities=tuple(f"{phase}_s" for phase in phases))
    return _experiment(name, module, needs, quiet=True, **own)


def _attention(name: str, cases: Callable[[str], list[Case]], *arms: str) -> Experiment:
    return _timing(name, attention, attention.case(1), arms, *PASSES, cases=cases)


def _heads(name: str, cases: Callable[[str], list[Case]], arms: tuple[str, ...]) -> Experiment:
    return _timing(name, training_step, training_step.case(), arms, *PHASES, cases=cases, **heads.timed(arms))


def _training(name: str, module: Parts, like: Case, *tests: str, **own: Any) -> Experiment:
    """An experiment that trains models; its records have cases like this one and these tests (`fitting.experiment`)."""
    return fitting.experiment(name, TITLES[name], like, tests=tests, **{**parts(module), **own})


def _bytes(name: str, cases: Callable[[str], list[Case]]) -> Experiment:
    return _training(name, language, language.case("learned"), "test", cases=cases)


def _ladder(name: str, module: Parts = ladder, **own: Any) -> Experiment:
    needs = Needs.like(ladder.case("python", "learned"), quantities=("validation_bits",), facts=fitting.FACTS)
    return _experiment(name, module, needs, resumes=True, **own)


def _translation(name: str) -> Experiment:
    like = translating.case(name, "8 learned", pairs=next(iter(translating.STEPS[name]["cpu"])))
    facts = {**fitting.FACTS, "source_tokens": float, "target_tokens": float, "vocab_size": int}
    cases = partial(translating.cases, name)
    return _training(name, translating, like, translating.TESTS[name], facts=facts, cases=cases)


_HEADS = Needs.like(
    positional_heads.case("recall", "softmax", 1),
    arms=tuple(f"{stage}, layer 1, head 1" for stage in positional_heads.STAGES),
    quantities=tuple(f"{name}_fraction" for name in positional_heads.FIGURES),
)
_DEPTH = Needs.like(
    depth.case("learned", True, 1),
    arms=depth.STAGES,
    quantities=("first_over_last_fraction",),
    facts={"gradients": dict},
)
_TABLES = Needs.like(ladder_tables.case("python", 1), arms=("tables",), quantities=("test_bits",))
_RETRIEVAL = Needs.like(retrieval.case("mqar", "learned"), quantities=fitting.QUANTITIES, facts=fitting.FACTS)
_PRUNING = Needs.like(
    pruning.case(),
    arms=tuple(pruning.arm(first, count) for first in pruning.FIRST for count in (0, 1)),
    quantities=fitting.QUANTITIES,
    facts={**fitting.FACTS, "importance": dict},
)
_TRANSLATION = Needs.like(
    translation_budgets.case("8 learned", pairs=translation_budgets.TUNED_PAIRS, budget=translation_budgets.TUNED),
    facts={**fitting.FACTS, "source_tokens": float, "target_tokens": float, "vocab_size": int},
)
_STUDIES = (studies.RECALL_STUDY, studies.PARITY_STUDY, studies.PERMUTATIONS_STUDY, studies.FLIP_FLOP_STUDY)
_KEPT = (recomputation.KEPT, recomputation.MATERIALISED)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _timing("training-step", training_step, training_step.case(), training_step.VARIANTS, *PHASES),
        _timing("inference", inference, training_step.case(), inference.ARMS, "forward"),
        _attention("attention-speed", attention.cases, YARDSTICK),
        _attention("memory-speed", attention.memory_cases, "delta causal"),
        _attention("pattern-speed", attention.pattern_cases),
        _attention("flash-speed", attention.flash_cases, YARDSTICK),
        _timing("decode-speed", decoding, decoding.case("softmax"), (decoding.YARDSTICK,), "step"),
        _timing("whole-models", whole_models, whole_models.case("BERT-base"), training_step.VARIANTS, *PHASES),
        _timing("generation", generation, generation.case(), generation.ARMS, "step"),
        _timing("recomputation-speed", recomputation, recomputation.case(), _KEPT, *PASSES),
        _timing("exchanged-speed", value_gradient, value_gradient.case(), value_gradient.ARMS, *PASSES),
        _timing("projection-speed", projections, projections.case(), ("dense", "structured"), *projections.PHASES),
        _heads("heads-speed", heads.cases, heads.ARMS),
        _heads("induction-speed", heads.retrieving_cases, heads.RETRIEVING),
        *map(study.experiment, _STUDIES),
        _experiment("positional-heads", positional_heads, _HEADS, resumes=True),
        _experiment("depth", depth, _DEPTH),
        _bytes("bytes", language.of_equal_flop),
        _bytes("bytes-parameters", language.of_equal_parameters),
        _bytes("bytes-budgets", language.of_budgets),
        _bytes("bytes-little", language.of_little_text),
        _ladder("ladder"),
        _ladder("ladder-selective", cases=ladder.selective_cases),
        _ladder("ladder-others", cases=ladder.other_cases),
        _ladder("ladder-lengths", ladder_lengths),
        _ladder("ladder-large", cases=ladder.large_cases),
        _ladder("copying", copying),
        _experiment("ladder-tables", ladder_tables, _TABLES),
        _experiment("retrieval", retrieval, _RETRIEVAL),
        _timing("bytes-speed", language_models, language_models.case(), ("learned",), "step"),
        _timing("ladder-speed", ladder_models, ladder_models.case("python"), ("learned",), "step"),
        _training("synthetic", synthetic, synthetic.case("induction", "learned")),
        _training("images", images, images.case("learned"), "test"),
        _training(
            "fine-tuning", fine_tuning, fine_tuning.case("all trained"), "old, before", "new, before", "old", "new"
        ),
        _translation("translation"),
        _translation("transduction"),
        _experiment("translation-budgets", translation_budgets, _TRANSLATION, resumes=True),
        _experiment("pruning", pruning, _PRUNING, resumes=True),
        _experiment("agreement", agreement, Needs.like(agreement.case("softmax", True), quantities=agreement.ERRORS)),
    )
}
