"""Definitions that are computed one scalar at a time."""

import torch


def averaged(weight, v, allowed):
    """For each row of `allowed`, the mean of its allowed values weighted by `weight(i, j)`; 0 without weights."""
    out = torch.zeros(len(allowed), v.shape[1], dtype=v.dtype)
    for i, row in enumerate(allowed.tolist()):
        weights = [weight(i, j) if may else 0.0 for j, may in enumerate(row)]
        for one, value in zip(weights, v, strict=True):
            if any(weights):
                out[i] += one / sum(weights) * value
    return out
