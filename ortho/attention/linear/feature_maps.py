r"""What a feature map is, and the maps that are functions of one query or key.

Two of these maps, `Cosine` and `Powers`, are printed in texts on linear attention but do not do what they are meant to.
As the mechanisms 'cosine' and 'powers' they can be compared with 'cosformer' and 'taylor', which do.
"""

from abc import ABC, abstractmethod
from math import pi, sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import Function

from ortho import checks
from ortho._cost import Cost
from ortho._typing import Bool, Float, Int, Size, Tensor
from ortho.attention.scores import root_scale, scaled

RELU_FLOOR = 1e-3  # what Choromanski et al. add to their ReLU features, so that no row is without weight
HORIZON = 4096


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

    def cost(self, G: Size, N: Size, M: Size, K: Size, m: Size) -> Cost:
        """The products of mapping the N queries and M keys, K wide, of each of G sequences to m features; none if the
        map works number by number."""
        return Cost()


class _Elementwise(FeatureMap):
    """One function applied to each number of queries and keys, after scaling by `scale`, which is 1 by default."""

    def function(self, x: Tensor) -> Tensor:
        """phi(x), of the shape of x."""
        raise NotImplementedError

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
        # This keeps the digits of small results, which subtracting and adding 1 would lose.
        return x.clamp(max=0).exp_().add_(x.clamp(min=0))

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


class EluPlusOne(_Elementwise):
    """elu(x) + 1: x + 1 for positive x, exp(x) for others (Katharopoulos et al. 2020, arXiv:2006.16236, equation 7)."""

    def function(self, x: Tensor) -> Tensor:
        decoding = (
            x.shape[-2:-1] == (1,) and not torch.is_grad_enabled()
        )  # where calling a function takes most of the time
        # The compiler traces no function that has a forward derivative of its own.
        if torch.compiler.is_compiling() or decoding:
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        return _EluPlusOneFunction.apply(x)


class Relu(_Elementwise):
    """ReLU(x) + 0.001 (Choromanski et al. 2021, arXiv:2009.14794, section 4: generalised attention)."""

    def function(self, x: Tensor) -> Tensor:
        return torch.relu(x) + RELU_FLOOR


class Exp(_Elementwise):
    """exp(x), for each token relative to its largest number.

    softmax(x) for queries gives the same attention: its divisor cancels. Efficient Attention (Shen et al. 2021,
    arXiv:1812.01243) starts from these features and divides each by its own sum over positions. Here each row is
    divided by its total instead, so the attention can be causal.
    """

    scales_keys = True

    def __call__(self, q: Tensor, k: Tensor, *, scale: float | None = None, **_: Any) -> Features:
        q, k = scaled(scale, q, k)
        top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (q, k))
        return Features((q - top_q).exp_(), (k - top_k).exp_(), top_k[..., 0])


class CosFormer(FeatureMap):
    r"""ReLU(q)^T ReLU(k) cos(pi (i - j) / 2M) for positions i and j (Qin et al. 2022, arXiv:2202.08791, equation 10).

    M is the `horizon`: positions below it have non-negative weights, and others raise ValueError. The authors set M to
    the length of the sequence; in causal use the past would then depend on the future, and padding would matter. A row
    is 0 if its query's ReLU shares no positive channel with any key's.
    """

    weights = "non-negative"
    positional = True

    def __init__(self, horizon: int = HORIZON) -> None:
        self.horizon = checks.positive_int("horizon", horizon)

    def __repr__(self) -> str:
        return f"CosFormer(horizon={self.horizon})"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        q_start: int | Tensor = 0,
        k_start: int | Tensor = 0,
        **_: Any,
    ) -> Features:
        q, k = scaled(scale, q, k)
        return Features(self._map(q, q_start), self._map(k, k_start))

    def _map(self, x: Tensor, start: int | Tensor) -> Tensor:
        if isinstance(start, int) and start + x.shape[-2] > self.horizon:  # an int is not read from a device
            raise ValueError(f"horizon: expected at least {start + x.shape[-2]} positions, got {self.horizon}")
        positions = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] + start  # (N, 1)
        checks.within("horizon", "positions", positions, 0.0, float(self.horizon - 1))
        angles = positions * (pi / 2 / self.horizon)
        x = torch.relu(x)
        return torch.cat([x * angles.cos(), x * angles.sin()], -1)

    def width(self, K: Size) -> Size:
        return 2 * K


class Taylor(FeatureMap):
    r"""$\sum_{n \le p} t^n / n!$ in $t = q^T k / \sqrt{K}$, from n-fold outer products of the queries and the keys.

    Order 2 is the feature map of Based (Arora et al. 2024, arXiv:2402.18668, section 3), with 1 + K + K^2 features and
    weights of at least 1/2. With odd orders weights may be negative.
    """

    def __init__(self, order: int = 2) -> None:
        self.order = checks.positive_int("order", order)
        self.weights = "signed" if order % 2 else "positive"

    def __repr__(self) -> str:
        return f"Taylor(order={self.order})"

    def __call__(self, q: Tensor, k: Tensor, *, scale: float | None = None, **_: Any) -> Features:
        root = root_scale(1 / sqrt(q.shape[-1]) if scale is None else scale)
        return Features(self._map(q * root), self._map(k * root))

    def _map(self, x: Tensor) -> Tensor:
        powers = [torch.ones_like(x[..., :1]), x]
        for n in range(2, self.order + 1):
            powers.append((powers[-1][..., :, None] * x[..., None, :]).flatten(-2) / sqrt(n))
        return torch.cat(powers, -1)

    def width(self, K: Size) -> Size:
        return sum(K**n for n in range(self.order + 1))


class Cosine(_Elementwise):
    r"""$\cos(x)$, which texts give as cosFormer. Its weights $\sum_l \cos q_l \cos k_l$ may be negative."""

    weights = "signed"

    def function(self, x: Tensor) -> Tensor:
        return x.cos()


class Powers(_Elementwise):
    r"""$[1, x, \dots, x^p]$ of each number, which texts give as the polynomial kernel.

    Its weights are $\sum_l \sum_{n \le p} (q_l k_l)^n$, a function of the products of coordinates, not of $q^T k$.
    """

    def __init__(self, order: int = 2) -> None:
        self.order = checks.positive_int("order", order)
        self.weights = "signed" if order % 2 else "positive"  # 1 + t + ... + t^p has no real zero for even p

    def __repr__(self) -> str:
        return f"Powers(order={self.order})"

    def function(self, x: Tensor) -> Tensor:
        return torch.cat([x**n for n in range(self.order + 1)], -1)

    def width(self, K: Size) -> Size:
        return K * (self.order + 1)
