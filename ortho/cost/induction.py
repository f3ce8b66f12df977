"""The closed form of induction heads (`ortho.layers.induction`)."""

from ortho._checks import checked, one_of
from ortho._cost import Cost, head_width
from ortho._typing import Size
from ortho.attention import FORMS
from ortho.attention.softmax.value_gradient import value_gradient_cost
from ortho.layers.induction import STRUCTURED
from ortho.orthogonal import DRAWS
from ortho.projections.structured import factors, sufficient_rounds

__all__ = ["induction_heads"]


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
    one_of("form", form, FORMS)
    K, n = head_width(d, H, head_dim), tokens
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
    core = value_gradient_cost(B, N, H, K, K, form=form, causal=causal, itemsize=itemsize)
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
