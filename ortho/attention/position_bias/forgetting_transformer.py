r"""Forgetting attention: the forget gates of the tokens after a key, up to the query, lower its score,
$q_i^T k_j / \sqrt K + \sum_{l=j+1}^{i} \log f_l$. There is a gate $f_t \in (0, 1]$ per head and token, made from the
input (Lin et al. 2025, arXiv:2503.02130, section 3).

A constant gate $f = e^{-m}$ is ALiBi with the slope m. The bias is added to the scores after their scaling.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.attention.call import Call
from ortho.attention.forms import two_forms
from ortho.attention.mechanism import Mechanism
from ortho.attention.position_bias.distance import distance_attention, distance_attention_reference
from ortho.gates import Gate


def _forgetting_attention(
    call: Call, *, log_forget: Float[Tensor, "*batch N"] | None = None
) -> tuple[Float[Tensor, "... N"], Float[Tensor, "... M"], Float[Tensor, "*batch M"]]:
    r"""Softmax attention with the biases added, both N x M matrices materialised.

    Arguments are as in `softmax_attention_reference`; `log_forget` is $\log f$, at most 0, by default 0. It counts as 0
    for a key that no query may attend to: in a causal call a mask must be one row for all queries. The paper has no
    form for calls that are not causal; here they add the sum between the two tokens on either side. The state is (keys,
    values, what each key's score has lost so far).

    Raises TypeError or ValueError for operands that do not fit together; on the CPU for a `log_forget` above 0 or so
    low that sums leave the range of the dtype; and for different numbers of queries and keys.
    """
    M, k = call.k.shape[-2], call.k[..., call.past :, :]  # the new ones
    queries, keys = call.q.shape[-2], k.shape[-2]
    checks.expect(queries == keys, "q", f"as many queries as keys, {keys}", queries)
    checks.gate("log_forget", log_forget, k.shape[:-1])
    checks.within("log_forget", "logarithms of forget gates", log_forget, torch.finfo(k.dtype).min / keys, 0.0)
    log_forget = k.new_zeros(k.shape[:-1]) if log_forget is None else log_forget
    if call.attn_mask is not None:
        seen: Any = call.key_mask if call.is_causal else torch.atleast_2d(call.attn_mask).any(-2)
        log_forget = log_forget.masked_fill(~seen.expand(*k.shape[:-2], M)[..., call.past :], 0)
    depth = log_forget.double().cumsum(-1)  # of the queries, and of the new keys; 0 before the first
    depths = depth
    if call.state:
        faded = checks.carried("faded", call.state[0], (*k.shape[:-2], call.past), k)
        depths = torch.cat([-faded.double(), depth], -1)
    # What is added to each key's score for a query right after the last token, at most 0.
    lost = (depths[..., -1:] - depths).clamp(min=torch.finfo(k.dtype).min).to(k.dtype)
    return depth, depths, lost


forgetting_attention_reference, forgetting_attention = two_forms(
    _forgetting_attention, distance_attention_reference, distance_attention, beside=("faded",)
)


class ForgetGate(Gate):
    r"""$\log f = \log \sigma(x W^T + b)$, at most 0 (Lin et al. 2025, arXiv:2503.02130, equation 5)."""

    trained = 1

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(torch.zeros(self.num_heads, **kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return -softplus(-(self._numbers(x) + self.bias[:, None]))


MECHANISM = Mechanism(
    name="fox",
    family="position_bias",
    source="Lin et al. 2025, arXiv:2503.02130",
    reference=forgetting_attention_reference,
    fast=forgetting_attention,
    positional=True,
    self_attention_only=True,
    gates={"log_forget": ForgetGate},
)
