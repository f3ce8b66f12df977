r"""What a feature map is: the kernel $\kappa(q, k) = \phi(q)^T \phi(k)$ of an attention, as an object."""

from abc import ABC, abstractmethod
from math import inf, sqrt
from typing import Literal, NamedTuple

from ortho._typing import Bool, Float, Int, Size, Tensor


class Features(NamedTuple):
    r"""A kernel in factors, $\kappa(q_i, k_j) = e^{s_j}\, \phi(q_i)^T \phi(k_j)$.

    `log_k`, the $s_j$, keeps the features of large and small keys in range together; it must carry no gradient. Any
    factor of the query alone cancels in the attention, so a map may scale each query's features as it likes.
    """

    q: Float[Tensor, "*batch N m"]
    k: Float[Tensor, "*batch M m"]
    log_k: Float[Tensor, "*batch M"] | None = None


class MapCost(NamedTuple):
    """What a feature map adds to a call.

    forward, backward: FLOPs of matrix products. elementwise_forward, elementwise_backward: scalar operations outside
    them. saved: numbers that autograd keeps besides the features. keeps_features: whether the map's backward pass
    reads the features that it made.
    """

    forward: Size
    backward: Size
    elementwise_forward: Size
    elementwise_backward: Size
    saved: Size
    keeps_features: bool


class FeatureMap(ABC):
    r"""`map(q, k)` gives the `Features` of q (..., N, K) and k (..., M, K), which may be mapped differently.

    Both are float32 at least. `scale` multiplies their products; None stands for what is published. `q_start` and
    `k_start` are the positions of the first query and key. `hidden` is True for keys that no query sees, `hidden_q` for
    queries that are no tokens, and None for none: a map that looks at the whole sequence must not look at them.
    """

    # Weights are 'positive', 'non-negative' (all may be 0, and the row is) or 'signed': then a row's total is anything,
    # and divides all the same.
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

    @abstractmethod
    def cost(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> MapCost:
        """What it costs to map N queries and M keys, K wide, of each of G sequences, to m features."""


def root_scale(scale: float) -> float:
    """The factor of q and of k that multiplies their products by `scale`; ValueError for a negative one."""
    if not 0 <= scale < inf:
        raise ValueError(f"scale: expected a finite number of at least 0, got {scale}")
    return sqrt(scale)
