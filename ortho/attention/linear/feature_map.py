r"""What a feature map is, and elu(x) + 1, the map of linear attention itself. `feature_maps` has others."""

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import Function

from ortho._typing import Bool, Float, Int, Size, Tensor
from ortho.attention.scores import scaled


class Features(NamedTuple):
    r"""A factorised kernel, $\kappa(q_i, k_j) = e^{s_j}\, \phi(q_i)^T \phi(k_j)$.

    `log_k`, the $s_j$, keeps the features of both large and small keys in range; it must carry no gradient. A factor
    that depends on the query alone cancels in the attention, so a map may scale each query's features freely.
    """

    q: Float[Tensor, "*batch N m"]
    k: Float[Tensor, "*batch M m"]
    log_k: Float[Tensor, "*batch M"] | None = None


class FeatureMap(ABC):
    r"""`map(q, k)` gives the `Features` of q (..., N, K) and k (..., M, K), which may be mapped differently.

    Both are float32 at least. `scale` multiplies their products; None stands for the published scale. `q_start` and
    `k_start` are the positions of the first query and key. `hidden` is True for keys that no query sees, `hidden_q` for
    padding among the queries; None if nothing is hidden. A map of the whole sequence leaves hidden tokens out.
    """

    # Weights are 'positive', 'non-negative' (if all of a row's are 0, the row is 0) or 'signed': then a row's total may
    # be any number, and the row is still divided by it.
    weights: Literal["positive", "non-negative", "signed"] = "positive"
    positional = False  # whether positions matter; the state then ends with the number of tokens seen, int64 ()
    scales_keys = False  # whether there is a `log_k`
    causal = True  # False if the features of a token depend on the others

    @abstractmethod
    def __call__(
        self,
        q: Float[Tensor, "*batch N K"],
        k: Float[Tensor, "*batch M K"],
        *,
        scale: float | None = None,
        q_start: int | Int[Tensor, ""] = 0,
        k_start: int | Int[Tensor, ""] = 0,
        hidden: Bool[Tensor, "*batch M"] | None = None,
        hidden_q: Bool[Tensor, "*batch N"] | None = None,
    ) -> Features: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def width(self, K: Size) -> Size:
        """The number m of features of a K-wide query or key."""

    def flops(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> tuple[Size, Size]:
        """FLOPs, forward and backward, of the matrix products that map the N queries and M keys, K wide, of each of G
        sequences to m features; none if the map works number by number."""
        return 0, 0


class Elementwise(FeatureMap):
    """One function applied to each number of queries and keys, after scaling by `scale`, which is 1 by default."""

    @abstractmethod
    def function(self, x: Tensor) -> Tensor:
        """phi(x), of the shape of x."""

    def __call__(self, q: Tensor, k: Tensor, *, scale: float | None = None, **_: Any) -> Features:
        q, k = scaled(scale, q, k)
        return Features(self.function(q), self.function(k))

    def width(self, K: Size) -> Size:
        return K


class _EluPlusOneFunction(Function):
    """elu(x) + 1 from its two branches; its derivative is min(phi, 1), so only the result is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        # exp(x), at most 1, keeps the digits of small results, which subtracting and adding 1 would lose.
        return x.exp().clamp_(max=1).add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, _: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> Tensor:  # uses operations that autograd follows, for second derivatives
        (phi,) = ctx.saved_tensors
        return phi.clamp(max=1).mul_(d_phi)

    @staticmethod
    def jvp(ctx: Any, along: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return phi.clamp(max=1) * along


class EluPlusOne(Elementwise):
    """elu(x) + 1: x + 1 for positive x, exp(x) for others (Katharopoulos et al. 2020, arXiv:2006.16236, equation 7)."""

    def function(self, x: Tensor) -> Tensor:
        # Where calling a function takes most of the time.
        decoding = x.shape[-2:-1] == (1,) and not torch.is_grad_enabled()
        # The compiler traces no function that has a forward derivative of its own.
        if torch.compiler.is_compiling() or decoding:
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        return _EluPlusOneFunction.apply(x)
