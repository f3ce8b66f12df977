r"""A short convolution before attention: it mixes each channel of a token with that channel of the last few tokens.

$$y_t = x_t + \sum_{i=0}^{w-1} a_i \odot x_{t-i}$$

with w trained taps for each channel, usually w = 4, and zeros before the first token. It is causal, depthwise and
residual, like the layers A of Canon (Allen-Zhu 2025, arXiv:2512.17351). Primer (So et al. 2021, arXiv:2109.08668) has
it after the projections; RWKV's token shift (Peng et al. 2023, arXiv:2305.13048) has w = 2. Queries, keys and values
are made of y. The taps are 0 at first, so a layer begins as it would without them and keeps its initial scale. (Canon
begins with random taps, Primer with taps that sum to 1.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._checks import Kernel, carried, checked, no_autocast, once, upcast
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import tokens_there
from ortho.layers.hybrid import HybridCache
from ortho.layers.multihead import MultiheadAttention


@checked(own=("tail",))
def short_convolution_reference(
    x: Float[Tensor, "B N d"], taps: Float[Tensor, "w d"], tail: Float[Tensor, "B past d"] | None = None
) -> Float[Tensor, "B N d"]:
    """x (B, N, d) -> (B, N, d) by the formula; `tail` (B, w - 1, d) holds the tokens before, zeros by default."""
    line = torch.cat([_tail(x, taps, tail), x], 1)
    windows = line.unfold(1, len(taps), 1)  # (B, N, d, w), the oldest token first
    return (x + (windows * taps.flip(0).mT).sum(-1)).to(x.dtype)


@checked(own=("tail",))
def short_convolution(
    x: Float[Tensor, "B N d"], taps: Float[Tensor, "w d"], tail: Float[Tensor, "B past d"] | None = None
) -> Float[Tensor, "B N d"]:
    """`short_convolution_reference` by shifted sums, in float32 at least; the backward pass keeps x and the taps.

    It takes and returns the same, and cannot be differentiated twice.
    """
    line = x if tail is None else torch.cat([_tail(x, taps, tail), x], 1)
    with no_autocast(x):
        y = _Convolution.apply(upcast(line), upcast(taps))
    return y[:, line.shape[1] - x.shape[1] :].to(x.dtype)


def _tail(x: Tensor, taps: Tensor, tail: Tensor | None) -> Tensor:
    shape = (len(x), len(taps) - 1, x.shape[2])
    if tail is None:
        return x.new_zeros(shape)
    _checks.float_tensor("tail", tail)
    fits = tail.shape == shape and tail.dtype == x.dtype and tail.device == x.device
    _checks.expect(fits, "tail", f"{x.dtype} of shape {shape} on {x.device}", _checks.describe(tail))
    _checks.finite("tail", tail)
    return tail


class _Convolution(Kernel):
    """The sums with a backward pass of their own: autograd's would pass over the sequence twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        y = torch.addcmul(x, x, taps[0])
        for i in range(1, min(len(taps), x.shape[1])):
            y[:, i:].addcmul_(x[:, :-i], taps[i])
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, taps = ctx.saved_tensors
        dx, d_taps, N = torch.addcmul(dy, dy, taps[0]), torch.zeros_like(taps), x.shape[1]
        d_taps[0] = (dy * x).sum((0, 1))
        for i in range(1, min(len(taps), N)):
            dx[:, : N - i].addcmul_(dy[:, i:], taps[i])
            d_taps[i] = (dy[:, i:] * x[:, : N - i]).sum((0, 1))
        return dx, d_taps


class ConvolvedAttention(nn.Module):
    """An attention layer, with heads of any kinds, on x after a short convolution.

    `of` is the class of the layer, made with `kwargs`: `LanguageModel(..., layer=ConvolvedAttention,
    of=HybridAttention, heads=...)`. `taps` (width, d) are trained and start at 0. The convolution never looks ahead,
    even in calls that are not causal. Padding, and a token that a mask of keys leaves out, count as zeros, so they add
    nothing to others; they keep their places, so tokens before a gap do not move up. A mask of pairs leaves out no
    token.

    Raises TypeError or ValueError for sizes below 1.
    """

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        of: Callable[..., nn.Module] = MultiheadAttention,
        width: int = 4,
        form: str = "fast",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.form = form
        self.d_model, self.num_heads, self.width = d_model, num_heads, width
        self.attention: Any = of(d_model, num_heads, form=form, dtype=dtype, device=device, **kwargs)
        self.taps = nn.Parameter(torch.zeros(width, d_model, dtype=dtype, device=device))

    @checked(shapes=False)
    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
        cache: "ConvolvedCache | None" = None,
        **kwargs: Any,
    ) -> Any:
        """x (B, N, d) -> (B, N, d); takes the layer's arguments. A state is the last width - 1 tokens and its state."""
        _checks.sequence("x", x, self.taps)
        there = None  # with a context the masks are of its tokens
        if kwargs.get("context") is None:
            keys = None if initial_state is not None else x.shape[1]
            _checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
            cut = return_state or initial_state is not None
            there = tokens_there(attn_mask, key_padding_mask, x.shape[1], cut=cut)
        kwargs |= {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        tail, state = self._before(initial_state)
        if tail is not None:
            carried("tail", tail, (len(x), len(self.taps) - 1, x.shape[2]), x.dtype)
        if cache is not None:
            _checks.expect(cache.attention is self, "cache", "one of this layer", "another's")
            kwargs["cache"], tail = cache.parts[0], cache.tail
            if tail is not None:
                _checks.expect(len(tail) == len(x), "cache", f"one of batch {len(x)}", f"batch {len(tail)}")
        x = x if there is None else x * there[..., None]
        if initial_state is not None:
            kwargs["initial_state"] = state
        convolve = short_convolution if self.form == "fast" else short_convolution_reference
        y = self.attention(convolve(x, self.taps, tail), return_state=return_state, **kwargs)
        if cache is not None:
            cache.tail = self._after(x, tail).detach()
        return (y[0], (self._after(x, tail), *y[1])) if return_state else y

    @checked
    def new_cache(self, capacity: int | None = None) -> "ConvolvedCache":
        """An empty cache for decoding with this layer: the attention's own cache, and the last tokens."""
        return ConvolvedCache(self, [self.attention], capacity)

    def _before(self, state: Any) -> tuple[Tensor | None, Any]:
        """The last tokens and the layer's own state."""
        if state is None:
            return None, None
        if not isinstance(state, tuple | list) or not state or not isinstance(state[0], Tensor):
            raise TypeError(
                f"initial_state: expected the last tokens and the attention's state, got {_checks.describe(state)}"
            )
        return state[0], tuple(state[1:])

    def _after(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """The last width - 1 tokens."""
        line = torch.cat([_tail(x, self.taps, tail), x], 1)
        return line[:, x.shape[1] :].clone()  # a view would keep all of them

    def extra_repr(self) -> str:
        return f"width={self.width}"


class ConvolvedCache(HybridCache):
    """The cache of a layer's attention, its only part, and the last tokens before the convolution."""

    tail: Tensor | None = None  # replaced with each call, and never written to

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.tail is None else self.tail.nbytes)
