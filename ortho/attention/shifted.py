r"""KV shift: each head mixes every key, and every value, with the previous token's, by learned weights.

$$\hat k_t = \alpha_1 k_t + \alpha_2 k_{t-1}, \qquad \hat v_t = \beta_1 v_t + \beta_2 v_{t-1}$$

Xu et al. 2025 (arXiv:2411.19574, equation 5): four numbers per head, and zeros before the first token. With
$\alpha = (0, 1)$ and $\beta = (1, 0)$ one layer can be an induction head. As in the paper, $\alpha_1$ and $\beta_1$
start uniform on [0, 1], with $\alpha_2 = 1 - \alpha_1$ and $\beta_2 = 1 - \beta_1$.
"""

from typing import Any

import torch
from torch import nn

from ortho import _checks
from ortho._checks import carried, checked
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import tokens_there
from ortho.attention import MECHANISMS

__all__ = ["ShiftedKeysValues"]


class ShiftedKeysValues(nn.Module):
    """A mechanism whose keys and values are mixed with the previous token's, for `MultiheadAttention(attention=...)`.

    `attention` names a mechanism without gates, and `form` its form; with 'rotary', keys are rotated after they are
    mixed. Key heads that query heads share are mixed separately for each query head. `keys` and `values`
    (num_heads, 2) hold the weights of the current token and of the previous one.

    A key that a mask of keys hides from all heads adds nothing to the next one. The state is the last key and value
    before mixing, and the mechanism's own state.

    Raises TypeError or ValueError, naming the argument, for an unknown mechanism or form, or a mechanism with gates.
    """

    takes_padding = True  # a layer hands its key_padding_mask on

    @checked
    def __init__(
        self,
        num_heads: int,
        attention: str = "softmax",
        *,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mechanism = MECHANISMS[_checks.one_of("attention", attention, MECHANISMS)]
        if mechanism.gates:
            raise ValueError(f"attention: expected a mechanism without gates, got {attention!r}")
        mechanism.form(form)  # checks the name
        self.name, self.form, self.same_tokens = attention, form, mechanism.same_tokens
        drawn = torch.rand(2, num_heads, generator=generator, dtype=dtype, device=device)
        self.keys, self.values = (nn.Parameter(torch.stack([now, 1 - now], 1)) for now in drawn)

    @checked(shapes=False)
    def forward(
        self,
        q: Float[Tensor, "B H N K"],
        k: Float[Tensor, "B H M K"],
        v: Float[Tensor, "B H M V"],
        *,
        is_causal: bool = False,
        attn_mask: Bool[Tensor, "..."] | None = None,
        scale: float | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
        same_tokens: bool = False,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Any:
        """q (B, H, N, K), k (B, H, M, K), v (B, H, M, V) -> (B, H, N, V), with the mechanism's arguments.

        `key_padding_mask`, True = padding, is the part of `attn_mask` that is known to be padding.
        """
        _checks.qkv(q, k, v, None, is_causal)
        heads = len(self.keys)
        _checks.expect(q.dim() == 4 and q.shape[1] == heads, "q", f"shape (B, {heads}, N, K)", tuple(q.shape))
        last_k = last_v = state = None
        if initial_state is not None:
            last_k, last_v, *own = _checks.state(initial_state, "key", "value", *self._names(initial_state))
            state = tuple(own)
        if key_padding_mask is not None:
            _check_padding(key_padding_mask, k, attn_mask, initial_state)
        there = tokens_there(attn_mask, key_padding_mask, k.shape[-2], cut=return_state or initial_state is not None)
        if there is not None:
            k, v = (x * there[:, None, :, None] for x in (k, v))
        keys, values = _mixed("key", k, self.keys, last_k), _mixed("value", v, self.values, last_v)
        o = MECHANISMS[self.name].form(self.form)(
            q,
            keys,
            values,
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            initial_state=state,
            return_state=return_state,
            **({"same_tokens": same_tokens} if self.same_tokens else {}),
        )
        return (o[0], (k[..., -1:, :], v[..., -1:, :], *o[1])) if return_state else o

    def _names(self, state: Any) -> list[str]:
        """Names for the mechanism's own parts of a state; the mechanism itself checks how many there are."""
        return ["part"] * max(0, len(state) - 2) if isinstance(state, tuple | list) else []

    def extra_repr(self) -> str:
        return f"attention={self.name!r}, form={self.form!r}"


def _check_padding(padding: Tensor, k: Tensor, attn_mask: Tensor | None, initial_state: State | None) -> None:
    """ValueError unless padding (B, M), or longer beside a state, comes with a mask, which alone hides keys."""
    shape, B, M = tuple(padding.shape), len(k), k.shape[-2]
    fits = len(shape) == 2 and shape[0] == B and (shape[1] == M or (initial_state is not None and shape[1] > M))
    _checks.expect(fits, "key_padding_mask", f"shape ({B}, {M}), or longer beside an initial_state", shape)
    _checks.expect(attn_mask is not None, "attn_mask", "a mask that hides the padding, too", None)


def _mixed(name: str, x: Tensor, weights: Tensor, last: Tensor | None) -> Tensor:
    """Each token's vector mixed with the previous one, (B, H, M, K); `last` (B, H, 1, K) precedes the first."""
    shape = (*x.shape[:2], 1, x.shape[3])
    before = x.new_zeros(shape) if last is None else carried(name, last, shape, x.dtype)
    now, then = weights.to(x.dtype)[..., None, None].unbind(1)  # (H, 1, 1) each
    return torch.addcmul(now * x, then, torch.cat([before, x[..., :-1, :]], -2))
