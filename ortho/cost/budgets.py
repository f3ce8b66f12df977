"""Which mechanisms fit a budget, by their declared costs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ortho._checks import checked, expect, one_of
from ortho._cost import Cost
from ortho.attention import MECHANISMS
from ortho.cost.layers import layer

# What a budget may bound: figures of `ortho.cost.Cost`, FLOPs, bytes and numbers of parameters.
FIGURES = ("forward", "backward", "step", "decode", "saved_bytes", "state_bytes", "optimiser_bytes", "trained")


class Choice(NamedTuple):
    """A mechanism that fits: its name in `MECHANISMS`, and the cost of a layer with it."""

    attention: str
    cost: Cost


@checked
def choose(
    N: int,
    d: int,
    budget: float | Mapping[str, float],
    *,
    num_heads: int = 1,
    batch: int = 1,
    causal: bool = True,
    exact: bool = False,
    projection: str = "learned",
    form: str = "fast",
    itemsize: int = 4,
) -> list[Choice]:
    """The mechanisms whose layer, `MultiheadAttention(d, num_heads)` on (batch, N, d), stays within a budget.

    `budget` maps names in `FIGURES` to the largest allowed figures of the layer's `Cost`: FLOPs of the forward and the
    backward pass, of both (`step`), and of one more token (`decode`); bytes kept for the gradient, carried from token
    to token, and held by the optimiser; trained parameters. A single number bounds the FLOPs of the forward pass.
    `exact` keeps only mechanisms that compute softmax attention itself. The cheapest by the first figure come first.
    Costs say nothing about quality, nor about time, which also depends on memory traffic and kernels.

    Mechanisms that cannot serve such calls, causal or not, are left out. A listed one can still restrict the sizes:
    rotary positions need heads of an even width.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, heads that do not divide d, unknown figures,
    an empty budget, and bounds below 0.
    """
    expect(not d % num_heads, "num_heads", f"a divisor of d = {d}", num_heads)
    bounds = dict(budget) if isinstance(budget, Mapping) else {"forward": budget}
    expect(bounds, "budget", f"a bound of at least one of {', '.join(FIGURES)}", "none")
    for name, most in bounds.items():
        one_of("budget", name, FIGURES)
        expect(most >= 0, "budget", f"a bound of at least 0 for {name}", most)
    sizes: dict[str, Any] = {"projection": projection, "form": form, "causal": causal, "itemsize": itemsize}
    served = [m for m in MECHANISMS.values() if (m.causal if causal else m.bidirectional) and (m.exact or not exact)]
    found = [Choice(m.name, layer(batch, N, d, num_heads, attention=m.name, **sizes)) for m in served]
    first = next(iter(bounds))
    found.sort(key=lambda choice: getattr(choice.cost, first))
    return [one for one in found if all(getattr(one.cost, name) <= most for name, most in bounds.items())]
