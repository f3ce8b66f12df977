"""Mixtures of experts: the fast form equals the definition, places go to tokens in their order, costs are counted."""

from math import ceil

import pytest
import torch
from seeded import draw
from torch.nn.functional import gelu, silu

from ortho.cost import of
from ortho.cost.models import feed_forward, mixture_of_experts
from ortho.layers.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts

D, E = 6, 5
# Sums of at most 24 float64 products of size 1, in another order.
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}


def mixture(seed=1, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return MixtureOfExperts(D, E, generator=generator, **{"dtype": torch.float64, "d_ff": 4} | kwargs)


VARIANTS = [
    {"top_k": k, "gated": gated, "capacity_factor": factor}
    for k in (1, 2, 5)
    for gated in (False, True)
    for factor in (None, 0.1, 1.0, 2.5)
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_fast_form_is_the_definition(variant):
    """Outputs, and gradients of the input and of all parameters, also of experts that no token picks."""
    results = []
    for form in ("reference", "fast"):
        module, x = mixture(form=form, **variant), draw(3, 7, D).requires_grad_()
        y, routing = module(x, return_routing=True)
        loss = (y * draw(3, 7, D, seed=2)).sum() + 0.1 * routing.balance_loss
        leaves = [x, *module.parameters()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append((y, *(torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True))))
    torch.testing.assert_close(*results, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_by_hand(variant):
    """Token by token: pick experts, check whether they have room, weight what they give."""
    module, x = mixture(**variant), draw(2, 9, D)
    k, factor = variant["top_k"], variant["capacity_factor"]
    room = 10**9 if factor is None else ceil(factor * k * 9 / E)
    want, dropped = torch.zeros_like(x), 0
    for b in range(2):
        taken = [0] * E
        for n in range(9):
            p = (module.weight_router @ x[b, n]).softmax(0)
            picked = sorted(range(E), key=lambda e: -p[e].item())[:k]
            total = sum(p[e] for e in picked) if k > 1 else 1
            for e in picked:
                taken[e] += 1
                if taken[e] > room:
                    dropped += 1
                    continue
                up = module.weight_up[e] @ x[b, n]
                hidden = silu(module.weight_gate[e] @ x[b, n]) * up if variant["gated"] else gelu(up)
                want[b, n] += p[e] / total * (module.weight_down[e] @ hidden)
    y, routing = module(x, return_routing=True)
    torch.testing.assert_close(y, want, **TOLERANCE)
    assert routing.dropped == dropped
    assert int(routing.load.sum()) == 2 * 9 * k - dropped


def test_the_balance_loss():
    module, x = mixture(top_k=1), draw(4, 50, D)
    routing = module.route(x)
    picked = [float((routing.experts == e).double().mean()) for e in range(E)]
    mean = routing.probabilities.mean((0, 1))
    torch.testing.assert_close(routing.balance_loss, E * sum(f * P for f, P in zip(picked, mean, strict=True)))
    even = routing._replace(probabilities=torch.full_like(routing.probabilities, 1 / E))
    torch.testing.assert_close(even.balance_loss, torch.tensor(1.0, dtype=torch.float64))
    assert routing.balance_loss.requires_grad


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_declared_is_counted(gated, k, form):
    module = mixture(top_k=k, gated=gated, form=form)
    counts = of(module, draw(2, 7, D).requires_grad_())
    declared = mixture_of_experts(2, 7, D, E, k, 4, gated=gated, form=form)
    assert (counts.forward, counts.backward) == (declared.forward, declared.backward)
    assert counts.trained == declared.trained


def test_a_gated_network():
    module, x = GatedFeedForward(D, 9, dtype=torch.float64), draw(2, 3, D).requires_grad_()
    want = (silu(x @ module.weight_gate.T) * (x @ module.weight_up.T)) @ module.weight_down.T
    torch.testing.assert_close(module(x), want, **TOLERANCE)
    counts, declared = of(module, x), feed_forward(2, 3, D, 9, gated=True)
    assert (counts.forward, counts.backward, counts.trained) == (declared.forward, declared.backward, declared.trained)
    assert GatedFeedForward(24).weight_up.shape == (64, 24)
    sizes = (sum(p.numel() for p in m.parameters()) for m in (GatedFeedForward(24), FeedForward(24)))
    assert len(set(sizes)) == 1


def test_half_precision_routes_in_float32():
    module, x = mixture(dtype=torch.bfloat16), draw(2, 7, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert module.route(x).probabilities.dtype == torch.float32
    assert module(x).dtype == torch.bfloat16


@pytest.mark.parametrize(("factor", "top_k", "tokens", "experts", "room"), [(1.1, 1, 100, 10, 11), (0.1, 3, 10, 3, 1)])
def test_room_is_not_rounded_up_from_a_rounding_error(factor, top_k, tokens, experts, room):
    """1.1 * 100 / 10 is 11.000000000000002 in floating point. With equal scores all tokens ask for the same experts."""
    layer = MixtureOfExperts(4, experts, top_k=top_k, capacity_factor=factor, d_ff=4)
    torch.nn.init.zeros_(layer.weight_router)
    x = torch.randn(1, tokens, 4, generator=torch.Generator().manual_seed(0))
    assert layer.route(x).load.max() == room
