"""The mechanisms whose fast form takes tokens in pieces, and operands and gates for them."""

from functools import partial
from inspect import signature

import torch
from seeded import draw, generator

from ortho import MECHANISMS
from ortho.attention.linear.dense_features import FITS, DenseExponentialFeatures
from ortho.attention.linear.linear_attention import kernel_mechanism
from ortho.attention.recurrent.channels import ChannelDecay

K, V = 4, 3  # widths of keys and values
SIZES = ("chunk", "tile", "block", "rows", "columns", "mini_batch_size")  # arguments that say how large a piece is


def held(fit):
    """The mechanism with parameters fitted to other data: how it maps a token then depends on nothing else."""
    x, y = (draw(40, K, seed=seed) / K**0.25 for seed in (21, 22))
    fitted = partial(DenseExponentialFeatures, fit, FITS[fit].function(x, y), m=20)
    return kernel_mechanism(f"{fit}, held", fitted, "")


def takes(function):
    """The arguments in `SIZES` that the function has."""
    return [name for name in signature(function).parameters if name in SIZES]


def pieces(function, size):
    """`size` for each of these arguments, by name; tiles are a little wider than high."""
    return {name: size + 2 * (name == "columns") for name in takes(function)}


def ways(m):
    """The values of `is_causal` that the mechanism serves."""
    return [way for way, served in ((False, m.bidirectional), (True, m.causal)) if served]


PIECEWISE = {name: m for name, m in MECHANISMS.items() if takes(m.fast)}
PIECEWISE |= {f"{fit}, held": held(fit) for fit in FITS}


def operands(m, *lead, length, seed=0):
    """Everything that a call of the mechanism can be given, by name.

    Write strengths and steps are drawn from [0, 2], its ends included; write strengths of vector gates are half as
    large. Half of the log decays per token are near 0, some are below -1, and some tokens erase all. With decays per
    channel, some tokens have no decay and others erase two whole channels.
    """
    seeds = iter(range(100 * seed, 100 * seed + 20))

    def normal(*shape):
        return draw(*lead, length, *shape, seed=next(seeds))

    def positive():
        return torch.rand(*lead, length, generator=generator(next(seeds)), dtype=torch.float64)

    scan = m.name == "selective-scan"
    several, wide = m.name == "delta-product", K if m.name == "path" else 2
    decay = -normal().square() / 2
    decay[..., 2::9] = -1e30
    if m.gates.get("log_decay") is ChannelDecay:
        decay = -normal(K).square() / 2 * (normal(1) > -1)
        decay[..., 2::9, 1:3] = -1e30
    strengths = (1 + 0.8 * normal(*[2] * several)).clamp(0, 2)
    given = {
        "beta": strengths / 2 if m.name == "vector-gated" else strengths,
        "dt": draw(*lead, length, V, seed=next(seeds)).abs() if scan else strengths,
        "A": draw(*lead, V, K, seed=next(seeds)).square() if scan else normal().square() / 2,
        "eta": 0.4 * positive(),
        "log_decay": decay,
        "log_forget": -positive(),
        "directions": normal(wide),
        "bias_queries": normal(2),
        "bias_keys": normal(2),
        "more_keys": normal(1, K),
        "more_values": normal(1, V),
        "log_linear_weight": normal(),
    }
    return {"q": normal(K), "k": normal(K), "v": normal(V)} | {name: given[name] for name in m.gates}


def per_token(given):
    """The names of operands that have an entry for each token; rates of a selective scan are the same for all."""
    tokens = given["v"].shape[:-1]
    return [name for name, x in given.items() if x.shape[: len(tokens)] == tokens]


def part(given, start, stop, axis):
    """The tokens from `start` to `stop` of each tensor, along that axis."""
    return given | {name: given[name].narrow(axis, start, stop - start) for name in per_token(given)}


def with_gaps(x):
    """The same numbers: every other entry of a larger tensor, with the last two axes transposed in memory."""
    if x.dim() < 2:
        return x.clone()
    wide = torch.zeros(*x.shape[:-2], x.shape[-1], 2 * x.shape[-2], dtype=x.dtype)
    wide[..., ::2] = x.mT
    return wide[..., ::2].mT


def differentiated(call, given, wanted=None):
    """The output, and its gradients with respect to `wanted` (all by default), for a fixed upstream gradient."""
    names = list(given) if wanted is None else wanted
    leaves = {name: x.detach().requires_grad_(name in names) for name, x in given.items()}
    o = call(**leaves)
    wanted = [leaves[name] for name in names]
    return [o, *torch.autograd.grad(o, wanted, draw(*o.shape, seed=900), materialize_grads=True)]
