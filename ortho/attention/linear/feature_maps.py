r"""Maps that are functions of one query or key, besides elu(x) + 1, and linear attention with each of them.

Two of these maps, `Cosine` and `Powers`, are printed in texts on linear attention but do not do what they are meant to.
As the mechanisms 'cosine' and 'powers' they can be compared with 'cosformer' and 'taylor', which do.
"""

from math import pi, sqrt
from typing import Any

import torch

from ortho import checks
from ortho._typing import Size, Tensor
from ortho.attention.linear.feature_map import Elementwise, FeatureMap, Features
from ortho.attention.linear.linear_attention import kernel_mechanism
from ortho.attention.scores import root_scale, scaled

RELU_FLOOR = 1e-3  # what Choromanski et al. add to their ReLU features, so that no row is without weight
HORIZON = 4096


class Relu(Elementwise):
    """ReLU(x) + 0.001 (Choromanski et al. 2021, arXiv:2009.14794, section 4: generalised attention)."""

    def function(self, x: Tensor) -> Tensor:
        return torch.relu(x) + RELU_FLOOR


class Exp(FeatureMap):
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

    def width(self, K: Size) -> Size:
        return K


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


class Cosine(Elementwise):
    r"""$\cos(x)$, which texts give as cosFormer. Its weights $\sum_l \cos q_l \cos k_l$ may be negative."""

    weights = "signed"

    def function(self, x: Tensor) -> Tensor:
        return x.cos()


class Powers(Elementwise):
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


MECHANISMS = (
    kernel_mechanism("linear-relu", Relu, "Choromanski et al. 2021, arXiv:2009.14794"),
    kernel_mechanism("linear-exp", Exp, "Shen et al. 2021, arXiv:1812.01243"),
    kernel_mechanism("cosformer", CosFormer, "Qin et al. 2022, arXiv:2202.08791"),
    kernel_mechanism("taylor", Taylor, "Arora et al. 2024, arXiv:2402.18668"),
    kernel_mechanism("cosine", Cosine, "printed in place of Qin et al. 2022, arXiv:2202.08791"),
    kernel_mechanism("powers", Powers, "printed in place of the polynomial kernel"),
)
