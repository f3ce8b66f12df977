"""The memory that running code takes, counted from the tensors it makes: the same on every machine.

A process's resident size holds what the allocator keeps for later as well, and an earlier peak in it hides a later one.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside `with Allocations() as memory:`, forward or backward.

    `live`: of those that still exist, each storage once and whole, however many views there are of it. `peak`: the
    most that there were at once. `largest`: of the largest. Tensors made before do not count, wherever they come in;
    nor does what a kernel takes and gives back inside: on a CPU about 3 MB of PyTorch's fused softmax attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self._meet((args, kwargs), made=False)  # first, or a view of them would pass for new
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
