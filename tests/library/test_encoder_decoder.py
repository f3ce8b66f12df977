"""The encoder-decoder: compared with PyTorch's layers, causality, padding, decoding, dropout, errors."""

import pytest
import torch
from drawn_models import assert_near, drawn, norm
from refusals import refuses
from seeded import generator
from torch import nn
from torch.nn.functional import dropout as drop

from ortho import FrozenQKAttention, HybridAttention, PositionalHeads
from ortho.layers.positional import sinusoidal_positions
from ortho.models.encoder_decoder import EncoderDecoder

START, STOP, VOCAB = 1, 2, 11
SEVEN_AND_ONE = {"layer": HybridAttention, "heads": {"learned": 1, "positional": 3}}
ARMS = {
    "learned": {},
    "frozen": {name: {"projection": "frozen"} for name in ("encoder", "decoder", "cross")},
    "stopped": {
        "encoder": {"layer": FrozenQKAttention},
        "decoder": {"layer": FrozenQKAttention},
        "cross": {"projection": "stopped"},
    },
    "hybrid": {"encoder": SEVEN_AND_ONE, "decoder": SEVEN_AND_ONE, "cross": {"num_kv_heads": 2}},
    "positional": {"encoder": {"layer": PositionalHeads}, "cross": {"attention": "linear"}},
    "one head": {"encoder": {"num_heads": 1, "head_dim": 2}, "decoder": {"attention": "rotary"}, "max_length": None},
}
EVERY_ARM = pytest.mark.parametrize("arm", ARMS)


def model(**kwargs):
    """A small model in evaluation mode, with every parameter drawn anew, so that no two logits are near each other."""
    kwargs = {"max_length": 12, "dtype": torch.float64, "generator": generator(), **kwargs}
    return drawn(EncoderDecoder(VOCAB, 8, 4, 2, **kwargs).eval())


def texts(B=3, M=7, N=6, seed=1):
    source, target = (torch.randint(3, VOCAB, (B, n), generator=generator(seed)) for n in (M, N))
    return source, target


def padding():
    """Where tokens are, in three sources of up to seven tokens."""
    return torch.arange(7) < torch.tensor([7, 4, 1])[:, None]


def copied(theirs, **modules):
    """PyTorch's layer with this package's weights: attention layers by their names, norms in their order."""
    network, norms = modules.pop("network"), modules.pop("norms")
    for name, attention in modules.items():
        setattr(theirs, name, attention.to_torch())
    pairs = {"linear1.weight": network.weight_up, "linear1.bias": network.bias_up}
    pairs |= {"linear2.weight": network.weight_down, "linear2.bias": network.bias_down}
    for i, one in enumerate(norms, 1):
        pairs |= {f"norm{i}.weight": one.weight, f"norm{i}.bias": one.bias}
    with torch.no_grad():
        for name, value in pairs.items():
            theirs.get_parameter(name).copy_(value)
    return theirs.eval()


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_it_is_pytorchs_layers_one_after_the_other(positions):
    ours = model(bias=True, positions=positions, d_ff=5)
    (source, target), mask = texts(), padding()
    kind = {"batch_first": True, "norm_first": True, "activation": "gelu", "dtype": torch.float64}
    waves = sinusoidal_positions(12, 8, dtype=torch.float64) * 0.02 * 2**0.5
    tables = {"source": ours.embed_source, "target": ours.embed_target}
    assert tables["source"].tokens is None  # the target's are read
    x, y = (
        tables["target"].tokens[tokens]
        + (waves if positions == "sinusoidal" else tables[side].places)[: tokens.shape[1]]
        for side, tokens in (("source", source), ("target", target))
    )
    for block in ours.encoder:
        theirs = nn.TransformerEncoderLayer(8, 4, 5, 0.0, **kind)
        norms = (block.norm_attention, block.norm_feed_forward)
        copied(theirs, self_attn=block.attention, network=block.feed_forward, norms=norms)
        x = theirs.train()(x, src_key_padding_mask=~mask)  # in evaluation a fused path packs the batch
    x = norm(x, ours.norm_source)
    assert_near(ours.encode(source, mask)[mask], x[mask])
    for block in ours.decoder:
        theirs = nn.TransformerDecoderLayer(8, 4, 5, 0.0, **kind)
        norms = (block.norm_attention, block.norm_cross, block.norm_feed_forward)
        copied(theirs, self_attn=block.attention, multihead_attn=block.cross, network=block.feed_forward, norms=norms)
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        y = theirs(y, x, tgt_mask=future, memory_key_padding_mask=~mask)
    assert_near(ours(source, target, mask), norm(y, ours.norm_target) @ tables["target"].tokens.T)


@EVERY_ARM
def test_what_stands_in_the_padding_and_how_long_it_is_makes_no_difference(arm):
    ours, (source, target), mask = model(**ARMS[arm]), texts(), padding()
    logits = ours(source, target, mask)
    assert_near(ours(torch.where(mask, source, 0), target, mask), logits)
    for row, length in enumerate((7, 4, 1)):
        alone = ours(source[row : row + 1, :length], target[row : row + 1])
        assert_near(alone[0], logits[row])
    unmasked = ours(source, target)
    assert (unmasked - logits)[1:].abs().amax((1, 2)).min() > 1e-6  # without the mask it makes one


@EVERY_ARM
def test_every_trained_parameter_has_a_gradient(arm):
    """Except the norm before a cross-attention with a stopped gradient: its output makes nothing but queries."""
    ours, (source, target) = model(**ARMS[arm]), texts()
    ours(source, target, padding()).square().sum().backward()
    without = {name for name, p in ours.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert without == ({f"decoder.{i}.norm_cross.weight" for i in range(2)} if arm == "stopped" else set())


def greedy(ours, source, mask, most):
    """Greedy decoding without caches: everything written is read again for each token, one row at a time."""
    rows = []
    for b in range(len(source)):
        written = [START]
        while len(written) <= most and STOP not in written[1:]:
            logits = ours(source[b : b + 1], torch.tensor([written]), mask[b : b + 1])
            written.append(int(logits[0, -1].argmax()))
        rows.append(written[1:])
    longest = max(map(len, rows))
    return torch.tensor([row + [STOP] * (longest - len(row)) for row in rows])


@EVERY_ARM
def test_greedy_decoding_with_caches_is_that_without(arm):
    ours, ends = model(**ARMS[arm]), set()
    for seed in range(4 if arm == "learned" else 2):
        source, mask = texts(seed=seed)[0], padding()
        got = ours.generate(source, mask, start=START, stop=STOP, max_length=9)
        assert torch.equal(got, greedy(ours, source, mask, 9))
        ends |= set((got == STOP).any(1).tolist())
    if ours.max_length is not None:
        got = ours.generate(source, mask, start=START, stop=STOP)
        assert torch.equal(got, greedy(ours, source, mask, 12))
    assert arm != "learned" or ends == {True, False}  # some rows end and some do not


def test_decoding_saves_nothing_for_gradients():
    ours, saved = model(), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        ours.generate(texts()[0], start=START, stop=STOP)
        assert not saved
        ours(*texts())
    assert saved


def test_dropout_in_training_alone():
    ours, (source, target) = model(dropout=0.5), texts()
    without = model()
    assert torch.equal(ours(source, target), without(source, target))
    ours.train()
    torch.manual_seed(0)
    first, second = ours(source, target), ours(source, target)
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(0)
    assert torch.equal(ours(source, target), first)


def test_dropout_of_embeddings_and_of_each_part(monkeypatch):
    """In a model with one layer: two embeddings, two parts of the encoder's block, three of the decoder's."""
    shapes = []

    def watched(x, p, training, inplace=False):
        shapes.append((tuple(x.shape), p))
        return drop(x, p, training, inplace)

    monkeypatch.setattr("torch.nn.functional.dropout", watched)
    ours = EncoderDecoder(VOCAB, 8, 2, 1, max_length=9, dropout=0.1)
    ours(*texts())
    read, written = ((3, 7, 8), 0.1), ((3, 6, 8), 0.1)
    assert shapes == [read] * 3 + [written] * 4


def test_the_encoder_s_layers_take_their_arguments():
    made = EncoderDecoder(VOCAB, 8, 2, 1, max_length=8, encoder={"dropout": 0.1, "bias": True})
    layer = made.encoder[0].attention
    assert layer.dropout == 0.1
    assert layer.bias_v is not None
    assert made.encoder[0].dropout.p == 0
    assert made.encoder[0].norm_attention.bias is None
    refuses("dropout: expected a number in", EncoderDecoder, VOCAB, 8, 2, 1, max_length=8, encoder={"dropout": 2.0})
