r"""Positions in layers: heads with fixed patterns beside learned ones, and sinusoidal positions to add to tokens."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho._weights import new_weight, split_heads
from ortho.attention import FORMS, MECHANISMS
from ortho.attention.positional.attention import (
    SEVEN,
    PositionalPattern,
    named,
    positional_attention,
    positional_attention_reference,
)
from ortho.attention.positional.pattern import EMPTY
from ortho.projections import PROJECTIONS

__all__ = ["PositionalAttention", "sinusoidal_positions"]

_PARTS = 3  # tensors of a state of `positional_attention`


class PositionalAttention(nn.Module):
    r"""Multi-head attention whose first heads have fixed patterns and whose others are learned, without biases.

    With the default patterns and eight heads, seven fixed and one learned, it is the encoder's attention of Raganato,
    Scherrer & Tiedemann 2020 (arXiv:2002.10260). `patterns` has a pattern, or its name in `PATTERNS`, for each fixed
    head; there may be none, or as many as heads. The others are heads of `ortho.layers.MultiheadAttention` with this
    `projection` and `attention`, both by name: queries and keys are made for them alone. `form` is the 'reference' or 'fast' form of both; `empty` says what a fixed head has in rows without
    any weight. W_V and W_O (`weight_v`, `weight_o`, stored as in `torch.nn.Linear`) are always trained.

    Raises TypeError or ValueError, naming the argument, for unknown names, for d_model not divisible by num_heads, for
    more patterns than heads, and for a mechanism with gates, of which a layer has as many as heads.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        patterns: Sequence[PositionalPattern | str] = SEVEN,
        *,
        projection: str = "learned",
        attention: str = "softmax",
        form: str = "fast",
        empty: str = "zero",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)
        self.patterns = named(patterns)
        if len(patterns) > num_heads:
            raise ValueError(f"patterns: expected at most num_heads = {num_heads}, got {len(patterns)}")
        self.fixed, self.learned = len(self.patterns), num_heads - len(self.patterns)
        self.form, self.empty = _checks.one_of("form", form, FORMS), _checks.one_of("empty", empty, EMPTY)
        self.attention = _checks.one_of("attention", attention, MECHANISMS)
        if MECHANISMS[attention].gates:
            raise ValueError(f"attention: expected a mechanism without gates, got {attention!r}")
        make = PROJECTIONS[_checks.one_of("projection", projection, PROJECTIONS)]
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        width = d_model // num_heads
        self.projection = make(d_model, self.learned, head_dim=width, **kind) if self.learned else None
        self.weight_v = new_weight(d_model, d_model, **kind)
        self.weight_o = new_weight(d_model, d_model, **kind)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        words: Int[Tensor, "B N"] | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = may attend. Fixed heads take masks of keys only, and their rows
        of masked tokens are zeros. `words` (B, N), the number of each token's word, is for the fixed heads.
        `initial_state` and `return_state` cut a causal sequence anywhere: the state that one call returns is what the
        next one starts from.
        """
        _checks.sequence("x", x, self.weight_v)
        if words is not None and not self.fixed:
            raise ValueError("words: expected None in a layer without fixed heads")
        past_fixed, past_learned = self._parts(initial_state)
        # Products of their own for fixed and for learned heads: autograd keeps the values of the learned ones alone.
        sizes = [heads * self.d_model // self.num_heads for heads in (self.fixed, self.learned)]
        (v_fixed, v_learned), (o_fixed, o_learned) = self.weight_v.split(sizes), self.weight_o.split(sizes, 1)
        kwargs = {"is_causal": is_causal, "return_state": return_state}
        found: list[tuple[Any, Tensor]] = []  # what each kind of heads gives, and its columns of W_O
        if self.fixed:
            attend = positional_attention if self.form == "fast" else positional_attention_reference
            o = attend(
                split_heads(linear(x, v_fixed), self.fixed),
                self.patterns,
                attn_mask=self._of_heads(attn_mask, slice(0, self.fixed)),
                empty=self.empty,
                words=words,
                initial_state=past_fixed,
                **kwargs,
            )
            found.append((o, o_fixed))
        if self.projection is not None:
            q, k = self.projection(x)  # (B, learned, N, K)
            o = MECHANISMS[self.attention].form(self.form)(
                q,
                k,
                split_heads(linear(x, v_learned), self.learned),
                attn_mask=self._of_heads(attn_mask, slice(self.fixed, None)),
                initial_state=past_learned,
                **kwargs,
            )
            found.append((o, o_learned))
        state: tuple[Tensor, ...] = ()
        outputs = []
        for o, weight in found:
            if return_state:
                o, parts = o
                state += tuple(parts)
            outputs.append(linear(o.transpose(1, 2).flatten(2), weight))
        y = sum(outputs[1:], start=outputs[0])
        return (y, state) if return_state else y

    def _parts(self, state: State | None) -> tuple[State | None, State | None]:
        """What of a state is the fixed heads', and what the learned ones'."""
        if state is not None and not isinstance(state, tuple | list):
            raise TypeError(f"initial_state: expected a tuple of tensors, got {_checks.describe(state)}")
        if state is None or not (self.fixed and self.learned):
            return state, state
        return state[:_PARTS], state[_PARTS:]

    def _of_heads(self, mask: Tensor | None, heads: slice) -> Tensor | None:
        """A mask of some of the heads."""
        own = isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-3] == self.num_heads
        return mask[..., heads, :, :] if mask is not None and own else mask

    def extra_repr(self) -> str:
        names = ", ".join(pattern.name for pattern in self.patterns)
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, patterns=({names}), attention={self.attention!r}, "
            f"form={self.form!r}, empty={self.empty!r}"
        )


def sinusoidal_positions(
    n: int,
    d: int,
    *,
    start: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "n d"]:
    r"""Positions (n, d) to be added to tokens: $\sin(p / 10000^{2i/d})$ in channel 2i and the cosine of the same in
    channel 2i + 1 (Vaswani et al. 2017, arXiv:1706.03762, section 3.5), for p from `start` on.

    Computed in float64. With an odd d the last sine has no cosine. Raises TypeError or ValueError for n or d below 1,
    for a negative start, and for a dtype that is not of floating-point numbers.
    """
    _checks.positive_int("n", n)
    _checks.positive_int("d", d)
    if isinstance(start, bool) or not isinstance(start, int):
        raise TypeError(f"start: expected an integer of at least 0, got {_checks.describe(start)}")
    if start < 0:
        raise ValueError(f"start: expected an integer of at least 0, got {start}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating-point type, got {dtype}")
    p = torch.arange(start, start + n, dtype=torch.float64)[:, None]
    angles = p * torch.exp(torch.arange(0, d, 2, dtype=torch.float64) * (-log(10000) / d))  # (n, ceil(d / 2))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d].to(dtype=dtype, device=device)
