"""torch's attention layers, and kinds for their heads."""

import torch
from torch import nn

from ortho.attention.sparse.window import Window

D, H, N = 12, 6, 7
KINDS = ["learned", "previous", Window(2), "linear", "stopped", "start"]
SOFTMAX = ["learned", "stopped"] * 3
# Products of float64 in another order: sums of fewer than 100 terms of size 1, each of error 1e-16, a few layers deep.
TOLERANCE = {"atol": 1e-12, "rtol": 0}


def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(D, H, **{"batch_first": True} | kwargs).double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if "bias" in name:
                value.normal_()  # they are 0 at first, and would show nothing
    return layer


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, **{"dropout": 0.0, "batch_first": True} | kwargs)
    return nn.TransformerEncoder(layer, 3).double()


def tokens(seed=1):
    return torch.randn(3, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def future():
    return torch.ones(N, N, dtype=torch.bool).triu(1)
