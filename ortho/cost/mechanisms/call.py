"""The call whose cost a closed form gives, and what the forms share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ortho._cost import Cost, product
from ortho._typing import Size
from ortho.attention.call import with_options
from ortho.checks import FORMS, one_of


class CostedCall(NamedTuple):
    """The call whose cost is computed: self-attention of queries and keys (B, H, N, K) and values (B, H, N, V).

    `qk_grad` says whether autograd must reach q and k, or v alone.
    """

    B: Size
    N: Size
    H: Size
    K: Size
    V: Size
    form: str = "fast"
    causal: bool = False
    qk_grad: bool = True
    itemsize: int = 4

    @property
    def sizes(self) -> tuple[Size, Size, Size, Size]:
        """(G, N, K, V), where G = B H is the number of sequences."""
        return self.B * self.H, self.N, self.K, self.V

    @property
    def reach(self) -> int:
        """`qk_grad` as a number: 1 if gradients reach q and k, else 0."""
        return int(self.qk_grad)

    @property
    def item(self) -> int:
        """Bytes of a number where computation is in float32 at least."""
        return max(self.itemsize, 4)

    def attending(self, pairs: Size, width: Size = None) -> Cost:
        """The products for `pairs` pairs: scores of vectors of this width, by default K, and weights times values.
        Backward: the values' gradient and, if gradients reach q and k, those of weights, queries and keys."""
        scores = product(pairs * (self.K if width is None else width), 2 * self.reach)
        return scores + product(pairs * self.V, 1 + self.reach)

    def held_keys(self, keys: Size = None) -> Cost:
        """A state of `keys` keys and values, by default N; a new token is multiplied with all of them."""
        numbers = self.B * self.H * (self.N if keys is None else keys) * (self.K + self.V)
        return Cost(decode=2 * numbers, state_bytes=self.itemsize * numbers)

    def by(self, form: Callable[..., Cost], **options: Any) -> Cost:
        """The cost of the same call by another closed form."""
        return form(*self[:5], **dict(zip(self._fields[5:], self[5:], strict=True)), **options)


def closed_form(of: Callable[..., Cost]) -> Callable[..., Cost]:
    """A `Mechanism.cost` made from `of(call, **options)`, where `call` is a `CostedCall`."""

    def cost(
        B: Size,
        N: Size,
        H: Size,
        K: Size,
        V: Size,
        *,
        form: str = "fast",
        causal: bool = False,
        qk_grad: bool = True,
        itemsize: int = 4,
        **options: Any,
    ) -> Cost:
        one_of("form", form, FORMS)
        return of(CostedCall(B, N, H, K, V, form, causal, qk_grad, itemsize), **options)

    return with_options(cost, of)


def equal_parts(length: Size, most: Size) -> tuple[Size, Size]:
    """(the width of the fewest equal parts of at most `most` tokens, their number); a symbol is a multiple of it."""
    if not isinstance(length, int):
        return most, length / most
    number = -(-length // most)
    return -(-length // number), number
