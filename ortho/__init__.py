"""Orthogonal random attention and its rivals: definitions, fast forms, exact costs.

`MultiheadAttention` is the layer, `LanguageModel` a whole model; `freeze_qk` converts models of other libraries.
`MECHANISMS`, `PROJECTIONS` and `HEADS` map the names that a layer takes to what they stand for. `cost` has the costs of
layers and models.
"""

from ortho import attention, cost, orthogonal, projections
from ortho.adapters import freeze_qk, to_standard, unfreeze_qk
from ortho.attention import MECHANISMS, RandomFeatureAttention
from ortho.attention.cache import Cache, new_cache
from ortho.layers.block import TransformerBlock
from ortho.layers.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from ortho.layers.hybrid import HEADS, HybridAttention
from ortho.layers.induction import InductionHeads
from ortho.layers.longformer import LongformerAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.layers.stop_gradient import StoppedAttention
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
    "GatedFeedForward",
    "HybridAttention",
    "InductionHeads",
    "LanguageModel",
    "LongformerAttention",
    "MixtureOfExperts",
    "MultiheadAttention",
    "PositionalHeads",
    "RandomFeatureAttention",
    "StoppedAttention",
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
