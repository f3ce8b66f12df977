"""Costs of the encoder-decoder and of attention to a context: declared costs equal counted ones, exactly."""

from itertools import product

import pytest
import torch
from refusals import refuses

from ortho import PROJECTIONS, FrozenQKAttention, HybridAttention, MultiheadAttention, PositionalHeads
from ortho.cost import layer, model, of
from ortho.cost.layers import cross_layer
from ortho.cost.models import encoder_decoder
from ortho.models.encoder_decoder import EncoderDecoder

SIZES = [(1, 5, 3, 8, 2), (2, 7, 7, 12, 3), (3, 4, 9, 16, 1), (2, 1, 6, 64, 4), (1, 6, 1, 24, 4)]  # B, N, M, d, H
HYBRIDS = ({"learned": 1, "positional": 3}, {"learned": 2, "stopped": 2}, {"frozen": 1, "structured-stopped": 3})
STOPPED = {"layer": FrozenQKAttention, "projection": "stopped"}
ARMS = {
    "learned": {},
    "frozen": {name: {"projection": "frozen"} for name in ("encoder", "decoder", "cross")},
    "structured": {name: {"projection": "structured"} for name in ("encoder", "decoder", "cross")},
    "stopped": {"encoder": STOPPED, "decoder": STOPPED, "cross": {"projection": "stopped"}},
    "stopped by default": {name: {"layer": FrozenQKAttention} for name in ("encoder", "decoder", "cross")},
    "positional": {"encoder": {"layer": PositionalHeads}, "decoder": {"layer": PositionalHeads}},
    "one head": {"encoder": {"num_heads": 1, "head_dim": 2}, "cross": {"num_heads": 2, "num_kv_heads": 1}},
    "linear": {"encoder": {"attention": "linear"}, "decoder": {"attention": "window", "form": "reference"}},
    **{
        str(heads): {name: {"layer": HybridAttention, "heads": heads} for name in ("encoder", "decoder")}
        for heads in HYBRIDS
    },
}


class Beside(torch.nn.Module):
    """A layer that is called with the context it attends to."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, context):
        return self.attention(x, context)


def counted(module, *inputs, **kwargs):
    return derived(of(module, *inputs, **kwargs))


def derived(cost):
    return cost.forward, cost.backward, cost.trained, cost.frozen


def used(made):
    """The model, in which norms before a stopped cross-attention no longer require the gradient that they never get."""
    for one in made.decoder:
        if getattr(one.cross.projection, "stop_gradient", False):
            one.norm_cross.requires_grad_(False)
    return made


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_cross_layer(projection, form):
    for B, N, M, d, H in SIZES:
        variants = [{}, {"num_kv_heads": 1}, {"bias": True}, {"num_kv_heads": 1, "bias": True}, {"head_dim": 2}]
        for variant in variants:
            kind = {"projection": projection, "form": form, **variant}
            attention = Beside(MultiheadAttention(d, H, **kind))
            # With a stopped projection x gets no gradient.
            x = torch.zeros(B, N, d, requires_grad=not projection.endswith("stopped"))
            context = torch.zeros(B, M, d, requires_grad=True)
            assert counted(attention, x, context) == derived(cross_layer(B, N, M, d, H, **kind))


@pytest.mark.parametrize("projection", ["learned", "frozen"])
def test_a_context_as_long_as_x_costs_what_self_attention_does(projection):
    own, beside = layer(2, 9, 8, 2, projection=projection), cross_layer(2, 9, 9, 8, 2, projection=projection)
    assert derived(own) == derived(beside)


@pytest.mark.parametrize("arm", ARMS)
def test_encoder_decoder(arm):
    for (B, N, M), bias, L in product([(2, 5, 7), (1, 6, 3)], (False, True), (1, 2)):
        if bias and arm not in ("learned", "frozen", "stopped"):
            continue  # not every layer has biases
        kind = {"max_length": 9, "bias": bias, **ARMS[arm]}
        made = used(EncoderDecoder(11, 12, 4, L, d_ff=10, **kind))
        source, target = torch.zeros(B, M, dtype=torch.long), torch.zeros(B, N, dtype=torch.long)
        declared = encoder_decoder(B, M, N, 12, 4, L, vocab_size=11, d_ff=10, **kind)
        unused = sum(p.numel() for one in made.decoder for p in one.norm_cross.parameters() if not p.requires_grad)
        # The counter has no rule for the search for rows without a key.
        looking = any(isinstance(one, FrozenQKAttention) for one in made.encoder.modules())
        for mask in [None] if looking else [None, torch.ones(B, M, dtype=torch.bool)]:
            forward, backward, trained, frozen = counted(made, source, target, source_mask=mask)
            assert (forward, backward, trained + unused, frozen - unused) == derived(declared)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("positions", "most"), [("learned", 9), ("sinusoidal", 9), ("learned", None)])
def test_embeddings(positions, most, shared):
    kind = {"positions": positions, "max_length": most, "shared_embeddings": shared}
    made = EncoderDecoder(11, 8, 2, 1, **kind)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert counted(made, tokens, tokens) == derived(encoder_decoder(2, 5, 5, 8, 2, 1, vocab_size=11, **kind))


def test_a_decoder_alone_is_a_language_model():
    """The rest of the cost is that of the encoder and of cross-attention."""
    whole = encoder_decoder(2, 6, 5, 8, 2, 3, vocab_size=11, max_length=9)
    single = model(2, 5, 8, 2, 3, vocab_size=11, max_length=9)
    reading = model(2, 6, 8, 2, 3, vocab_size=11, max_length=9, causal=False)
    beside = cross_layer(2, 5, 6, 8, 2)
    read_out = 2 * 2 * 6 * 8 * 11  # the encoder has none
    assert whole.forward == single.forward + reading.forward - read_out + 3 * beside.forward
    assert whole.backward == single.backward + reading.backward - 2 * read_out + 3 * beside.backward


@pytest.mark.bad_input
def test_errors():
    sizes = {"vocab_size": 11, "max_length": 9}
    with pytest.raises(TypeError, match="encoder: expected the layer MultiheadAttention or .*, got type"):
        encoder_decoder(1, 5, 5, 8, 2, 1, encoder={"layer": torch.nn.Linear}, **sizes)
    with pytest.raises(TypeError, match="cross: expected the layer MultiheadAttention or FrozenQKAttention, got"):
        encoder_decoder(1, 5, 5, 8, 2, 1, cross={"layer": HybridAttention}, **sizes)
    with pytest.raises(ValueError, match="attention: expected one of 'softmax', got 'linear'"):
        encoder_decoder(1, 5, 5, 8, 2, 1, cross={"attention": "linear"}, **sizes)
    refuses("H: expected a divisor of d = 8, got 3", cross_layer, 1, 5, 5, 8, 3)
    refuses("M: expected at most max_length = 9, got 10", encoder_decoder, 1, 10, 5, 8, 2, 1, **sizes)
    refuses("N: expected at most max_length = 9, got 10", encoder_decoder, 1, 5, 10, 8, 2, 1, **sizes)
    refuses("N: expected at most max_length = 9, got 10", model, 1, 10, 8, 2, 1, **sizes)
