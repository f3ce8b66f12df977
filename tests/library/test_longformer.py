"""Global tokens with projections of their own: the definition, the pattern as the start, who reads what."""

import pytest
import torch
from gradients import trained
from torch import nn

from ortho import LongformerAttention, MultiheadAttention
from ortho.attention import FORMS
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import pattern_attention

D, H, K, WIDTH, TOKENS = 12, 3, 4, 4, 5
# Sums of a few dozen products of numbers near 1, in another order: each is rounded to eps.
TOLERANCE = {"rtol": 0, "atol": 1e3 * torch.finfo(torch.float64).eps}


def make(form="fast", bias=True, different=True):
    """A layer; by default its global weights are no longer equal to the others, as they are at first."""
    generator = torch.Generator().manual_seed(0)
    kind = {"bias": bias, "form": form, "dtype": torch.float64, "generator": generator}
    layer = LongformerAttention(D, H, width=WIDTH, tokens=TOKENS, **kind)
    if different:
        for p in layer.parameters():
            nn.init.normal_(p, std=D**-0.5, generator=generator)
    return layer


def inputs(length, seed=1):
    return torch.randn(2, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_rows(layer, x, mask):
    """One query of one head at a time: the first tokens use global weights over all keys, others the other weights."""
    heads = torch.zeros(*x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        end = "_global" if i < TOKENS else ""
        made, weight, bias = (getattr(layer, f"{name}{end}") for name in ("projection", "weight_v", "bias_v"))
        keys = [j for j in range(x.shape[1]) if i < TOKENS or j < TOKENS or abs(i - j) < WIDTH]
        q = x[:, i] @ made.weight_q.T + made.bias_q
        k, v = x[:, keys] @ made.weight_k.T + made.bias_k, x[:, keys] @ weight.T + bias
        for h in range(H):
            own = slice(h * K, (h + 1) * K)
            scores = (k[..., own] @ q[:, own, None])[..., 0] / K**0.5
            weights = scores.masked_fill(~mask[:, i, keys], -torch.inf).softmax(-1)
            heads[:, i, own] = (weights[:, None] @ v[..., own])[:, 0]
    return heads @ layer.weight_o.T + layer.bias_o


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, TOKENS, TOKENS + 1, 23])
@pytest.mark.parametrize("masked", ["", "pairs", "keys"])
def test_definition_and_gradients(form, length, masked):
    layer, x = make(form), inputs(length).requires_grad_()
    mask, call = torch.ones(2, length, length, dtype=torch.bool), {}
    if masked == "pairs":
        mask = torch.rand(2, length, length, generator=torch.Generator().manual_seed(2)) < 0.7
        mask |= torch.eye(length, dtype=torch.bool)
        call = {"attn_mask": mask[:, None]}
    elif masked:
        call = {"key_padding_mask": torch.arange(length).expand(2, -1) >= length - 1}
        mask = mask & ~call["key_padding_mask"][:, None]
    operands = [x, *trained(layer).values()]
    found, wanted = layer(x, **call), by_rows(layer, x, mask)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    pairs = zip(
        *(torch.autograd.grad(y.square().sum(), operands, allow_unused=True) for y in (found, wanted)), strict=True
    )
    for got, expected in pairs:
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)  # gradients of squares of about a dozen


def test_a_new_layer_is_the_pattern():
    """Global weights begin equal to the others, but are separate parameters: 7 d^2 in all."""

    class Attend(nn.Module):
        def forward(self, q, k, v, *, attn_mask=None, **_):
            return pattern_attention(q, k, v, pattern=GlobalLocal(WIDTH, TOKENS), attn_mask=attn_mask)

    layer, x = make(bias=False, different=False), inputs(20)
    plain = MultiheadAttention(D, H, attention=Attend(), dtype=torch.float64)
    own = {name: value for name, value in layer.state_dict().items() if "global" not in name}
    plain.load_state_dict(own)
    torch.testing.assert_close(layer(x), plain(x), **TOLERANCE)
    assert sum(p.numel() for p in layer.parameters()) == 7 * D**2
