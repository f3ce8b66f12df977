"""Checks of single values, by name."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ortho._checks.names import unknown

FORMS = ("reference", "fast")  # of an attention function: as its formula reads, and as it is computed in practice

_values_checked: ContextVar[bool] = ContextVar("values_checked", default=True)


@contextmanager
def unchecked_values() -> Iterator[None]:
    """Leave out the checks that read a tensor's values (finiteness); shapes and types are still checked.

    For code that counts operations. Under a transform of `torch.func`, while compiling and on an accelerator they are
    left out anyway.
    """
    token = _values_checked.set(False)
    try:
        yield
    finally:
        _values_checked.reset(token)


def describe(value: Any) -> str:
    """How a value is named in an error: a tensor by its dtype and shape, anything else by its type and repr."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}: {', '.join(map(describe, value))}"
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def expect(fits: Any, name: str, wanted: str, got: Any) -> None:
    """ValueError, `name: expected <wanted>, got <got>`, unless it `fits`."""
    if not fits:
        raise ValueError(f"{name}: expected {wanted}, got {got}")


def positive_int(name: str, value: Any) -> int:
    """`value` if it is an integer of at least 1, else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer of at least 1, got {describe(value)}")
    expect(value >= 1, name, "an integer of at least 1", value)
    return value


def share(name: str, value: Any) -> float:
    """`value` if it is a number in [0, 1), else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number in [0, 1), got {describe(value)}")
    expect(0 <= value < 1, name, "a number in [0, 1)", value)
    return float(value)


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """`value` if it is one of the known names, else ValueError that says which is near, or all."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(unknown(name, value, known))
    return value


def float_tensor(name: str, value: Any) -> Tensor:
    """`value` if it is a tensor of floating-point numbers, else TypeError."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {describe(value)}")
    return value


def reads_values(value: Tensor) -> bool:
    """Whether reading a value is cheap: not on an accelerator, whose queue it would stall, nor while compiling, nor
    under a transform of `torch.func`, where it may stand for many."""
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        return False
    return _values_checked.get() and not torch._C._are_functorch_transforms_active()


def shows_values(value: Tensor) -> bool:
    """Whether only the result can show numbers out of range, as NaN: on an accelerator, and while compiling."""
    return torch.compiler.is_compiling() or value.device.type != "cpu"


def indices(name: str, value: Tensor, count: int) -> None:
    """ValueError if an integer tensor holds a number outside 0..count-1; like `finite`, on the CPU only."""
    if reads_values(value):
        low, high = (int(x) for x in value.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"{name}: expected indices in 0..{count - 1}, got {low}..{high}")


def finite(name: str, value: Tensor) -> None:
    """ValueError if a tensor holds NaN or infinity; checked on the CPU only, where reading a value stalls nothing."""
    if not (reads_values(value) and value.numel()):
        return
    low, high = value.detach().aminmax()  # one pass; NaN propagates
    if not (low.isfinite() and high.isfinite()):
        bad = int((~value.isfinite()).sum())
        raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite of {value.numel()}")


def within(name: str, what: str, value: Tensor, least: float | int, most: float | int) -> None:
    """ValueError unless a tensor, which is `what`, lies within [least, most]; like `finite`, on the CPU only."""
    if not (reads_values(value) and value.numel()):
        return
    low, high = (float(x) for x in value.detach().aminmax())  # NaN propagates, and lies nowhere
    if not (least <= low and high <= most):
        raise ValueError(f"{name}: expected {what} within {least:.2g} and {most:.2g}, got {low:.2g} to {high:.2g}")


def heads(d_model: Any, num_heads: Any) -> tuple[int, int]:
    """(d_model, num_heads) if they are positive integers and the heads divide the width."""
    positive_int("d_model", d_model)
    if d_model % positive_int("num_heads", num_heads):
        raise ValueError(f"num_heads: expected a divisor of d_model = {d_model}, got {num_heads}")
    return d_model, num_heads


def sequence(name: str, value: Any, weight: Tensor) -> Tensor:
    """`value` if it is a finite tensor (B, N, d), N >= 1, that a (·, d) `weight` can multiply."""
    float_tensor(name, value)
    width = weight.shape[-1]
    if value.dim() != 3 or value.shape[-1] != width or 0 in value.shape:
        raise ValueError(f"{name}: expected shape (B, N, {width}) with B, N >= 1, got {tuple(value.shape)}")
    if value.dtype != weight.dtype and not torch.is_autocast_enabled(value.device.type):
        raise TypeError(f"{name}: expected {weight.dtype} like the weights, got {value.dtype}")
    finite(name, value)
    return value


def state(value: Any, *names: str, axes: int = 0) -> tuple[Tensor, ...]:
    """An `initial_state` as a tuple of tensors with `axes` axes or more, one for each of `names`, else TypeError or
    ValueError."""
    wanted = f"initial_state: expected a tuple of tensors ({', '.join(names)}), got {describe(value)}"
    if not isinstance(value, tuple | list) or not all(map(torch.is_tensor, value)):
        raise TypeError(wanted)
    if len(value) != len(names) or any(part.dim() < axes for part in value):
        raise ValueError(wanted)
    return tuple(value)


def scale_factor(value: Any) -> None:
    """TypeError or ValueError unless a `scale` is None or a finite number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"scale: expected a number, got {describe(value)}")
    expect(value is None or isfinite(value), "scale", "a finite number", value)


def qkv(q: Any, k: Any, v: Any, attn_mask: Any, is_causal: bool, past: int = 0) -> None:
    """Raise unless q (..., N, K), k (..., M, K), v (..., M, V) and the mask fit together.

    `past` is the number of cached keys before k: a mask spans them too, and a causal call may have them.
    """
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: expected True or False, got {describe(is_causal)}")
    for name, value in (("q", q), ("k", k), ("v", v)):
        float_tensor(name, value)
        if value.dim() < 2 or 0 in value.shape:
            raise ValueError(f"{name}: expected shape (..., N, width) without empty axes, got {tuple(value.shape)}")
        if value.dtype != q.dtype or value.device != q.device:
            raise TypeError(f"{name}: expected {q.dtype} on {q.device} like q, got {value.dtype} on {value.device}")
        if value.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name}: expected leading axes {tuple(q.shape[:-2])} like q, got {tuple(value.shape)}")
        finite(name, value)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected width {q.shape[-1]} like q, got shape {tuple(k.shape)}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected length {k.shape[-2]} like k, got shape {tuple(v.shape)}")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"is_causal: expected as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
    if attn_mask is not None:
        mask(attn_mask, (*q.shape[:-1], past + k.shape[-2]))


def mask(value: Any, shape: tuple[int, ...], name: str = "attn_mask") -> None:
    """Raise, naming the argument, unless `value` is a boolean tensor that broadcasts to `shape`."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        raise TypeError(f"{name}: expected a boolean tensor (True = may attend), got {describe(value)}")
    try:
        fits = torch.broadcast_shapes(value.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {tuple(value.shape)}")


def layer_mask(
    attn_mask: Any,
    key_padding_mask: Any,
    batch: int,
    heads: int,
    queries: int,
    keys: int | None,
    name: str = "attn_mask",
) -> Tensor | None:
    """The two masks of a layer combined: None, or a mask that broadcasts to (B, H, N, M), True = may attend.

    Raises ValueError for a padding mask that is not (B, M), with any M if `keys` is None; and for an `attn_mask`, by
    its `name`, whose first axis is ambiguous.
    """
    if isinstance(attn_mask, Tensor):
        shape = tuple(attn_mask.shape)
        if len(shape) == 2 and shape[0] == batch == queries > 1:
            raise ValueError(
                f"{name}: expected four axes where B = N = {batch}, got {shape}: "
                "write (N, M) as mask[None, None], and padded keys (B, M) as a key_padding_mask"
            )
        if len(shape) == 3 and shape[0] == batch == heads > 1:
            raise ValueError(
                f"{name}: expected four axes where B = H = {batch}, got {shape}: "
                "write (H, N, M) as mask[None], and (B, N, M) as mask[:, None]"
            )
    if key_padding_mask is None:
        return attn_mask
    shape = tuple(key_padding_mask.shape)
    if len(shape) != 2 or shape[0] != batch or (keys is not None and shape[1] != keys):
        wanted = (batch, "M" if keys is None else keys)
        raise ValueError(f"key_padding_mask: expected shape {wanted}, got {shape}".replace("'", ""))
    there = ~key_padding_mask[:, None, None]  # (B, 1, 1, M)
    if attn_mask is None:
        return there
    mask(attn_mask, (batch, heads, queries, shape[1]))
    return attn_mask & there
