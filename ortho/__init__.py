"""Orthogonal random attention and its rivals: definitions, fast forms, exact costs. An example::

    import torch
    from ortho import LanguageModel, MultiheadAttention, cost, freeze_qk

    x = torch.randn(2, 128, 768)
    layer = MultiheadAttention(768, 12, attention="window", width=64, projection="frozen")
    y = layer(x, is_causal=True)  # (2, 128, 768); `python -m ortho mechanisms` lists all names
    model = LanguageModel(50257, 768, 12, 12, max_length=1024, attention="favor")
    text = model.generate(torch.tensor([[464, 3290]]), 20)  # token by token, with caches
    step = cost.of(layer, x)  # what a call costs: FLOPs, parameters, bytes kept for the backward pass
    freeze_qk(torch.nn.TransformerEncoderLayer(768, 12, batch_first=True))  # in a model of your own

Functions on q, k, v are in `ortho.attention`, and `ortho.attention.register` enters one of your own. `PROJECTIONS` and
`HEADS` map the names that a layer takes to what they stand for.
"""

from ortho import attention, cost, orthogonal, projections
from ortho.adapters import freeze_qk, to_standard, unfreeze_qk
from ortho.attention import MECHANISMS, RandomFeatureAttention
from ortho.attention.cache import Cache, new_cache
from ortho.layers.block import TransformerBlock
from ortho.layers.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.induction import InductionHeads
from ortho.layers.longformer import LongformerAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.layers.synthesizer import SynthesizerAttention
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.encoders import TextEncoder, VisionTransformer
from ortho.models.language_model import LanguageModel
from ortho.projections import PROJECTIONS

__version__ = "0.1.0"

__all__ = [
    "HEADS",
    "MECHANISMS",
    "PROJECTIONS",
    "Cache",
    "ConvolvedAttention",
    "EncoderDecoder",
    "FeedForward",
    "FrozenQKAttention",
    "GatedFeedForward",
    "HybridAttention",
    "InductionHeads",
    "LanguageModel",
    "LongformerAttention",
    "MixtureOfExperts",
    "MultiheadAttention",
    "PositionalHeads",
    "RandomFeatureAttention",
    "SynthesizerAttention",
    "TextEncoder",
    "TransformerBlock",
    "VisionTransformer",
    "attention",
    "cost",
    "freeze_qk",
    "new_cache",
    "orthogonal",
    "projections",
    "to_standard",
    "unfreeze_qk",
]
