"""The mechanisms that are feature maps, and operands for them: what several files of tests begin with."""

from functools import partial

import torch

from ortho.attention import MECHANISMS
from ortho.attention.linear.favor import FITS, DenseExponentialFeatures
from ortho.attention.linear.linear_attention import kernel_mechanism

# Sums of at most 1e3 rounded products (2e-13) of which the largest are some 10; a wrong term would show at 1e-2. Totals
# of signed weights cancel: the smallest of the rows here is some 1e-3 of what is summed, and its gradient squares that.
TOLERANCE = {"atol": 1e-11, "rtol": 1e-11}
SIGNED = {"atol": 1e-7, "rtol": 1e-7}
WIDTH = 6


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(*lead, length, width=WIDTH, values=5, seed=0):
    return [draw(*lead, length, w, seed=3 * seed + i) for i, w in enumerate((width, width, values))]


def held(fit):
    """The map with what is fitted to other data: how it maps a token then depends on nothing else."""
    x, y = (each * WIDTH**-0.25 for each in qkv(length=40, seed=7)[:2])
    return DenseExponentialFeatures(fit, parameters=FITS[fit].function(x, y), count=20)


FACTORED = {
    name: m for name, m in MECHANISMS.items() if isinstance(m.fast, partial) and "feature_map" in m.fast.keywords
}
HELD = {f"{fit}, held": kernel_mechanism(f"{fit}, held", held(fit), "") for fit in FITS}
ALL = FACTORED | HELD
FITTED = [name for name in FACTORED if FACTORED[name].fitted]
CAUSAL = [name for name in ALL if ALL[name].causal]
CASES = [(name, causal) for name in ALL for causal in (False, True)[: 1 + ALL[name].causal]]
FORMS = ["reference", "fast"]


def feature_map(name):
    return ALL[name].fast.keywords["feature_map"]


def tolerance(name):
    return SIGNED if ALL[name].signed else TOLERANCE
