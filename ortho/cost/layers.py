"""Closed forms of layers and blocks, with all their constants."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from math import nan
from operator import add
from typing import Any, NamedTuple

from ortho._checks import checked, one_of, positive_int
from ortho._cost import Cost, head_width, linear_map
from ortho._typing import Size
from ortho.attention import FORMS, MECHANISMS
from ortho.attention.softmax.softmax_attention import softmax_cost
from ortho.attention.softmax.value_gradient import value_gradient_cost
from ortho.cost.counting import LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD
from ortho.cost.induction import induction_heads
from ortho.cost.positional import positional_heads
from ortho.gates import Gate
from ortho.layers.hybrid import HEADS
from ortho.projections import PROJECTIONS, kv_heads
from ortho.projections.structured import factors, sufficient_rounds

__all__ = [
    "Cost",
    "RecomputedCost",
    "added",
    "block",
    "convolved_layer",
    "cross_layer",
    "feed_forward",
    "gated_feed_forward",
    "hybrid",
    "layer",
    "layer_norm",
    "mixture_of_experts",
    "projection_cost",
    "recomputed",
    "shifted_layer",
    "stopped_layer",
]

# Figures that a closed form does not give. Sums with them are not a number either.
NOT_DERIVED: dict[str, Any] = dict.fromkeys(
    ("elementwise_forward", "elementwise_backward", "saved_bytes", "decode", "state_bytes"), nan
)


def added(*costs: Cost) -> Cost:
    """The costs one after the other."""
    return reduce(add, costs)


@checked
def shared_heads(H: Size, num_kv_heads: Size | None) -> Size:
    """The heads of keys that H heads of queries share, by default as many; numbers are checked, symbols pass."""
    if num_kv_heads is None or hasattr(num_kv_heads, "free_symbols"):
        return H if num_kv_heads is None else num_kv_heads
    return num_kv_heads if hasattr(H, "free_symbols") else kv_heads(H, num_kv_heads)


def passes_gradient(projection: str, input_grad: bool = True) -> bool:
    """Whether a gradient reaches queries and keys."""
    return projection == "learned" or (input_grad and not projection.endswith("stopped"))


@checked
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
    """`PROJECTIONS[projection]` on x (B, N, d): queries of H heads of width K, and keys of G heads that they share.

    The sum of x's gradients is the layer's; x, which the layer keeps, does not count. Structured projections need
    numbers for d, H, K and G.
    """
    one_of("projection", projection, PROJECTIONS)
    numbers = K * (H + G)  # of a token's queries and keys
    gradient = passes_gradient(projection, input_grad)
    if not projection.startswith("structured"):
        made = linear_map(B, N, d, numbers, bias=bias, input_grad=input_grad, itemsize=itemsize)
        if projection == "learned":
            return made
        into_x = made.forward if gradient else 0
        return replace(made, backward=into_x, elementwise_backward=0, trained=0, frozen=made.trained)
    (a, b), rounds, biases = factors(d, K), sufficient_rounds(d, K), int(bias) * numbers
    last = sum(-(-heads * K // b) for heads in (H, G))  # rows of the tables that are read in the end
    products = 2 * rounds * 2 * d * b + 2 * (rounds - 1) * 2 * d * a + 2 * last * a * b  # of a token
    return Cost(
        forward=B * N * products,
        backward=B * N * products if gradient else 0,
        elementwise_forward=2 * rounds * 2 * d * b + B * N * biases,  # signs into the blocks
        saved_bytes=itemsize * 2 * rounds * d * b if gradient else 0,  # the blocks
        decode=B * products,
        frozen=2 * rounds * 2 * d + a * a + b * b + biases,
        itemsize=itemsize,
    )


@checked
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
    """`MultiheadAttention(d, H)` on x (B, N, d); `options` go to the mechanism's closed form (FAVOR+'s `m`).

    Symbols stand for more than one head and token: a single one's output is not copied to be put side by side. Each of
    `num_kv_heads` heads of keys and values is spread before the call to the heads of queries that share it; the state,
    and the decode step, are those of a call with a state, where all of them are held (`ortho.cost.decoding` has a
    cache's).
    `input_grad` says whether x needs a gradient: always, but for a first layer over frozen embeddings. Without it, q
    and k of a frozen projection depend on nothing that is trained, and autograd leaves their path out.
    """
    K, G = head_width(d, H, head_dim), shared_heads(H, num_kv_heads)
    one_of("form", form, FORMS)
    mechanism = MECHANISMS[one_of("attention", attention, MECHANISMS)]
    maps: dict[str, Any] = {"bias": bias, "itemsize": itemsize}
    qk = projection_cost(projection, B, N, d, H, K, G, input_grad=input_grad, **maps)
    qk_grad = passes_gradient(projection, input_grad)
    values = linear_map(B, N, d, K * G, input_grad=input_grad, **maps)
    merged = linear_map(B, N, H * K, d, **maps)
    core = mechanism.cost(B, N, H, K, K, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, **options)
    sums = 2 * B * N * d if input_grad and qk_grad else 0  # of x's gradients
    if G != H:  # k's and v's gradients over the heads that share them
        sums += B * N * H * K * (1 + qk_grad)
    kept_twice = 0 if 1 in (H, N) else core.output_bytes  # heads, or tokens, lie side by side as they are
    own = Cost(
        elementwise_backward=sums,
        saved_bytes=itemsize * B * N * (d + H * K) + kept_twice,  # x, the merged heads
        itemsize=itemsize,
    )
    gate_classes = {**mechanism.gates, **(gates or {})}.values()
    of_gates = [gate.cost(B, N, d, H, input_grad=input_grad, itemsize=itemsize) for gate in gate_classes]
    return added(own, qk, values, merged, *of_gates) + core


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
    K, G = head_width(d, H, head_dim), shared_heads(H, num_kv_heads)
    qk = projection_cost(projection, B, N, d, H, K, G, bias=bias, input_grad=input_grad, itemsize=itemsize)
    kernel = softmax_cost(B, N, H, K, K, causal=causal, qk_grad=False, itemsize=itemsize)
    exchanged = value_gradient_cost(B, N, H, K, K, causal=causal, itemsize=itemsize)
    again = Cost(
        backward=qk.forward,
        elementwise_backward=qk.elementwise_forward,
        saved_bytes=-itemsize * 2 * B * N * H * K,  # q and k, which are not kept
    )
    return plain - kernel + exchanged + again


@checked
def shifted_layer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    attention: str = "softmax",
    head_dim: Size = None,
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`MultiheadAttention(d, H, attention=ShiftedKeysValues(H, attention))` on x (B, N, d), in its fast form."""
    options: dict[str, Any] = {"head_dim": head_dim, "causal": causal, "input_grad": input_grad, "itemsize": itemsize}
    bare = layer(B, N, d, H, attention=attention, **options)
    K = head_width(d, H, head_dim)
    numbers = 2 * B * N * H * K  # of keys and of values
    return replace(
        bare,
        # A product with the one number, a product with the other and a sum in one.
        elementwise_forward=bare.elementwise_forward + 2 * numbers,
        # Into the vectors two products and a sum; for either number a product, a sum, and for one a factor of 1.
        elementwise_backward=bare.elementwise_backward + 8 * numbers + 2 * H,
        saved_bytes=bare.saved_bytes + 2 * itemsize * numbers,  # the vectors, and those before them
        state_bytes=bare.state_bytes + 2 * itemsize * B * H * K,
        trained=bare.trained + 4 * H,
    )


@checked
def convolved_layer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    of: Callable[..., Cost] = layer,
    width: Size = 4,
    itemsize: int = 4,
    **kwargs: Any,
) -> Cost:
    """`ConvolvedAttention(d, H)` on x (B, N, d) that needs a gradient; `of` is the closed form of its layer, and
    `kwargs` are its.

    The convolution has no products of matrices. Symbols stand for sequences that are longer than `width`.
    """
    bare = of(B, N, d, H, itemsize=itemsize, **kwargs)
    reached = min(width, N) if isinstance(width, int) and isinstance(N, int) else width  # taps within the sequence
    before = reached * (reached - 1)  # twice the tokens that would stand before the first
    sums = B * d * (reached * N - (before // 2 if isinstance(before, int) else before / 2))
    return replace(
        bare,
        elementwise_forward=bare.elementwise_forward + sums,
        elementwise_backward=bare.elementwise_backward + 3 * sums,  # into x; for the taps a product and a sum
        saved_bytes=bare.saved_bytes + itemsize * B * N * d,
        state_bytes=bare.state_bytes + itemsize * B * (width - 1) * d,
        trained=bare.trained + width * d,
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
    K = head_width(d, H)
    if sum(heads.values()) != H:
        raise ValueError(f"heads: expected numbers that are together H = {H}, got {sum(heads.values())}")
    options: dict[str, Any] = {"head_dim": K, "causal": causal, "input_grad": input_grad, "itemsize": itemsize}
    groups = [COSTS[one_of("heads", kind, HEADS)](B, N, d, count, **options) for kind, count in heads.items() if count]
    sums = (len(groups) - 1) * B * N * d
    together = Cost(
        elementwise_forward=sums,
        elementwise_backward=sums if input_grad else 0,
        saved_bytes=-itemsize * sums,  # x is kept once
    )
    return added(*groups, together)


@checked
def cross_layer(
    B: Size,
    N: Size,
    M: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    num_kv_heads: Size = None,
    bias: bool = False,
    projection: str = "learned",
    attention: str = "softmax",
    form: str = "fast",
) -> Cost:
    """`MultiheadAttention(d, H)` of x (B, N, d) to a context (B, M, d), which both need a gradient: FLOPs of matrix
    products, and parameters. The other figures are not derived.

    `StoppedAttention` costs as much, whose exchanged pass is that of self-attention alone. Raises TypeError or
    ValueError as the layer does, and for an attention other than softmax.
    """
    one_of("attention", attention, ("softmax",))
    K, G = head_width(d, H, head_dim), shared_heads(H, num_kv_heads)
    # Queries are half of what as many heads of queries and of keys cost at N tokens, keys half of it at M.
    halves = [projection_cost(projection, B, n, d, h, K, h, bias=bias) for n, h in ((N, H), (M, G))]
    qk = projection_cost(projection, B, N, d, H, K, G, bias=bias)
    values, merged = linear_map(B, M, d, K * G, bias=bias), linear_map(B, N, H * K, d, bias=bias)
    pair = softmax_cost(B, 1, H, K, K, form=form, qk_grad=passes_gradient(projection))
    figures = {
        name: sum(getattr(half, name) for half in halves) // 2
        + getattr(values, name)
        + getattr(merged, name)
        + N * M * getattr(pair, name)
        for name in ("forward", "backward")
    }
    trained = qk.trained + values.trained + merged.trained
    return Cost(**figures, trained=trained, frozen=qk.frozen, **NOT_DERIVED)


@checked
def feed_forward(B: Size, N: Size, d: Size, d_ff: Size = None, *, bias: bool = False, itemsize: int = 4) -> Cost:
    """`FeedForward(d, d_ff)` on x (B, N, d) that needs a gradient."""
    d_ff = 4 * d if d_ff is None else d_ff
    product = 2 * B * N * d * d_ff
    return Cost(
        forward=2 * product,
        backward=4 * product,
        elementwise_forward=B * N * d_ff,
        elementwise_backward=B * N * d_ff + (B * N * (d + d_ff) if bias else 0),  # GELU's; the biases' sums
        saved_bytes=itemsize * B * N * (d + 2 * d_ff),  # x, and what goes into and comes out of the GELU
        decode=4 * B * d * d_ff,
        trained=2 * d * d_ff + (d + d_ff if bias else 0),
        itemsize=itemsize,
    )


@checked
def gated_feed_forward(B: Size, N: Size, d: Size, d_ff: Size) -> Cost:
    """`GatedFeedForward(d, d_ff)` on x (B, N, d) that needs a gradient: three products, and two backward for each.

    FLOPs of matrix products and parameters; the other figures are not derived.
    """
    weights = 3 * d * d_ff
    products = {"forward": 2 * B * N * weights, "backward": 4 * B * N * weights, "trained": weights}
    return Cost(**{**NOT_DERIVED, **products, "decode": 2 * B * weights})


@checked
def mixture_of_experts(
    B: Size, N: Size, d: Size, E: Size, k: Size, d_ff: Size, *, gated: bool = False, form: str = "fast"
) -> Cost:
    """`MixtureOfExperts(d, E, top_k=k, d_ff=d_ff)`, none of whose tokens is dropped: the router's product, and those of
    k experts a token; of all E in the form "reference".

    FLOPs of matrix products on x that needs a gradient, and parameters; the other figures are not derived.
    """
    matrices = 3 if gated else 2
    expert, run = matrices * d * d_ff, E if form == "reference" else k
    token = 2 * d * E + 2 * run * expert
    products = {"forward": B * N * token, "backward": 2 * B * N * token, "trained": E * expert + d * E}
    return Cost(**{**NOT_DERIVED, **products, "decode": B * token})


@checked
def layer_norm(B: Size, N: Size, d: Size, *, bias: bool = False, itemsize: int = 4) -> Cost:
    """`torch.nn.LayerNorm(d)` on x (B, N, d) that needs a gradient."""
    size = B * N * d
    return Cost(
        elementwise_forward=(LAYER_NORM_FORWARD + bias) * size,
        elementwise_backward=(LAYER_NORM_BACKWARD + bias) * size,
        # x, and each row's mean and 1/std, in float32 at least as on CUDA (the CPU's kernel has them in half precision)
        saved_bytes=itemsize * size + 2 * max(itemsize, 4) * B * N,
        trained=d + (d if bias else 0),
        itemsize=itemsize,
    )


@checked
def block(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    layer: Callable[..., Cost] = layer,
    d_ff: Size = None,
    bias: bool = False,
    itemsize: int = 4,
    **kwargs: Any,
) -> Cost:
    """`TransformerBlock(d, H, d_ff=d_ff)` on x (B, N, d) that needs a gradient; `layer` is the closed form of its
    attention layer, and `kwargs` are its.

    The norm before the attention has a trained gain, so the attention's own input always needs a gradient, and
    `input_grad` may not be said. Raises TypeError if it is.
    """
    if "input_grad" in kwargs:
        raise TypeError("input_grad: expected in ortho.cost.layer alone; a block's attention always needs the gradient")
    kind: dict[str, Any] = {"bias": bias, "itemsize": itemsize}
    own = kind if bias else {"itemsize": itemsize}  # not every layer knows of biases
    norm = layer_norm(B, N, d, **kind)
    sums = 2 * B * N * d  # two residual sums forward; backward, the two gradients of each branch point are added
    residuals = Cost(elementwise_forward=sums, elementwise_backward=sums)
    return added(norm, layer(B, N, d, H, **own, **kwargs), norm, feed_forward(B, N, d, d_ff, **kind), residuals)


class RecomputedCost(NamedTuple):
    """FLOPs of a step's matrix products, those of them that are computed again, and bytes of activations: kept from
    the forward pass, and at the peak, when a segment's are there again."""

    step: Any
    again: Any
    kept_bytes: Any
    peak_bytes: Any


@checked
def recomputed(
    B: Size, N: Size, d: Size, H: Size, L: int, segments: int, *, itemsize: int = 4, **kwargs: Any
) -> RecomputedCost:
    """`ortho.layers.recomputation.Recomputed` of L blocks, of whose last products in each segment PyTorch knows that
    nothing needs them; `kwargs` are `block`'s. With 0 segments nothing is recomputed, and all is kept."""
    one = block(B, N, d, H, itemsize=itemsize, **kwargs)
    whole = L * one.step
    if not segments:
        return RecomputedCost(whole, 0, L * one.saved_bytes, L * one.saved_bytes)
    if positive_int("segments", segments) > L:
        raise ValueError(f"segments: expected at most the {L} blocks, got {segments}")
    d_ff = kwargs.get("d_ff") or 4 * d
    again = L * one.forward - segments * 2 * B * N * d * d_ff
    own, longest = itemsize * B * N * d, -(-L // segments)
    # A segment's input is also what its first block keeps.
    peak = (segments - 1) * own + longest * one.saved_bytes
    return RecomputedCost(whole + again, again, segments * own, peak)
