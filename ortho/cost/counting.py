"""Costs counted from running code: FLOPs of matrix products, bytes that autograd keeps, bytes that a call allocates.

Counts depend on shapes and on what autograd executes, not on the machine or its speed. FLOPs are those of PyTorch's
`FlopCounterMode`, with formulas for what it does not know or counts otherwise: fused attention kernels, of a causal
call only the half that they compute; triangular systems; eigenvalues; products in place and with vectors. An operator
that has no formula, in PyTorch or here, counts as 0.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ortho._cost import causal_pairs

__all__ = ["Allocations", "Counts", "flop_counter", "flops_of", "of", "optimiser_bytes", "saved_bytes"]

aten = torch.ops.aten

# Eigenvalues and eigenvectors of a symmetric matrix, in n^3 FLOPs (Golub & Van Loan 2013, section 8.3). What LAPACK
# does depends on the matrix.
EIGEN = 9


def argument(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    """The value that an operator call gives to its argument `name`, by the operator's schema."""
    for position, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[position] if position < len(args) else kwargs.get(name, each.default_value)
    raise TypeError(f"name: expected an argument of {func}, got {name!r}")


def fused_pairs(func: Any, args: tuple, kwargs: dict) -> int:
    """The pairs of queries and keys that a fused attention kernel computes: of a causal call the lower half."""
    q, k = argument(func, args, kwargs, "query"), argument(func, args, kwargs, "key")
    causal = argument(func, args, kwargs, "is_causal")
    return prod(q.shape[:-2]) * (causal_pairs(q.shape[-2]) if causal else q.shape[-2] * k.shape[-2])


def _fused(packet: Any) -> Callable[..., int]:
    """FLOPs of a fused attention kernel. Forward two products a pair (scores, output), backward five (scores again, dP,
    dV, dQ, dK); the kernels have no form that leaves out dQ and dK."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:  # noqa: ARG001
        K, V = args[0].shape[-1] if not back else args[1].shape[-1], args[2 + back].shape[-1]
        products = 3 * K + 2 * V if back else K + V
        return 2 * fused_pairs(packet.default, args, kwargs) * products

    back = "backward" in packet.__name__
    count._get_raw = True  # type: ignore[attr-defined]  # FlopCounterMode gives it the tensors, not their shapes
    return count


_KERNELS = [
    getattr(aten, f"_scaled_dot_product_{kernel}{way}")
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for way in ("", "_backward")
]
FORMULAS: dict[Any, Callable[..., int]] = {
    **{packet: _fused(packet) for packet in _KERNELS},
    aten.addmm_: lambda _, a, b, **__: 2 * prod(a) * b[-1],
    aten.baddbmm_: lambda _, a, b, **__: 2 * prod(a) * b[-1],
    aten.mv: lambda a, *_, **__: 2 * prod(a),
    aten.dot: lambda a, *_, **__: 2 * prod(a),
    # A substitution goes over half of a.
    aten.linalg_solve_triangular: lambda a, b, *_, **__: prod(b) * a[-1],
    aten._linalg_eigh: lambda a, *_, **__: EIGEN * prod(a) * a[-1],
}


class _Whole(nullcontext):
    """In place of PyTorch's tracker of modules, which cannot follow a forward pass that is recomputed within a backward
    pass: everything counts together."""

    parents = ("Global",)


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """PyTorch's counter with the formulas of this module: `with flop_counter() as counter: ...`, then
    `counter.get_total_flops()`."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = _Whole()  # type: ignore[assignment]
    with counter:
        yield counter


def flops_of(call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> int:
    """FLOPs of the matrix products in `call(*inputs, **kwargs)`, without gradients; a multiply-add counts as 2."""
    with torch.no_grad(), flop_counter() as counter:
        call(*inputs, **kwargs)
    return counter.get_total_flops()


@contextmanager
def saved_bytes(exclude: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd keeps for the backward pass: `with saved_bytes(params) as total: ...; total()`.

    Each storage counts once and whole, however many views of it are kept; storages of `exclude` (parameters and
    buffers, which exist anyway) do not count.
    """
    known = {t.untyped_storage()._cdata for t in exclude}
    kept: dict[int, Tensor] = {}  # holding the tensor keeps its storage's address from being used again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in known:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(t.untyped_storage().nbytes() for t in kept.values())


@dataclass(frozen=True)
class Counts:
    """What one forward and one backward pass did, counted.

    forward, backward: FLOPs of matrix products; a multiply-add counts as 2. trained, frozen: numbers of parameters,
    buffers among the frozen ones. saved_bytes: bytes that autograd keeps from forward to backward, without parameters.
    by_operation: the FLOPs of each pass by operator.
    """

    forward: int
    backward: int
    trained: int
    frozen: int
    saved_bytes: int
    by_operation: dict[str, Counter[str]] = field(repr=False, compare=False)

    @property
    def step(self) -> int:
        """FLOPs of one training step, forward and backward."""
        return self.forward + self.backward


def of(call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Counts:
    """Run `call(*inputs, **kwargs)`, of any module or function, forward and backward once, and count.

    Gradients are taken for every parameter and input that requires one, from a given gradient of each output, so no
    loss is counted. An input that a layer before would give must require a gradient, or its part is left out. On
    `FakeTensorMode`'s tensors nothing is computed, so that any size can be counted.

    >>> of(nn.Linear(3, 4), torch.ones(2, 3, requires_grad=True))
    Counts(forward=48, backward=96, trained=16, frozen=0, saved_bytes=24)
    """
    module = call if isinstance(call, nn.Module) else nn.Module()  # a function has no parameters
    trained = [p for p in module.parameters() if p.requires_grad]
    stored = [*module.parameters(), *module.buffers()]
    wanted = [*trained, *(x for x in tree_leaves((inputs, kwargs)) if isinstance(x, Tensor) and x.requires_grad)]
    with torch.enable_grad(), flop_counter() as ahead, saved_bytes(stored) as kept:
        made = call(*inputs, **kwargs)
    outputs = [y for y in tree_leaves(made) if isinstance(y, Tensor) and y.requires_grad]
    gradients = [torch.ones_like(y) for y in outputs]
    with flop_counter() as back:
        if wanted and outputs:
            torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
    passes = {"forward": ahead, "backward": back}
    by_operation = {
        name: Counter(
            {f"{packet}".removeprefix("aten."): n for packet, n in one.get_flop_counts().get("Global", {}).items()}
        )
        for name, one in passes.items()
    }
    n_trained = sum(p.numel() for p in trained)
    return Counts(
        forward=ahead.get_total_flops(),
        backward=back.get_total_flops(),
        trained=n_trained,
        frozen=sum(t.numel() for t in stored) - n_trained,
        saved_bytes=kept(),
        by_operation=by_operation,
    )


def optimiser_bytes(optimiser: torch.optim.Optimizer) -> int:
    """Bytes of an optimiser's state after a step, without its scalar step counts."""
    tensors = (t for state in optimiser.state.values() for t in state.values() if isinstance(t, Tensor))
    return sum(t.numel() * t.element_size() for t in tensors if t.dim() > 0)


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside `with Allocations() as memory:`, forward or backward.

    `live`: bytes of those that still exist; each storage counts once and whole, however many views it has. `peak`: the
    most bytes at once. `largest`: bytes of the largest. Tensors made before do not count, wherever they are used; nor
    does memory that a kernel allocates and frees internally: about 3 MB for PyTorch's fused softmax attention on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), made=False)  # first, or a view of an argument would count as new
        out = func(*args, **kwargs)
        self._meet(out, made=True)
        return out

    def _meet(self, tensors: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()  # the same object for as long as the memory is held
            if id(storage) in self._known:
                continue
            size = storage.nbytes() if made else 0
            self._known.add(id(storage))
            self.live += size
            self.peak = max(self.peak, self.live)
            self.largest = max(self.largest, size)
            weakref.finalize(storage, self._leave, id(storage), size).atexit = False

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
