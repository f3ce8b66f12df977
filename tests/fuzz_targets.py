"""The public functions and classes, and values with which a call of each is valid."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import nn

import ortho
from ortho import (
    MECHANISMS,
    PROJECTIONS,
    EncoderDecoder,
    FeedForward,
    FrozenQKAttention,
    GatedFeedForward,
    HybridAttention,
    LanguageModel,
    MixtureOfExperts,
    MultiheadAttention,
    PositionalHeads,
    RandomFeatureAttention,
    SynthesizerAttention,
    TextEncoder,
    TransformerBlock,
    VisionTransformer,
    theory,
)
from ortho.adapters.layouts import Source
from ortho.attention.cache import new_cache
from ortho.attention.linear.dense_features import isotropic
from ortho.attention.linear.feature_maps import EluPlusOne
from ortho.attention.linear.random_features import iid_features
from ortho.attention.recurrent.ttt_losses import Squared
from ortho.attention.sparse.window import Window
from ortho.cost.configurations import CONFIGURATIONS, Configuration
from ortho.gates import WriteStrength
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention
from ortho.theory.estimates import Estimate
from ortho.theory.johnson_lindenstrauss import share_law
from ortho.theory.kernels import KERNELS

DOUBLE = torch.float64
GENERATOR = torch.Generator().manual_seed(1)

# Sizes of the axes that annotations name.
SIZES = {"B": 2, "N": 5, "M": 5, "K": 4, "V": 4, "d": 8, "H": 2, "m": 4, "S": 2, "R": 2, "P": 3, "D": 4, "n": 4,
         "k": 2, "count": 6, "steps": 1, "half": 2, "rounds": 2, "clusters": 3, "runs": 2, "more": 1,
         "C": 3}  # fmt: skip

WHOLE = (
    "orthogonal", "models.generation", "layers.checkpointed", "adapters", "layers.feed_forward", "gates",
    "layers.hybrid", "layers.multihead", "models.language_model", "models.encoders", "models.encoder_decoder",
    "layers.block", "layers.longformer", "layers.positional", "layers.frozen_qk", "projections.matrices",
    "projections.structured", "layers.synthesizer.layer",
    "layers.synthesizer.sources", "attention.cache", "attention.linear.random_feature_attention",
    "attention.softmax.backends", "attention.untrained.positional_attention", "attention.untrained.patterns",
    "attention.recurrent.ttt_losses", "attention.linear.linear_attention", "attention.linear.favor",
    "attention.linear.dense_features", "attention.linear.random_features", "attention.positions.alibi",
    "attention.selected.routing",
    "attention.selected.top_k", "attention.selected.importance",
    "attention.sparse.window", "attention.sparse.dilated",
    "attention.sparse.strided", "attention.sparse.fixed", "attention.sparse.block_sparse",
    "attention.sparse.global_local", "attention.sparse.flex", "cost.layers", "cost.models", "cost.attention",
    "adapters.conversion",
    "adapters.layouts", "training.recipe", "tasks.copying", "tasks.induction", "tasks.modular_addition",
    "tasks.mqar", "tasks.needle", "tasks.ngrams",
)  # fmt: skip


def model():
    return nn.Sequential(MultiheadAttention(8, 2))


BY_NAME: dict[str, Any] = {
    "q": torch.rand(2, 2, 5, 4, dtype=DOUBLE), "k": torch.rand(2, 2, 5, 4, dtype=DOUBLE),
    "v": torch.rand(2, 2, 5, 4, dtype=DOUBLE), "x": torch.rand(2, 5, 8, dtype=DOUBLE),
    "attn_mask": torch.ones(5, 5, dtype=torch.bool), "scale": 0.5, "initial_state": (torch.ones(2), torch.ones(2)),
    "generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": torch.device("cpu"),
    "B": 2, "N": 6, "M": 6, "d": 8, "H": 2, "K": 4, "V": 4, "G": 2, "L": 2, "E": 4, "m": 4, "n": 4, "C": 3,
    "d_model": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 11, "max_length": 16, "d_ff": 16, "head_dim": 4,
    "num_kv_heads": 1, "num_experts": 4, "capacity_factor": 1.5, "rows": 4, "cols": 2, "rank": 2, "k1": 2,
    "d_head": 4, "heads": 2, "chunk": 3, "image_size": 4, "patch_size": 2, "num_classes": 3, "count": 3, "steps": 3,
    "width": 2, "capacity": 8, "tokens": torch.tensor([[1, 2, 3], [4, 5, 6]]), "temperature": 1.0,
    "attention": "softmax", "segments": 1, "capacity_": 3, "spread": 0.5, "square": 0.5, "draw": "haar",
    "kind": "positive", "eps": 0.5, "c": 1.0, "beta": 0.5, "gamma": 0.5, "eta": 0.5, "cosine": 0.5, "tied": True,
    "share": 0.5, "size": 1.0, "length": 4, "features": 2, "distance": 2, "pattern": Window(2), "update": "in turn",
    "log_factor": 0.1, "error": 0.5, "order": 2, "bits": 8, "block": 2, "stride": 2, "dilation": 2, "reach": 2,
    "memory": "delta", "pairs": 3, "draws": 2, "age": 1, "decay": 0.9, "loss": Squared(), "margin": 0.5, "seed": 0,
    "model": model(), "module": model(), "feature_map": EluPlusOne(), "empty": "zero",
    "start": 1, "stop": 0, "rounds": 1, "every": 1, "name": "gaussian",
    "gates": {"beta": WriteStrength}, "count_": 3, "bias": False, "strengths": ((0.1, 0.9),),
    "orthogonalise_every": 2,
    "layers": (0,), "seed_": 0, "last": 2, "a": 0.0, "failure": 0.5, "window": 2, "table": ((0,), (0, 1)),
}  # fmt: skip

_WEIGHTS = torch.rand(4, 5, 5, dtype=DOUBLE).softmax(-1)
_TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
_RATIONAL = ((1, 2), (3, 4))
_POSITIVE = torch.eye(4, dtype=DOUBLE) + 1
_PARAMETERS = isotropic(torch.zeros(2, 2, dtype=DOUBLE), 4)
_CAUSAL = {"is_causal": True}
_UNIT = torch.nn.functional.normalize(torch.rand(3, 4, dtype=DOUBLE), dim=-1)
_COST = ortho.cost.layer(2, 6, 8, 2)

BY_FUNCTION: dict[str, dict[str, Any]] = {
    "theory.associativity.product_flops": {"inner": 3, "columns": 3},
    "theory.transitions.gated_recurrence": {"gamma": torch.rand(2, 2, 5, dtype=DOUBLE)},
    "language model.generate": {"count": 3},
    **{f"text encoder.{name}": {"attn_mask": torch.ones(2, 3, dtype=torch.bool), "tokens": _TOKENS}
       for name in ("forward", "encode")},
    **{f"vision transformer.{name}": {"images": torch.rand(2, 3, 4, 4, dtype=DOUBLE)} for name in ("forward",
    "encode")},
    "random features.forward": {},
    **{f"{name}.new_cache": {"capacity": 8} for name in ("softmax layer", "rotary layer", "hybrid")},
    "key-value cache.attend": {name: torch.rand(2, 2, 1, 4, dtype=DOUBLE) for name in "qkv"},
    **{f"{name}:{form}": _CAUSAL for name in ("path", "position-delta", "efficient-causal")
       for form in ("fast", "reference")},
    "layers.checkpointed.Checkpointed": {"blocks": [nn.Linear(2, 2)]},
    "layers.hybrid.HybridAttention": {"heads": {"learned": 1, "positional": 1}},
    "layers.hybrid.split": {"heads": {"learned": 1, "positional": 1}},
    "attention.cache.new_cache": {"capacity": 8},
    "attention.softmax.backends.backend_attention": {"backend": "math"},
    "attention.softmax.backends.serves": {"backend": "math"},
    "attention.untrained.positional_attention.positional_attention": {"patterns": ("left", "right")},
    "attention.untrained.positional_attention.positional_attention_reference": {"patterns": ("left", "right")},
    "attention.untrained.patterns.Shift": {"name": "two", "offset": 2},
    "attention.sparse.block_sparse.BlockSparse": {"blocks": ((0,), (0, 1))},
    "attention.sparse.fixed.Summaries": {"summaries": 1},
    "attention.sparse.fixed.Fixed": {"summaries": 1},
    "attention.linear.dense_features.isotropic": {"a": torch.zeros(2, dtype=DOUBLE), "K": 4},
    "attention.linear.dense_features.optimal_a": {"moment": torch.rand(3, dtype=DOUBLE)},
    "attention.linear.dense_features.dense_features": {"parameters": _PARAMETERS},
    "cost.attention.choosing": {"attention": "top-k"},
    "cost.models.mixture_of_experts": {"k": 2},
    **{f"cost.attention.{name}": {"M": 100} for name in ("columns_first", "rows_first")},
    **{f"cost.attention.{name}_tile": {"M": 100} for name in ("columns_first", "rows_first")},
    "efficient-causal:cost": {"causal": True},
    "cost.layers.projection_cost": {"projection": "frozen"},
    "cost.layers.longformer_layer": {"tokens": 2},
    "cost.models.step_memory": {"cost": _COST},
    "cost.layers.hybrid": {"heads": {"learned": 1, "positional": 1}},
    "adapters.conversion.restore": {"record": {}},
    "adapters.conversion.set_heads": {"model": nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)),
    "kinds": ["learned", "linear"]},
    "adapters.layouts.Source": {"name": "q_proj", "holds": "q"},
    "adapters.layouts.Layout": {"q": Source("q_proj", "q"), "k": Source("k_proj", "k")},
    "training.recipe.Recipe": {"rate": 0.1},
    **{f"theory.associativity.{name}": dict.fromkeys(parts, _RATIONAL) for name, parts in {
        "by_chunks": "qkv", "by_states": "qkv", "by_sums": "qkv", "divided": ("rows",), "left_first": "abc",
        "product": "ab", "right_first": "abc", "transpose": "a", "with_ones": "v"}.items()},
    "theory.transitions.chunk_keys": {"kind": "random"},
    "theory.variance.reductions": {"data": "isotropic"},
    "theory.variance.sample_data": {"name": "isotropic", "tokens": 3},
    "theory.variance.mean_log_moment": {"parameters": _PARAMETERS},
    "theory.transitions.affinity_error": {"step": torch.square, "one": _UNIT, "other": _UNIT},
    "theory.johnson_lindenstrauss.law_test": {"law": share_law("haar", 8, 2)},
    "theory.kernels.gram": {"kernel": KERNELS["softmax"]},
    **{f"theory.kernels.{name}": {"matrix": _POSITIVE} for name in ("features_of", "least_eigenvalue", "rank")},
    "theory.kernels.copying": {"distance": 1},
    "theory.kernels.copy_error": {"weights": _WEIGHTS[0]},
    "theory.unbiasedness.omegas": {"draw": iid_features},
    "theory.unbiasedness.unbiasedness": {"draw": iid_features, "name": "positive"},
    "theory.unbiasedness.ratios": {"name": "positive"},
    **{f"theory.unbiasedness.{name}": {"found": Estimate(1.0, 0.1)} for name in ("rejects", "p_value")},
    "theory.variance.features": {"kind": "positive"},
    "theory.variance.log_moments": {"parameters": _PARAMETERS},
    "theory.variance.row_estimates": {"kind": "positive"},
    "theory.variance.log_variances": {"log_second_moments": torch.rand(3, dtype=DOUBLE)},
    "theory.variance.where_orthogonality_helps": {"share": 0.05},
}  # fmt: skip


def _public(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions and classes that a module defines and lists, or all whose name does not begin with `_`."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    return {
        name: one
        for name, one in found.items()
        if (inspect.isfunction(one) or inspect.isclass(one))
        and one.__module__ == module.__name__
        and not inspect.isabstract(one)
        and not (inspect.isclass(one) and issubclass(one, tuple))
    }


@cache
def built() -> dict[str, tuple[nn.Module | Any, tuple[str, ...]]]:
    """Objects by name, and the methods of each that are called."""
    kind: dict[str, Any] = {"dtype": DOUBLE, "generator": torch.Generator().manual_seed(2)}
    found: dict[str, tuple[Any, tuple[str, ...]]] = {
        f"{name} layer": (MultiheadAttention(8, 2, attention=name, **kind), ("forward", "new_cache"))
        for name in ("softmax", "linear", "favor++", "gated-delta", "delta-product", "kda", "fox", "window",
        "routing",
                     "sparse-linear", "ttt", "rotary")
    }  # fmt: skip
    found |= {f"{name} projection": (PROJECTIONS[name](8, 2, **kind), ("forward",)) for name in PROJECTIONS}
    return found | {
        "hybrid": (HybridAttention(8, 2, heads={"learned": 1, "window": 1}, **kind), ("forward", "new_cache")),
        "positional": (PositionalHeads(8, 2, **kind), ("forward", "new_cache")),
        "stopped": (FrozenQKAttention(8, 2, **kind), ("forward",)),
        "synthesizer": (SynthesizerAttention(8, 2, 16, **kind), ("forward", "weights")),
        "block": (TransformerBlock(8, 2, **kind), ("forward",)),
        "feed-forward": (FeedForward(8, **kind), ("forward",)),
        "gated feed-forward": (GatedFeedForward(8, **kind), ("forward",)),
        "experts": (MixtureOfExperts(8, 4, **kind), ("forward", "route")),
        "language model": (LanguageModel(11, 8, 2, 1, max_length=16, **kind), ("forward", "generate", "new_caches")),
        "text encoder": (TextEncoder(11, 8, 2, 1, max_length=16, **kind), ("forward", "encode")),
        "vision transformer": (VisionTransformer(4, 2, 8, 2, 1, num_classes=3, **kind), ("forward", "encode")),
        "encoder-decoder": (
            EncoderDecoder(11, 8, 2, 1, max_length=16, **kind),
            ("forward", "encode", "decode", "generate"),
        ),
        "random features": (RandomFeatureAttention(4, 8, **kind), ("forward", "redraw")),
        "write strength": (WriteStrength(8, 2, **kind), ("forward",)),
        "configuration": (_tiny(), ("build", "inputs", "cost", "step_by_part")),
        # Two blocks: for one, [None] says that it starts anew.
        "recomputed": (Checkpointed([TransformerBlock(8, 2, **kind) for _ in range(2)]), ("forward",)),
        "recomputed attention": (CheckpointedAttention(), ("forward",)),
        "key-value cache": (new_cache("softmax", 10_000), ("attend",)),
        "pattern": (Window(2), ("pairs",)),
    }


def _tiny() -> Configuration:
    return replace(CONFIGURATIONS["BERT-base"], d=8, H=2, L=1, N=6, sizes={"vocab_size": 11, "max_length": 16})


@cache
def targets() -> dict[str, Callable[..., Any]]:
    """Everything that is called, by label."""
    found: dict[str, Callable[..., Any]] = {}
    for m in MECHANISMS.values():
        found |= {f"{m.name}:fast": m.fast, f"{m.name}:reference": m.reference, f"{m.name}:cost": m.cost}
    modules = [*WHOLE, *(f"theory.{m.name}" for m in iter_modules(theory.__path__))]
    for name in modules:
        package = "paper" if name.startswith(("tasks.", "training.")) else "ortho"
        module = import_module(f"{package}.{name}")
        found |= {f"{name}.{label}": one for label, one in _public(module).items()}
    found |= {
        f"{name}.{method}": getattr(one, method) for name, (one, methods) in built().items() for method in methods
    }
    return {label: one for label, one in found.items() if label not in LEFT_OUT}


# Not called: steps of other functions, which have checked the arguments; functions of any number of arguments;
# functions that are only run compiled.
LEFT_OUT = {
    "cost.layers.passes_gradient",
    "layers.block.DecoderCache", "cost.layers.Cost", "cost.models.RecomputedCost",
    "cost.attention.DecodeCost", "attention.selected.routing.members_of",
    "favor++ layer.new_cache", "adapters.conversion.from_pretrained",
    "layers.hybrid.HybridCache",
    *(f"attention.cache.{name}Cache" for name in ("", "KeyValue", "Pattern", "Rotary", "State")),
    *(f"attention.untrained.patterns.{name}" for name in
      ("added", "cubes", "exact", "running", "sum_of_cubes", "times", "windows")),
    *(f"attention.linear.linear_attention.{name}" for name in
      ("kernel_mechanism", "kernel_weights")), "attention.linear.favor.exponentials",
    *(f"layers.synthesizer.sources.{name}" for name in ("product", "shared")),
    "attention.sparse.strided.residue_band", "attention.sparse.window.evenly", "attention.sparse.window.tile_width",
    "attention.sparse.flex.flex_pattern_attention", "cost.layers.added", "theory.transitions.gated_step",
    "theory.reachability.reached", "theory.transitions.unit_keys", "attention.linear.dense_features.dense_features",
}  # fmt: skip
