"""Orthogonal random attention and its rivals: definitions, fast forms, exact costs."""

from ortho import attention, cost, orthogonal, projections
from ortho.adapters import freeze_qk, set_heads, standard_heads, unfreeze_qk
from ortho.attention import MECHANISMS, RandomFeatureAttention
from ortho.attention.decoding import Cache, new_cache
from ortho.conversion import to_standard
from ortho.encoder_decoder import EncoderDecoder
from ortho.encoders import TextEncoder, VisionTransformer
from ortho.experts import GatedFeedForward, MixtureOfExperts
from ortho.hybrid import HEADS, HybridAttention
from ortho.induction import InductionHeads
from ortho.kv_shift import ShiftedKeysValues
from ortho.layers import FeedForward, MultiheadAttention, TransformerBlock
from ortho.models import LanguageModel
from ortho.positional_layers import PositionalHeads
from ortho.projections import PROJECTIONS
from ortho.short_convolution import ConvolvedAttention
from ortho.stopped import StoppedAttention
from ortho.synthesizer import SynthesizerAttention

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
    "MixtureOfExperts",
    "MultiheadAttention",
    "PositionalHeads",
    "RandomFeatureAttention",
    "ShiftedKeysValues",
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
    "set_heads",
    "standard_heads",
    "to_standard",
    "unfreeze_qk",
]
