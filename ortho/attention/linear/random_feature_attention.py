"""Random-feature attention as a module, to be passed to a layer, with its own rows, which can be redrawn."""

from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, State, Tensor
from ortho.attention.linear.dense_features import DenseExponentialFeatures
from ortho.attention.linear.favor import FEATURES, PositiveFeatures, RandomFeatureMap, TrigonometricFeatures
from ortho.attention.linear.linear_attention import linear_attention, linear_attention_reference
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.heads import frozen

MAPS: dict[str, type[RandomFeatureMap]] = {
    "positive": PositiveFeatures,
    "trigonometric": TrigonometricFeatures,
    "dense": DenseExponentialFeatures,
}


class RandomFeatureAttention(nn.Module):
    """`linear_attention` with m random features, whose rows are frozen parameters of the module.

    The estimate of the kernel is unbiased over draws, not for one draw. A model trained on one draw adapts to it; to
    train on the kernel itself, call `redraw` regularly (the authors of Performer: every 1000 steps), and keep the rows
    at evaluation. Rows are never redrawn automatically. Do not use a state made before a redraw after it.

    `map` is 'positive', 'trigonometric' or 'dense', `draw` 'orthogonal', 'iid' or 'structured'; `options` go to the map
    (such as `fit`; `parameters` are kept as given, and not in the state dict). A trigonometric map makes two features
    from each row. Raises TypeError or ValueError for unknown names and for sizes
    that are below 1 or do not fit.
    """

    features: Tensor
    same_tokens = True  # as in `Mechanism`
    keeps = "sums"

    @checked
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
        self.map = _checks.one_of("map", map, MAPS)
        self.draw = _checks.one_of("draw", draw, FEATURE_DRAWS)
        self.form = form
        self.options = options
        rows_of_m, rest = divmod(m, MAPS[map].of_a_row)
        if rest:
            raise ValueError(f"m: expected an even number of features, two for each row of {map!r}, got {m}")
        rows = FEATURE_DRAWS[draw](rows_of_m, d_head, generator=generator, dtype=dtype, device=device)
        MAPS[map](features=rows, **options)  # wrong options raise here
        self.features = frozen(rows)

    @checked
    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rows from the same distribution, in place."""
        device = None if generator is None else generator.device
        count, d_head = self.features.shape
        rows = FEATURE_DRAWS[self.draw](count, d_head, generator=generator, dtype=torch.float64, device=device)
        self.features.copy_(rows)

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
        count, d_head = self.features.shape
        return f"{d_head}, {count * MAPS[self.map].of_a_row}, map={self.map!r}, draw={self.draw!r}, form={self.form!r}"
