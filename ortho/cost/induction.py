"""Closed forms of induction heads (`ortho.layers.induction`), and of what other heads have for the same: the short
convolution (`ortho.layers.short_convolution`) and the KV shift (`ortho.attention.shifted`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ortho._checks import checked, one_of
from ortho._typing import Size
from ortho.attention import FORMS
from ortho.attention.softmax.value_gradient import exchanged_cost
from ortho.cost.closed_forms import Cost, check_sizes, layer
from ortho.layers.induction_projection import STRUCTURED
from ortho.orthogonal import DRAWS
from ortho.projections.structured import factors, sufficient_rounds

__all__ = ["convolved_layer", "induction_heads", "shifted_layer"]


@checked
def induction_heads(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    tokens: Size = 1,
    draw: str = "haar",
    form: str = "fast",
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`InductionHeads(d, H)` on x (B, N, d); structured draws need numbers for d, H and `head_dim`.

    Queries are made, and keys are the same a token late: one product. The fast form makes them again backward.
    """
    if head_dim is None:
        check_sizes(d=d, H=H)
        head_dim = d // H if isinstance(d, int) else d / H
    check_sizes(B=B, N=N, d=d, head_dim=head_dim, tokens=tokens)
    check_sizes(H=H)
    one_of("form", form, FORMS)
    K, n = head_dim, tokens
    width = H * K
    product = 2 * B * N * d * width  # with W_V, or W_O
    made, drawn, frozen = n * product, 0, n * d * width
    if one_of("draw", draw, (*DRAWS, STRUCTURED)) == STRUCTURED:
        (a, b), rounds = factors(d, K), sufficient_rounds(d, K)
        rows = -(-width // b)  # of the table, which are read in the end
        made = n * B * N * (rounds * 2 * d * b + (rounds - 1) * 2 * d * a + 2 * rows * a * b)
        drawn, frozen = n * rounds * 2 * d * b, n * (rounds * 2 * d + a * a + b * b)  # signs into the blocks
    # Squares, their sum, the product with the length; of a token its length. The sum over tokens.
    elementwise = 3 * B * N * d + 3 * B * N + (n - 1) * B * N * width + drawn
    core = exchanged_cost(B, N, H, K, K, form=form, causal=causal, itemsize=itemsize)
    again = form == "fast"
    kept = 2 * itemsize * B * N * width if again else 0  # q and k, which are not kept
    token = made // N if isinstance(N, int) else made / N
    return Cost(
        forward=2 * product + made + core.forward,
        backward=(3 + input_grad) * product + core.backward + (made if again else 0),
        elementwise_forward=core.elementwise_forward + elementwise,
        elementwise_backward=core.elementwise_backward + (elementwise if again else 0),
        saved_bytes=itemsize * B * N * (d + width) + core.saved_bytes - kept,
        decode=4 * B * d * width + token + core.decode,
        state_bytes=core.state_bytes + itemsize * B * (width + (n - 1) * d),
        trained=2 * d * width,
        frozen=frozen,
        itemsize=itemsize,
    )


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
    K = head_dim if head_dim is not None else d // H if isinstance(d, int) else d / H
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
    check_sizes(B=B, N=N, d=d, width=width)
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
