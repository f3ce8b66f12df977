"""Scalar operations outside matrix products, counted from running code."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ortho.cost.counting import argument, fused_pairs
from paper.memory import fitted

aten = torch.ops.aten

# Scalar operations per element that a composite kernel is counted as, by its textbook definition.
SOFTMAX_FORWARD = 5  # maximum, subtract, exp, sum, divide
SOFTMAX_BACKWARD = 4  # multiply by the weights, sum, subtract, multiply
# A fused backward kernel, per score: scale, subtract the log-sum-exp, exp; subtract the row's term, multiply, scale.
FUSED_BACKWARD = 6
LAYER_NORM_FORWARD = 8  # sum, divide; subtract, square, sum, divide; multiply by 1/std; multiply by the gain
LAYER_NORM_BACKWARD = 9  # gain: multiply, sum; input: multiply by the gain, two products summed, two terms, scale
_PER_INPUT: dict[Any, int] = {
    aten._softmax: SOFTMAX_FORWARD,
    aten._safe_softmax: SOFTMAX_FORWARD,
    aten._softmax_backward_data: SOFTMAX_BACKWARD,
    aten.native_layer_norm: LAYER_NORM_FORWARD,
    aten.native_layer_norm_backward: LAYER_NORM_BACKWARD,
    aten.embedding_dense_backward: 1,
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.argmax, aten.cumsum, aten.cummax, aten.topk), 1),
}
_MOVING = (aten.clone, aten.copy_, aten.copy, aten._to_copy, aten.fill, aten.fill_, aten.zero_, aten.ones_like)


class _Elementwise(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        name = packet.__name__
        if name.startswith("_scaled_dot_product"):
            pairs, v = fused_pairs(func, args, kwargs), argument(func, args, kwargs, "value")
            rows = prod(argument(func, args, kwargs, "query").shape[:-1])
            back = FUSED_BACKWARD * pairs + 2 * rows * v.shape[-1]  # and the row's term, sum_v do * o
            self.counts[name] += back if "backward" in name else pairs * (1 + SOFTMAX_FORWARD)
        elif not made or packet in _MOVING:  # indices and masks are not floating-point work
            pass
        elif packet in _PER_INPUT:
            self.counts[name] += _PER_INPUT[packet] * args[0].numel()
        elif torch.Tag.pointwise in func.tags:
            self.counts[name] += sum(x.numel() for x in made)
        return out


def elementwise(call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> tuple[Counter[str], Counter[str]]:
    """Scalar operations by operator, of one forward and one backward pass of a module or a function: pointwise
    operators count the floating-point numbers that they make, sums those that they read, and kernels that do several
    steps at once as their definitions say. Index arithmetic does not count."""
    module = call if isinstance(call, nn.Module) else nn.Module()
    tensors = (*module.parameters(), *tree_leaves((inputs, kwargs)))
    wanted = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    with _Elementwise() as ahead:
        y = call(*inputs, **kwargs)
    gradient = torch.ones_like(y)
    with _Elementwise() as back:
        if wanted:
            torch.autograd.grad(y, wanted, gradient)
    return ahead.counts, back.counts


def formulas(build: Callable[..., nn.Module], *terms: Any) -> tuple[Any, Any]:
    """The formulas of the scalar operations of `build(N, d, H, m)` on x (1, N, d), forward and backward, see
    `paper.memory.fitted`."""

    def count(way: int, *sizes: int) -> int:
        x = torch.zeros(1, *sizes[:2], requires_grad=True)
        return elementwise(build(*sizes), x)[way].total()

    return fitted(partial(count, 0), *terms), fitted(partial(count, 1), *terms)
