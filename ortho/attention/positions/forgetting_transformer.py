r"""Forgetting attention: the forget gates of the tokens after a key, up to the query, lower its score,
$q_i^T k_j / \sqrt K + \sum_{l=j+1}^{i} \log f_l$. There is a gate $f_t \in (0, 1]$ per head and token, made from the
input (Lin et al. 2025, arXiv:2503.02130, section 3).

A constant gate $f = e^{-m}$ is ALiBi with the slope m. The bias is added to the scores after their scaling.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from ortho import _checks
from ortho._checks import absent_keys, attention_form, carried, gate, past_length
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.positions.distance import distance_attention, distance_attention_reference, distance_cost
from ortho.attention.softmax.tiling import TILE
from ortho.gates import LogSigmoidGate


def _check(q: Tensor, k: Tensor, v: Tensor, *, log_forget: Tensor | None = None, **_: Any) -> None:
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"q: expected as many queries as keys, {k.shape[-2]}, got {q.shape[-2]}")
    gate("log_forget", log_forget, k, k.shape[:-1])
    if log_forget is not None:
        limits = torch.finfo(torch.promote_types(k.dtype, torch.float32))
        _checks.within("log_forget", "logarithms of forget gates", log_forget, limits.min / k.shape[-2], 0.0)


@attention_form(beside=("faded",), check=_check)
def forgetting_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    log_forget: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""Softmax attention with the biases added, both N x M matrices materialised.

    Arguments are as in `softmax_attention_reference`; `log_forget` is $\log f$, at most 0, by default 0. It counts as 0
    for a key that no query may attend to: in a causal call a mask must be one row for all queries. The paper has no
    form for calls that are not causal; here they add the sum between the two tokens on either side. The state is (keys,
    values, what each key's score has lost so far).

    Raises TypeError or ValueError for operands that do not fit together; for a `log_forget` above 0 or so low that sums
    leave the range of the dtype; and for different numbers of queries and keys.
    """
    depths = _depths(k, log_forget, is_causal, attn_mask, initial_state)
    o = distance_attention_reference(q, k, v, *depths, is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    return (o, _faded(depths[1], k)) if return_state else o


@attention_form(beside=("faded",), check=_check)
def forgetting_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    log_forget: Float[Tensor, "*batch N"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    tile: int = TILE,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`forgetting_attention_reference` `tile` queries at a time, in memory linear in N. Not differentiable twice."""
    depths = _depths(k, log_forget, is_causal, attn_mask, initial_state)
    o = distance_attention(q, k, v, *depths, is_causal=is_causal, attn_mask=attn_mask, scale=scale, tile=tile)
    return (o, _faded(depths[1], k)) if return_state else o


def _depths(
    k: Tensor, log_forget: Tensor | None, is_causal: bool, attn_mask: Tensor | None, initial_state: State | None
) -> tuple[Tensor, Tensor]:
    """The depths of queries and of all keys k, in float64; the depth is 0 before the first new token."""
    past = past_length(initial_state)
    k = k[..., past:, :]  # the new ones
    log_forget = k.new_zeros(k.shape[:-1]) if log_forget is None else log_forget
    absent = absent_keys(attn_mask, k, past, is_causal)
    if absent is not None:
        log_forget = log_forget.masked_fill(absent, 0)
    depth = log_forget.double().cumsum(-1)
    if initial_state is None:
        return depth, depth
    faded = carried("faded", initial_state[2], (*k.shape[:-2], past), k.dtype)
    return depth, torch.cat([-faded.double(), depth], -1)


def _faded(k_depth: Tensor, k: Tensor) -> tuple[Float[Tensor, "*batch M"]]:
    """What is added to each key's score for a query right after the last token, at most 0."""
    return ((k_depth[..., -1:] - k_depth).clamp(min=torch.finfo(k.dtype).min).to(k.dtype),)


class ForgetGate(LogSigmoidGate):
    r"""$\log f = \log \sigma(x W^T + b)$, at most 0 (Lin et al. 2025, arXiv:2503.02130, equation 5)."""

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(torch.zeros(self.num_heads, **kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return -softplus(-(self._numbers(x) + self.bias[:, None]))


MECHANISM = Mechanism(
    name="fox",
    family="positions",
    source="Lin et al. 2025, arXiv:2503.02130",
    reference=forgetting_attention_reference,
    fast=forgetting_attention,
    positional=True,
    self_attention_only=True,
    cost=partial(distance_cost, gated=True),
    gates={"log_forget": ForgetGate},
)
