"""What a projection is: a module that makes the queries and keys of some heads from x."""

from torch import nn
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.heads import split_heads


class HeadSizes(nn.Module):
    """A module with heads: `d_model`, `num_heads`, and by default `head_dim` = d/H and `num_kv_heads` = H.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for heads that do not divide.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, head_dim: int | None = None, num_kv_heads: int | None = None
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = head_sizes(d_model, num_heads, head_dim)
        self.num_kv_heads = kv_heads(self.num_heads, num_kv_heads)


class Projection(HeadSizes):
    """x (B, N, d) and a context (B, M, d), by default x itself -> q (B, H, N, K) and k (B, G, M, K).

    K is `head_dim`, by default d/H; if it is given, there may be any number of heads. With fewer heads of keys, G =
    `num_kv_heads`, H/G neighbouring heads of queries share one of them (Ainslie et al. 2023, arXiv:2305.13245; G = 1:
    Shazeer 2019, arXiv:1911.02150). Weights (H K, d) and (G K, d), and biases, if any, are stored as in
    `torch.nn.Linear`: q = x W^T, so that the sources' $W_Q$ is the transpose of `weight_q`. Subclasses define the
    weights and whether they are trained.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for heads that do not divide.
    """

    own_tokens = True  # whether a token's query and key are made from it alone
    frozen = False  # whether the weights are never trained
    stop_gradient = False  # whether q and k are constants, so that no gradient passes through them to x
    weight_q: Tensor
    weight_k: Tensor
    bias_q: Tensor | None
    bias_k: Tensor | None

    @property
    def q_width(self) -> int:
        """The width of a token's queries, all heads together."""
        return self.head_dim * self.num_heads

    @property
    def kv_width(self) -> int:
        """The width of a token's keys, all heads together, and of its values."""
        return self.head_dim * self.num_kv_heads

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        x, context = self._sources(x, context)
        q, k = linear(x, self.weight_q, self.bias_q), linear(context, self.weight_k, self.bias_k)
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)

    def _sources(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """What queries and keys are made of."""
        context = x if context is None else context
        return (x.detach(), context.detach()) if self.stop_gradient else (x, context)

    def extra_repr(self) -> str:
        width = "" if self.q_width == self.d_model else f", head_dim={self.head_dim}"
        shared = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}{width}{shared}"


def head_sizes(d_model: int, num_heads: int, head_dim: int | None) -> tuple[int, int, int]:
    """(d_model, num_heads, head_dim), the last by default d_model / num_heads.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, and for a default that is not an integer.
    """
    if head_dim is None:
        d_model, num_heads = checks.heads(d_model, num_heads)
        return d_model, num_heads, d_model // num_heads
    d_model, num_heads = checks.positive_int("d_model", d_model), checks.positive_int("num_heads", num_heads)
    return d_model, num_heads, checks.positive_int("head_dim", head_dim)


def kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """The number of heads of keys and values, by default `num_heads`, the number of heads of queries.

    Raises TypeError or ValueError, naming the argument, unless it divides `num_heads`.
    """
    if num_kv_heads is None:
        return num_heads
    num_kv_heads = checks.positive_int("num_kv_heads", num_kv_heads)
    checks.expect(not num_heads % num_kv_heads, "num_kv_heads", f"a divisor of num_heads = {num_heads}", num_kv_heads)
    return num_kv_heads
