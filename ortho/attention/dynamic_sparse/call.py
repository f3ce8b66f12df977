"""Shared wrappers of the mechanisms in this folder: users pass q, k, v and options, a mechanism receives a `Call`.

A mechanism is a function of a `Call` and of its own options. `selecting_form` and `mask_form` turn it into what users
call: the mechanism sees sequences along one leading axis, and its results get the caller's axes back. `attention_form`
does the rest, as for all mechanisms.
"""

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import torch

from ortho import _checks
from ortho._checks import (
    attention_form,
    carried,
    checked,
    gate,
    mask_of_keys,
    no_autocast,
    past_length,
    prepend_state,
    uncompiled,
    upcast,
)
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.mechanism import with_options

# Scores processed together: as many as in a few tiles of a fused kernel, so that memory stays linear.
SCORES = 2**22
ALL = slice(None)


class Call(NamedTuple):
    """The operands of a call: G sequences, in float32 at least."""

    q: Float[Tensor, "G N K"]
    k: Float[Tensor, "G M K"]  # the new keys, after those of a state
    v: Float[Tensor, "G M V"]
    visible: Bool[Tensor, "G M"] | None  # the keys that are not masked; None for all
    first: int  # position of the first query; the first key's is 0
    is_causal: bool
    scale: float
    given_scale: float | None
    new: int  # keys that are not from a state
    leading: tuple[int, ...]  # the caller's leading axes; G is their product
    past: State  # what an `initial_state` holds besides keys and values
    return_state: bool

    @property
    def new_k(self) -> Float[Tensor, "G new K"]:
        """The keys that are not from a state, without a gradient."""
        return self.k.detach()[:, -self.new :]

    @property
    def places(self) -> Int[Tensor, "N"]:
        """The queries' positions."""
        return torch.arange(self.first, self.first + self.q.shape[1], device=self.q.device)

    def reachable(self, queries: slice = ALL) -> Bool[Tensor, "G n M"]:
        """Whether each query could attend to each key."""
        i, j = self.places[queries, None], torch.arange(self.k.shape[1], device=self.k.device)
        free = (j <= i if self.is_causal else torch.ones_like(i + j, dtype=torch.bool))[None]
        return (free if self.visible is None else free & self.visible[:, None]).expand(len(self.k), -1, -1)

    def products(self, queries: slice, keys: Float[Tensor, "G m K"]) -> Float[Tensor, "G n m"]:
        """Products of queries with keys, times the sign of the scale: the highest have the highest scores. No gradient
        flows through a selection."""
        q, sign = self.q.detach()[:, queries], (self.scale > 0) - (self.scale < 0)
        return (q if sign == 1 else sign * q) @ keys.detach().mT

    def steps(self, width: int) -> Iterator[slice]:
        """All queries, in tiles of about `SCORES` numbers each, `width` numbers per query."""
        N = self.q.shape[1]
        step = max(1, SCORES // (len(self.q) * width))
        for start in range(0, N, step):
            yield slice(start, min(N, start + step))

    def lead(self, x: Tensor) -> Tensor:
        """x (G, ...) with the caller's leading axes."""
        return x.reshape(*self.leading, *x.shape[1:])

    def flat(self, name: str, value: Tensor, *each: int, rows: int | None = None) -> Tensor:
        """A tensor with the caller's leading axes, as (G, rows, *each), in the dtype of q; `rows` is by default the
        number of new keys. ValueError unless it has that shape and its numbers are finite."""
        shape = (*self.leading, self.new if rows is None else rows, *each)
        gate(name, value, self.k, shape, "keys" if rows is None else "queries")
        _checks.finite(name, value)
        return value.to(self.q.dtype).reshape(len(self.q), *shape[len(self.leading) :])

    def continued(self, name: str, numbers: Tensor, *, least: float | None = None) -> Tensor:
        """Numbers of the new keys (G, ..., new) after those of earlier keys, the only other part of the state, which
        are finite, or of at least `least`."""
        if not self.past:
            return numbers
        shape = (*self.lead(numbers).shape[:-1], self.k.shape[1] - self.new)
        earlier = carried(name, self.past[0], shape, numbers.dtype, least=least)
        return torch.cat([earlier.reshape(*numbers.shape[:-1], -1), numbers], -1)


def selecting_form(*beside: str, trims: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that turns a function of a `Call` and of options into an attention function; see `attention_form`.

    The function returns o (G, N, V); or (o, parts), if the state has parts `beside` keys and values; or, if it `trims`
    the state, (o, (keys, values, *parts)).
    """

    def decorated(form: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            q: Float[Tensor, "*batch N K"],
            k: Float[Tensor, "*batch M K"],
            v: Float[Tensor, "*batch M V"],
            *,
            is_causal: bool = False,
            attn_mask: Bool[Tensor, "..."] | None = None,
            scale: float | None = None,
            initial_state: State | None = None,
            return_state: bool = False,
            **options: Any,
        ) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
            past, parts = past_length(initial_state), tuple(initial_state or ())[2:]
            call = _call(q, k, v, past, past, is_causal, attn_mask, scale)
            found = form(call._replace(past=parts, return_state=return_state), **options)
            o, state = found if isinstance(found, tuple) else (found, ())
            return call.lead(o), tuple(map(call.lead, state))

        return uncompiled(attention_form(beside=beside, trims=trims)(with_options(attend, form)))

    return decorated


def mask_form() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that turns a function of a `Call`, which returns one or several tensors (G, N, M) of all pairs, into
    a function of q and k. In a causal call the last query is at the last key's position."""

    def decorated(form: Callable[..., Any]) -> Callable[..., Any]:
        def pairs(
            q: Float[Tensor, "*batch N K"],
            k: Float[Tensor, "*batch M K"],
            *,
            is_causal: bool = False,
            attn_mask: Bool[Tensor, "..."] | None = None,
            scale: float | None = None,
            **options: Any,
        ) -> Any:
            prepend_state(q, k, k, False, attn_mask, None)
            x, y = upcast(q), upcast(k)
            first = k.shape[-2] - q.shape[-2] if is_causal else 0
            with no_autocast(q):
                call = _call(x, y, y, 0, first, is_causal, attn_mask, scale)
                found = form(call, **options)
            return type(found)(*map(call.lead, found)) if isinstance(found, tuple) else call.lead(found)

        return checked(shapes=False)(with_options(pairs, form))

    return decorated


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: int,
    first: int,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Call:
    M, visible = k.shape[-2], None
    if attn_mask is not None:
        mask_of_keys(attn_mask, M)
        mask = attn_mask[None] if attn_mask.dim() == 1 else attn_mask
        visible = mask.expand(*k.shape[:-2], 1, M).reshape(-1, M)
    factor = 1 / sqrt(q.shape[-1]) if scale is None else scale
    x, y, z = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    return Call(x, y, z, visible, first, is_causal, factor, scale, M - past, tuple(q.shape[:-2]), (), False)
