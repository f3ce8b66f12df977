"""Small models from torch, from this package and from others, in which tests freeze layers."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ortho import MultiheadAttention

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
