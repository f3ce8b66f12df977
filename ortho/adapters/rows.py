"""Frozen rows of another library's matrices and biases, and outputs at which gradients stop.

A matrix whose rows are all frozen stays the parameter that it is, without a gradient. Rows of a fused matrix are frozen
by a parametrization: a frozen and a trained parameter, each with memory of its own, from which the whole is put
together wherever it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ortho._typing import Tensor

MARK = "ortho_frozen"  # attribute of what is frozen: whether each frozen tensor, by its name, was trained before
Runs = tuple[tuple[int, bool], ...]  # of neighbouring rows: how many, and whether they are frozen


def parts_of(tensor: Tensor, runs: Runs, axis: int) -> list[tuple[Tensor, bool]]:
    """The runs of a tensor's rows along an axis, and whether they are frozen."""
    return list(zip(tensor.split([n for n, _ in runs], axis), (frozen for _, frozen in runs), strict=True))


class FrozenRows(nn.Module):
    """A parametrization: a tensor whose rows, along `axis`, are frozen or trained."""

    def __init__(self, runs: Runs, axis: int) -> None:
        super().__init__()
        self.runs, self.axis = runs, axis

    def forward(self, frozen: Tensor, trained: Tensor) -> Tensor:
        """The rows of both in their order."""
        whole = {True: frozen, False: trained}
        lengths = {kind: [n for n, of in self.runs if of is kind] for kind in whole}
        parts = {kind: iter(whole[kind].split(lengths[kind], self.axis)) for kind in whole}
        return torch.cat([next(parts[kind]) for _, kind in self.runs], self.axis)

    def right_inverse(self, whole: Tensor) -> list[Tensor]:
        """The frozen rows and the trained ones, each dense."""
        parts = parts_of(whole, self.runs, self.axis)
        return [torch.cat([rows for rows, of in parts if of is kind], self.axis) for kind in (True, False)]

    def extra_repr(self) -> str:
        return f"frozen={sum(n for n, frozen in self.runs if frozen)} of {sum(n for n, _ in self.runs)}"


class StopRows:
    """A forward hook of a linear layer: no gradient passes through the frozen outputs."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return output.detach()
        return torch.cat([part.detach() if of else part for part, of in parts_of(output, self.runs, -1)], -1)


class StopOperands:
    """A forward pre-hook of `torch.nn.MultiheadAttention`: queries and keys are made of constants.

    Without gradients it changes nothing, so that PyTorch's fast path sees one sequence.
    """

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value")
        q, k, v = (*args[:3], *(kwargs[name] for name in names[len(args) :]))
        rest = {name: value for name, value in kwargs.items() if name not in names}
        return ((q.detach(), k.detach(), v, *args[3:]), rest) if torch.is_grad_enabled() else None


class LoadWhole:
    """A hook before a state dict is loaded: takes the whole tensors of an unconverted layer, or of earlier versions."""

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        for old in ("frozen", "in_proj_frozen"):  # which rows are frozen, as earlier versions stored it
            state_dict.pop(prefix + old, None)
        for name, rows in frozen_rows(module).items():
            if prefix + name in state_dict:
                parts = rows.right_inverse(state_dict.pop(prefix + name))
                state_dict |= {f"{prefix}parametrizations.{name}.original{i}": part for i, part in enumerate(parts)}


def frozen_rows(module: nn.Module) -> dict[str, Any]:
    """The parametrizations of a module by `FrozenRows`, by the tensors' names."""
    found: Any = getattr(module, "parametrizations", {})
    return {name: parts[0] for name, parts in found.items() if isinstance(parts[0], FrozenRows)}


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's class before rows were frozen; another parametrization keeps the class that it gave the module."""
    found: Any = getattr(module, "parametrizations", {})
    return type(module).__mro__[1] if len(frozen_rows(module)) == len(found) > 0 else type(module)


def foreign_hooks(module: nn.Module) -> bool:
    """Whether something else acts around a module's calls."""
    every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" in vars(module) or any(not isinstance(hook, StopRows) for own in every for hook in own.values())


@dataclass(frozen=True)
class Part:
    """The tensor `name` of a module, whose rows lie along `axis`; `rows` has those of queries, "q", and keys, "k"."""

    owner: nn.Module
    name: str
    axis: int
    rows: dict[str, list[int]]

    def value(self) -> Tensor:
        """The whole tensor."""
        value: Tensor = getattr(self.owner, self.name)
        return value

    def parameters(self) -> Sequence[nn.Parameter]:
        """What it is stored in: itself, or its frozen rows and its trained rows."""
        if self.name in frozen_rows(self.owner):
            return list(self.owner.get_submodule(f"parametrizations.{self.name}").parameters())
        return [self.owner._parameters[self.name]]  # type: ignore[list-item]

    def runs(self) -> Runs:
        """Which rows are those of queries and keys."""
        chosen = {row for rows in self.rows.values() for row in rows}
        count = range(self.value().shape[self.axis])
        return tuple((len(list(run)), frozen) for frozen, run in groupby(row in chosen for row in count))

    def freeze(self) -> None:
        """Freeze these rows."""
        runs = self.runs()
        if len(runs) > 1:
            parametrize.register_parametrization(self.owner, self.name, FrozenRows(runs, self.axis))
        self.parameters()[0].requires_grad_(False)
        self.owner.register_load_state_dict_pre_hook(LoadWhole())


def thaw(module: nn.Module) -> None:
    """Undo the freezing of a layer's rows: what was trained before is trained again.

    PyTorch's `remove_parametrizations` would also change the class, which copies of the layer share.
    """
    for key, was in vars(module).pop(MARK, {}).items():
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        if whole := {name: getattr(owner, name).detach().clone() for name in frozen_rows(owner)}:
            owner.__class__ = original_class(owner)
            del owner.parametrizations
            for own, value in whole.items():
                owner.register_parameter(own, nn.Parameter(value))
        owner._parameters[name].requires_grad_(was)  # type: ignore[union-attr]
        for hooks in (owner._forward_hooks, owner._forward_pre_hooks, owner._load_state_dict_pre_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "hook", hook), StopRows | StopOperands | LoadWhole):
                    del hooks[number]
                    owner._forward_pre_hooks_with_kwargs.pop(number, None)
