"""Masks of layers: padding by its own argument, and shapes that may be meant in two ways are refused."""

from functools import partial

import pytest
import torch

from ortho import HybridAttention, MultiheadAttention, TransformerBlock
from ortho.layers.positional import PositionalHeads
from ortho.layers.stop_gradient import StoppedAttention
from ortho.layers.synthesizer import SynthesizerAttention

B, N, D, H = 3, 5, 12, 4
KIND = {"dtype": torch.float64}
LAYERS = {
    "softmax": partial(MultiheadAttention, D, H, **KIND),
    "softmax, reference": partial(MultiheadAttention, D, H, form="reference", **KIND),
    "linear": partial(MultiheadAttention, D, H, attention="linear", **KIND),
    "fox": partial(MultiheadAttention, D, H, attention="fox", **KIND),
    "stopped": partial(StoppedAttention, D, H, **KIND),
    "hybrid": partial(HybridAttention, D, H, heads={"learned": 2, "positional": 1, "linear": 1}, **KIND),
    "positional": partial(PositionalHeads, D, H, **KIND),
    "synthesizer": partial(SynthesizerAttention, D, H, 2 * N, source="dense", **KIND),
    "block": partial(TransformerBlock, D, H, **KIND),
}
PADDING = torch.tensor([[False] * 5, [False, True, False, False, True], [False] * 4 + [True]])


def tokens(batch=B, *, length=N, seed=0):
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a, b):
    """Two float64 computations of sums of at most some 100 terms."""
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_hidden(name):
    """The same as a mask of keys, and what padding holds does not matter."""
    layer, x = LAYERS[name](generator=torch.Generator().manual_seed(0)), tokens()
    y = layer(x, key_padding_mask=PADDING)
    same(y, layer(x, attn_mask=~PADDING[:, None, None]))
    louder = torch.where(PADDING[..., None], 9.0, x)
    same(layer(louder, key_padding_mask=PADDING)[~PADDING], y[~PADDING])
    assert not torch.allclose(layer(x)[~PADDING], y[~PADDING])
    causal = layer(x, key_padding_mask=PADDING, is_causal=True)
    same(layer(x[:, :3], key_padding_mask=PADDING[:, :3], is_causal=True), causal[:, :3])


def test_padding_is_that_of_torch():
    """Also beside a mask of pairs, whose sense is the other way round there, and with a context."""
    layer, x, context = LAYERS["softmax"](), tokens(), tokens(length=7, seed=1)
    theirs = layer.to_torch()
    pairs = torch.ones(N, N, dtype=torch.bool).tril()
    same(layer(x, key_padding_mask=PADDING), theirs(x, x, x, key_padding_mask=PADDING, need_weights=False)[0])
    both = theirs(x, x, x, key_padding_mask=PADDING, attn_mask=~pairs, need_weights=False)[0]
    same(layer(x, key_padding_mask=PADDING, attn_mask=pairs), both)
    padding = torch.tensor([[False] * 7, [True] * 6 + [False], [False, True] * 3 + [False]])
    expected = theirs(x, context, context, key_padding_mask=padding, need_weights=False)[0]
    same(layer(x, context, key_padding_mask=padding), expected)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("fox", "linear", "positional", "hybrid")])
def test_ambiguous_masks_are_refused(name):
    """(N, M) where B = N and (H, N, M) where B = H; with all axes, or one batch more, they are as they read."""
    layer = LAYERS[name](generator=torch.Generator().manual_seed(0))
    pairs = torch.ones(N, N, dtype=torch.bool).tril()
    x = tokens(N)
    with pytest.raises(
        ValueError, match=r"^attn_mask: expected four axes where B = N = 5, got \(5, 5\): write \(N, M\)"
    ):
        layer(x, attn_mask=pairs)
    same(layer(x, attn_mask=pairs[None, None])[:3], layer(x[:3], attn_mask=pairs))
    of_heads = pairs.expand(H, N, N).clone()
    of_heads[0] = True
    x = tokens(H)
    with pytest.raises(ValueError, match=r"^attn_mask: expected four axes where B = H = 4, got \(4, 5, 5\): write \(H"):
        layer(x, attn_mask=of_heads)
    same(layer(x, attn_mask=of_heads[None])[:3], layer(x[:3], attn_mask=of_heads))
    same(layer(x, attn_mask=pairs), layer(x, attn_mask=pairs[None, None]))


def test_groups_of_heads_are_not_taken_for_batches():
    """Two heads of a kind, two items: masks that tell heads apart."""
    layer = HybridAttention(D, H, heads={"learned": 2, "rotary": 2}, **KIND)
    masks = torch.randn(1, H, N, N, generator=torch.Generator().manual_seed(1)) > -1
    x = tokens(2)
    y = layer(x, attn_mask=masks)
    same(y, sum(group(x, attn_mask=masks[:, h : h + 2]) for group, h in zip(layer.groups, (0, 2), strict=True)))
    same(y, layer(x, attn_mask=masks[0]))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", LAYERS)
def test_bad_padding(name):
    layer, x = LAYERS[name](), tokens()
    with pytest.raises(TypeError, match=r"^key_padding_mask: expected a boolean tensor \(True = padding\), got"):
        layer(x, key_padding_mask=PADDING.float())
    for wrong in (PADDING[:2], PADDING[:, :4], PADDING[0], PADDING[:, None]):
        with pytest.raises(ValueError, match=r"^key_padding_mask: expected shape \(3, 5\), got"):
            layer(x, key_padding_mask=wrong)
