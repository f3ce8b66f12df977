"""How much of the work of a mechanism that selects its pairs goes into choosing them."""

from typing import Any, NamedTuple

from ortho._checks import checked, one_of
from ortho._typing import Size
from ortho.attention import MECHANISMS

# Not of a sparse + linear hybrid, in which near keys are so by their positions.
CHOOSING = ("top-k", "importance", "lsh", "routing", "moba", "nsa")


class Flops(NamedTuple):
    """FLOPs of matrix products in a forward pass: what goes into choosing pairs, and into attending to them."""

    choosing: Size
    attending: Size

    @property
    def share(self) -> Size:
        """Of choosing, in both."""
        return self.choosing / (self.choosing + self.attending)


@checked
def choosing(attention: str, N: int, K: int, V: int, *, causal: bool = True, **sizes: Any) -> Flops:
    """What the fast form spends on choosing pairs and on attending to them, for a sequence of N tokens, in FLOPs of
    matrix products; its `share` is that of choosing. `sizes` are those of the mechanism's closed form.

    Comparisons are not in it, which is all that "importance" chooses by. Raises ValueError for a mechanism that does
    not choose, and for a call that it does not serve.
    """
    mechanism = MECHANISMS[one_of("attention", attention, CHOOSING)]
    if not causal and not mechanism.bidirectional:
        raise ValueError(f"causal: expected True, since {attention!r} chooses from a query's past, got {causal}")
    whole, one_more = (mechanism.cost(1, N, 1, K, width, causal=causal, **sizes).forward for width in (V, V + 1))
    attending = (K + V) * (one_more - whole)  # values of one number more: so much does a pair take for a number
    return Flops(whole - attending, attending)
