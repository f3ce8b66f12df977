"""The closed form of induction heads (`ortho.layers.induction`)."""

from ortho._checks import checked, one_of
from ortho._cost import Cost, head_width
from ortho._typing import Size
from ortho.attention import FORMS
from ortho.attention.softmax.value_gradient import exchanged_cost
from ortho.layers.induction_projection import STRUCTURED
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
    values = linear_map(B, N, d, width, input_grad=input_grad, itemsize=itemsize)
    merged = linear_map(B, N, width, d, itemsize=itemsize)
    made, drawn, frozen = n * values.forward, 0, n * d * width
    if one_of("draw", draw, (*DRAWS, STRUCTURED)) == STRUCTURED:
        (a, b), rounds = factors(d, K), sufficient_rounds(d, K)
        rows = -(-width // b)  # of the table, which are read in the end
        made = n * B * N * (rounds * 2 * d * b + (rounds - 1) * 2 * d * a + 2 * rows * a * b)
        drawn, frozen = n * rounds * 2 * d * b, n * (rounds * 2 * d + a * a + b * b)  # signs into the blocks
    # Squares, their sum, the product with the length; of a token its length. The sum over tokens.
    elementwise = 3 * B * N * d + 3 * B * N + (n - 1) * B * N * width + drawn
    again = form == "fast"
    queries = Cost(
        forward=made,
        backward=made if again else 0,
        elementwise_forward=elementwise,
        elementwise_backward=elementwise if again else 0,
        # x, the merged heads; not q and k, which the kernel's closed form has
        saved_bytes=itemsize * B * N * (d + width - (2 * width if again else 0)),
        decode=made // N if isinstance(N, int) else made / N,
        state_bytes=itemsize * B * (width + (n - 1) * d),
        frozen=frozen,
        itemsize=itemsize,
    )
