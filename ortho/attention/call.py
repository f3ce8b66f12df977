"""One call of an attention function, as every family's body reads it.

Users pass q, k, v and options; a mechanism is a function of a `Call` and of its own options. `attention_function` turns
it into what users call: operands are checked at the door, in float32 at least, with autocast off, after those of the
state. So the body reads like the formula.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from math import sqrt
from typing import Any

import torch

from ortho import checks
from ortho._typing import Bool, Float, State, Tensor

# q (..., N, K), k (..., M, K), v (..., M, V), is_causal, attn_mask, scale, initial_state, return_state, options of its
# own -> o (..., N, V), or with `return_state` (o, state).
AttentionFunction = Callable[..., Any]


@dataclass
class Call:
    """The operands of one call, checked. M counts the keys of the state and the new ones.

    `attn_mask` is the caller's, True = attend; `scale` is the caller's, too, and None stands for the mechanism's own.
    `past` is the number of keys that come from the state, `state` what it holds besides keys and values. A mechanism
    that sums its keys up gets the new keys alone, and the whole state. `bias`, where a mechanism takes one, is added to
    the scores; pairs where the caller's was -inf are blocked by `attn_mask` instead.
    """

    q: Float[Tensor, "*batch N K"]
    k: Float[Tensor, "*batch M K"]
    v: Float[Tensor, "*batch M V"]
    is_causal: bool = False
    attn_mask: Bool[Tensor, "..."] | None = None
    scale: float | None = None
    state: State = ()
    past: int = 0
    return_state: bool = False
    bias: Float[Tensor, "..."] | None = None

    @property
    def factor(self) -> float:
        r"""What scores are multiplied by: the scale, by default $1/\sqrt K$."""
        return 1 / sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @property
    def blocked(self) -> Bool[Tensor, "..."] | None:
        """True where a query may not attend to a key, broadcastable to (..., N, M); None if all may."""
        return blocked_pairs(self.q.shape[-2], self.k.shape[-2], self.is_causal, self.attn_mask, self.q.device)

    @property
    def key_mask(self) -> Bool[Tensor, "*batch M"] | None:
        """True where queries may attend to a key. ValueError for a mask that is not the same for all queries."""
        if self.attn_mask is None:
            return None
        M = self.v.shape[-2]  # with those of the state, even where k holds the new keys alone
        checks.mask_of_keys(self.attn_mask, M)
        return self.attn_mask.expand(*self.v.shape[:-2], 1, M)[..., 0, :]

    def carried(self, name: str, *shape: int, like: Tensor | None = None) -> Tensor | None:
        """The only part of the state, of this shape after the leading axes; None without a state."""
        if not self.state:
            return None
        (value,) = checks.state(self.state, name)
        return checks.carried(name, value, (*self.k.shape[:-2], *shape), self.v if like is None else like)


def attention_function(
    *, keeps: str = "keys", beside: tuple[str, ...] = (), upcasts: bool = True, bias: bool = False
) -> Callable[[Callable[..., Any]], AttentionFunction]:
    """A decorator that turns a function of a `Call` and of options into an attention function.

    `keeps` says what is carried on to later calls:

    - 'keys': the state is (keys, values), and further parts that `beside` names. The body returns o, or (o, parts).
    - 'fewer keys': likewise, but the body drops keys that no later query reads. It returns (o, (keys, values, *parts)).
    - 'changed keys': tokens change the keys before them. The body gets only the new keys, and in `call.state` the
      earlier ones, in float32 at least; it returns (o, (all keys,)).
    - 'sums': keys are summed up in a state of fixed size. The body returns (o, the whole new state), and the mask is
      one of the new keys.

    The caller gets o in the dtype of q, and the state if `return_state` asks for it. With `upcasts=False` operands keep
    their dtype and layout, for kernels that choose them. With `bias` a mask may hold numbers, which are added to the
    scores.
    """

    def decorate(body: Callable[..., Any]) -> AttentionFunction:
        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            is_causal: bool = False,
            attn_mask: Tensor | None = None,
            scale: float | None = None,
            initial_state: State | None = None,
            return_state: bool = False,
            **options: Any,
        ) -> Any:
            keys, values, state, past = _joined(k, v, initial_state, keeps, beside)
            checks.operands(q, k, v, is_causal=is_causal, attn_mask=attn_mask, past=past, bias=bias)
            added = attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None
            mask = attn_mask if added is None else added != -torch.inf
            call = Call(q, keys, values, is_causal, mask, scale, state, past, return_state)
            with no_autocast(q):
                if upcasts:
                    call.q, call.k, call.v = upcast(q), upcast(keys), upcast(values)
                    for name, value in options.items():
                        if isinstance(value, Tensor) and value.is_floating_point():
                            options[name] = value.to(call.q.dtype).contiguous()
                if added is not None:
                    call.bias = added.to(call.q.dtype).masked_fill(added == -torch.inf, 0)
                found = body(call, **options)
            o, parts = found if isinstance(found, tuple) else (found, ())
            if not return_state:
                return o.to(q.dtype)
            return o.to(q.dtype), _state(parts, keys, values, keeps)

        attend.keeps = keeps  # type: ignore[attr-defined]
        attend.definition = body  # type: ignore[attr-defined]  # what the book shows
        return with_options(attend, body)

    return decorate


def _joined(
    k: Tensor, v: Tensor, initial_state: State | None, keeps: str, beside: tuple[str, ...]
) -> tuple[Tensor, Tensor, State, int]:
    """(keys, values, the other parts of the state, the number of its keys): the new ones come after those of the state.
    Sums are another part; so are keys that new tokens will change."""
    if initial_state is None or keeps == "sums":
        return k, v, tuple(initial_state or ()), 0
    keys, values, *rest = checks.state(initial_state, "keys", "values", *beside)
    past = values.shape[-2]
    like = upcast(k[..., :0, :]) if keeps == "changed keys" else k
    checks.carried("keys", keys, (*k.shape[:-2], past, k.shape[-1]), like)
    checks.carried("values", values, (*v.shape[:-2], past, v.shape[-1]), v)
    values = torch.cat([values, v], -2)
    if keeps == "changed keys":
        return k, values, (keys, *rest), past
    return torch.cat([keys, k], -2), values, tuple(rest), past


def _state(parts: Any, keys: Tensor, values: Tensor, keeps: str) -> State:
    """The state that is returned, from the `parts` that the body returned."""
    if keeps == "changed keys":
        return *parts, values
    if keeps == "fewer keys":
        return parts[0].to(keys.dtype), parts[1].to(values.dtype), *parts[2:]
    return tuple(parts) if keeps == "sums" else (keys, values, *parts)


def with_options(function: Any, body: Callable[..., Any]) -> Any:
    """`function` with the name, the docstring and the options of `body` in its signature in place of `**options`."""
    shared = [p for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    known = {p.name for p in shared}
    own = [p for p in signature(body).parameters.values() if p.kind is Parameter.KEYWORD_ONLY and p.name not in known]
    update_wrapper(function, body)
    del function.__wrapped__  # whoever looks for the signature finds this one
    function.__signature__ = Signature([*shared, *own])
    return function


def blocked_pairs(
    queries: int, keys: int, is_causal: bool, attn_mask: Tensor | None, device: torch.device
) -> Bool[Tensor, "..."] | None:
    """True where a query may not attend to a key; None if all may. The last query is at the last key's position."""
    blocked = None if attn_mask is None else ~attn_mask
    if is_causal:
        future = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
        blocked = future if blocked is None else blocked | future
    return blocked


def upcast(x: Tensor) -> Tensor:
    """x in float32 at least, and contiguous: a layer's heads are not, and each product would copy them."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off for the device of x; where it is off, or there is none, nothing is switched.

    Some releases' compilers cannot follow the question whether a device has autocast. What they compile for has it.
    """
    kind = x.device.type
    if torch.compiler.is_compiling() or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
