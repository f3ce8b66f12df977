"""Heads of several kinds in one attention call: which kinds there are, and what each does with its operands.

A kind is "learned": softmax attention; "stopped": the same with queries and keys that are constants; "linear": linear
attention (`ortho.attention.linear.linear_attention`); a pattern such as `Window(64)`: softmax attention over its pairs;
or a positional pattern, or its name in `ortho.attention.untrained.positional_attention.PATTERNS`, which needs neither
queries nor keys.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ortho import _checks
from ortho._typing import Bool, Float, Int, Tensor
from ortho.attention import MECHANISMS
from ortho.attention.softmax.frozen_qk import frozen_qk_attention
from ortho.attention.sparse.pattern import Pattern, pattern_attention
from ortho.attention.untrained.positional_attention import PATTERNS, PositionalPattern, positional_attention

Kind = str | Pattern | PositionalPattern

SOFTMAX = ("learned", "stopped")  # kinds with the outputs of the original layer
_NAMES = (*SOFTMAX, "linear")


def kinds_of(name: str, value: Any, heads: int) -> tuple[Kind, ...]:
    """The kinds of a layer's heads, patterns in place of names. Raises TypeError or ValueError for other values."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name}: expected a sequence of the kinds of {heads} heads, got {_checks.describe(value)}")
    _checks.expect(len(value) == heads, name, f"a kind for each of {heads} heads", len(value))
    found = []
    for kind in value:
        if not isinstance(kind, str | Pattern | PositionalPattern):
            raise TypeError(f"{name}: expected names of kinds, or patterns, got {_checks.describe(kind)}")
        if isinstance(kind, str):
            _checks.one_of(name, kind, (*_NAMES, *PATTERNS))
        found.append(PATTERNS.get(kind, kind) if isinstance(kind, str) else kind)
    return tuple(found)


def asks(kind: Kind) -> bool:
    """Whether such a head has queries and keys."""
    return not isinstance(kind, PositionalPattern)


def placed(kind: Kind) -> bool:
    """Whether such a head needs queries to have places among the keys, as they have within one sequence."""
    return isinstance(kind, Pattern | PositionalPattern)


def described(kinds: Sequence[Kind]) -> list[Any]:
    """Kinds as JSON values: names, and for patterns without a name their class and its fields."""
    names: dict[Any, str] = {pattern: name for name, pattern in PATTERNS.items()}
    return [
        kind if isinstance(kind, str) else names.get(kind) or {"class": type(kind).__name__, **asdict(kind)}
        for kind in kinds
    ]


def from_description(value: Sequence[Any]) -> list[Kind]:
    """The kinds that `described` gave. Raises ValueError for a pattern of an unknown class."""
    classes = {cls.__name__: cls for base in (Pattern, PositionalPattern) for cls in _subclasses(base)}
    found: list[Kind] = []
    for kind in value:
        if not isinstance(kind, str):
            fields = {name: _tuples(field) for name, field in kind.items()}
            kind = classes[_checks.one_of("kinds", fields.pop("class"), classes)](**fields)
        found.append(kind)
    return found


def _tuples(value: Any) -> Any:
    """Turn the lists that JSON made of tuples into tuples again."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class HeadKinds(nn.Module):
    """The kinds of a layer's heads. It has no weights, but its state dict records the kinds, and loads only where they
    are the same.

    For a layer of transformers it also holds the layer's original configuration, and whether the current call attends
    to another sequence.
    """

    def __init__(self, kinds: tuple[Kind, ...], before: Any = None) -> None:
        super().__init__()
        self.kinds, self.before, self.crosses = kinds, before, False

    def forward(self) -> tuple[Kind, ...]:
        """The kinds."""
        return self.kinds

    def extra_repr(self) -> str:
        return ", ".join(kind if isinstance(kind, str) else getattr(kind, "name", repr(kind)) for kind in self.kinds)

    def _words(self) -> str:
        return json.dumps(described(self.kinds))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        del keep_vars
        destination[f"{prefix}kinds"] = torch.tensor(list(self._words().encode()), dtype=torch.uint8)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        del metadata, strict, unexpected
        if (value := state_dict.get(f"{prefix}kinds")) is None:
            missing.append(f"{prefix}kinds")
        elif (words := bytes(value.tolist()).decode()) != self._words():
            errors.append(f"{prefix}kinds: expected heads of the kinds {self._words()}, got {words}")


def as_booleans(name: str, mask: Tensor) -> Bool[Tensor, "..."]:
    """The pairs that an additive mask allows: it is 0 there, and the lowest number or -inf elsewhere. Raises ValueError
    for other numbers, which would be biases of the scores."""
    allowed = mask == 0
    known = (allowed | (mask <= torch.finfo(mask.dtype).min)).all()
    wanted = f"{name}: expected booleans, or 0 and -inf, with heads of several kinds, got others"
    if torch.compiler.is_compiling():
        torch._assert_async(known, wanted)
    elif not known:
        raise ValueError(wanted)
    return allowed


@dataclass(frozen=True)
class _Call:
    """What the heads of a call have in common: which pairs may attend, and how scores are scaled."""

    queries: int
    keys: int
    itself: bool  # whether queries and keys are of one sequence
    mask: Bool[Tensor, "..."] | None
    is_causal: bool
    scale: float | None

    def of(self, heads: Sequence[int]) -> "_Call":
        """The same call, for these heads only."""
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, list(heads)]
        return _Call(self.queries, self.keys, self.itself, mask, self.is_causal, self.scale)

    @property
    def whole(self) -> bool:
        """Whether each query has its own key."""
        return self.itself and self.queries == self.keys

    @property
    def in_kernel(self) -> bool:
        """Whether the mask is the kernel's own causal one."""
        return self.mask is None and self.is_causal and self.queries > 1

    def slots(self, device: torch.device) -> Int[Tensor, "B h N 1"]:
        """The index of each query among the keys: with older keys and a mask, that of the last key it sees."""
        if self.whole or self.mask is None:
            return torch.arange(self.keys - self.queries, self.keys, device=device)[None, None, :, None]
        return (self.keys - 1 - self.mask.flip(-1).int().argmax(-1))[..., None]

    @property
    def from_the_first(self) -> bool:
        """Whether no present key comes after an absent one, so that indices are positions."""
        if self.mask is None:
            return True
        there = self.mask.any(-2)
        return bool((there[..., 1:] <= there[..., :-1]).all())

    def positions(self, device: torch.device) -> tuple[Int[Tensor, "B h N 1"], Int[Tensor, "B h 1 M"]]:
        """The positions of queries and of keys; absent keys are not counted."""
        slots, at = self.slots(device), torch.arange(self.keys, device=device)[None, None, None]
        if self.mask is None:
            return slots, at
        at = (self.mask.any(-2, keepdim=True).cumsum(-1) - 1).clamp(min=0)
        return at.mT.take_along_dim(slots.expand(*at.shape[:2], -1, -1), -2), at

    def by_keys(self, device: torch.device) -> tuple[bool, Bool[Tensor, "B h 1 M"] | None]:
        """Whether the call is causal, and which keys are present. Raises ValueError if the mask says more than that."""
        if self.mask is None:
            return self.is_causal, None
        there = self.mask.any(-2, keepdim=True)
        at, slots = torch.arange(self.keys, device=device), self.slots(device)
        rows = there.mT if self.whole else self.mask.any(-1, keepdim=True)  # rows of absent tokens do not matter
        wanted = (
            "attention_mask: expected a mask of keys, causal or not, beside positional and linear heads, got another"
        )
        for causal in (self.is_causal, not self.is_causal):
            expected = there & (at <= slots) if causal else there
            other = ((self.mask != expected) & rows).any()
            if torch.compiler.is_compiling():  # no branch can depend on a value, but an error can be raised
                torch._assert_async(~other, wanted)
                return causal, there
            if (not causal or self.is_causal or self.whole) and not other:
                return causal, there
        raise ValueError(wanted)


def attend(
    kinds: Sequence[Kind],
    q: Float[Tensor, "B A N K"],
    k: Float[Tensor, "B A M K"],
    v: Float[Tensor, "B H M K"],
    *,
    queries: int,
    itself: bool = True,
    mask: Bool[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "B H N K"]:
    """The outputs of H heads, each by its kind; q and k are those of the A heads that have queries and keys, in order.

    `itself` says whether queries and keys are of one sequence, which their lengths do not show. `mask` (B or 1, H or 1,
    N, M), True = may attend, includes the causal mask; `is_causal` then only says what to expect. In a causal call with
    fewer queries than keys, the queries are those of the last tokens. Raises ValueError for another sequence's keys if
    a head needs places among them, and for masks and lengths that a kind does not support.
    """
    if not itself and any(placed(kind) for kind in kinds):
        raise ValueError(
            "key: expected the same sequence as of the queries (the same tensor, in torch's layers) for windows, other "
            "patterns and positional heads, got another sequence (cross-attention)"
        )
    if mask is not None and mask.shape[-2] == 1:
        mask = mask.expand(*mask.shape[:-2], queries, -1)
    call = _Call(queries, v.shape[-2], itself, mask, is_causal, scale)
    asking = [h for h, kind in enumerate(kinds) if asks(kind)]
    groups: dict[Any, list[int]] = {}
    for h, kind in enumerate(kinds):
        groups.setdefault(kind if asks(kind) else PositionalPattern, []).append(h)
    outputs = []
    for kind, heads in groups.items():
        own, values = call.of(heads), v[:, heads] if len(groups) > 1 else v
        if kind is PositionalPattern:
            outputs.append(_positional([kinds[h] for h in heads], values, own))
            continue
        some = len(heads) < len(asking)
        places = [asking.index(h) for h in heads]
        operands = (q[:, places] if some else q, k[:, places] if some else k, values)
        outputs.append(_asking(kind, *operands, own))
    if len(outputs) == 1:
        return outputs[0]
    order = torch.tensor([h for heads in groups.values() for h in heads]).argsort()
    return torch.cat(outputs, 1)[:, order.to(v.device)]


def _asking(kind: Kind, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """The outputs of heads of one kind that have queries and keys."""
    o: Any
    if kind == "stopped":
        o = frozen_qk_attention(
            q.detach(), k.detach(), v, attn_mask=call.mask, is_causal=call.in_kernel, scale=call.scale
        )
        return o
    if kind == "linear":
        return _linear(q, k, v, call)
    mask = call.mask
    if isinstance(kind, Pattern):
        causal = mask is None and call.is_causal
        if call.whole and not torch.compiler.is_compiling() and call.from_the_first:  # tiles are not compiled
            o = pattern_attention(q, k, v, pattern=kind, attn_mask=mask, is_causal=causal, scale=call.scale)
            return o
        if not call.whole:
            _places(call, "a window")
        near = kind.rule(causal)(*call.positions(q.device))
        mask = near if mask is None else mask & near
    return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and call.in_kernel, scale=call.scale)


def _linear(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """Linear attention to all keys, or to those up to the query's own; its feature map uses no scale."""
    is_causal, there = call.by_keys(q.device)
    if is_causal and call.queries == 1:  # it sees all keys that are present
        is_causal = False
    if is_causal and not call.whole:
        raise ValueError(
            f"queries: expected 1, or as many as keys of the same sequence, in a causal call of a linear head, got "
            f"{call.queries} and {call.keys}"
        )
    o: Any = MECHANISMS["linear"].fast(q, k, v, is_causal=is_causal, attn_mask=there)
    return o


def _positional(patterns: Sequence[Any], v: Tensor, call: _Call) -> Tensor:
    """Heads whose weights are functions of position: computed for all tokens; the queries' rows are returned."""
    if not call.whole:
        _places(call, "a positional head")
    is_causal, there = call.by_keys(v.device)
    o: Any = positional_attention(v, patterns, is_causal=is_causal, attn_mask=there)
    if call.whole:
        return o
    return o.take_along_dim(call.slots(v.device).expand(*v.shape[:2], call.queries, 1), -2)


def _places(call: _Call, what: str) -> None:
    """Raise ValueError unless the queries have known places among the keys."""
    if not call.is_causal:
        raise ValueError(
            f"queries: expected as many as keys in a call that is not causal, which {what} can place, "
            f"got {call.queries} and {call.keys}"
        )


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    sub: type[Any]
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
