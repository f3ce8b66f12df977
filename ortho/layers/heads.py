"""What layers of heads share: their sizes, and the trained maps around their attention."""

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Float
from ortho.heads import merge_heads, new_bias, new_weight, split_heads
from ortho.projections.projection import HeadSizes


class Heads(HeadSizes):
    """Heads of width K = `head_dim` that read values: W_V makes the values of x, W_O the layer's output of the heads'.

    K is d/H by default; if it is given, there may be any number of heads. W_V (`weight_v`, (G K, d)) and W_O
    (`weight_o`, (d, H K)) are stored as in `torch.nn.Linear` and always trained, and so are their biases, if any. With
    a given K their entries start with the variance of a layer whose heads together are as wide as x. There are G =
    `num_kv_heads` heads of values, by default H. A subclass makes the maps by `_make_maps`, in its order of draws.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for heads that do not divide.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, head_dim: int | None = None, num_kv_heads: int | None = None
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        self._fans = None if head_dim is None else 2 * d_model

    def _make_maps(self, *, bias: bool = False, **kind: Any) -> None:
        """Draw W_V, then W_O; `kind` is the generator, dtype and device."""
        self.weight_v = new_weight(self.num_kv_heads * self.head_dim, self.d_model, fans=self._fans, **kind)
        self.weight_o = new_weight(self.d_model, self.num_heads * self.head_dim, fans=self._fans, **kind)
        self.bias_v, self.bias_o = (new_bias(w) if bias else None for w in (self.weight_v, self.weight_o))

    def _values(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B G N K"]:
        return split_heads(linear(x, self.weight_v, self.bias_v), self.num_kv_heads)

    def _merge(self, o: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N d"]:
        """Heads side by side, then W_O."""
        return linear(merge_heads(o), self.weight_o, self.bias_o)


def alone(is_causal: bool, **others: Any) -> None:
    """Raise ValueError unless a call with a cache is causal and has none of the other arguments."""
    checks.expect(is_causal, "is_causal", "True beside a cache", "False")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none beside a cache, got {checks.describe(value)}")
