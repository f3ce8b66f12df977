"""All experiments, each a module's measurement."""

from functools import partial
from types import ModuleType
from typing import Any

from paper.experiments import speed
from paper.experiments.engine.runner import Experiment
from paper.experiments.learning import (
    copying,
    depth,
    fine_tuning,
    fitting,
    images,
    ladder,
    ladder_tables,
    language,
    pruning,
    retrieval,
    studies,
    study,
    synthetic,
    translating,
    translation_budgets,
)
from paper.experiments.speed import (
    attention,
    decoding,
    generation,
    heads,
    inference,
    language_models,
    layers,
    projections,
    recomputation,
    training_step,
    value_gradient,
    whole_models,
)

TITLES = {
    "training-step": "forward, backward and optimiser of the layer and the block, learned, frozen and stopped q and k",
    "inference": "forward passes without gradients, learned, frozen, and learned once more as a control",
    "attention-speed": "time and memory of attention alone, forward and backward, beside the fused softmax attention",
    "memory-speed": "time and memory of memories that erase, forward and backward, beside the fused softmax attention",
    "pattern-speed": "time and memory of sparse attention, forward and backward, beside the fused softmax attention",
    "layer-speed": "the training step and the forward pass alone of a whole layer, by its mechanism",
    "flash-speed": "time and memory of softmax attention, materialised, in tiles and fused, forward and backward",
    "decode-speed": "a decoded token behind contexts of many lengths: time, and what the cache holds",
    "whole-models": "the training step of published models, learned, frozen and stopped q and k",
    "generation": "tokens a second that GPT-2 medium decodes, by its attention and cache",
    "recomputation-speed": "a row of blocks, forward and backward, activations kept or computed again",
    "exchanged-speed": "the gradient of the values alone, by a forward pass with q and k exchanged",
    "projection-speed": "queries and keys by dense and structured frozen matrices",
    "heads-speed": "the training step of layers with stopped heads and with heads of several kinds",
    "induction-speed": "the training step of layers with heads that retrieve untrained",
    "depth": "how large gradients are through the depth of a stack",
    "bytes": "language models of bytes, all arms at equal training FLOPs",
    "bytes-parameters": "language models of bytes at equal trained parameters",
    "bytes-budgets": "language models of bytes along budgets",
    "bytes-little": "language models of few bytes",
    "ladder": "language models of bytes along budgets, with heads that retrieve untrained",
    "ladder-selective": "language models of bytes along budgets, whose untrained heads read nothing without a match",
    "ladder-others": "language models of bytes along budgets: other arms",
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
}


def _experiment(name: str, module: ModuleType, **own: Any) -> Experiment:
    """The experiment of a module, which has `cases`, `run`, `label`, `smoke_case` and VERSION, or some of them; the
    fields in `own` replace those of the module. What lies in `speed` is a timing."""
    fields = ("cases", "run", "label", "smoke_case")
    found = {field: getattr(module, field) for field in fields if hasattr(module, field)}
    known = {"version": getattr(module, "VERSION", 1), "is_timing": module.__name__.startswith(f"{speed.__name__}.")}
    return Experiment(name, TITLES[name], **{"smoke_case": fitting.smoke_case, **known, **found, **own})


_STUDIES = (studies.RECALL_STUDY, studies.PARITY_STUDY, studies.PERMUTATIONS_STUDY, studies.FLIP_FLOP_STUDY)

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _experiment("training-step", training_step),
        _experiment("inference", inference),
        _experiment("attention-speed", attention),
        _experiment("memory-speed", attention, cases=attention.memory_cases),
        _experiment("pattern-speed", attention, cases=attention.pattern_cases),
        _experiment("flash-speed", attention, cases=attention.flash_cases),
        _experiment("layer-speed", layers),
        _experiment("decode-speed", decoding),
        _experiment("whole-models", whole_models),
        _experiment("generation", generation),
        _experiment("recomputation-speed", recomputation),
        _experiment("exchanged-speed", value_gradient),
        _experiment("projection-speed", projections),
        _experiment("heads-speed", training_step, cases=heads.cases, run=heads.run),
        _experiment("induction-speed", training_step, cases=heads.retrieving_cases, run=heads.retrieving_run),
        *map(study.experiment, _STUDIES),
        _experiment("depth", depth),
        _experiment("bytes", language, cases=language.of_equal_flop),
        _experiment("bytes-parameters", language, cases=language.of_equal_parameters),
        _experiment("bytes-budgets", language, cases=language.of_budgets),
        _experiment("bytes-little", language, cases=language.of_little_text),
        _experiment("ladder", ladder),
        _experiment("ladder-selective", ladder, cases=ladder.selective_cases),
        _experiment("ladder-others", ladder, cases=ladder.other_cases),
        _experiment("copying", copying),
        _experiment("ladder-tables", ladder_tables),
        _experiment("retrieval", retrieval),
        _experiment("bytes-speed", language_models),
        _experiment("ladder-speed", language_models, cases=language_models.ladder_cases),
        _experiment("synthetic", synthetic),
        _experiment("images", images),
        _experiment("fine-tuning", fine_tuning),
        _experiment("translation", translating, cases=partial(translating.cases, "translation")),
        _experiment("transduction", translating, cases=partial(translating.cases, "transduction")),
        _experiment("translation-budgets", translation_budgets),
        _experiment("pruning", pruning),
    )
}
