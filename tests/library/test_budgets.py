"""What fits a budget: declared costs of layers, bounds on several figures, what is left out, order, errors."""

import pytest
from refusals import refuses

from ortho import MECHANISMS, choose
from ortho.cost import layer
from ortho.cost.budgets import FIGURES


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_bound_all_that_serve_the_call(causal):
    """The cheapest comes first; each has its layer's cost, in which every figure is a number."""
    found = choose(48, 24, 1e30, num_heads=4, batch=2, causal=causal, itemsize=8)
    assert {one.attention for one in found} == {
        name for name, m in MECHANISMS.items() if (m.causal if causal else m.bidirectional)
    }
    flops = [one.cost.forward for one in found]
    assert flops == sorted(flops)
    for name, cost in found:
        assert cost == layer(2, 48, 24, 4, attention=name, causal=causal, itemsize=8)
        assert all(getattr(cost, figure) >= 0 for figure in FIGURES)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_bound_is_kept_and_reached(figure):
    """For each cost that occurs as the bound: mechanisms that cost no more are listed, others are not."""
    every = {one.attention: getattr(one.cost, figure) for one in choose(64, 16, {figure: 1e30}, num_heads=2)}
    for most in sorted(set(every.values()))[::5]:
        found = [one.attention for one in choose(64, 16, {figure: most}, num_heads=2)]
        assert set(found) == {name for name, cost in every.items() if cost <= most}
        assert [every[name] for name in found] == sorted(every[name] for name in found)


def test_several_bounds_and_what_is_exact():
    """A window needs less state than softmax attention, and a memory less than a window."""
    found = choose(4096, 64, {"state_bytes": 1e5, "forward": 5e8}, num_heads=4)
    assert {"delta", "linear"} <= {one.attention for one in found}
    assert all(one.cost.state_bytes <= 1e5 and one.cost.forward <= 5e8 for one in found)
    assert not {"softmax", "window", "favor"} & {one.attention for one in found}
    exact = {one.attention for one in choose(4096, 64, 1e30, num_heads=4, exact=True)}
    assert "softmax" in exact and all(MECHANISMS[name].exact for name in exact)
    assert choose(4096, 64, 1.0) == []


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((4, 8, {"foward": 1}), {}, ValueError, "budget: expected one of 'forward', .* did you mean 'forward'"),
        ((4, 8, {}), {}, ValueError, "budget: expected a bound of at least one of forward, .*, got none"),
        ((4, 8, {"decode": -1.0}), {}, ValueError, "budget: expected a bound of at least 0 for decode, got -1.0"),
        ((4, 8, "1e9"), {}, TypeError, "budget: expected a number or a mapping .*, got str '1e9'"),
        ((4, 8, 1e9), {"num_heads": 3}, ValueError, "num_heads: expected a divisor of d = 8, got 3"),
        ((0, 8, 1e9), {}, ValueError, "N: expected an integer of at least 1, got 0"),
        ((4, 8, 1e9), {"projection": "haar"}, ValueError, "projection: expected one of"),
    ],
)
def test_errors(args, kwargs, error, message):
    refuses(message, choose, *args, error=error, **kwargs)
