"""Closed forms of the layer, the block and the model, with all their constants."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ortho._checks import checked, one_of, positive_int
from ortho._typing import Size
from ortho.attention import FORMS, MECHANISMS
from ortho.cost.counting import LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD
from ortho.cost.projections import projection_cost
from ortho.gates import Gate, GateCost
from ortho.projections import kv_heads


@dataclass(frozen=True)
class Cost:
    """What one training step or one decode step costs. Integers for integer sizes, formulas for symbols.

    forward, backward: FLOPs of matrix products, 2 a multiply-add. elementwise_forward, elementwise_backward: scalar
    operations outside them. recompute: further FLOPs if only the input is kept and the forward pass is run again.
    saved_bytes: kept by autograd from forward to backward. decode: FLOPs of one generated token at context N, itself
    included; state_bytes: carried between decode steps. trained, frozen: parameters. optimiser_bytes: AdamW's moments.
    """

    forward: Any
    backward: Any
    elementwise_forward: Any
    elementwise_backward: Any
    saved_bytes: Any
    decode: Any
    state_bytes: Any
    trained: Any
    frozen: Any
    itemsize: Any = 4

    @property
    def step(self) -> Any:
        """FLOPs of matrix products in one training step, forward and backward."""
        return self.forward + self.backward

    @property
    def recompute(self) -> Any:
        """FLOPs added by recomputing the forward pass from its input."""
        return self.forward

    @property
    def optimiser_bytes(self) -> Any:
        """AdamW's two moments of every trained parameter (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
        return 2 * self.itemsize * self.trained


@checked
def check_sizes(**sizes: Size) -> None:
    """TypeError or ValueError for a number that is no size; symbols pass."""
    for name, value in sizes.items():
        if not hasattr(value, "free_symbols"):
            positive_int(name, value)
    d, H = sizes.get("d"), sizes.get("H")
    if isinstance(d, int) and isinstance(H, int) and d % H:
        raise ValueError(f"H: expected a divisor of d = {d}, got {H}")


@checked
def shared_heads(H: Size, num_kv_heads: Size | None) -> Size:
    """The heads of keys that H heads of queries share, by default as many; numbers are checked, symbols pass."""
    if num_kv_heads is None or hasattr(num_kv_heads, "free_symbols"):
        return H if num_kv_heads is None else num_kv_heads
    return num_kv_heads if hasattr(H, "free_symbols") else kv_heads(H, num_kv_heads)


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
    if head_dim is None:
        check_sizes(B=B, N=N, d=d, H=H)
        K = d // H if isinstance(d, int) else d / H
    else:
        check_sizes(B=B, N=N, d=d)
        check_sizes(H=H, head_dim=head_dim)
        K = head_dim
    one_of("form", form, FORMS)
    mechanism = MECHANISMS[one_of("attention", attention, MECHANISMS)]
    G = shared_heads(H, num_kv_heads)
    made = projection_cost(projection, B, N, d, H, K, G, bias=bias, input_grad=input_grad, itemsize=itemsize)
    core = mechanism.cost(B, N, H, K, K, form=form, causal=causal, qk_grad=made.gradient, itemsize=itemsize, **options)
    kept_twice = 0 if 1 in (H, N) else core.output_bytes  # heads, or tokens, lie side by side as they are
    numbers = K * (H + G)  # of a token's values and of its merged heads
    product = 2 * B * N * d * numbers  # FLOPs of making the values, and the output
    merged = 2 * B * N * d * H * K  # of the latter alone
    sums = B * N * int(bias) * (d + K * G)  # of the biases
    if G != H:  # k's and v's gradients over the heads that share them
        sums += B * N * H * K * (1 + made.gradient)
    own = numbers * d + int(bias) * (d + K * G)  # trained in any case
    bare = Cost(
        forward=product + made.forward + core.forward,
        # dO always; into x through v, and through q and k where autograd goes there.
        backward=product + (product if input_grad else merged) + made.backward + core.backward,
        elementwise_forward=core.elementwise_forward + made.elementwise_forward,
        elementwise_backward=core.elementwise_backward
        + made.elementwise_backward
        + (2 * B * N * d if input_grad and made.gradient else 0)  # sum of dx
        + sums,
        # x, the merged heads
        saved_bytes=itemsize * B * N * (d + H * K) + core.saved_bytes + made.saved_bytes + kept_twice,
        decode=2 * B * d * numbers + made.decode + core.decode,
        state_bytes=core.state_bytes,
        trained=own + made.trained,
        frozen=made.frozen,
        itemsize=itemsize,
    )
    gate_classes = {**mechanism.gates, **(gates or {})}.values()
    of_gates = [gate.cost(B, N, d, H, input_grad=input_grad, itemsize=itemsize) for gate in gate_classes]
    return replace(
        bare, **{name: getattr(bare, name) + sum(getattr(g, name) for g in of_gates) for name in GateCost._fields}
    )


@checked
def feed_forward(B: Size, N: Size, d: Size, d_ff: Size = None, *, bias: bool = False, itemsize: int = 4) -> Cost:
    """`FeedForward(d, d_ff)` on x (B, N, d) that needs a gradient."""
    d_ff = 4 * d if d_ff is None else d_ff
    check_sizes(B=B, N=N, d=d, d_ff=d_ff)
    product = 2 * B * N * d * d_ff
    return Cost(
        forward=2 * product,
        backward=4 * product,
        elementwise_forward=B * N * d_ff,
        elementwise_backward=B * N * d_ff + (B * N * (d + d_ff) if bias else 0),  # GELU's; the biases' sums
        saved_bytes=itemsize * B * N * (d + 2 * d_ff),  # x, and what goes into and comes out of the GELU
        decode=4 * B * d * d_ff,
        state_bytes=0,
        trained=2 * d * d_ff + (d + d_ff if bias else 0),
        frozen=0,
        itemsize=itemsize,
    )


@checked
def layer_norm(B: Size, N: Size, d: Size, *, bias: bool = False, itemsize: int = 4) -> Cost:
    """`torch.nn.LayerNorm(d)` on x (B, N, d) that needs a gradient."""
    size = B * N * d
    return Cost(
        forward=0,
        backward=0,
        elementwise_forward=(LAYER_NORM_FORWARD + bias) * size,
        elementwise_backward=(LAYER_NORM_BACKWARD + bias) * size,
        # x, and each row's mean and 1/std, in float32 at least as on CUDA (the CPU's kernel has them in half precision)
        saved_bytes=itemsize * size + 2 * max(itemsize, 4) * B * N,
        decode=0,
        state_bytes=0,
        trained=d + (d if bias else 0),
        frozen=0,
        itemsize=itemsize,
    )


def added(*costs: Cost) -> Cost:
    """The costs one after the other."""
    names = [name for name in Cost.__dataclass_fields__ if name != "itemsize"]
    return Cost(**{name: sum(getattr(c, name) for c in costs) for name in names}, itemsize=costs[0].itemsize)


@checked
def repeated(L: Size, cost: Cost) -> Cost:
    """L times the same."""
    names = [name for name in Cost.__dataclass_fields__ if name != "itemsize"]
    return Cost(**{name: L * getattr(cost, name) for name in names}, itemsize=cost.itemsize)


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
    total = added(norm, layer(B, N, d, H, **own, **kwargs), norm, feed_forward(B, N, d, d_ff, **kind))
    residuals = 2 * B * N * d  # two sums forward; backward, the two gradients of each branch point are added
    return replace(
        total,
        elementwise_forward=total.elementwise_forward + residuals,
        elementwise_backward=total.elementwise_backward + residuals,
    )


@checked
def model(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    L: Size,
    *,
    vocab_size: Size,
    max_length: Size | None,
    bias: bool = False,
    itemsize: int = 4,
    **kwargs: Any,
) -> Cost:
    """`LanguageModel(vocab_size, d, H, L, max_length=max_length)` on tokens (B, N); `kwargs` are `block`'s.

    The loss is not included: `saved_bytes` and the counts end at the logits.
    """
    check_sizes(L=L, vocab_size=vocab_size, max_length=1 if max_length is None else max_length)
    places, sums = (0, 0) if max_length is None else (max_length, B * N * d)  # token + position
    one = block(B, N, d, H, bias=bias, itemsize=itemsize, **{"causal": True, **kwargs})
    product = 2 * B * N * d * vocab_size
    ends = Cost(
        forward=product,
        backward=2 * product,
        elementwise_forward=sums,
        # positions' gradient summed over the batch, tokens' scattered; the tied matrix's two gradients added
        elementwise_backward=sums + B * N * d + vocab_size * d,
        saved_bytes=itemsize * B * N * d + 8 * B * N,  # the read-out's input; the token indices
        decode=2 * B * d * vocab_size,
        state_bytes=0,
        trained=(vocab_size + places) * d,
        frozen=0,
        itemsize=itemsize,
    )
    return added(repeated(L, one), layer_norm(B, N, d, bias=bias, itemsize=itemsize), ends)
