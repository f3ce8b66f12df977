"""The arms of the translation experiments: which heads an encoder-decoder has, and what they cost to train."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ortho._checks import one_of, positive_int
from ortho.attention.untrained.positional_attention import SEVEN
from ortho.cost.models import encoder_decoder
from ortho.layers.hybrid import HybridAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.stop_gradient import StoppedAttention
from ortho.models.encoder_decoder import EncoderDecoder

H = len(SEVEN) + 1  # heads of a layer: one beside the fixed ones
FIXED = partial(PositionalHeads, patterns=SEVEN)


def arms(d: int) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Arm -> the arguments of `EncoderDecoder` that say what its attention is, at width d.

    'fixed' heads have the patterns `SEVEN`, 'frozen' ones are orthogonal random attention, and 'stopped' ones have no
    gradient through queries and keys either. '1 learned' is as wide as one of 8 heads, '1 learned, wide' as all.
    """
    frozen = {"projection": "frozen"}
    return {
        "8 learned": {},
        "7 fixed + 1 learned": {"encoder": {"layer": HybridAttention, "heads": {"learned": 1, "positional": H - 1}}},
        "1 learned": {"encoder": {"num_heads": 1, "head_dim": positive_int("d", d) // H}},
        "1 learned, wide": {"encoder": {"num_heads": 1}},
        "8 frozen": {"encoder": frozen},
        "8 frozen everywhere": {"encoder": frozen, "decoder": frozen, "cross": frozen},
        "8 stopped": {"encoder": {"layer": StoppedAttention, "projection": "stopped"}},
        "7 stopped + 1 learned": {"encoder": {"layer": HybridAttention, "heads": {"learned": 1, "stopped": H - 1}}},
    }


def build(
    arm: str, vocab_size: int, d: int, L: int, *, max_length: int, dropout: float, generator: torch.Generator
) -> EncoderDecoder:
    """The untrained model, with sinusoidal positions; its weights are drawn on the CPU.

    Raises ValueError for an unknown arm, and what `EncoderDecoder` raises.
    """
    known = arms(d)
    settings = dict(known[one_of("arm", arm, known)])
    encoder = dict(settings.get("encoder", {}))
    if "heads" in encoder:
        encoder["heads"] = [(FIXED if kind == "positional" else kind, n) for kind, n in encoder["heads"].items()]
    settings["encoder"] = encoder
    own: dict[str, Any] = {"dropout": dropout, "generator": generator, **settings}
    return EncoderDecoder(vocab_size, d, H, L, max_length=max_length, positions="sinusoidal", **own)


def training_flop(arm: str, B: int, M: int, N: int, d: int, L: int, *, vocab_size: int) -> int:
    """FLOPs of the matrix products of a training step on sources (B, M) and targets (B, N), without the loss.

    Raises TypeError or ValueError for sizes below 1, and ValueError for an unknown arm.
    """
    known = arms(d)
    settings: dict[str, Any] = dict(known[one_of("arm", arm, known)])
    # Fixed patterns cost no products, whichever they are; nor do positions, however many.
    return int(encoder_decoder(B, M, N, d, H, L, vocab_size=vocab_size, max_length=None, **settings).step)
