"""Heads that only the learning experiments need: controls of what is drawn or trained, and one kind's faster form.

Like `ortho.layers.multihead.MultiheadAttention` and its projections, layers take (d_model, num_heads, *, head_dim,
form, generator, dtype, device), and projections take what `Projection` takes.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortho import checks
from ortho.attention.call import no_autocast, upcast
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.position_bias.rotary import angles, apply_rotary
from ortho.heads import split_heads
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.synthesizer import SynthesizerAttention
from ortho.orthogonal import haar
from ortho.projections import PROJECTIONS, FrozenProjection, Projection


class TemperatureProjection(FrozenProjection):
    """A frozen projection whose heads learn how sharply they attend: queries times exp(`log_scale`), (H,), initially 1.

    The inverse of that factor is the temperature of a head's softmax.
    """

    def __init__(self, d_model: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(d_model, num_heads, **kwargs)
        self.log_scale = nn.Parameter(self.weight_q.new_zeros(num_heads))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, G, M, K)."""
        q, k = super().forward(x, context)
        return q * self.log_scale.exp()[:, None, None].to(q.dtype), k


class TiedProjection(FrozenProjection):
    """A frozen projection with W_K = W_Q: for the same tokens, keys equal queries and are made once.

    Raises ValueError for fewer heads of keys than of queries, besides `FrozenProjection`'s errors.
    """

    def __init__(self, d_model: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(d_model, num_heads, **kwargs)
        if self.num_kv_heads != num_heads:
            raise ValueError(f"num_kv_heads: expected num_heads = {num_heads} of keys, got {self.num_kv_heads}")
        self.weight_k.copy_(self.weight_q)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, N, d), context (B, M, d) or x -> q (B, H, N, K), k (B, H, M, K)."""
        if context is not None:
            return super().forward(x, context)
        x, _ = self._sources(x, None)
        q = split_heads(linear(x, self.weight_q, self.bias_q), self.num_heads)
        return q, q


def low_rank(d_model: int, num_heads: int, *, of: str, rank: int, **kwargs: Any) -> Projection:
    """The projection `of` that name; in its matrices each head's part, (K, d), has the given rank.

    A part is a product of two matrices with orthonormal columns and rows, scaled so that its entries have the mean
    square of a full-rank part, 1/d; the logits of random tokens then also keep theirs. Raises ValueError for a rank
    above K.
    """
    made = PROJECTIONS[checks.one_of("of", of, PROJECTIONS)](d_model, num_heads, **kwargs)
    K = made.head_dim
    if checks.positive_int("rank", rank) > K:
        raise ValueError(f"rank: expected at most the heads' width, {K}, got {rank}")
    with torch.no_grad():
        for weight in (made.weight_q, made.weight_k):
            kind: dict[str, Any] = {
                "generator": kwargs.get("generator"),
                "dtype": weight.dtype,
                "device": weight.device,
            }
            for part in weight.split(K):
                part.copy_(haar(K, rank, **kind) @ haar(rank, d_model, **kind) * sqrt(K / rank))
    return made


def scaled(d_model: int, num_heads: int, *, of: str, factor: float, **kwargs: Any) -> Projection:
    """The projection `of` that name, with W_Q and W_K times a factor: initial logits grow by the factor's square."""
    made = PROJECTIONS[checks.one_of("of", of, PROJECTIONS)](d_model, num_heads, **kwargs)
    with torch.no_grad():
        for weight in (made.weight_q, made.weight_k):
            weight.mul_(factor)
    return made


class StoppedRotaryAttention(FrozenQKAttention):
    """Rotary attention with a projection that stops the gradient, by the exchanged pass.

    Computes the same as `MultiheadAttention(projection="stopped", attention="rotary")`, as turned queries and keys are
    constants, too. Calls with a context, a state or a cache run as in that layer. Takes what `FrozenQKAttention` takes.
    """

    def __init__(self, d_model: int, num_heads: int, *, projection: Any = "stopped", **kwargs: Any) -> None:
        super().__init__(d_model, num_heads, projection=projection, **kwargs)
        self.attention = "rotary"

    def _constants(self) -> nn.Module:
        """What makes turned queries and keys."""
        return _Turned(self.projection)


class _Turned(nn.Module):
    """A projection whose queries and keys are turned by their positions."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.projection(x)
        with no_autocast(x):
            table = angles(0, x.shape[1], q.shape[-1], device=x.device)
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = table.cos().to(wide), table.sin().to(wide)
            q, k = (apply_rotary(upcast(one), cos, sin).to(one.dtype) for one in (q, k))
        return q, k


def window_heads(d_model: int, num_heads: int, *, width: int, **kwargs: Any) -> MultiheadAttention:
    """Heads that see a window of `width` tokens."""
    return MultiheadAttention(d_model, num_heads, attention="window", width=width, **kwargs)


def random_feature_heads(
    d_model: int,
    num_heads: int,
    *,
    m: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> MultiheadAttention:
    """FAVOR+ with m features on orthogonal rows, which are drawn once for each layer and stay fixed."""
    d_model, num_heads = checks.heads(d_model, num_heads)
    kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
    attention = RandomFeatureAttention(d_model // num_heads, m, **kind)
    return MultiheadAttention(d_model, num_heads, attention=attention, **kind, **kwargs)


def synthesizer_heads(
    d_model: int, num_heads: int, *, max_length: int, form: str = "fast", **kwargs: Any
) -> SynthesizerAttention:
    """A Synthesizer as one kind of heads among others. It has only one form, which serves as both."""
    checks.one_of("form", form, ("reference", "fast"))
    return SynthesizerAttention(d_model, num_heads, max_length, **kwargs)
