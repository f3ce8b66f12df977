"""Operands and gates for the delta rule, and what is compared of its calls: what several files of tests begin with."""

import torch

from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference

FUNCTIONS = {"reference": delta_rule_reference, "fast": delta_rule}
FORMS = list(FUNCTIONS)
# Sums of at most 130 rounded products, of which the largest are some 10, through systems whose inverses have entries of
# at most 2: some 1e-13. A wrong term would show at 1e-2.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def arguments(*lead, length, gated, keys=None, state=True, seed=0):
    """All that a call can be given, by name: keys 4 wide, values 3, as many as queries by default.

    Write strengths are from all of [0, 2], its ends included; half of the decays are near 0, some below -1;
    `initial_state` is a tensor.
    """
    M = length if keys is None else keys
    seeds = iter(range(100 * seed, 100 * seed + 6))
    given = {
        "q": draw(*lead, length, 4, seed=next(seeds)),
        "k": draw(*lead, M, 4, seed=next(seeds)),
        "v": draw(*lead, M, 3, seed=next(seeds)),
        "beta": (1 + 0.8 * draw(*lead, M, seed=next(seeds))).clamp(0, 2),
        "log_decay": -draw(*lead, M, seed=next(seeds)).square() / 2,
        "initial_state": draw(*lead, 4, 3, seed=next(seeds)),
    }
    left_out = [name for name, wanted in (("log_decay", gated), ("initial_state", state)) if not wanted]
    return {name: x for name, x in given.items() if name not in left_out}


def call(function, given, **kwargs):
    """(o, S)."""
    state = {"initial_state": (given["initial_state"],)} if "initial_state" in given else {}
    o, (S,) = function(**given | state, return_state=True, **kwargs)
    return o, S


def with_gradients(function, given, wanted=None, **kwargs):
    """The output, the memory, and the gradients of what is wanted (all), for one and the same gradients of both."""
    wanted = list(given) if wanted is None else wanted
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in given.items()}
    o, S = call(function, leaves, **kwargs)
    reached = [(x, draw(*x.shape, seed=98 + i).to(x.dtype)) for i, x in enumerate((o, S)) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in reached], [leaves[name] for name in wanted], [upstream for _, upstream in reached]
    )
    return [o, S, *gradients]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
