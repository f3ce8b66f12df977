r"""A short convolution before attention: it mixes each channel of a token with that channel of the last few tokens.

$$y_t = x_t + \sum_{i=0}^{w-1} a_i \odot x_{t-i}$$

with a trained kernel of w numbers for each channel, usually w = 4, and zeros before the first token. It is causal,
depthwise and residual, like the layers A of Canon (Allen-Zhu 2025, arXiv:2512.17351). Primer (So et al. 2021,
arXiv:2109.08668) has it after the projections; RWKV's token shift (Peng et al. 2023, arXiv:2305.13048) has w = 2.
Queries, keys and values are made of y. The kernel is 0 at first, so a layer begins as it would without it and keeps
its initial scale. (Canon begins with a random kernel, Primer with one that sums to 1.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ortho import checks
from ortho._typing import Bool, Float
from ortho.attention.backward import once
from ortho.attention.cache import PartsCache
from ortho.attention.call import no_autocast, upcast
from ortho.heads import token_mask
from ortho.layers.multihead import MultiheadAttention


def short_convolution(
    x: Float[Tensor, "B N d"], kernel: Float[Tensor, "w d"], conv_state: Float[Tensor, "B past d"] | None = None
) -> Float[Tensor, "B N d"]:
    """x (B, N, d) -> (B, N, d) by the formula, in float32 at least; `conv_state` (B, w - 1, d) holds the tokens before,
    by default zeros. It cannot be differentiated twice."""
    line = x if conv_state is None else torch.cat([_before(x, kernel, conv_state), x], 1)
    with no_autocast(x):
        y = _Convolution.apply(upcast(line), upcast(kernel))
    return y[:, line.shape[1] - x.shape[1] :].to(x.dtype)


def _before(x: Tensor, kernel: Tensor, conv_state: Tensor | None) -> Tensor:
    """The w - 1 tokens before x."""
    shape = (len(x), len(kernel) - 1, x.shape[2])
    return x.new_zeros(shape) if conv_state is None else checks.carried("conv_state", conv_state, shape, x)


class _Convolution(Function):
    """The sums, shifted, with a backward pass of their own: autograd's takes more than twice the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor) -> Tensor:
        ctx.save_for_backward(x, kernel)
        y = torch.addcmul(x, x, kernel[0])
        for i in range(1, min(len(kernel), x.shape[1])):
            y[:, i:].addcmul_(x[:, :-i], kernel[i])
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, kernel = ctx.saved_tensors
        dx, d_kernel, N = torch.addcmul(dy, dy, kernel[0]), torch.zeros_like(kernel), x.shape[1]
        d_kernel[0] = (dy * x).sum((0, 1))
        for i in range(1, min(len(kernel), N)):
            dx[:, : N - i].addcmul_(dy[:, i:], kernel[i])
            d_kernel[i] = (dy[:, i:] * x[:, : N - i]).sum((0, 1))
        return dx, d_kernel


class ConvolvedAttention(nn.Module):
    """An attention layer, with heads of any kinds, on x after a short convolution.

    `of` is the class of the layer, made with `kwargs`: `LanguageModel(..., layer=ConvolvedAttention,
    of=HybridAttention, heads=...)`. `kernel` (kernel_size, d) is trained and starts at 0. The convolution never looks
    ahead, even in calls that are not causal. Padding, and a token that a mask of keys leaves out, count as zeros, so
    they add nothing to others; they keep their places, so tokens before a gap do not move up. A mask of pairs leaves
    out no token.

    Raises TypeError or ValueError for sizes below 1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        of: Callable[..., nn.Module] = MultiheadAttention,
        kernel_size: int = 4,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.kernel_size = checks.positive_int("kernel_size", kernel_size)
        self.attention: Any = of(d_model, num_heads, dtype=dtype, device=device, **kwargs)
        self.kernel = nn.Parameter(torch.zeros(kernel_size, d_model, dtype=dtype, device=device))

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        cache: PartsCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """x (B, N, d) -> (B, N, d); takes the layer's arguments. With a `cache` (`new_cache`) x follows the tokens that
        it has read. Raises ValueError for a state, which would lack the tokens that the convolution needs."""
        checks.sequence("x", x, self.d_model)
        stateful = {"initial_state", "return_state"} & kwargs.keys()
        checks.expect(not stateful, "cache", "one in place of a state", ", ".join(sorted(stateful)))
        if kwargs.get("context") is None:  # else the masks are of the context's tokens
            keys = x.shape[1] if cache is None else None
            checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
            tokens = token_mask(attn_mask, key_padding_mask, x.shape[1])
            x = x if tokens is None else x * tokens[..., None]
        kwargs |= {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        if cache is None:
            return self.attention(short_convolution(x, self.kernel), **kwargs)
        cache.fits("ConvolvedAttention")
        before = next(iter(cache.beside), None)
        y = self.attention(short_convolution(x, self.kernel, before), cache=cache.parts[0], **kwargs)
        line = torch.cat([_before(x, self.kernel, before), x], 1)
        cache.beside = (line[:, x.shape[1] :].detach().clone(),)  # a view would keep all of them
        return y

    def new_cache(self, capacity: int | None = None) -> PartsCache:
        """An empty cache for decoding with this layer: the attention's own cache, and the last tokens."""
        return PartsCache("ConvolvedAttention", [self.attention.new_cache(capacity)], capacity)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"
