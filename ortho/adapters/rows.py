"""A linear map of which some rows are frozen."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from ortho._typing import Bool, Float, Int, Tensor

Draw = Callable[[int, int], Tensor]  # (rows, columns) -> a matrix of that shape


class FrozenRows(nn.Module):
    r"""$x W^T + b$ in place of a linear layer: some rows of W and b are trained, the others are buffers.

    `frozen` (out,) says which. With `stop_gradient` no gradient passes through them to x. The state dict says which
    they are: `order` holds for each row of W its place among the trained rows and, behind them, the frozen ones. `kind`
    is the class of the layer in whose place this stands: `nn.Linear`, or one that is made of (out, in) and stores the
    transpose, as transformers' `Conv1D` does.
    """

    trained_weight: nn.Parameter | None
    trained_bias: nn.Parameter | None
    frozen_weight: Tensor | None
    frozen_bias: Tensor | None
    order: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, "out"] | None,
        frozen: Bool[Tensor, "out"],
        *,
        stop_gradient: bool = False,
        kind: type[nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.stop_gradient, self.kind = stop_gradient, kind
        rows = [mask.nonzero()[:, 0] for mask in (~frozen, frozen)]
        trains, freezes = len(rows[0]) > 0 or len(weight) == 0, len(rows[1]) > 0
        for name, value in (("weight", weight), ("bias", bias)):
            own, fixed = (None if value is None else value.detach()[at] for at in rows)
            trained = None if value is None or own is None else nn.Parameter(own, value.requires_grad)
            self.register_parameter(f"trained_{name}", trained if trains else None)
            self.register_buffer(f"frozen_{name}", fixed if freezes else None)
        self.register_buffer("order", torch.cat(rows).argsort())

    @classmethod
    def of(cls, layer: nn.Module) -> "FrozenRows":
        """What a linear layer does, with no frozen rows; a `FrozenRows` as it is."""
        if isinstance(layer, FrozenRows):
            return layer
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        weight = weight if type(layer) is nn.Linear else weight.T
        return cls.trainable(weight, bias, type(layer))

    @classmethod
    def trainable(
        cls, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None, kind: type[nn.Module] = nn.Linear
    ) -> "FrozenRows":
        """These matrices with no frozen rows."""
        return cls(weight, bias, torch.zeros(len(weight), dtype=torch.bool, device=weight.device), kind=kind)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """All rows, put together; the gradient goes to the trained ones."""
        weight = self._together(self.trained_weight, self.frozen_weight)
        assert weight is not None
        return weight

    @property
    def bias(self) -> Float[Tensor, "out"] | None:
        return self._together(self.trained_bias, self.frozen_bias)

    @property
    def frozen(self) -> Bool[Tensor, "out"]:
        """Which rows are frozen."""
        return self.order >= (0 if self.trained_weight is None else len(self.trained_weight))

    def _together(self, trained: Tensor | None, frozen: Tensor | None) -> Tensor | None:
        if trained is None or frozen is None:
            return frozen if trained is None else trained
        return torch.cat([trained, frozen])[self.order]

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """x (..., in) -> (..., out)."""
        if not self.stop_gradient or self.frozen_weight is None:
            return linear(x, self.weight, self.bias)
        y = linear(x.detach(), self.frozen_weight, self.frozen_bias)
        if self.trained_weight is None:
            return y
        return torch.cat([linear(x, self.trained_weight, self.trained_bias), y], -1)[..., self.order]

    def freeze(self, parts: Sequence[Int[Tensor, "rows"]], draw: Draw | None, stop_gradient: bool) -> "FrozenRows":
        """Another one with these rows frozen, too: as they are, or with each part a matrix that `draw` gives and no
        bias; itself if that is what it is. The rows that are frozen already stay so; ValueError if these pass gradients
        on and those shall not, or the other way about.
        """
        frozen, chosen = self.frozen, torch.zeros_like(self.order, dtype=torch.bool)
        chosen[torch.cat(list(parts))] = True
        if draw is None and not (chosen & ~frozen).any() and self.stop_gradient == stop_gradient:
            return self
        if (frozen & ~chosen).any() and self.stop_gradient != stop_gradient:
            raise ValueError(
                f"stop_gradient: expected {self.stop_gradient}, as it is of the heads that this layer has frozen "
                f"already, got {stop_gradient}"
            )
        needs = self.trained_weight is None or self.trained_weight.requires_grad
        weight, bias = self.weight.detach().clone(), None if self.bias is None else self.bias.detach().clone()
        for rows in parts if draw is not None else ():
            assert draw is not None
            weight[rows] = draw(len(rows), self.in_features).to(weight)
            if bias is not None:
                bias[rows] = 0
        for value in (weight, bias):
            if value is not None:
                value.requires_grad_(needs)
        return FrozenRows(weight, bias, frozen | chosen, stop_gradient=stop_gradient, kind=self.kind)

    def unfrozen(self) -> "FrozenRows":
        """The same map with all rows trained."""
        weight, bias = (None if x is None else x.detach().clone().requires_grad_() for x in (self.weight, self.bias))
        assert weight is not None
        return self.trainable(weight, bias, self.kind)

    def select(self, rows: Int[Tensor, "rows"]) -> "FrozenRows":
        """The map to these outputs alone."""
        weight, bias = self.weight, self.bias
        bias = None if bias is None else bias[rows]
        return FrozenRows(weight[rows], bias, self.frozen[rows], stop_gradient=self.stop_gradient, kind=self.kind)

    def plain(self) -> nn.Module:
        """This map as a layer of its `kind`, or itself if there is a row that is frozen."""
        if self.frozen_weight is not None:
            return self
        with torch.device("meta"):  # no draw: its weights are these
            args = (self.out_features, self.in_features)
            layer = nn.Linear(*args[::-1], bias=False) if self.kind is nn.Linear else self.kind(*args)
        for name, value in (("weight", self.trained_weight), ("bias", self.trained_bias)):
            if value is not None:
                transposed = name == "weight" and self.kind is not nn.Linear
                data = value.detach().T.contiguous() if transposed else value.detach()
                setattr(layer, name, nn.Parameter(data, value.requires_grad))
        return layer.train(self.training)

    def extra_repr(self) -> str:
        frozen = 0 if self.frozen_weight is None else len(self.frozen_weight)
        return f"{self.in_features}, {self.out_features}, frozen={frozen}, stop_gradient={self.stop_gradient}"
