"""Small float64 layers and models of every kind, with their inputs, on which `torch.compile` is tested."""

import adapted_models
import torch

from ortho import MECHANISMS, PROJECTIONS, HybridAttention, LanguageModel, MultiheadAttention, TransformerBlock
from ortho.adapters import freeze_qk
from ortho.attention import FORMS
from ortho.attention.linear.random_feature_attention import MAPS, RandomFeatureAttention
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention
from ortho.layers.feed_forward import MixtureOfExperts
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.hybrid import HEADS
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.layers.synthesizer import SOURCES, SynthesizerAttention
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.encoders import TextEncoder, VisionTransformer

D, H, WORDS, LONGEST = 8, 2, 11, 16
KIND = {"dtype": torch.float64}
TEXT = {"max_length": LONGEST, **KIND}


def sequences(n, width=D):
    return torch.randn(1, n, width, generator=torch.Generator().manual_seed(n), **KIND)


def tokens(n):
    return torch.randint(0, WORDS, (1, n), generator=torch.Generator().manual_seed(n))


def bidirectional(n):
    return (sequences(n),), {}


def causal(n):
    return (sequences(n),), {"is_causal": True}


def padded(n):
    return (sequences(n),), {"key_padding_mask": torch.arange(n)[None] > n - 3}


def text(n):
    return (tokens(n),), {}


def padded_text(n):
    return (tokens(n),), {"key_padding_mask": torch.arange(n)[None] >= n - 2}


def pair(n):
    return (tokens(n), tokens(n - 2)), {"source_mask": torch.arange(n)[None] < n - 1}


def images(n):
    """A batch of n images: the number of tokens of an image model is fixed, so the size of the batch varies instead."""
    return (torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(n), **KIND),), {}


def layer(given=causal, heads=H, **kwargs):
    return lambda: MultiheadAttention(D, heads, **kwargs, **KIND), given


def model(given=text, **kwargs):
    return lambda: LanguageModel(WORDS, D, H, 1, **TEXT, **kwargs), given


def frozen(name):
    def given(n):
        x = sequences(n, adapted_models.D)
        return ((x, x.flip(1)) if name == "decoder" else (x,)), {}

    return lambda: freeze_qk(adapted_models.make(name), stop_gradient=name == "ortho-frozen"), given


# Name -> (what makes it, its inputs at each length as (arguments, keywords)).
CASES = {
    f"{name}, {form}": layer(causal if m.causal else bidirectional, attention=name, form=form)
    for name, m in MECHANISMS.items()
    for form in FORMS
}
CASES |= {f"{name} projection": layer(projection=name) for name in PROJECTIONS}
CASES |= {
    "grouped": layer(num_kv_heads=1, bias=True),
    "padded": layer(padded, attention="linear"),
    "padded, tiled": layer(padded, attention="alibi"),
    "exchanged": (lambda: FrozenQKAttention(D, H, **KIND), causal),
    "positional": (lambda: PositionalHeads(D, H, **KIND), causal),
    "convolved": (lambda: ConvolvedAttention(D, H, **KIND), causal),
    "positional, reference": (lambda: PositionalHeads(D, H, form="reference", **KIND), bidirectional),
}
CASES |= {
    f"{kind} heads": (
        lambda kind=kind: HybridAttention(D, H, heads=[(kind, 1), ("learned", 1)], **KIND),
        causal if kind not in MECHANISMS or MECHANISMS[kind].causal else bidirectional,
    )
    for kind in HEADS
}
CASES |= {
    f"redrawn {name}": layer(
        bidirectional if name == "dense" else causal, attention=RandomFeatureAttention(D // H, 8, map=name, **KIND)
    )
    for name in MAPS
}
CASES |= {
    f"synthesizer {source}": (lambda source=source: SynthesizerAttention(D, H, LONGEST, source=source, **KIND), causal)
    for source in (*SOURCES, tuple(SOURCES))
}
CASES |= {
    f"experts, {form}, room {room}": (
        lambda form=form, room=room: MixtureOfExperts(D, 3, form=form, capacity_factor=room, **KIND),
        bidirectional,
    )
    for form in FORMS
    for room in (None, 1.0)
}
CASES |= {
    f"recomputed {name}": layer(attention=CheckpointedAttention(name, "fast"))
    for name in ("softmax", "linear", "window")
}
CASES |= {
    f"recomputed blocks, {name}": (
        lambda name=name: Checkpointed([TransformerBlock(D, H, attention=name, **KIND) for _ in range(2)]),
        causal,
    )
    for name in ("softmax", "window")
}
CASES |= {
    "language model": model(),
    "language model, window": model(attention="window"),
    "language model, fox": model(attention="fox", positions="sinusoidal"),
    "language model, hybrid": model(layer=HybridAttention, heads={"selective-induction": 1, "positional": 1}),
    "text encoder": (lambda: TextEncoder(WORDS, D, H, 1, **TEXT), padded_text),
    "vision transformer": (lambda: VisionTransformer(4, 2, D, H, 1, num_classes=3, channels=1, **KIND), images),
    "encoder-decoder": (lambda: EncoderDecoder(WORDS, D, H, 1, **TEXT), pair),
    "encoder-decoder, linear": (lambda: EncoderDecoder(WORDS, D, H, 1, cross={"attention": "linear"}, **TEXT), pair),
}
CASES |= {f"frozen {name}": frozen(name) for name in adapted_models.MODELS}
