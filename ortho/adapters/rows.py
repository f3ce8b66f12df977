"""A linear map with some rows frozen; and the projections of this package's layers converted to such maps, and back."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ortho._typing import Bool, Float, Int, Tensor
from ortho.heads import split_heads
from ortho.projections import FrozenProjection, LearnedProjection, Projection, by_matrices

Draw = Callable[[int, int], Tensor]  # (rows, columns) -> a matrix of that shape

# Linear layers of transformers besides torch's: whether they store the transpose and are constructed with (out, in).
_OTHERS = {"transformers.pytorch_utils.Conv1D": True, "transformers.models.falcon.modeling_falcon.FalconLinear": False}


class FrozenRows(nn.Module):
    r"""$x W^T + b$ in place of a linear layer: some rows of W and b are trained, the others are frozen.

    `frozen` (out,) says which. With `stop_gradient` no gradient passes through the frozen rows to x. `kind` is the
    class of the layer that this replaces.

    Each run of trained rows is a parameter, each run of frozen rows a buffer. All are views of W and b, which are
    stored whole. So a call without gradients concatenates nothing, and writing to a parameter writes to the whole. If
    they are no longer views (some wrappers give them other memory), rows are concatenated at each call, as they are
    when a gradient is needed. `weight` and `bias` are for reading: what is written to them may be lost, or change
    frozen rows.

    The state dict has the names and shapes of the linear layer, and `frozen`: for each row 0, or 1 if it is frozen, or
    2 if gradients stop there as well. It loads only where the same rows are frozen.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, "out"] | None,
        frozen: Bool[Tensor, "out"],
        *,
        stop_gradient: bool = False,
        kind: type[nn.Module] = nn.Linear,
        trains: tuple[bool, bool] = (True, True),
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.stop_gradient, self.kind = stop_gradient, kind
        runs = [(key, len(list(rows))) for key, rows in groupby(frozen.tolist())]
        ends = torch.tensor([0, *(length for _, length in runs)]).cumsum(0).tolist()
        # For each run of rows: the first row, the end, and whether it is frozen.
        self._runs = [(first, stop, key) for (key, _), first, stop in zip(runs, ends, ends[1:], strict=False)]
        # Of the weight and of the bias: the whole, and the name of each run with its rows and whether it is frozen.
        self._whole: dict[str, Tensor | None] = {}
        self._rows: dict[str, list[tuple[str, int, int, bool]]] = {}
        for name, value, needs in zip(("weight", "bias"), (weight, bias), trains, strict=True):
            self._set(name, None if value is None else value.detach().clone(), needs)

    def _set(self, name: str, whole: Tensor | None, needs: bool) -> None:
        """Store a whole matrix, or bias, and make parameters and buffers that are views of it."""
        self._whole[name], self._rows[name] = None, []
        if whole is None:
            return
        self._whole[name] = whole = self._laid_out(name, whole)
        for first, stop, frozen in self._runs:
            key = f"{'frozen' if frozen else 'trained'}_{name}_{first}"
            self._rows[name].append((key, first, stop, frozen))
            if frozen:
                self.register_buffer(key, whole[first:stop], persistent=False)
            else:
                self.register_parameter(key, nn.Parameter(whole[first:stop], needs))

    def _laid_out(self, name: str, whole: Tensor) -> Tensor:
        """The whole in the memory order of the layer that this replaces, so that a state dict has no copies."""
        return whole.T.contiguous().T if name == "weight" and _transposed(self.kind) else whole.contiguous()

    @staticmethod
    def problem(layer: nn.Module) -> str | None:
        """What was expected of a layer so that this could replace it; None if it can."""
        if isinstance(layer, FrozenRows):
            return None
        kind = type(layer)
        if kind is not nn.Linear and f"{kind.__module__}.{kind.__qualname__}" not in _OTHERS:
            return "nn.Linear or transformers' Conv1D, not yet wrapped by an adapter or quantised"
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or "forward" in vars(layer) or set(dict(layer.named_parameters())) - {"weight", "bias"}:
            return "a linear layer without hooks and parametrisations"
        return None

    @staticmethod
    def outputs(layer: nn.Module) -> int:
        """How many outputs a linear layer has."""
        if isinstance(layer, FrozenRows):
            return layer.out_features
        assert isinstance(layer.weight, Tensor)
        return layer.weight.shape[1 if _transposed(type(layer)) else 0]

    @classmethod
    def of(cls, layer: nn.Module) -> "FrozenRows":
        """A linear layer as a `FrozenRows` without frozen rows; a `FrozenRows` is returned as it is."""
        if isinstance(layer, FrozenRows):
            return layer
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        return cls.trainable(weight, bias, type(layer))

    @classmethod
    def trainable(cls, weight: Tensor, bias: Tensor | None, kind: type[nn.Module] = nn.Linear) -> "FrozenRows":
        """A `FrozenRows` with these weights of a layer of that kind, and no frozen rows."""
        trains = weight.requires_grad, bias is None or bias.requires_grad
        weight = weight.T if _transposed(kind) else weight
        frozen = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        return cls(weight, bias, frozen, kind=kind, trains=trains)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """All rows; the gradient goes to the trained ones."""
        weight = self._together("weight")
        assert weight is not None
        return weight

    @property
    def bias(self) -> Float[Tensor, "out"] | None:
        return self._together("bias")

    @property
    def frozen(self) -> Bool[Tensor, "out"]:
        """Which rows are frozen."""
        whole = self._whole["weight"]
        assert whole is not None
        return self._code().to(torch.bool).to(whole.device)

    def _code(self) -> Tensor:  # (out,), uint8
        """Which rows are frozen, as the state dict codes it."""
        code = 1 + self.stop_gradient
        return torch.tensor([code * frozen for first, stop, frozen in self._runs for _ in range(first, stop)]).byte()

    @property
    def freezes(self) -> bool:
        """Whether any row is frozen."""
        return any(frozen for *_, frozen in self._runs)

    def _together(self, name: str) -> Tensor | None:
        whole = self._whole[name]
        if whole is None or (not self._differentiated(name) and self._tied(name, whole)):
            return whole
        return torch.cat(self._parts(name))

    def _parts(self, name: str) -> list[Tensor]:
        """The runs of rows."""
        return [getattr(self, key) for key, *_ in self._rows[name]]

    def _differentiated(self, name: str) -> bool:
        return torch.is_grad_enabled() and any(part.requires_grad for part in self._parts(name))

    def _tied(self, name: str, whole: Tensor) -> bool:
        """Whether the runs of rows are still views of the whole. It runs at each call, so it has to be fast."""
        rows = self._rows[name]
        if not rows or torch.compiler.is_compiling():
            return not rows
        parameters: Any = self._parameters
        buffers: Any = self._buffers
        try:
            begin, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
            for key, first, _, frozen in rows:
                if (buffers if frozen else parameters)[key].data_ptr() != begin + first * step:
                    return False
        except RuntimeError:  # tensors without memory, in transformations of functions
            return False
        return True

    def _tie(self) -> None:
        """Make the runs of rows views of the whole again, keeping their values."""
        for name, rows in self._rows.items():
            whole = self._whole[name]
            if whole is None or self._tied(name, whole):
                continue
            with torch.no_grad():
                self._whole[name] = whole = self._laid_out(name, torch.cat(self._parts(name)))
            for key, first, stop, frozen in rows:
                if frozen:
                    self._buffers[key] = whole[first:stop]
                else:
                    getattr(self, key).data = whole[first:stop]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenRows":
        super()._apply(fn, recurse)  # each run of rows on its own
        self._tie()
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # a copy's parameters have memory of their own
        self._tie()

    def forward(self, x: Float[Tensor, "*batch in"], first: int = 0, stop: int | None = None) -> Tensor:
        """x (..., in) -> (..., out), or only the outputs from `first` on and before `stop`."""
        stops = self.stop_gradient and torch.is_grad_enabled() and self.freezes
        stop = self.out_features if stop is None else stop
        if not stops:
            weight, bias = self.weight, self.bias
            if stop - first < self.out_features:
                weight, bias = weight[first:stop], None if bias is None else bias[first:stop]
            return linear(x, weight, bias)
        weights = self._parts("weight")
        biases: Sequence[Tensor | None] = [None] * len(weights) if self.bias is None else self._parts("bias")
        outputs = []
        for (begin, end, frozen), weight, bias in zip(self._runs, weights, biases, strict=True):
            own = slice(max(first - begin, 0), max(min(stop, end) - begin, 0))
            if own.start < own.stop:
                bias = None if bias is None else bias[own]
                outputs.append(linear(x.detach() if frozen else x, weight[own], bias))
        return torch.cat(outputs, -1) if outputs else linear(x, self.weight[:0])

    def freeze(self, parts: Sequence[Int[Tensor, "_"]], draw: Draw | None, stop_gradient: bool) -> "FrozenRows":
        """A map with these rows frozen, too: as they are, or each part replaced by a matrix from `draw`, with bias 0.
        Itself if nothing changes. Rows that are already frozen stay so; ValueError if those that are not chosen have
        another `stop_gradient`.
        """
        frozen = self.frozen
        chosen = torch.zeros_like(frozen)
        chosen[torch.cat(list(parts))] = True
        if draw is None and not (chosen & ~frozen).any() and self.stop_gradient == stop_gradient:
            return self
        if (frozen & ~chosen).any() and self.stop_gradient != stop_gradient:
            raise ValueError(
                f"stop_gradient: expected {self.stop_gradient}, as it is of the heads that this layer has frozen "
                f"already, got {stop_gradient}"
            )
        weight, bias = self.weight.detach().clone(), None if self.bias is None else self.bias.detach().clone()
        for rows in parts if draw is not None else ():
            assert draw is not None
            weight[rows] = draw(len(rows), self.in_features).to(weight)
            if bias is not None:
                bias[rows] = 0
        return FrozenRows(weight, bias, frozen | chosen, stop_gradient=stop_gradient, kind=self.kind, trains=self.needs)

    @property
    def needs(self) -> tuple[bool, bool]:
        """Whether trained rows of the weight and of the bias require gradients."""
        weight, bias = (
            all(p.requires_grad for key, p in self.named_parameters() if key.startswith(f"trained_{name}"))
            for name in ("weight", "bias")
        )
        return weight, bias

    def unfrozen(self) -> "FrozenRows":
        """The same map with all rows trained."""
        return FrozenRows(self.weight, self.bias, torch.zeros_like(self.frozen), kind=self.kind)

    def select(self, rows: Int[Tensor, "rows"]) -> "FrozenRows":
        """The map to these outputs alone."""
        bias = None if self.bias is None else self.bias[rows]
        kwargs: dict[str, Any] = {"stop_gradient": self.stop_gradient, "kind": self.kind, "trains": self.needs}
        return FrozenRows(self.weight[rows], bias, self.frozen[rows], **kwargs)

    def plain(self) -> nn.Module:
        """This map as a layer of its `kind`, or itself if any row is frozen."""
        if self.freezes:
            return self
        with torch.device("meta"):  # no initial draw: the weights are set below
            args = (self.out_features, self.in_features)
            layer = self.kind(*args) if _transposed(self.kind) else self.kind(*args[::-1], bias=self.bias is not None)
        for name, needs in zip(("weight", "bias"), self.needs, strict=True):
            if (value := self._stored(name)) is not None:
                setattr(layer, name, nn.Parameter(value.clone(), needs))
        return layer.train(self.training)

    def extra_repr(self) -> str:
        frozen = sum(stop - first for first, stop, frozen in self._runs if frozen)
        return f"{self.in_features}, {self.out_features}, frozen={frozen}, stop_gradient={self.stop_gradient}"

    def _stored(self, name: str) -> Tensor | None:
        """The matrix, or bias, as the layer that this replaces stores it."""
        with torch.no_grad():
            value = self._together(name)
            return value.T.contiguous() if value is not None and name == "weight" and _transposed(self.kind) else value

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        del keep_vars  # the parameters are not what is stored
        for name in ("weight", "bias"):
            if (value := self._stored(name)) is not None:
                destination[prefix + name] = value
        if self.freezes:
            destination[prefix + "frozen"] = self._code()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name: value for name in ("weight", "bias") if (value := self._stored(name)) is not None}
        if self.freezes:
            own["frozen"] = self._code()
        missing_keys += [prefix + name for name in own if prefix + name not in state_dict]
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k.removeprefix(prefix) not in own]
        new = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        for name, value in new.items():
            if value.shape != own[name].shape:
                error_msgs.append(f"{prefix}{name}: expected shape {tuple(own[name].shape)}, got {tuple(value.shape)}")
                return
        if "frozen" in new and new["frozen"].tolist() != own["frozen"].tolist():
            error_msgs.append(
                f"{prefix}frozen: expected a checkpoint in which the same rows are frozen, with the same "
                "stop_gradient, got another: load it where the same heads are frozen (ortho.adapters.restore)"
            )
            return
        for name, needs in zip(("weight", "bias"), self.needs, strict=True):
            if name in new:
                value = new[name].T if name == "weight" and _transposed(self.kind) else new[name]
                if local_metadata.get("assign_to_params_buffers") or own[name].is_meta:
                    self._set(name, value.detach().clone(), needs)
                    continue
                with torch.no_grad():
                    for key, first, stop, _ in self._rows[name]:
                        getattr(self, key).copy_(value[first:stop])


def _transposed(kind: type[nn.Module]) -> bool:
    return _OTHERS.get(f"{kind.__module__}.{kind.__qualname__}", False)


class PartlyFrozenProjection(Projection):
    """W_Q and W_K with some heads frozen and the others trained."""

    def __init__(self, q: FrozenRows, k: FrozenRows, *, num_heads: int, head_dim: int) -> None:
        super().__init__(q.in_features, num_heads, head_dim=head_dim, num_kv_heads=k.out_features // head_dim)
        self.rows_q, self.rows_k = q, k

    @property
    def weight_q(self) -> Float[Tensor, "HK d"]:  # type: ignore[override]
        return self.rows_q.weight

    @property
    def weight_k(self) -> Float[Tensor, "GK d"]:  # type: ignore[override]
        return self.rows_k.weight

    @property
    def bias_q(self) -> Float[Tensor, "HK"] | None:  # type: ignore[override]
        return self.rows_q.bias

    @property
    def bias_k(self) -> Float[Tensor, "GK"] | None:  # type: ignore[override]
        return self.rows_k.bias

    def forward(
        self, x: Float[Tensor, "B N d"], context: Float[Tensor, "B M d"] | None = None
    ) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B G M K"]]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        q, k = self.rows_q(x), self.rows_k(x if context is None else context)
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads)


def read_projection(projection: Projection) -> dict[str, FrozenRows]:
    """The matrices of a projection. Raises TypeError for a custom projection, whose weights need not define it."""
    if isinstance(projection, PartlyFrozenProjection):
        return {"q": projection.rows_q, "k": projection.rows_k}
    old = by_matrices(projection)
    matrices = {}
    for name, weight, bias in (("q", old.weight_q, old.bias_q), ("k", old.weight_k, old.bias_k)):
        if old.frozen:
            frozen = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
            matrices[name] = FrozenRows(weight, bias, frozen, stop_gradient=old.stop_gradient)
        else:
            matrices[name] = FrozenRows.trainable(weight, bias)
    return matrices


def written_projection(old: Projection, matrices: dict[str, FrozenRows]) -> Projection:
    """A projection of the old one's sizes with these matrices: learned, frozen, or partly frozen."""
    q, k = matrices["q"], matrices["k"]
    frozen = torch.cat([q.frozen, k.frozen])
    if frozen.any() and not frozen.all():
        return PartlyFrozenProjection(q, k, num_heads=old.num_heads, head_dim=old.head_dim).train(old.training)
    sizes: dict[str, Any] = {"num_kv_heads": old.num_kv_heads, "bias": q.bias is not None, "device": "meta"}
    if old.q_width != old.d_model:
        sizes["head_dim"] = old.head_dim
    new: Projection
    if frozen.any():
        new = FrozenProjection(old.d_model, old.num_heads, draw="gaussian", **sizes, stop_gradient=q.stop_gradient)
        new.draw = "given"
    else:
        new = LearnedProjection(old.d_model, old.num_heads, **sizes)
    for name, matrix in matrices.items():
        for part, value, needs in zip(("weight", "bias"), (matrix.weight, matrix.bias), matrix.needs, strict=True):
            if value is not None:
                kept = value.detach().clone()  # the matrix may belong to the old projection
                setattr(new, f"{part}_{name}", nn.Parameter(kept, needs and not frozen.any()))
    return new.train(old.training)
