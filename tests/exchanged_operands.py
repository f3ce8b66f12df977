"""Operands of attention with constant scores, and its results."""

import torch
from torch.autograd import grad

K = 8


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def operands(N, lead=(2, 3), dtype=torch.float64, width=K):
    """q, k, v with a gradient, and the gradient of the output."""
    q, k, v, do = (draw(*lead, N, width, seed=seed).to(dtype) for seed in range(4))
    return q, k, v.requires_grad_(), do


def results(form, q, k, v, do, **kwargs):
    """The output, the gradient of v, and that of the state's values."""
    past = kwargs.get("initial_state")
    o = form(q, k, v, **kwargs)
    return o, *grad(o, [v] if past is None else [v, past[1]], do)


def holes(N, M, lead=(2, 3)):
    """A mask in which a query attends to nothing, and a key is attended to by none."""
    mask = draw(*lead, N, M, seed=7) > -0.5
    mask[..., N // 2, :], mask[..., M // 3] = False, False
    return mask
