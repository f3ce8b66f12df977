"""Closed forms of layers that stop the gradient, and of `ortho.layers.hybrid`: heads of several kinds."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ortho._checks import checked, one_of
from ortho._typing import Size
from ortho.attention.softmax.softmax_attention import softmax_cost
from ortho.attention.softmax.value_gradient import exchanged_cost
from ortho.cost.closed_forms import Cost, added, check_sizes, layer, shared_heads
from ortho.cost.induction import induction_heads
from ortho.cost.positional import positional_heads
from ortho.cost.projections import projection_cost
from ortho.layers.hybrid import HEADS
from ortho.projections import PROJECTIONS

__all__ = ["hybrid", "stopped_layer"]


@checked
def stopped_layer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    num_kv_heads: Size = None,
    bias: bool = False,
    projection: str = "structured-stopped",
    form: str = "fast",
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`StoppedAttention(d, H)` on x (B, N, d): backward it makes q and k again, and calls the forward kernel."""
    one_of("projection", projection, [name for name in PROJECTIONS if name.endswith("stopped")])
    sizes: dict[str, Any] = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "bias": bias}
    passes: dict[str, Any] = {"causal": causal, "input_grad": input_grad, "itemsize": itemsize}
    plain = layer(B, N, d, H, projection=projection, form=form, **sizes, **passes)
    if form == "reference":
        return plain
    K = head_dim if head_dim is not None else d // H if isinstance(d, int) else d / H
    G = shared_heads(H, num_kv_heads)
    made = projection_cost(projection, B, N, d, H, K, G, bias=bias, input_grad=input_grad, itemsize=itemsize)
    kernel = softmax_cost(B, N, H, K, K, causal=causal, qk_grad=False, itemsize=itemsize)
    own = exchanged_cost(B, N, H, K, K, causal=causal, itemsize=itemsize)
    numbers = itemsize * 2 * B * N * H * K  # q and k, which are not kept
    return replace(
        plain,
        backward=plain.backward - kernel.backward + own.backward + made.forward,
        elementwise_backward=plain.elementwise_backward
        - kernel.elementwise_backward
        + own.elementwise_backward
        + made.elementwise_forward,
        saved_bytes=plain.saved_bytes - kernel.saved_bytes + own.saved_bytes - numbers,
    )


# The closed form of each of `ortho.layers.hybrid.HEADS`.
COSTS: dict[str, Callable[..., Cost]] = {
    "learned": layer,
    "rotary": partial(layer, attention="rotary"),
    "frozen": partial(layer, projection="frozen"),
    "structured": partial(layer, projection="structured"),
    "stopped": partial(stopped_layer, projection="stopped"),
    "structured-stopped": stopped_layer,
    "induction": induction_heads,
    "positional": positional_heads,
    "window": partial(layer, attention="window"),
    "linear": partial(layer, attention="linear"),
}


@checked
def hybrid(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    heads: Mapping[str, int],
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`HybridAttention(d, H, heads=heads)` on x (B, N, d), in its fast forms; H is a number.

    Raises TypeError or ValueError as the layer does.
    """
    check_sizes(B=B, N=N, d=d, H=H)
    K = d // H if isinstance(d, int) else d / H
    if sum(heads.values()) != H:
        raise ValueError(f"heads: expected numbers that are together H = {H}, got {sum(heads.values())}")
    options: dict[str, Any] = {"causal": causal, "input_grad": input_grad, "itemsize": itemsize}
    groups = [
        COSTS[one_of("heads", kind, HEADS)](B, N, d, count, head_dim=K, **options)
        for kind, count in heads.items()
        if count
    ]
    total, sums = added(*groups), (len(groups) - 1) * B * N * d
    return replace(
        total,
        elementwise_forward=total.elementwise_forward + sums,
        elementwise_backward=total.elementwise_backward + (sums if input_grad else 0),
        saved_bytes=total.saved_bytes - itemsize * sums,  # x is kept once
    )
