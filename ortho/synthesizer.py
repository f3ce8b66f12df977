r"""The random Synthesizer: attention whose weights are parameters, not functions of the input (Tay et al. 2021).

Each head has a matrix of logits $R$ for positions, and $Y = \mathrm{concat}_j\, \mathrm{softmax}(R_j) V_j\, W_O$
(arXiv:2005.00743). There are no queries and no keys, so it stands beside the projections and mechanisms.
"""

import torch
from torch import nn
from torch.nn.functional import linear

from ortho import _checks
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import new_weight, split_heads
from ortho.attention.operands import blocked_pairs, masked_softmax

__all__ = ["SynthesizerAttention"]


class SynthesizerAttention(nn.Module):
    """Multi-head random Synthesizer for sequences of at most `max_length` tokens, without biases.

    `logits` (H, max_length, max_length) are drawn from N(0, 1), the variance of scaled dot products of standard normal
    q and k; they are a parameter if `trained`, else a buffer ("fixed random"). A shorter sequence uses their first
    rows and columns. W_V and W_O (`weight_v`, `weight_o`, stored as in `torch.nn.Linear`) are always trained.

    Raises TypeError or ValueError, naming the argument, for sizes below 1 and for d_model not divisible by num_heads.
    """

    logits: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_length: int,
        *,
        trained: bool = True,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = _checks.heads(d_model, num_heads)
        self.max_length = _checks.positive_int("max_length", max_length)
        shape = (num_heads, max_length, max_length)
        logits = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        if trained:
            self.register_parameter("logits", nn.Parameter(logits))
        else:
            self.register_buffer("logits", logits)
        self.weight_v = new_weight(d_model, d_model, generator=generator, dtype=dtype, device=device)
        self.weight_o = new_weight(d_model, d_model, generator=generator, dtype=dtype, device=device)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = may attend; a row with nothing to attend to gives zeros.
        `initial_state` holds the values (B, H, P, K) of P earlier tokens, which the mask then spans too; with
        `return_state` the result is (y, state). Raises TypeError or ValueError for arguments that do not fit, and for
        more than `max_length` tokens, earlier ones included.
        """
        _checks.sequence("x", x, self.weight_v)
        v = split_heads(linear(x, self.weight_v), self.num_heads)  # (B, H, N, K)
        if initial_state is not None:
            v = self._with_past(v, initial_state)
        queries, keys = x.shape[1], v.shape[2]
        if keys > self.max_length:
            raise ValueError(f"x: expected at most {self.max_length} tokens, got {keys}")
        if attn_mask is not None:
            _checks.mask(attn_mask, (*v.shape[:2], queries, keys))
        weights = self.weights(queries, keys, attn_mask, is_causal)
        if len(weights) == 1:  # one matrix a head for the whole batch, whose items are columns of one product
            columns = v.permute(1, 2, 0, 3)  # (H, M, B, K)
            o = (weights[0] @ columns.flatten(2)).unflatten(2, columns.shape[2:]).permute(2, 1, 0, 3)  # (B, N, H, K)
        else:
            o = (weights @ v).transpose(1, 2)
        y = linear(o.flatten(2), self.weight_o)
        return (y, (v,)) if return_state else y

    def weights(
        self, queries: int, keys: int, attn_mask: Bool[Tensor, "..."] | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b H N M"]:
        """The attention weights (1 or B, H, queries, keys) of the last `queries` of `keys` positions."""
        scores = self.logits[None, :, keys - queries : keys, :keys]
        blocked = blocked_pairs(queries, keys, is_causal, attn_mask, scores.device)
        return masked_softmax(scores, blocked, empty_rows=attn_mask is not None)

    def _with_past(self, v: Tensor, state: State) -> Tensor:
        (past,) = _checks.state(state, "values")
        expected = (v.shape[0], self.num_heads, v.shape[3])
        if past.dim() != 4 or (*past.shape[:2], past.shape[3]) != expected or past.dtype != v.dtype:
            shape = f"({expected[0]}, {expected[1]}, P, {expected[2]})"
            raise ValueError(f"initial_state: expected {v.dtype} values of shape {shape}, got {_checks.describe(past)}")
        return torch.cat([past, v], 2)

    def extra_repr(self) -> str:
        trained = isinstance(self.logits, nn.Parameter)
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_length={self.max_length}, trained={trained}"
