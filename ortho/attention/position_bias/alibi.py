r"""ALiBi: a score falls in proportion to the distance, $q_i^T k_j / \sqrt K - m_h |i - j|$ (Press et al. 2022,
arXiv:2108.12409, section 3), with a slope $m_h$ for each head, the same for every input."""

import torch

from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.forms import two_forms
from ortho.attention.mechanism import Mechanism
from ortho.attention.position_bias.distance import distance_attention, distance_attention_reference


def _alibi_attention(call: Call) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Softmax attention minus the biases, with both N x M matrices materialised.

    Arguments, errors and state are as in `softmax_attention_reference`. The heads are the axis before N; 2-d operands
    have one head. Keys stand at positions 0, 1, ..., and so do queries, after the keys of the state; a masked key keeps
    its position. In causal calls the bias is the published one; other calls mirror it for later keys.
    """
    # The depth -m_h p of each query and key, (H, N) and (H, M); without heads (N,) and (M,).
    q, past, (N, M) = call.q, call.past, (call.q.shape[-2], call.k.shape[-2])
    places = torch.arange(0, -max(past + N, M), -1, dtype=torch.float64, device=q.device)
    of_heads = torch.tensor(slopes(int(q.shape[-3]) if q.dim() > 2 else 1), dtype=torch.float64, device=q.device)
    depths = of_heads[:, None] * places if q.dim() > 2 else of_heads * places
    return depths[..., past : past + N], depths[..., :M]


alibi_attention_reference, alibi_attention = two_forms(
    _alibi_attention, distance_attention_reference, distance_attention
)


def slopes(heads: int) -> list[float]:
    r"""The slopes $2^{-8h/H}$ for the heads h = 1 to H, a power of 2. For another H, as published, those of the power
    below, and for the remaining heads every second slope of the power above."""
    power = 1 << (heads.bit_length() - 1)
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return own if power == heads else own + slopes(2 * power)[::2][: heads - power]


MECHANISM = Mechanism(
    name="alibi",
    family="position_bias",
    source="Press et al. 2022, arXiv:2108.12409",
    reference=alibi_attention_reference,
    fast=alibi_attention,
    positional=True,
)
