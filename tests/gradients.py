"""What a module computes, and the gradients that flow back through it."""

import torch
from seeded import draw


def trained(module):
    """The parameters that require gradients, by name: all but frozen weights."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def step(module, x, upstream=None, *, unused=False, **kwargs):
    """The output, then the gradients of x and of what is trained, for an upstream gradient that is fixed by default.

    A parameter that the output does not depend on is an error or, if it may be `unused`, has a gradient of zero.
    """
    leaf = x.clone().requires_grad_()
    y = module(leaf, **kwargs)
    upstream = draw(*y.shape, seed=9).to(y.dtype) if upstream is None else upstream
    return [y.detach(), *torch.autograd.grad(y, [leaf, *trained(module).values()], upstream, materialize_grads=unused)]
