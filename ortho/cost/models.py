"""Closed forms of blocks and whole models.

The loss is not included: counts end at what `forward` returns.
"""

from collections.abc import Callable
from typing import Any

from ortho._cost import Cost, linear_map
from ortho._typing import Size
from ortho.checks import expect
from ortho.cost.layers import NOT_DERIVED, added, layer


def feed_forward(
    B: Size, N: Size, d: Size, d_ff: Size = None, *, gated: bool = False, bias: bool = False, itemsize: int = 4
) -> Cost:
    """Cost of `FeedForward(d, d_ff)`, or of `GatedFeedForward(d, d_ff)`, on x (B, N, d) that needs a gradient. The
    default `d_ff` is the former's, 4 d."""
    d_ff = 4 * d if d_ff is None else d_ff
    up, down = (linear_map(B, N, *sizes, bias=bias, itemsize=itemsize) for sizes in ((d, d_ff), (d_ff, d)))
    return up * (1 + gated) + down


def mixture_of_experts(
    B: Size, N: Size, d: Size, E: Size, k: Size, d_ff: Size, *, gated: bool = False, form: str = "fast"
) -> Cost:
    """Cost of `MixtureOfExperts(d, E, top_k=k, d_ff=d_ff)` that drops no tokens: the router's product, and those of k
    experts for each token, or of all E in the form "reference".

    FLOPs of matrix products and parameters, on x that needs a gradient; the other figures are not derived.
    """
    matrices = 3 if gated else 2
    expert, run = matrices * d * d_ff, E if form == "reference" else k
    token = 2 * d * E + 2 * run * expert
    products = {"forward": B * N * token, "backward": 2 * B * N * token, "trained": E * expert + d * E}
    return Cost(**{**NOT_DERIVED, **products, "decode": B * token})


def _norm(d: Size, bias: bool) -> Cost:
    """The parameters of `torch.nn.LayerNorm(d)`."""
    return Cost(trained=d + (d if bias else 0))


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
    """Cost of `TransformerBlock(d, H, d_ff=d_ff)` on x (B, N, d) that needs a gradient.

    `layer` is the closed form of its attention layer, and takes `kwargs`. The norm before the attention has a trained
    gain, so the attention's own input always needs a gradient. Raises TypeError if `input_grad` is given.
    """
    if "input_grad" in kwargs:
        raise TypeError("input_grad: expected in ortho.cost.layer alone; a block's attention always needs the gradient")
    kind: dict[str, Any] = {"bias": bias, "itemsize": itemsize}
    own = kind if bias else {"itemsize": itemsize}  # not every layer takes `bias`
    norm = _norm(d, bias)
    return added(layer(B, N, d, H, **own, **kwargs), feed_forward(B, N, d, d_ff, **kind), norm, norm)


def recomputed(B: Size, N: Size, d: Size, H: Size, L: int, segments: int, *, itemsize: int = 4, **kwargs: Any) -> Cost:
    """Cost of `ortho.layers.checkpointed.Checkpointed` with L blocks, which it computes again in the backward pass;
    `kwargs` are `block`'s. PyTorch leaves out the last product of each segment, which nothing needs. With 0 segments
    nothing is computed twice."""
    expect(segments <= L, "segments", f"at most the {L} blocks", segments)
    whole = block(B, N, d, H, itemsize=itemsize, **kwargs) * L
    d_ff = kwargs.get("d_ff") or 4 * d
    again = whole.forward - segments * 2 * B * N * d * d_ff if segments else 0
    return whole + Cost(backward=again)


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
    """Cost of `LanguageModel(vocab_size, d, H, L, max_length=max_length)` on tokens (B, N); `kwargs` are `block`'s."""
    fits = not (isinstance(N, int) and isinstance(max_length, int)) or max_length >= N
    expect(fits, "N", f"at most max_length = {max_length}", N)
    places = 0 if max_length is None else max_length
    one = block(B, N, d, H, bias=bias, itemsize=itemsize, **{"causal": True, **kwargs})
    read_out = linear_map(B, N, d, vocab_size, itemsize=itemsize)  # the tied matrix, the tokens' vectors
    return added(one * L, _norm(d, bias), read_out, Cost(trained=places * d))
