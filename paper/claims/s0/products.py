r"""Which matrix products a layer's backward pass holds, read off autograd's own graph."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortho.cost.big_o import N, d
from ortho.layers.multihead import MultiheadAttention

# The gradients of the two operands of each product of the forward pass.
_WEIGHTED = {"weight_o": ("dO", "dW_O"), **{f"weight_{x}": (f"dX_{x.upper()}", f"dW_{x.upper()}") for x in "vqk"}}
_WITHIN = [("dP", "dV"), ("dQ", "dK")]  # P V, then Q K^T: from the output back
# What each is, and its FLOPs for one sequence. dX_Q is the part of dX that comes through Q. S is no gradient; a fused
# kernel computes it a second time.
PRODUCTS = {
    "dW_O": (r"O^\top\,\mathrm{d}Y", 2 * N * d**2),
    "dO": (r"\mathrm{d}Y\,W_O^\top", 2 * N * d**2),
    "S": (r"Q K^\top", 2 * N**2 * d),
    "dV": (r"P^\top\,\mathrm{d}O", 2 * N**2 * d),
    "dP": (r"\mathrm{d}O\,V^\top", 2 * N**2 * d),
    "dQ": (r"\mathrm{d}S\,K", 2 * N**2 * d),
    "dK": (r"\mathrm{d}S^\top Q", 2 * N**2 * d),
    "dW_V": (r"X^\top\,\mathrm{d}V", 2 * N * d**2),
    "dX_V": (r"\mathrm{d}V\,W_V^\top", 2 * N * d**2),
    "dW_Q": (r"X^\top\,\mathrm{d}Q", 2 * N * d**2),
    "dX_Q": (r"\mathrm{d}Q\,W_Q^\top", 2 * N * d**2),
    "dW_K": (r"X^\top\,\mathrm{d}K", 2 * N * d**2),
    "dX_K": (r"\mathrm{d}K\,W_K^\top", 2 * N * d**2),
}


def graph(y: Tensor) -> list[Any]:
    """The nodes of autograd's graph behind y, in the order in which a backward pass may reach them."""
    nodes, front = [], [y.grad_fn]
    while front:
        node = front.pop(0)
        if node is not None and node not in nodes:
            nodes.append(node)
            front += [below for below, _ in node.next_functions]
    return nodes


class _KernelOutputs(TorchDispatchMode):
    """Keeps what a fused attention kernel's backward pass hands to autograd: dq, dk, dv."""

    gradients: tuple[Tensor, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in func.name() and "backward" in func.name():
            self.gradients = out[:3]
        return out


@cache
def backward_products(projection: str, *, form: str = "reference", input_grad: bool = True) -> dict[str, str]:
    """What becomes of each of `PRODUCTS` in a layer's backward pass, read off autograd's graph of a small layer.

    'used': an edge of the graph asks for the result. 'discarded': none does, but the fused kernel returns it all the
    same. 'absent': it is not computed.
    """
    generator = torch.Generator().manual_seed(0)
    module = MultiheadAttention(4, 1, projection=projection, form=form, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 3, 4, generator=generator, dtype=torch.float64).requires_grad_(input_grad)
    y = module(x)
    found = dict.fromkeys(PRODUCTS, "absent")

    def ask(names: tuple[str, ...], node: Any) -> None:
        found.update({name: "used" for name, (below, _) in zip(names, node.next_functions, strict=False) if below})

    within = list(_WITHIN)
    for node in graph(y):
        kind = node.name()
        if kind == "MmBackward0":
            ask(_WEIGHTED[_weight(node, module)], node)
        elif kind == "BmmBackward0":
            ask(within.pop(0), node)
        elif kind.startswith("ScaledDotProduct"):
            with _KernelOutputs() as kernel:
                torch.autograd.grad(y, list(module.parameters()), y.detach(), retain_graph=True)
            returned = zip(("dQ", "dK", "dV"), kernel.gradients, strict=True)
            found.update({name: "discarded" for name, gradient in returned if gradient.count_nonzero()})
            ask(("dQ", "dK", "dV"), node)
            found["S"], found["dP"] = "used", found["dQ"]  # dV needs the weights again, dQ and dK need dP
    return found


def _weight(node: Any, module: MultiheadAttention) -> str:
    """Which of the layer's matrices the product of a node has as its right operand."""
    below = node.next_functions[1][0]
    weight = below.next_functions[0][0].variable if below else node._saved_mat2  # trained: a leaf below the transpose
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = next(name for name, known in named.items() if known.data_ptr() == weight.data_ptr())
    return found.rpartition(".")[2]
