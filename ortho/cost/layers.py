"""Closed forms of attention layers, with all their constants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import nan
from operator import add
from typing import Any

from ortho._cost import Cost, head_width, linear_map
from ortho._typing import Size
from ortho.attention import MECHANISMS
from ortho.attention.positional.positional_attention import PositionalPattern, named
from ortho.checks import expect, one_of
from ortho.cost.attention import shared_heads
from ortho.cost.mechanisms.softmax import frozen_qk_cost, softmax_cost
from ortho.gates import Gate
from ortho.layers.hybrid import split
from ortho.layers.induction import SINK, default_key_dim
from ortho.layers.positional import shared_out
from ortho.projections import PROJECTIONS
from ortho.projections.structured import factors, sufficient_rounds

# Figures that a closed form does not give: NaN, and so are sums with them.
NOT_DERIVED: dict[str, Any] = {"decode": nan, "state_bytes": nan}


def added(*costs: Cost) -> Cost:
    """The sum of the costs."""
    return reduce(add, costs)


def _passes_gradient(projection: str, input_grad: bool = True) -> bool:
    """Whether a gradient reaches queries and keys."""
    return projection == "learned" or (input_grad and not projection.endswith("stopped"))


def projection_cost(
    projection: str,
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    K: Size,
    G: Size,
    *,
    bias: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """Cost of `PROJECTIONS[projection]` on x (B, N, d): queries of H heads of width K, keys of G heads that they share.

    Structured projections need numbers for d, H, K and G.
    """
    one_of("projection", projection, PROJECTIONS)
    numbers = K * (H + G)  # of a token
    gradient = _passes_gradient(projection, input_grad)
    if projection.startswith("structured"):
        own = Cost(frozen=int(bias) * numbers, itemsize=itemsize)
        return own + _structured(B, N, d, K, H, G, gradient=gradient, itemsize=itemsize)
    made = linear_map(B, N, d, numbers, bias=bias, input_grad=input_grad, itemsize=itemsize)
    if projection == "learned":
        return made
    into_x = made.forward if gradient else 0
    return replace(made, backward=into_x, trained=0, frozen=made.trained)


def _structured(B: Size, N: Size, d: int, K: int, *heads: int, gradient: bool, itemsize: int) -> Cost:
    """Cost of sign flips, a set for each of these numbers of heads, and of the small transforms that sets share."""
    (a, b), sets, rounds = factors(d, K), len(heads), sufficient_rounds(d, K)
    last = sum(-(-count * K // b) for count in heads)  # rows of the tables that are read in the end
    products = sets * rounds * 2 * d * b + sets * (rounds - 1) * 2 * d * a + 2 * last * a * b  # of a token
    return Cost(
        forward=B * N * products,
        backward=B * N * products if gradient else 0,
        decode=B * products,
        frozen=sets * rounds * 2 * d + a * a + b * b,
        itemsize=itemsize,
    )


def around(B: Size, N: Size, d: Size, width: Size, *, input_grad: bool, itemsize: int) -> Cost:
    """Cost of W_V and W_O for heads of this total width."""
    values = linear_map(B, N, d, width, input_grad=input_grad, itemsize=itemsize)
    return values + linear_map(B, N, width, d, itemsize=itemsize)


def layer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    num_kv_heads: Size = None,
    bias: bool = False,
    projection: str = "learned",
    attention: str = "softmax",
    form: str = "fast",
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
    gates: Mapping[str, type[Gate]] | None = None,
    **options: Any,
) -> Cost:
    """Cost of `MultiheadAttention(d, H)` on x (B, N, d); `options` go to the mechanism's closed form (FAVOR+'s `m`).

    Each of `num_kv_heads` heads of keys and values is copied to the heads of queries that share it; the state and the
    decode step are those of a call with a state, which holds these copies (`ortho.cost.attention` has a cache's).

    `input_grad` says whether x needs a gradient; only the input of a first layer over frozen embeddings does not.
    Without it, autograd leaves out the path through q and k of a frozen projection.
    """
    K, G = head_width(d, H, head_dim), shared_heads(H, num_kv_heads)
    mechanism = MECHANISMS[one_of("attention", attention, MECHANISMS)]
    maps: dict[str, Any] = {"bias": bias, "itemsize": itemsize}
    qk = projection_cost(projection, B, N, d, H, K, G, input_grad=input_grad, **maps)
    qk_grad = _passes_gradient(projection, input_grad)
    values = linear_map(B, N, d, K * G, input_grad=input_grad, **maps)
    merged = linear_map(B, N, H * K, d, **maps)
    options = {mechanism.option_names.get(name, name): value for name, value in options.items()}
    if mechanism.cost is None:
        raise ValueError(f"attention: expected a mechanism with a closed form, got {attention!r}: ortho.cost.of counts")
    core = mechanism.cost(B, N, H, K, K, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, **options)
    gate_classes = {**mechanism.gates, **(gates or {})}.values()
    of_gates = [_gate(gate, B, N, d, H, K, input_grad, itemsize) for gate in gate_classes]
    return added(qk, values, merged, *of_gates, core)


def _gate(gate: type[Gate], B: Size, N: Size, d: Size, H: Size, K: Size, input_grad: bool, itemsize: int) -> Cost:
    """A gate of x (B, N, d). Its second matrix reads what the first one makes, which needs a gradient."""
    matrices, others = gate.sizes(d, K, H)
    maps = [linear_map(B, N, *sizes, input_grad=input_grad or i > 0) for i, sizes in enumerate(matrices)]
    return added(Cost(trained=others, itemsize=itemsize), *maps)


def stopped_layer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    num_kv_heads: Size = None,
    projection: str = "structured-stopped",
    form: str = "fast",
    **kwargs: Any,
) -> Cost:
    """Cost of `FrozenQKAttention(d, H)` on x (B, N, d): backward it recomputes q and k, and calls the kernel; `kwargs`
    are `layer`'s."""
    one_of("projection", projection, [name for name in PROJECTIONS if name.endswith("stopped")])
    kwargs |= {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "projection": projection, "form": form}
    plain = layer(B, N, d, H, attention="softmax", **kwargs)
    if form == "reference":
        return plain
    K, G = head_width(d, H, head_dim), shared_heads(H, num_kv_heads)
    call = {name: kwargs[name] for name in ("causal", "itemsize") if name in kwargs}
    kernel = softmax_cost(B, N, H, K, K, qk_grad=False, **call)
    exchanged = frozen_qk_cost(B, N, H, K, K, **call)
    again = projection_cost(projection, B, N, d, H, K, G).forward
    return plain - kernel + exchanged + Cost(backward=again)


def induction_heads(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    key_dim: Size = None,
    tokens: Size = 1,
    sink: float | None = None,
    form: str = "fast",
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """Cost of `InductionHeads(d, H)` on x (B, N, d); a sink needs `key_dim` or numbers.

    Keys are the queries of the token before, so one product makes both. The fast form recomputes them in the backward
    pass.
    """
    V, n = head_width(d, H, head_dim), tokens
    K = key_dim if key_dim is not None else V if sink is None else default_key_dim(d, V, sink)
    passes: dict[str, Any] = {"input_grad": input_grad, "itemsize": itemsize}
    width = H * K
    made = projection_cost("stopped", B, N, d, H, K, 0, **passes)
    made = made * n + Cost(state_bytes=itemsize * B * (width + (n - 1) * d))
    core = frozen_qk_cost(B, N, H, K, V, form=form, causal=causal, itemsize=itemsize)
    again = Cost(backward=made.forward if form == "fast" else 0)
    return added(around(B, N, d, H * V, **passes), made, core, again)


def positional_heads(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    patterns: Sequence[PositionalPattern | str] | None = None,
    head_dim: Size = None,
    causal: bool = False,  # noqa: ARG001
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """Cost of `PositionalHeads(d, H)` in its fast form on x (B, N, d), without masks or words; H is a number. The heads
    take no matrix products.

    Raises TypeError or ValueError as the layer does.
    """
    K = head_width(d, H, head_dim)
    found = shared_out(H) if patterns is None else named(patterns)
    expect(len(found) == H, "patterns", f"one for each of {H} heads", len(found))
    state = Cost(state_bytes=8 * B * (K * sum(1 + pattern.vectors for pattern in found) + 1))  # float64 and int64
    return around(B, N, d, H * K, input_grad=input_grad, itemsize=itemsize) + state


# The closed form of each of `ortho.layers.hybrid.HEADS`.
COSTS: dict[str, Callable[..., Cost]] = {
    "learned": layer,
    "frozen": partial(layer, projection="frozen"),
    "structured": partial(layer, projection="structured"),
    "stopped": partial(stopped_layer, projection="stopped"),
    "structured-stopped": stopped_layer,
    "induction": induction_heads,
    "selective-induction": partial(induction_heads, tokens=2, sink=SINK),
    "positional": positional_heads,
    **{name: partial(layer, attention=name) for name in MECHANISMS},
}


def hybrid(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    heads: Mapping[str, int] | Sequence[tuple[Any, ...]],
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """Cost of `HybridAttention(d, H, heads=heads)` on x (B, N, d), in its fast forms; H is a number.

    Raises TypeError or ValueError as the layer does.
    """
    K = head_width(d, H)
    call: dict[str, Any] = {"head_dim": K, "causal": causal, "input_grad": input_grad, "itemsize": itemsize}
    return added(*(COSTS[str(kind)](B, N, d, count, **call, **options) for kind, count, options in split(heads, H)))
