"""The odd values that replace one argument, by its valid value, and whether a call may accept them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Odd(NamedTuple):
    """A value that replaces a valid one. `nonsense`: every call must refuse it; otherwise the call may work or
    refuse."""

    label: str
    value: Any
    nonsense: bool = True


_ARRAY = np.ones((2, 3))
_COMMON = [Odd("str", "no such thing"), Odd("list", [object()]), Odd("array", _ARRAY), Odd("dict", {"no such": 1})]
_NOT_FINITE = [Odd("nan", math.nan), Odd("numpy nan", np.float64("nan"))]

_BY_TYPE = {
    bool: [Odd("int", 1), Odd("zero", 0), Odd("numpy bool", np.True_), *_NOT_FINITE],
    torch.Generator: [Odd("int", 3), Odd("bool", True)],
    torch.dtype: [
        *(Odd("int64", torch.int64), Odd("name", "float32"), Odd("int", 3), Odd("complex", torch.complex64)),
        Odd("half", torch.float16, False),
    ],
    torch.device: [
        *(Odd("name", "no such device"), Odd("int", 7), Odd("absent", "cuda:77"), Odd("meta", "meta", False))
    ],
}

# Names of numbers that may be 0 or negative; names of sizes that may be 0.
ANY_INTEGER = {"seed", "offset", "start", "stop", "order", "split", "age"}
FROM_ZERO = {
    "K",
    "V",
    "erase",
    "segments",
    "reach",
    "leading",
    "random",
    "summaries",
    "tokens",
    "distance",
    "first",
    "last",
    "step",
    "bits",
}


def odd_values(name: str, base: Any, default: Any) -> Iterator[Odd]:
    """The odd values for an argument of this name whose valid value is `base`; None is not odd if it is the default."""
    if default is not None and base is not None:
        yield Odd("None", None)
    yield from _COMMON if not isinstance(base, str | Mapping) and type(base) not in (list, tuple) else _COMMON[2:3]
    for kind, odd in _BY_TYPE.items():
        if isinstance(base, kind):
            yield from odd
            return
    if isinstance(base, int):
        yield from (Odd("bool", True), Odd("complex", 2j), Odd("inf", math.inf), *_NOT_FINITE)
        yield from (Odd("fraction", base + 0.5), Odd("numpy int", np.int64(base), False))
        yield Odd("0", 0, name not in ANY_INTEGER | FROM_ZERO)
        yield Odd("-1", -1, name not in ANY_INTEGER)
        yield Odd("tensor", torch.ones(2, 3))
    elif isinstance(base, float):
        yield from (Odd("bool", True), Odd("complex", 2j), Odd("tensor", torch.ones(2, 3)), *_NOT_FINITE)
        yield from (Odd(str(x), x, False) for x in (0.0, -1.0, 1e-45, 1e308, math.inf, -math.inf))
        yield Odd("numpy float", np.float32(base), False)
    elif isinstance(base, str):
        yield from (
            Odd("name", "no such name"),
            Odd("empty", ""),
            Odd("int", 3),
            Odd("list", [base]),
            Odd("bool", True),
        )
        yield Odd("capitals", base.upper(), False)
    elif isinstance(base, Tensor):
        yield from _tensors(base)
    elif isinstance(base, Mapping):
        yield from (Odd("int", 3), Odd("list", [1, 2]), Odd("key", {"no such": 1}), Odd("number", {3: 3}))
        yield Odd("empty", {}, False)
    elif type(base) in (list, tuple):
        yield from (Odd("int", 3), Odd("name", "no such name"), Odd("nested", [[base]]), Odd("none in it", [None]))
        yield Odd("nan in it", [math.nan])
        yield Odd("empty", type(base)(), False)
    elif isinstance(base, nn.Module) or callable(base) or base is not None:
        yield from (Odd("int", 3), Odd("bool", True), Odd("module", nn.Linear(2, 2), False))


def _tensors(base: Tensor) -> Iterator[Odd]:
    yield from (Odd("int", 3), Odd("lists", base.tolist()), Odd("numpy", base.numpy()))
    yield from (Odd("axis more", base[None], False), Odd("zero-size", base[..., :0], False))
    yield from (Odd("axis less", base[0], False), Odd("longer", torch.cat([base, base], -1), False))
    yield from (Odd("scalar", base.flatten()[0], False), Odd("meta", base.to("meta"), False))
    yield Odd("complex", base.to(torch.complex64))
    if base.is_floating_point():
        holed = base.clone()
        holed.view(-1)[-1] = math.nan
        yield Odd("nan", holed)
        endless = base.clone()
        endless.view(-1)[-1] = math.inf
        yield from (Odd("inf", endless), Odd("integers", base.long()), Odd("booleans", base.bool()))
        yield Odd("half", base.half(), False)
    elif base.dtype == torch.bool:
        yield from (Odd("floats", base.double()), Odd("integers", base.long()))
    else:
        yield from (Odd("floats", base.double()), Odd("negative", base - 10**6), Odd("large", base + 10**6))
