"""Closed forms of what mixes neighbouring tokens: the short convolution (`ortho.layers.short_convolution`) and the KV
shift (`ortho.attention.shifted`)."""

from collections.abc import Callable
from typing import Any

from ortho._checks import checked
from ortho._cost import Cost, head_width
from ortho._typing import Size
from ortho.cost.layers import layer

__all__ = ["convolved_layer", "shifted_layer"]


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
    width = H * head_width(d, H, head_dim)
    numbers = 2 * B * N * width  # of keys and of values
    return bare + Cost(
        # A product with the one number, a product with the other and a sum in one.
        elementwise_forward=2 * numbers,
        # Into the vectors two products and a sum; for either number a product, a sum, and for one a factor of 1.
        elementwise_backward=8 * numbers + 2 * H,
        saved_bytes=2 * itemsize * numbers,  # the vectors, and those before them
        state_bytes=2 * itemsize * B * width,
        trained=4 * H,
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
    return bare + Cost(
        elementwise_forward=sums,
        elementwise_backward=3 * sums,  # into x; for the taps a product and a sum
        saved_bytes=itemsize * B * N * d,
        state_bytes=itemsize * B * (width - 1) * d,
        trained=width * d,
    )
