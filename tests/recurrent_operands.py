"""Mechanisms that write a state token by token, with operands and gates for them, which several test files share."""

from inspect import signature

import torch
from piecewise import K, V, operands
from seeded import draw

from ortho import MECHANISMS

GATES = {"beta", "log_decay", "dt", "A"}
# The selective scan has a decay for each number of its state, so a file of its own tests it.
NAMES = [
    name
    for name, m in MECHANISMS.items()
    if m.family == "recurrent" and GATES.issuperset(m.gates) and name != "selective-scan"
]
ADDING = [name for name in NAMES if "beta" not in MECHANISMS[name].gates]  # they erase nothing
NORMALISING = [name for name in NAMES if "qk_l2norm" in signature(MECHANISMS[name].reference).parameters]
FORMS = ["reference", "fast"]
FUNCTIONS = {(name, form): MECHANISMS[name].form(form) for name in NAMES for form in FORMS}
SCALES = {"gla": 0.5}  # the factor of queries of width 4, where it is not 1
# Sums of at most 130 rounded products, the largest about 10, through systems whose inverses have entries of at most 2:
# an error of about 1e-13. A wrong term would show at 1e-2.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}


def arguments(name, *lead, length, keys=None, state=True, seed=0):
    """Everything that a call can be given, by name; by default as many queries as keys. `initial_state` is a tensor."""
    given = operands(MECHANISMS[name], *lead, length=keys or length, seed=seed)
    if keys is not None:
        given["q"] = draw(*lead, length, K, seed=100 * seed + 30)
    return given | ({"initial_state": draw(*lead, K, V, seed=100 * seed + 31)} if state else {})


def fading(name, form):
    """The function, called with `log_decay`; one that takes `dt` and `A` is called with `dt` of 1."""
    function = FUNCTIONS[name, form]
    if name != "ssd":
        return function
    return lambda *x, log_decay, **kwargs: function(*x, A=-log_decay, **kwargs)


def call(function, given, **kwargs):
    """(o, S)."""
    state = {"initial_state": (given["initial_state"],)} if "initial_state" in given else {}
    o, (S,) = function(**given | state, return_state=True, **kwargs)
    return o, S


def with_gradients(function, given, wanted=None, **kwargs):
    """The output, the state, and the gradients of `wanted` (all by default), for fixed upstream gradients of both."""
    wanted = list(given) if wanted is None else wanted
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in given.items()}
    o, S = call(function, leaves, **kwargs)
    reached = [(x, draw(*x.shape, seed=98 + i).to(x.dtype)) for i, x in enumerate((o, S)) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in reached], [leaves[name] for name in wanted], [upstream for _, upstream in reached]
    )
    return [o, S, *gradients]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
