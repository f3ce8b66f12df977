"""Orthogonal random attention and its rivals: definitions, fast forms, exact costs."""

from ortho import attention, cost, orthogonal, projections
from ortho.attention import MECHANISMS, RandomFeatureAttention
from ortho.attention.decoding import Cache, new_cache
from ortho.conversion import to_standard
from ortho.encoders import TextEncoder, VisionTransformer
from ortho.experts import GatedFeedForward, MixtureOfExperts
from ortho.layers import FeedForward, MultiheadAttention, TransformerBlock
from ortho.models import LanguageModel
from ortho.projections import PROJECTIONS
from ortho.synthesizer import SynthesizerAttention

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "PROJECTIONS",
    "Cache",
    "FeedForward",
    "GatedFeedForward",
    "LanguageModel",
    "MixtureOfExperts",
    "MultiheadAttention",
    "RandomFeatureAttention",
    "SynthesizerAttention",
    "TextEncoder",
    "TransformerBlock",
    "VisionTransformer",
    "attention",
    "cost",
    "new_cache",
    "orthogonal",
    "projections",
    "to_standard",
]
