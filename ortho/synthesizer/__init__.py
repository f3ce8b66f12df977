"""Synthesizers: attention whose weights need no products of queries and keys (Tay et al. 2021, arXiv:2005.00743)."""

from ortho.synthesizer.by_position import FactoredRandom, FixedRandom, Random
from ortho.synthesizer.by_token import Dense, DotProduct, FactoredDense
from ortho.synthesizer.layer import SynthesizerAttention
from ortho.synthesizer.source import Call, LogitSource, Seen, SourceCost
from ortho.synthesizer.sources import SOURCES

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
    "SourceCost",
    "SynthesizerAttention",
]
