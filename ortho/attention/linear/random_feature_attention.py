"""Random-feature attention as a module, to be passed to a layer, with its own rows, which can be redrawn."""

from typing import Any

import torch
from torch import nn

from ortho import checks
from ortho._typing import Float, State, Tensor
from ortho.attention.linear.favor import FEATURES, PositiveFeatures, orthogonal_features
from ortho.attention.linear.linear_attention import linear_attention
from ortho.heads import frozen


class RandomFeatureAttention(nn.Module):
    """FAVOR+, `linear_attention` with m `PositiveFeatures`, whose orthogonal rows are frozen parameters of the module.

    The estimate of the kernel is unbiased over draws, not for one draw. A model trained on one draw adapts to it; to
    train on the kernel itself, call `redraw` regularly (the authors of Performer: every 1000 steps), and keep the rows
    at evaluation. Rows are never redrawn automatically. Do not use a state made before a redraw after it.
    """

    features: Tensor
    same_tokens = True  # as in `Mechanism`
    keeps = "sums"

    def __init__(
        self,
        d_head: int,
        m: int = FEATURES,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        m = checks.positive_int("m", m)
        self.features = frozen(orthogonal_features(m, d_head, generator=generator, dtype=dtype, device=device))

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rows from the same distribution, in place."""
        device = None if generator is None else generator.device
        drawn = orthogonal_features(*self.features.shape, generator=generator, dtype=torch.float64, device=device)
        self.features.copy_(drawn)

    def forward(
        self,
        q: Float[Tensor, "*batch N K"],
        k: Float[Tensor, "*batch M K"],
        v: Float[Tensor, "*batch M V"],
        **options: Any,
    ) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
        """q (..., N, K), k (..., M, K), v (..., M, V) -> (..., N, V), with the options of `linear_attention`."""
        return linear_attention(q, k, v, feature_map=PositiveFeatures(self.features), **options)

    def extra_repr(self) -> str:
        m, d_head = self.features.shape
        return f"{d_head}, {m}"
