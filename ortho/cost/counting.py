"""Costs counted from running code: every operation that PyTorch dispatches, every byte that autograd keeps or a call
allocates.

PyTorch's own FlopCounterMode counts nothing for the fused attention kernel of the CPU and nothing outside matrix
products. Counts here depend on the shapes and on what autograd executes, not on the machine or its speed.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ortho._checks import unchecked_values
from ortho.attention.indexing import is_indexing
from ortho.attention.mechanism import FUSED_BACKWARD, LOG_SUM_FORWARD, SOFTMAX_BACKWARD, SOFTMAX_FORWARD, causal_pairs

aten = torch.ops.aten

LAYER_NORM_FORWARD = 8  # sum, divide; subtract, square, sum, divide; multiply by 1/std; multiply by the gain
LAYER_NORM_BACKWARD = 9  # gain: multiply, sum; input: multiply by the gain, two products summed, two terms, scale

# Matrix products and their inverse: FLOPs from the shapes of the operands, 2 a multiply-add.
_MATMUL: dict[Any, Callable[..., int]] = {
    aten.mm: lambda a, b: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    aten.addmm: lambda _, a, b: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    aten.bmm: lambda a, b: 2 * prod(a.shape) * b.shape[2],
    aten.baddbmm: lambda _, a, b: 2 * prod(a.shape) * b.shape[2],
    aten.linalg_solve_triangular: lambda a, b: prod(b.shape) * a.shape[-1],  # a substitution goes over half of a
}
# Eigenvalues and eigenvectors of a symmetric matrix, in n^3 FLOPs (Golub & Van Loan 2013, section 8.3). What LAPACK
# does depends on the matrix.
EIGEN = 9
# Composite kernels: scalar operations per element of their first operand.
_COMPOSITE = {
    aten._softmax: SOFTMAX_FORWARD,
    aten._safe_softmax: SOFTMAX_FORWARD,
    aten._softmax_backward_data: SOFTMAX_BACKWARD,
    aten.native_layer_norm: LAYER_NORM_FORWARD,
    aten.native_layer_norm_backward: LAYER_NORM_BACKWARD,
    aten.embedding_dense_backward: 1,
    aten.softplus_backward: 1,
    aten.sum: 1,
    aten.mean: 1,
    aten.amax: 1,
    aten.argmax: 1,
    aten.cumsum: 1,
    aten.cummax: 1,
    aten.logcumsumexp: LOG_SUM_FORWARD,
    aten.topk: 1,  # one comparison a number, however many are wanted
}
# Operators that add numbers at some places, with the name of the argument that holds the numbers.
_ADDING = {aten.index_add: "source", aten.scatter_add: "src"}
# Operators that move, allocate or look up, and compute nothing (PyTorch tags some as pointwise).
_FREE = {
    aten.clone,
    aten.copy,
    aten._to_copy,
    aten.fill,
    aten.zero,
    aten.cat,
    aten.stack,
    aten.constant_pad_nd,
    aten.embedding,
    aten.index_select,
    aten.index_copy,
    aten.gather,
    aten.flip,
    aten.diag_embed,
    aten.triu,
    aten.tril,
    aten.slice_backward,
    aten.select_backward,
    aten.ones_like,
    aten.zeros_like,
    aten.empty_like,
    aten.new_empty_strided,
    aten.new_empty,
    aten.new_full,
    aten.new_zeros,
    aten._unsafe_view,
}


def _argument(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    """The value that an operator call gives to its argument `name`, by the operator's schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    raise TypeError(f"name: expected an argument of {func}, got {name!r}")


def _fused_attention(func: Any, args: tuple, kwargs: dict) -> tuple[int, int]:
    """(FLOPs, scalar operations) of a fused softmax attention kernel, forward or backward.

    Forward: two products a score (scores, output). Backward: five (scores again, dP, dV, dQ, dK); the kernel has no
    form that leaves out dQ and dK. It computes only the causal half of the scores if it knows that the call is causal.
    """
    q, k, v = (_argument(func, args, kwargs, name) for name in ("query", "key", "value"))
    rows, width, values = prod(q.shape[:-1]), q.shape[-1], v.shape[-1]
    causal = _argument(func, args, kwargs, "is_causal")
    pairs = prod(q.shape[:-2]) * causal_pairs(q.shape[-2]) if causal else rows * k.shape[-2]
    if "backward" in func.name():
        return 2 * pairs * (3 * width + 2 * values), FUSED_BACKWARD * pairs + 2 * rows * values
    return 2 * pairs * (width + values), pairs * (1 + SOFTMAX_FORWARD)


def _adds_bias(packet: Any, args: tuple) -> bool:
    """Whether a layer norm also adds a bias, or sums up its gradient."""
    place = {aten.native_layer_norm: 3, aten.native_layer_norm_backward: 6}.get(packet)
    return place is not None and args[place] is not None


def _functional(func: Any) -> Any:
    """For an in-place operator, the one that computes the same into new memory; other operators as they are."""
    name = func.overloadpacket.__name__
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    return func if packet is None else getattr(packet, func._overloadname, func)


def _holds_numbers(x: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, rather than integers or booleans."""
    return x.is_floating_point() or x.is_complex()


def _is_view(func: Any) -> bool:
    """Whether an operator only re-describes memory: its result aliases an argument that it does not write."""
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


class OperationCounter(TorchDispatchMode):
    """Counts what runs inside `with OperationCounter() as counter:`, forward or backward.

    `flops` and `elementwise` are counters by operator name; their sums are the totals. Index arithmetic, where it is
    declared as such (`ortho.attention.indexing`), is not counted. An operator without a rule raises RuntimeError: a
    silent zero would look like a saving.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.elementwise: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self) -> "OperationCounter":
        self._stack.enter_context(unchecked_values())  # the mechanism is counted, not its guards
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        func = _functional(func)
        packet = func.overloadpacket
        name = packet.__name__
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if not operands or (is_indexing() and not any(map(_holds_numbers, operands))):
            pass
        elif packet in _MATMUL:
            self.flops[name] += _MATMUL[packet](*args)
            if abs(kwargs.get("alpha", 1)) != 1:  # the product's count includes the addition, but not a factor
                self.elementwise[name] += out.numel()
        elif packet is aten._linalg_eigh:
            self.flops[name] += EIGEN * args[0].numel() * args[0].shape[-1]
        elif name.startswith("_scaled_dot_product"):
            flops, elementwise = _fused_attention(func, args, kwargs)
            self.flops[name] += flops
            self.elementwise[name] += elementwise
        elif packet in _COMPOSITE:
            self.elementwise[name] += (_COMPOSITE[packet] + _adds_bias(packet, args)) * args[0].numel()
        elif packet in _ADDING:
            self.elementwise[name] += _argument(func, args, kwargs, _ADDING[packet]).numel()
        elif packet in _FREE or _is_view(func):
            pass
        elif torch.Tag.pointwise in func.tags:
            self.elementwise[name] += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        else:
            raise RuntimeError(f"OperationCounter has no rule for {func}")
        return out


@contextmanager
def saved_bytes(exclude: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd keeps for the backward pass: `with saved_bytes(params) as total: ...; total()`.

    Each storage counts once and whole, however many views of it are kept; storages of `exclude` (parameters and
    buffers, which exist anyway) do not count.
    """
    known = {t.untyped_storage().data_ptr() for t in exclude}
    kept: dict[int, Tensor] = {}  # holding the tensor keeps its address from being used again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(t.untyped_storage().nbytes() for t in kept.values())


@dataclass(frozen=True)
class Counts:
    """What one forward and one backward pass executed; the names are those of `ortho.cost.Cost`."""

    forward: int
    backward: int
    elementwise_forward: int
    elementwise_backward: int
    saved_bytes: int
    trained: int
    frozen: int
    by_operation: dict[str, dict[str, int]] = field(repr=False, compare=False)


def count_step(call: Callable[..., Tensor], *inputs: Any, **kwargs: Any) -> Counts:
    """Run `call(*inputs, **kwargs)`, of a module or a function, forward and backward once and count.

    Gradients are taken for every parameter and argument that requires one, with a given gradient of the output, so that
    no loss is counted.
    """
    module = call if isinstance(call, nn.Module) else nn.Module()  # a function has no parameters
    trained = [p for p in module.parameters() if p.requires_grad]
    stored = [*module.parameters(), *module.buffers()]
    wanted = [*trained, *(x for x in tree_leaves((inputs, kwargs)) if isinstance(x, Tensor) and x.requires_grad)]
    with OperationCounter() as ahead, saved_bytes(stored) as kept:
        y = call(*inputs, **kwargs)
    gradient = torch.ones_like(y)
    with OperationCounter() as back:
        torch.autograd.grad(y, wanted, gradient)
    passes = {"forward": ahead, "backward": back}
    n_trained = sum(p.numel() for p in trained)
    return Counts(
        forward=ahead.flops.total(),
        backward=back.flops.total(),
        elementwise_forward=ahead.elementwise.total(),
        elementwise_backward=back.elementwise.total(),
        saved_bytes=kept(),
        trained=n_trained,
        frozen=sum(t.numel() for t in stored) - n_trained,
        by_operation={name: dict(c.flops + c.elementwise) for name, c in passes.items()},
    )


def count_forward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, int]:
    """(FLOPs, scalar operations) of one call."""
    with torch.no_grad(), OperationCounter() as counter:
        function(*args, **kwargs)
    return counter.flops.total(), counter.elementwise.total()


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
