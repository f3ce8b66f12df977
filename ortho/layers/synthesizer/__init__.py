"""Synthesizers: attention whose weights need no products of queries and keys (Tay et al. 2021, arXiv:2005.00743)."""

from ortho.layers.synthesizer.layer import SynthesizerAttention
from ortho.layers.synthesizer.sources import (
    SOURCES,
    Call,
    Dense,
    DotProduct,
    FactoredDense,
    FactoredRandom,
    FixedRandom,
    LogitSource,
    Random,
    Seen,
)

__all__ = [
    "SOURCES",
    "Call",
    "Dense",
    "DotProduct",
    "FactoredDense",
    "FactoredRandom",
    "FixedRandom",
    "LogitSource",
    "Random",
    "Seen",
    "SynthesizerAttention",
]
