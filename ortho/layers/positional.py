r"""Positions in layers: heads with fixed patterns, and sinusoidal positions to add to tokens."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch

from ortho import checks
from ortho._typing import Bool, Float, Int, Tensor
from ortho.attention.cache import Cache, StateCache
from ortho.attention.positional.positional_attention import (
    PositionalPattern,
    named,
    positional_attention,
    positional_attention_reference,
)
from ortho.layers.heads import Heads, alone

__all__ = ["PositionalHeads", "sinusoidal_positions"]

# For three positional heads beside a learned one: the token just before, the last few, and those further before.
DEFAULT = ("previous", "recent", "left")


class PositionalHeads(Heads):
    """Attention whose heads have fixed patterns of positions, and neither queries nor keys.

    `patterns` has a pattern, or its name in `PATTERNS`, for each head; by default the heads are divided among
    `DEFAULT`. Neighbouring heads with equal patterns are computed together. `Heads` has W_V, W_O and `head_dim`.

    Seven such heads with the patterns `SEVEN` beside a learned one are the encoder's attention of Raganato, Scherrer &
    Tiedemann 2020 (arXiv:2002.10260): `HybridAttention` puts kinds of heads side by side.

    Raises TypeError or ValueError, naming the argument, for unknown names, for sizes below 1, for d_model not divisible
    by num_heads, and for a number of patterns other than num_heads.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        patterns: Sequence[PositionalPattern | str] | None = None,
        head_dim: int | None = None,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim)
        self.patterns = shared_out(num_heads) if patterns is None else named(patterns)
        checks.expect(
            len(self.patterns) == num_heads, "patterns", f"one for each of {num_heads} heads", len(self.patterns)
        )
        self.form = form
        self._make_maps(generator=generator, dtype=dtype, device=device)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        is_causal: bool = False,
        words: Int[Tensor, "B N"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` is a mask of keys that broadcasts to (B, H, 1, N), True = present; `key_padding_mask` (B, N) is
        True = padding. Rows of absent tokens are zeros. `words` (B, N) are the indices of the tokens' words, in calls
        that are not causal. With a `cache` (`new_cache`) x follows the tokens that it has read.
        """
        checks.sequence("x", x, self.d_model)
        attn_mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], x.shape[1])
        v = self._values(x)
        if cache is not None:
            cache.fits("PositionalHeads")
            alone(is_causal, attn_mask=attn_mask, words=words)
            with torch.no_grad():
                return self._merge(cache.attend(v, v, v, function=self._called))
        return self._merge(self._attend(v, attn_mask=attn_mask, is_causal=is_causal, words=words))

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for decoding with this layer; it holds the sums that the patterns need."""
        return StateCache(PositionalHeads, capacity)

    def _called(self, *qkv: Tensor, **kwargs: Any) -> Any:
        """This layer's attention with a mechanism's signature, as caches call it."""
        return self._attend(qkv[2], **kwargs)

    def _attend(self, v: Tensor, **kwargs: Any) -> Any:
        attend = positional_attention if self.form == "fast" else positional_attention_reference
        return attend(v, self.patterns, **kwargs)

    def extra_repr(self) -> str:
        names = ", ".join(pattern.name for pattern in self.patterns)
        return f"d_model={self.d_model}, patterns=({names}), form={self.form!r}"


def shared_out(num_heads: int) -> tuple[PositionalPattern, ...]:
    """A pattern of `DEFAULT` for each head: equal ones adjoin, in shares as even as possible, the larger ones first."""
    shares = ((num_heads + len(DEFAULT) - 1 - i) // len(DEFAULT) for i in range(len(DEFAULT)))
    return named([name for name, share in zip(DEFAULT, shares, strict=True) for _ in range(share)])


def sinusoidal_positions(
    n: int, d: int, *, start: int = 0, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "n d"]:
    r"""Positions (n, d) to be added to tokens: $\sin(p / 10000^{2i/d})$ in channel 2i and the cosine of the same in
    channel 2i + 1 (Vaswani et al. 2017, arXiv:1706.03762, section 3.5), for p from `start` on.

    Computed in float64. With an odd d the last sine has no cosine.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    p = torch.arange(start, start + n, dtype=torch.float64)[:, None]
    angles = p * torch.exp(torch.arange(0, d, 2, dtype=torch.float64) * (-log(10000) / d))  # (n, ceil(d / 2))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d].to(dtype=dtype, device=device)
