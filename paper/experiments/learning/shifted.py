r"""KV shift: each head mixes every key, and every value, with the previous token's, by learned weights.

$$\hat k_t = \alpha_1 k_t + \alpha_2 k_{t-1}, \qquad \hat v_t = \beta_1 v_t + \beta_2 v_{t-1}$$

Xu et al. 2025 (arXiv:2411.19574, equation 5): four numbers per head, and zeros before the first token. With
$\alpha = (0, 1)$ and $\beta = (1, 0)$ one layer can be an induction head. As in the paper, $\alpha_1$ and $\beta_1$
start uniform on [0, 1], with $\alpha_2 = 1 - \alpha_1$ and $\beta_2 = 1 - \beta_1$.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ortho.attention import MECHANISMS


class ShiftedKeysValues(nn.Module):
    """Rotary attention whose keys and values are mixed with the previous token's: `MultiheadAttention(attention=...)`.

    Keys are rotated after they are mixed. `keys` and `values` (num_heads, 2) hold the weights of the current token and
    of the previous one. The state is the last key and value before mixing, and rotary attention's own state.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        drawn = torch.rand(2, num_heads, generator=generator, dtype=dtype, device=device)
        self.keys, self.values = (nn.Parameter(torch.stack([now, 1 - now], 1)) for now in drawn)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        initial_state: tuple[Tensor, ...] | None = None,
        return_state: bool = False,
    ) -> Any:
        """q (B, H, N, K), k (B, H, M, K), v (B, H, M, V) -> (B, H, N, V), with the arguments of rotary attention; a key
        that a mask hides still adds to the next one."""
        last_k, last_v, *own = initial_state or (None, None)
        found = MECHANISMS["rotary"].form(self.form)(
            q,
            _mixed(k, self.keys, last_k),
            _mixed(v, self.values, last_v),
            is_causal=is_causal,
            attn_mask=attn_mask,
            scale=scale,
            initial_state=tuple(own) or None,
            return_state=return_state,
        )
        return (found[0], (k[..., -1:, :], v[..., -1:, :], *found[1])) if return_state else found


def _mixed(x: Tensor, weights: Tensor, last: Tensor | None) -> Tensor:
    """Each token's vector mixed with the previous one, (B, H, M, K); `last` (B, H, 1, K) precedes the first."""
    before = torch.zeros_like(x[..., :1, :]) if last is None else last
    now, then = weights.to(x.dtype)[..., None, None].unbind(1)  # (H, 1, 1) each
    return torch.addcmul(now * x, then, torch.cat([before, x[..., :-1, :]], -2))
