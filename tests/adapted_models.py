"""Small models from torch, from this package and from others, in which tests freeze heads, and how to compare them."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ortho import MECHANISMS, MultiheadAttention
from ortho.attention.positional.positional_attention import PATTERNS, positional_attention_reference
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.attention.sparse.pattern import pattern_attention_reference
from ortho.attention.sparse.window import Window

D, H, N = 12, 4, 5
# float64 products summed in another order: fewer than 100 terms of size 1, each with error 1e-16, a few layers deep.
TOLERANCE = {"atol": 1e-12, "rtol": 0}


class NamedAttention(nn.Module):
    """A layer with grouped heads and the parameter names of Hugging Face's layers."""

    def __init__(self, kv_heads=2):
        super().__init__()
        self.head_dim = D // H
        self.q_proj = nn.Linear(D, D)
        self.k_proj, self.v_proj = (nn.Linear(D, kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        k, v = (y.repeat_interleave(H // k.shape[1], 1) for y in (k, v))
        return self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OfTorch(nn.Module):
    """torch's layer, called with one tensor; with `kdim`, its matrices for queries, keys and values are separate."""

    def __init__(self, kdim=None, **kwargs):
        super().__init__()
        self.layer = nn.MultiheadAttention(D, H, kdim=kdim, batch_first=True, **kwargs)
        self.kdim = kdim or D

    def forward(self, x):
        return self.layer(x, x[..., : self.kdim], x)[0]


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True, **kwargs)
    return nn.TransformerEncoder(layer, 3)


MODELS = {
    "torch": OfTorch,
    "torch-apart": lambda: OfTorch(kdim=8),
    "torch-no-bias": lambda: OfTorch(bias=False),
    "encoder": encoder,
    "decoder": lambda: nn.TransformerDecoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True),
    "ortho": lambda: MultiheadAttention(D, H, bias=True),
    "ortho-grouped": lambda: MultiheadAttention(D, H, num_kv_heads=2),
    "ortho-frozen": lambda: MultiheadAttention(D, H, projection="stopped", bias=True),
    "named": NamedAttention,
}


def make(name, seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]().double()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "bias" in key:
                value.normal_()  # biases start at 0, which would show nothing
    return model


def operands(model, seed=1):
    x = torch.randn(3, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (x, x.flip(0)) if isinstance(model, nn.TransformerDecoderLayer) else (x,)


def rows(heads, width=D // H):
    return [head * width + i for head in heads for i in range(width)]


def by_its_kind(kind, q, k, v, there=None, *, is_causal, scale=None):
    """The output (B, N, K) of a head by the definition of its mechanism; `there` (B, N) is False at padding."""
    masks = {"is_causal": is_causal, "attn_mask": None if there is None else there[:, None]}
    if kind in PATTERNS:
        masks["attn_mask"] = None if there is None else there[:, None, None]
        return positional_attention_reference(v[:, None], [kind], **masks)[:, 0]
    if kind == "linear":
        return MECHANISMS["linear"].reference(q, k, v, **masks)
    if isinstance(kind, Window):
        return pattern_attention_reference(q, k, v, pattern=kind, scale=scale, **masks)
    return softmax_attention_reference(q, k, v, scale=scale, **masks)


def described(model):
    """What a conversion may change: classes, names, whether they are trained, and values."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: (type(module), module.training) for name, module in model.named_modules()}
    return kinds, {name: p.requires_grad for name, p in model.named_parameters()}, state


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])
