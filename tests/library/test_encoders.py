"""Whole models, compared with their formulas and PyTorch's layers; causality, padding, decoding; drawing tokens."""

from itertools import product

import pytest
import torch
from seeded import generator
from torch import nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import gelu, layer_norm

from ortho import FrozenQKAttention, HybridAttention, LanguageModel, PositionalHeads, TextEncoder, VisionTransformer
from ortho.layers.positional import sinusoidal_positions
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.generation import next_token


def drawn(model):
    """The model with every parameter drawn anew, so that no bias is 0 and no gain is 1."""
    source = generator(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=parameter.dtype) / 2)
    return model


def norm(x, module):
    return layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def assert_near(got, wanted):
    """Two float64 computations of the same: about a hundred roundings of 1e-16 each, on numbers of about 10."""
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def text(**kwargs):
    kwargs = {"max_length": 9, "num_segments": 3, "dtype": torch.float64, "generator": generator(), **kwargs}
    return drawn(TextEncoder(13, 8, 2, 2, **kwargs))


def vision(**kwargs):
    kwargs = {"num_classes": 5, "dtype": torch.float64, "generator": generator(), **kwargs}
    return drawn(VisionTransformer(6, 3, 8, 2, 2, **kwargs))


def indices(count, *shape, seed=1):
    return torch.randint(count, shape, generator=generator(seed))


def images(*shape, seed=1):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def attention(x, layer, mask=None):
    """Attention, head by head, from the weights, with the softmax written out; `mask` (B, N) is False at padding."""
    K = x.shape[-1] // layer.num_heads
    made, heads = layer.projection, []
    for j in range(layer.num_heads):
        rows = slice(j * K, (j + 1) * K)
        q, k = (x @ w[rows].T + b[rows] for w, b in ((made.weight_q, made.bias_q), (made.weight_k, made.bias_k)))
        scores = (q @ k.mT / K**0.5).exp()
        scores = scores if mask is None else scores * mask[:, None]
        v = x @ layer.weight_v[rows].T + layer.bias_v[rows]
        heads.append(scores / scores.sum(-1, keepdim=True) @ v)
    return torch.cat(heads, -1) @ layer.weight_o.T + layer.bias_o


def network(x, layer):
    return gelu(x @ layer.weight_up.T + layer.bias_up) @ layer.weight_down.T + layer.bias_down


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_text_encoder_by_its_formulas(form):
    model = text(form=form)
    tokens, segments = indices(13, 2, 7), indices(3, 2, 7)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    for given, which in ((segments, segments), (None, torch.zeros_like(tokens))):
        x = torch.stack(
            [
                model.embed_tokens[tokens[b]] + model.embed_segments[which[b]] + model.embed_positions[:7]
                for b in range(2)
            ]
        )
        x = norm(x, model.norm)
        for block in model.blocks:
            x = norm(x + attention(x, block.attention, mask), block.norm_attention)
            x = norm(x + network(x, block.feed_forward), block.norm_feed_forward)
        assert_near(model.encode(tokens, given, key_padding_mask=~mask), x)
        pooled = torch.tanh(x[:, 0] @ model.weight_pool.T + model.bias_pool)
        assert_near(model(tokens, given, key_padding_mask=~mask), pooled)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_vision_transformer_by_its_formulas(form):
    model, given = vision(form=form), images(2, 3, 6, 6)
    x = torch.empty(2, 5, 8, dtype=torch.float64)
    x[:, 0] = model.class_token
    for place, (row, column) in enumerate(product((0, 3), (0, 3)), 1):
        patch = given[:, :, row : row + 3, column : column + 3].reshape(2, -1)
        x[:, place] = patch @ model.weight_patch.T + model.bias_patch
    x = x + model.embed_positions
    for block in model.blocks:
        x = x + attention(norm(x, block.norm_attention), block.attention)
        x = x + network(norm(x, block.norm_feed_forward), block.feed_forward)
    x = norm(x, model.norm)
    assert_near(model.encode(given), x)
    assert_near(model(given), x[:, 0] @ model.weight_head.T + model.bias_head)


# -------------------------------------------------------------------------------------------------- the encoder-decoder

START, STOP, VOCAB = 1, 2, 11
SEVEN_AND_ONE = {"layer": HybridAttention, "heads": {"learned": 1, "positional": 3}}
VARIANTS = {
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
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


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


@EVERY_VARIANT
def test_what_stands_in_the_padding_and_how_long_it_is_makes_no_difference(variant):
    ours, (source, target), mask = model(**VARIANTS[variant]), texts(), padding()
    logits = ours(source, target, mask)
    assert_near(ours(torch.where(mask, source, 0), target, mask), logits)
    for row, length in enumerate((7, 4, 1)):
        alone = ours(source[row : row + 1, :length], target[row : row + 1])
        assert_near(alone[0], logits[row])
    unmasked = ours(source, target)
    assert (unmasked - logits)[1:].abs().amax((1, 2)).min() > 1e-6  # without the mask it makes one


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


@EVERY_VARIANT
def test_greedy_decoding_with_caches_is_that_without(variant):
    ours, ends = model(**VARIANTS[variant]), set()
    for seed in range(4 if variant == "learned" else 2):
        source, mask = texts(seed=seed)[0], padding()
        got = ours.generate(source, mask, start=START, stop=STOP, max_length=9)
        assert torch.equal(got, greedy(ours, source, mask, 9))
        ends |= set((got == STOP).any(1).tolist())
    if ours.max_length is not None:
        got = ours.generate(source, mask, start=START, stop=STOP)
        assert torch.equal(got, greedy(ours, source, mask, 12))
    assert variant != "learned" or ends == {True, False}  # some rows end and some do not


def test_dropout_of_embeddings_and_of_each_part(monkeypatch):
    """In training, with one layer: two embeddings, two parts of the encoder's block, three of the decoder's."""
    shapes = []

    def watched(x, p, training, inplace=False):
        shapes.append((tuple(x.shape), p * training))
        return drop(x, p, training, inplace)

    monkeypatch.setattr("torch.nn.functional.dropout", watched)
    ours = EncoderDecoder(VOCAB, 8, 2, 1, max_length=9, dropout=0.1)
    ours(*texts())
    read, written = ((3, 7, 8), 0.1), ((3, 6, 8), 0.1)
    assert shapes == [read] * 3 + [written] * 4
    ours.eval()(*texts())
    assert not any(p for _, p in shapes[7:])


# ------------------------------------------------------------------------------------------------------- drawing tokens


def drawn_shares(chances, count=20_000, **kwargs):
    """The share of the draws that each token has."""
    rows = torch.tensor(chances, dtype=torch.float64).log().expand(count, -1)
    return next_token(rows, generator=generator(), **kwargs).flatten().bincount(minlength=len(chances)) / count


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30, 0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 1}, [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_what_is_left_to_draw_from(kwargs, wanted):
    """Tokens are drawn in their shares: each of 60 shares is wrong by 4.5 standard errors, .016, with probability 1e-5.
    Tokens left out, or forbidden by a logit of minus infinity, are never drawn. Another order gives the same."""
    found, wanted = drawn_shares([0.4, 0.3, 0.2, 0.1, 0.0], **kwargs), torch.tensor(wanted)
    assert (found - wanted).abs().max() < 0.016
    assert (found[wanted == 0] == 0).all()
    turned = drawn_shares([0.1, 0.4, 0.0, 0.2, 0.3], **kwargs)[[1, 4, 3, 0, 2]]
    assert (turned - wanted).abs().max() < 0.016


def test_tokens_as_likely_as_the_last_of_the_k_stay():
    assert (drawn_shares([0.4, 0.2, 0.2, 0.2], top_k=2) > 0.15).all()


def language_model(attention="softmax", **kwargs):
    """A model with weights so large that no two logits are close, but in which tokens do not follow themselves."""
    kwargs = {"max_length": 16, **kwargs}
    made = LanguageModel(11, 8, 2, 2, attention=attention, generator=generator(), dtype=torch.float64, **kwargs)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            size = 0.1 if name == "embed_tokens" else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i), dtype=torch.float64) * size)
    return made


def prompts(*lengths, side, width=6):
    """Tokens, padded to a width on a side, and where padding is; "within" leaves a gap after the first token."""
    tokens = torch.randint(1, 11, (len(lengths), width), generator=generator(3))
    places, counts = torch.arange(width), torch.tensor(lengths)[:, None]
    there = {
        "right": places < counts,
        "left": places >= width - counts,
        "within": (places == 0) | (places > width - counts),
    }[side]
    return tokens, ~there


@pytest.mark.parametrize("attention", ["softmax", "delta", "rotary"])
@pytest.mark.parametrize("side", ["right", "left", "within"])
def test_a_padded_batch_is_its_rows_alone(side, attention):
    model = language_model(attention)
    tokens, padded = prompts(6, 2, 4, 2, side=side)
    for stop in (None, 5):
        found = model.generate(tokens, 7, temperature=0.0, stop=stop, key_padding_mask=padded)
        assert torch.equal(found[:, :6], tokens)
        longest = 0
        for row, own in enumerate(padded):
            alone = model.generate(tokens[row : row + 1, ~own], 7, temperature=0.0, stop=stop)[0, int((~own).sum()) :]
            assert torch.equal(found[row, 6 : 6 + len(alone)], alone)
            assert (found[row, 6 + len(alone) :] == (stop or 0)).all()
            longest = max(longest, len(alone))
        assert found.shape[1] == 6 + longest


def test_a_row_ends_with_the_stop():
    """The row is filled up with the stop; other rows go on as before; when all have ended, nothing more is drawn."""
    model = language_model()
    tokens = torch.randint(11, (8, 3), generator=generator(1))
    plain = model.generate(tokens, 9, temperature=0.0)[:, 3:]
    assert len(plain.unique()) > 3
    stop = int(plain[0, 1])
    found = model.generate(tokens, 9, temperature=0.0, stop=stop)[:, 3:]
    ends = [row.index(stop) + 1 if stop in row else 9 for row in plain.tolist()]
    assert found.shape[1] == max(ends) and len(set(ends)) > 1
    for row, end in enumerate(ends):
        assert torch.equal(found[row, :end], plain[row, :end]) and (found[row, end:] == stop).all()
    assert model.generate(tokens[:1], 9, temperature=0.0, stop=stop).shape == (1, 3 + ends[0])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("side", ["right", "left", "within"])
def test_padding_in_a_language_model_is_as_good_as_absent(side, positions):
    """The tokens in the padding make no difference."""
    model = language_model(positions=positions)
    tokens, padded = prompts(6, 3, 5, side=side)
    logits = model(tokens, key_padding_mask=padded)
    for row, own in enumerate(padded):
        alone = model(tokens[row : row + 1, ~own])[0]
        torch.testing.assert_close(logits[row, ~own], alone, atol=1e-10, rtol=1e-10)
    other = model(torch.where(padded, 0, tokens), key_padding_mask=padded)
    torch.testing.assert_close(other[~padded], logits[~padded], atol=1e-10, rtol=1e-10)
