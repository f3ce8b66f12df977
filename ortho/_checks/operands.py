"""What is done around every mechanism alike: its operands are checked, upcast and joined to the state."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from ortho._checks import values as _checks
from ortho._checks.arguments import checked
from ortho._checks.autocast import no_autocast
from ortho._typing import State, Tensor

F = TypeVar("F", bound=Callable[..., Any])


def attention_form(
    *,
    beside: tuple[str, ...] = (),
    fixed_state: bool = False,
    moves_keys: bool = False,
    trims: bool = False,
    upcasts: bool = True,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Decorate a definition or a fast form; its body reads like the formula, as its operands come checked and clean.

    The body gets q, k, v and all other floating-point tensors in float32 at least, contiguous, with autocast off. It
    returns o, or (o, state). The caller gets o in the dtype of q, and the state if `return_state` asks for it.

    By default the state is (keys, values), in the caller's dtype: k and v begin with those of `initial_state`, and the
    mask spans them. `beside` names further parts of the state; the body reads them in `initial_state`, which has one
    part for each name, and returns (o, these parts). A body that `trims` the state, dropping keys that no later query
    reads, returns (o, (keys, values, these parts)) if `return_state` asks for it. With `moves_keys` tokens change the
    keys before them: the state holds keys in float32 at least, and the body gets only the new keys and returns (o, (all
    keys,)). With `fixed_state` keys are summed up in a state of fixed size: the body reads `initial_state` as it came
    and returns (o, the whole new state). The mask must then be the same for all queries, and there may be no state with
    it; the body gets it as (..., M).

    First the types, finite numbers, and the shapes of q, k, v and the mask are checked, by the annotations. `check` may
    refuse more: it is called with q, k, v as they came, and by name with `is_causal`, the mask that the body gets, and
    those of the mechanism's own arguments that were given. With `upcasts=False` operands keep their dtype and layout,
    for kernels that choose them.
    """

    def adapted(body: F) -> F:
        @checked(shapes=False)
        @wraps(body)
        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            is_causal: bool = False,
            attn_mask: Tensor | None = None,
            initial_state: State | None = None,
            return_state: bool = False,
            **own: Any,
        ) -> Any:
            for part in initial_state if isinstance(initial_state, tuple | list) else ():
                if isinstance(part, Tensor) and part.device != k.device:
                    raise TypeError(f"initial_state: expected tensors on {k.device} like k, got one on {part.device}")
            if fixed_state:
                _checks.qkv(q, k, v, attn_mask, is_causal)
                attn_mask = key_mask(attn_mask, k, initial_state)
                keys, values = k, v
            else:
                keys, values = prepend_state(q, k, v, is_causal, attn_mask, initial_state, beside, moves_keys)
            if check is not None:
                check(q, k, v, is_causal=is_causal, attn_mask=attn_mask, **own)
            operands, dtype = (q, keys, values), q.dtype
            with no_autocast(q):
                if upcasts:
                    operands = (upcast(q), upcast(keys), upcast(values))
                    own = {name: _upcast_like(operands[0], value) for name, value in own.items()}
                found = body(
                    *operands,
                    is_causal=is_causal,
                    attn_mask=attn_mask,
                    initial_state=initial_state,
                    return_state=return_state,
                    **own,
                )
                o, state = found if isinstance(found, tuple) else (found, ())
                o = o.to(dtype)
            if not return_state:
                return o
            if fixed_state:
                return o, tuple(state)
            if moves_keys:
                return o, (*state, values)
            if trims:
                keys, values, state = state[0].to(dtype), state[1].to(dtype), state[2:]
            return o, (keys, values, *state)

        return call  # type: ignore[return-value]

    return adapted


def prepend_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    initial_state: State | None,
    beside: tuple[str, ...] = (),
    moves_keys: bool = False,
) -> tuple[Tensor, Tensor]:
    """The checked keys and values, put after those of the state; `beside` names further parts of the state.

    With `moves_keys` the state's keys are in float32 at least, and are not put before the new ones.
    """
    if initial_state is None:
        _checks.qkv(q, k, v, attn_mask, is_causal)
        return k, v
    parts = _checks.state(initial_state, "keys", "values", *beside, axes=0 if beside else 2)
    past_k, past_v = _checks.state(parts[:2], "keys", "values", axes=2)
    _checks.qkv(q, k, v, attn_mask, is_causal, past=past_k.shape[-2])
    keys_dtype = _at_least_float32(k.dtype) if moves_keys else k.dtype
    for name, past, new, dtype in (("keys", past_k, k, keys_dtype), ("values", past_v, v, v.dtype)):
        if past.shape[:-2] != new.shape[:-2] or past.shape[-1] != new.shape[-1] or past.dtype != dtype:
            expected = f"{dtype} of shape {(*new.shape[:-2], '...', new.shape[-1])}"
            raise ValueError(f"initial_state: expected {name} {expected}, got {_checks.describe(past)}")
        _checks.finite("initial_state", past)
    if past_v.shape[-2] != past_k.shape[-2]:
        raise ValueError(
            f"initial_state: expected values of length {past_k.shape[-2]} like the keys, got {tuple(past_v.shape)}"
        )
    return k if moves_keys else torch.cat([past_k, k], -2), torch.cat([past_v, v], -2)


def past_length(initial_state: State | None) -> int:
    """The number of keys in a state (keys, values, ...)."""
    return 0 if initial_state is None else initial_state[0].shape[-2]


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least, and contiguous: a layer's heads are not, and each product would copy them."""
    return x.to(_at_least_float32(x.dtype)).contiguous()


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def gate(name: str, value: Tensor | None, k: Tensor, shape: tuple[int, ...], like: str = "keys") -> None:
    """TypeError or ValueError unless a gate is None or a tensor of that shape, `like` others', on the device of k.

    Its dtype may differ: autocast makes gates in float32 beside keys in half precision.
    """
    if value is None:
        return
    _checks.float_tensor(name, value)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)} like the {like}, got {tuple(value.shape)}")
    if value.device != k.device:
        raise TypeError(f"{name}: expected a tensor on {k.device} like the keys, got one on {value.device}")


def check_growth(name: str, strengths: Tensor | float | None, k: Tensor, attn_mask: Tensor | None) -> None:
    """ValueError, on the CPU, for a key along which writing would enlarge the state, strength |k|^2 > 2, unless the
    mask (..., M) hides it. Strengths (..., M) are 1 by default."""
    keys = upcast(k.detach())
    corrected = (keys**2).sum(-1)
    if isinstance(strengths, Tensor):
        strengths = strengths.detach().to(keys.dtype)
    corrected = corrected if strengths is None else strengths * corrected
    # Rounding, of the caller's keys and of this sum, may leave a unit key a little longer.
    most = 2 + 8 * max(torch.finfo(k.dtype).eps, torch.finfo(keys.dtype).eps * k.shape[-1])
    shown = corrected if attn_mask is None else corrected.masked_fill(~attn_mask, 0)
    _checks.within("k", f"{name} |k|^2", shown, 0, most)


def _upcast_like(q: Tensor, value: Any) -> Any:
    """A floating-point tensor in the dtype of q, contiguous; anything else as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(q.dtype).contiguous() if is_float else value


def key_mask(attn_mask: Tensor | None, k: Tensor, initial_state: State | None) -> Tensor | None:
    """True where queries may attend to a key, (..., M), for keys that are summed up and cannot be told apart later."""
    if attn_mask is None:
        return None
    if initial_state is not None:
        wanted = "None beside an initial_state (and no padding in a layer), as its keys are summed and cannot be masked"
        raise ValueError(f"attn_mask: expected {wanted}, got a mask")
    mask_of_keys(attn_mask, k.shape[-2])
    return attn_mask.expand(*k.shape[:-2], 1, k.shape[-2])[..., 0, :]


def mask_of_keys(attn_mask: Tensor, keys: int) -> None:
    """ValueError for a mask that is not the same for all queries."""
    if attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        shape = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask: expected a mask of keys, of shape (..., 1, {keys}), got {shape}")


def known_tokens(same_tokens: bool, q: Tensor, k: Tensor) -> None:
    """TypeError or ValueError unless `same_tokens` is a bool that q (..., N, K) and k (..., M, K) allow."""
    if not isinstance(same_tokens, bool):
        raise TypeError(f"same_tokens: expected True or False, got {_checks.describe(same_tokens)}")
    if same_tokens and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"same_tokens: expected False for {q.shape[-2]} queries and {k.shape[-2]} keys, got True")


def absent_keys(attn_mask: Tensor | None, k: Tensor, past: int, is_causal: bool) -> Tensor | None:
    """True where the mask lets no query attend to a key, (..., M), for keys k (..., M, K) after `past` others.

    ValueError for a mask in a causal call that is not the same for all queries: whether a later query may attend to a
    key would change the rows before it.
    """
    if attn_mask is None:
        return None
    if is_causal:
        mask_of_keys(attn_mask, past + k.shape[-2])
    seen = attn_mask.any(-2) if attn_mask.dim() > 1 else attn_mask
    return ~seen.expand(*k.shape[:-2], past + k.shape[-2])[..., past:]


def carried(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, least: float | None = None
) -> Tensor:
    """`value` if this part of an `initial_state` is a tensor of that shape and dtype, else TypeError or ValueError.

    Its numbers must be finite, or with `least`, which may be -inf, between that and the greatest of the dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"initial_state: expected a tensor as its {name}, got {_checks.describe(value)}")
    if value.shape != shape or value.dtype != dtype:
        wanted = f"{name} {dtype} of shape {tuple(shape)}"
        raise ValueError(f"initial_state: expected {wanted}, got {_checks.describe(value)}")
    if least is None:
        _checks.finite("initial_state", value)
    else:
        _checks.within("initial_state", name, value, least, torch.finfo(dtype).max)
    return value
