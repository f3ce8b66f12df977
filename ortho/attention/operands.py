"""What every mechanism does with its operands before its own work: check them, prepend the past, combine the masks."""

import torch

from ortho import _checks
from ortho._typing import Bool, State, Tensor


def with_past(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None, initial_state: State | None
) -> tuple[Tensor, Tensor]:
    """The checked keys and values, behind those that the state holds."""
    if initial_state is None:
        _checks.qkv(q, k, v, attn_mask, is_causal)
        return k, v
    past_k, past_v = _checks.state(initial_state, "keys", "values", axes=2)
    _checks.qkv(q, k, v, attn_mask, is_causal, past=past_k.shape[-2])
    for name, past, new in (("keys", past_k, k), ("values", past_v, v)):
        if past.shape[:-2] != new.shape[:-2] or past.shape[-1] != new.shape[-1] or past.dtype != new.dtype:
            expected = f"{new.dtype} of shape {(*new.shape[:-2], '...', new.shape[-1])}"
            raise ValueError(f"initial_state: expected {name} {expected}, got {_checks.describe(past)}")
    if past_v.shape[-2] != past_k.shape[-2]:
        raise ValueError(
            f"initial_state: expected values of length {past_k.shape[-2]} like the keys, got {tuple(past_v.shape)}"
        )
    return torch.cat([past_k, k], -2), torch.cat([past_v, v], -2)


def working(x: Tensor) -> Tensor:
    """float32 at least; and contiguous, which a layer's heads are not: else each product would copy its operands."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def hidden_keys(attn_mask: Tensor | None, k: Tensor, initial_state: State | None) -> Tensor | None:
    """True where no query may attend to a key, (..., M), for keys that are summed up and cannot be told apart later."""
    if attn_mask is None:
        return None
    if initial_state is not None:
        raise ValueError("attn_mask: expected None beside an initial_state, whose keys are summed and cannot be masked")
    mask_of_keys(attn_mask, k.shape[-2])
    return ~attn_mask.expand(*k.shape[:-2], 1, k.shape[-2])[..., 0, :]


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
    """True where no query may attend to a key by the mask, (..., M), for keys k (..., M, K) behind `past` others.

    ValueError for a mask in a causal call that is not the same for all queries: whether a later query may attend to a
    key would change the rows before it.
    """
    if attn_mask is None:
        return None
    if is_causal:
        mask_of_keys(attn_mask, past + k.shape[-2])
    seen = attn_mask.any(-2) if attn_mask.dim() > 1 else attn_mask
    return ~seen.expand(*k.shape[:-2], past + k.shape[-2])[..., past:]


def carried(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`value` if this part of an `initial_state` has that shape and dtype, else ValueError."""
    if value.shape != shape or value.dtype != dtype:
        wanted = f"{name} {dtype} of shape {tuple(shape)}"
        raise ValueError(f"initial_state: expected {wanted}, got {_checks.describe(value)}")
    return value


def blocked_pairs(
    queries: int, keys: int, is_causal: bool, attn_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """True where a query may not attend to a key, or None where all may. The last query stands at the last key."""
    blocked = None if attn_mask is None else ~attn_mask
    if is_causal:
        future = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
        blocked = future if blocked is None else blocked | future
    return blocked


def flat_mask(mask: Bool[Tensor, "..."], lead: torch.Size) -> Bool[Tensor, "G N M"]:
    """A mask that broadcasts to (*lead, N, M) with its leading axes in one, of size 1 where all sequences share it."""
    mask = mask[(None,) * (2 - mask.dim())] if mask.dim() < 2 else mask
    if mask.dim() == 2 or all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(1, *mask.shape[-2:])
    return mask.expand(*lead, *mask.shape[-2:]).reshape(-1, *mask.shape[-2:])


def masked_softmax(scores: Tensor, blocked: Tensor | None, *, empty_rows: bool) -> Tensor:
    """The softmax of each row's free entries; blocked ones are exactly 0, also, with `empty_rows`, where all are."""
    if blocked is None:
        return scores.softmax(-1)
    # The lowest finite number in place of -inf: its weight is exactly 0 beside any other, and a row of nothing but
    # blocked entries has no NaN in it or in its gradient.
    weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(blocked, 0) if empty_rows else weights
