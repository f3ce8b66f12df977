"""Random-feature attention as a module, to be passed to a layer, with its own rows, which can be redrawn."""

from typing import Any

import torch
from torch import nn

from ortho import checks
from ortho._typing import Float, State, Tensor
from ortho.attention.linear.dense_features import DenseExponentialFeatures
from ortho.attention.linear.favor import FEATURES, PositiveFeatures, RandomFeatureMap, RandomFourierFeatures
from ortho.attention.linear.linear_attention import linear_attention, linear_attention_reference
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.heads import frozen

MAPS: dict[str, type[RandomFeatureMap]] = {
    "positive": PositiveFeatures,
    "rff": RandomFourierFeatures,
    "dense": DenseExponentialFeatures,
}


class RandomFeatureAttention(nn.Module):
    """`linear_attention` with m random features, whose rows are frozen parameters of the module.

    The estimate of the kernel is unbiased over draws, not for one draw. A model trained on one draw adapts to it; to
    train on the kernel itself, call `redraw` regularly (the authors of Performer: every 1000 steps), and keep the rows
    at evaluation. Rows are never redrawn automatically. Do not use a state made before a redraw after it.

    `map` is 'positive', 'rff' or 'dense', `draw` 'orthogonal', 'iid' or 'structured'; `options` go to the map (such as
    `fit`; `parameters` are kept as given, and not in the state dict). 'rff' makes two features from each row. Raises
    TypeError or ValueError for unknown names and for an m that is below 1 or, with 'rff', odd.
    """

    features: Tensor
    same_tokens = True  # as in `Mechanism`
    keeps = "sums"

    def __init__(
        self,
        d_head: int,
        m: int = FEATURES,
        *,
        map: str = "positive",  # noqa: A002 - the field's word for it
        draw: str = "orthogonal",
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.map = checks.one_of("map", map, MAPS)
        self.draw = checks.one_of("draw", draw, FEATURE_DRAWS)
        self.form = checks.one_of("form", form, checks.FORMS)
        self.options = options
        wanted = MAPS[map](m=m, **options)  # wrong options raise here
        rows = FEATURE_DRAWS[draw](m // wanted.of_a_row, d_head, generator=generator, dtype=dtype, device=device)
        self.features = frozen(rows)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rows from the same distribution, in place."""
        device = None if generator is None else generator.device
        drawn = FEATURE_DRAWS[self.draw](*self.features.shape, generator=generator, dtype=torch.float64, device=device)
        self.features.copy_(drawn)

    def forward(
        self,
        q: Float[Tensor, "*batch N K"],
        k: Float[Tensor, "*batch M K"],
        v: Float[Tensor, "*batch M V"],
        **options: Any,
    ) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
        """q (..., N, K), k (..., M, K), v (..., M, V) -> (..., N, V), with the options of `linear_attention`."""
        attention = linear_attention if self.form == "fast" else linear_attention_reference
        feature_map = MAPS[self.map](features=self.features, **self.options)
        return attention(q, k, v, feature_map=feature_map, **options)

    def extra_repr(self) -> str:
        rows, d_head = self.features.shape
        return f"{d_head}, {rows * MAPS[self.map].of_a_row}, map={self.map!r}, draw={self.draw!r}, form={self.form!r}"
