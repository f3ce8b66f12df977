"""Whole encoders, compared with their formulas and with PyTorch's own layers; padding; costs; errors."""

from itertools import product

import pytest
import torch
from drawn_models import assert_near, drawn, norm
from seeded import generator
from torch import nn
from torch.nn.functional import gelu

from ortho import TextEncoder, TransformerBlock, VisionTransformer


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


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("projection", ["learned", "frozen"])
def test_block_is_pytorchs(norm_first, projection):
    """`nn.TransformerEncoderLayer` with the same weights, with biases, and with the norms on either side."""
    kind = {"dtype": torch.float64, "norm_first": norm_first}
    block = drawn(TransformerBlock(8, 2, d_ff=20, bias=True, projection=projection, generator=generator(), **kind))
    theirs = nn.TransformerEncoderLayer(8, 2, 20, dropout=0.0, activation="gelu", batch_first=True, **kind)
    theirs.self_attn = block.attention.to_torch()
    names = {"linear1": "up", "linear2": "down"}
    with torch.no_grad():
        for (name, part), what in product(names.items(), ("weight", "bias")):
            getattr(getattr(theirs, name), what).copy_(getattr(block.feed_forward, f"{what}_{part}"))
    theirs.norm1, theirs.norm2 = block.norm_attention, block.norm_feed_forward
    x = torch.randn(2, 5, 8, generator=generator(3), dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    assert_near(block(x), theirs(x))
    got = block(x, attn_mask=mask[:, None, None])
    assert_near(got[mask], theirs(x, src_key_padding_mask=~mask)[mask])
