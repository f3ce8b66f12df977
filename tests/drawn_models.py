"""Models whose every parameter is drawn, and what a test computes by hand beside them."""

import torch
from seeded import generator
from torch.nn.functional import layer_norm


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
