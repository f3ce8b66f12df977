r"""S0, section 2: what freezing $W_Q$ and $W_K$ takes out of the layer's work, and what it leaves there."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortho.attention import softmax_attention_reference
from ortho.cost import layer, of
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import optimiser_bytes
from ortho.layers.multihead import MultiheadAttention
from paper.claims.figures import show
from paper.claims.rules import growth_where
from paper.claims.shared.common import seeded
from paper.claims.verdicts import Finding
from paper.memory import fitted

# The gradients of the two operands of each product of the forward pass.
_WEIGHTED = {"weight_o": ("dO", "dW_O"), **{f"weight_{x}": (f"dX_{x.upper()}", f"dW_{x.upper()}") for x in "vqk"}}
_WITHIN = [("dP", "dV"), ("dQ", "dK")]  # P V, then Q K^T: from the output back
# What each is, and its FLOPs for one sequence. dX_Q is the part of dX that comes through Q. S is not a gradient; a
# fused kernel computes it a second time.
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
    """The nodes of autograd's graph of y, in the order in which a backward pass may reach them."""
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
    generator = seeded()
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
                trained = [weight for weight in module.parameters() if weight.requires_grad]
                torch.autograd.grad(y, trained, y.detach(), retain_graph=True)
            returned = zip(("dQ", "dK", "dV"), kernel.gradients, strict=True)
            found.update({name: "discarded" for name, gradient in returned if gradient.count_nonzero()})
            ask(("dQ", "dK", "dV"), node)
            found["S"], found["dP"] = "used", found["dQ"]  # dV needs the weights again, dQ and dK need dP
    return found


def _weight(node: Any, module: MultiheadAttention) -> str:
    """The name of the layer's matrix that is the right operand of a node's product."""
    below = node.next_functions[1][0]
    weight = below.next_functions[0][0].variable if below else node._saved_mat2  # trained: a leaf below the transpose
    found = next(name for name, known in module.named_parameters() if known.data_ptr() == weight.data_ptr())
    return found.rpartition(".")[2]


class ValuesLast(nn.Module):
    """A layer of softmax attention that averages tokens and maps them by W_V afterwards: (P X) W_V, not P (X W_V)."""

    def __init__(self, layer: MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, d) -> (B, N, d)."""
        made, heads = self.layer, self.layer.num_heads
        q, k = made.projection(x)
        mixed: Any = softmax_attention_reference(q, k, x[:, None].expand(-1, heads, -1, -1))  # P X: (B, H, N, d)
        o = mixed @ made.weight_v.unflatten(0, (heads, -1)).mT  # (B, H, N, d/H)
        return o.transpose(1, 2).flatten(2) @ made.weight_o.mT


@cache
def backward_counted(order: str, *, projection: str = "frozen", input_grad: bool = True) -> sympy.Expr:
    """The backward FLOPs of a layer that evaluates "P (X W_V)" or "(P X) W_V", counted in small runs."""

    def count(length: int, width: int, heads: int, _: int) -> int:
        made = MultiheadAttention(width, heads, projection=projection, form="reference")
        module = ValuesLast(made) if order == VALUES_LAST else made
        return of(module, torch.ones(1, length, width, requires_grad=input_grad)).backward

    return fitted(count, N * d**2, N**2 * d, H * N**2 * d)


VALUES_FIRST, VALUES_LAST = "P (X W_V)", "(P X) W_V"
WANTED = {True: "gradient for $X$", False: "none for $X$"}


def backward_settings(projection: str = "frozen") -> dict[str, sympy.Expr]:
    """The backward FLOPs of a layer, ORA by default, by the order of evaluation and by whether X needs a gradient."""
    return {
        f"${order}$, {wanted}": backward_counted(order, projection=projection, input_grad=input_grad)
        for order in (VALUES_FIRST, VALUES_LAST)
        for input_grad, wanted in WANTED.items()
    }


def saved_settings() -> dict[str, sympy.Expr]:
    """The share of a standard layer's backward FLOPs that freezing saves, in the settings of `backward_settings`.

    Both layers evaluate in the same order.
    """
    standard, frozen = backward_settings("learned"), backward_settings()
    return {setting: sympy.factor(1 - frozen[setting] / standard[setting]) for setting in standard}


def linear_backward() -> Finding:
    """Whether ORA's backward pass is O(N d^2): a statement that the source makes three times."""
    stopped = layer(1, N, d, H, projection="stopped", form="reference")
    return growth_where("N*d^2", backward_settings()).noting(
        f"With the gradient through $Q$ and $K$ stopped and one for $X$: {show(stopped.backward)}"
    )


@dataclass(frozen=True)
class Trained:
    """What one step of AdamW does to a layer. `moved`: entries that it changed, by matrix."""

    trainable: int
    gradient_bytes: int
    optimiser_bytes: int
    moved: dict[str, int]
    orthogonality: float  # the largest entry of |W^T W - I|, W_Q and W_K, after the step


@cache
def train_once(projection: str, d_model: int = 64) -> Trained:
    """Build a layer, take one step of AdamW on a random batch and look at what there is afterwards."""
    generator = seeded()
    module = MultiheadAttention(d_model, 4, projection=projection, generator=generator, dtype=torch.float64)
    optimiser = torch.optim.AdamW(module.parameters())
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    x = torch.randn(1, 16, d_model, generator=generator, dtype=torch.float64)
    module(x).square().sum().backward()
    optimiser.step()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    identity = torch.eye(d_model, dtype=torch.float64)
    return Trained(
        trainable=sum(weight.numel() for weight in module.parameters() if weight.requires_grad),
        gradient_bytes=sum(gradient.nbytes for gradient in gradients),
        optimiser_bytes=optimiser_bytes(optimiser),
        moved={
            name.rpartition("weight_")[2].upper(): int((weight != before[name]).sum())
            for name, weight in module.state_dict().items()
        },
        orthogonality=max(
            float((w.detach().T @ w.detach() - identity).abs().max())
            for w in (module.projection.weight_q, module.projection.weight_k)
        ),
    )
