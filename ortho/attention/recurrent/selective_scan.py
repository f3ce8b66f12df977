r"""Mamba's selective scan: a state-space model whose time steps depend on the input (Gu & Dao 2023, arXiv:2312.00752,
section 3, algorithm 2).

Channel v of the values has a state of its own, of width K, with a diagonal matrix $A_v = -\mathrm{diag}(\alpha_{v1},
\dots, \alpha_{vK})$ that is the same for all tokens. It fades for the time $\Delta_{tv}$ that the token chooses, and
takes up the token's value:

$$S_t = e^{-\Delta_{tv} \alpha_{vk}} \circ S_{t-1} + k_t (\Delta_t \circ v_t)^T, \qquad o_t = S_t^T q_t ,$$

with C, B, x in the paper for q, k, v. A decay for each pair of channels is no product of vectors, so chunks have no
form by matrix products, as those of `ssd` (Mamba-2) have: there $\alpha$ and $\Delta$ are one number a head.

The skip $D v_t$, the short convolution and the output gate are left to the layer around it.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad, softplus
from torch.utils.checkpoint import checkpoint

from ortho import checks
from ortho._typing import Float, Size, State, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.gates import Gate, step_biases

CHUNK = 64  # tokens whose states exist at once


@attention_function(keeps="sums")
def selective_scan_reference(
    call: Call, *, dt: Float[Tensor, "*batch M V"] | None = None, A: Float[Tensor, "*batch V K"] | None = None
) -> tuple[Float[Tensor, "*batch N V"], State]:
    r"""The selective scan, token by token.

    `dt` (..., M, V), $\Delta \ge 0$, is 1 by default; `A` (..., V, K), $\alpha \ge 0$ (the paper's A is its negative),
    is 0 by default, so that nothing fades. Queries and keys are not normalised; `scale`, if given, multiplies the
    queries. In a call that is not causal every query reads the state after the last key. A masked key leaves the state
    unchanged; the mask, of the new keys, must be the same for all queries. The state is (S (..., K, V),); it and all
    computation are in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for a
    `dt` or an `A` below 0 or not finite.
    """
    q, k, v, log_decay, S = _operands(call, dt, A)
    rows = []
    for t, (key, value) in enumerate(zip(k.unbind(-2), v.unbind(-2), strict=True)):
        S = log_decay(t, t + 1)[..., 0, :, :].exp() * S + key[..., :, None] * value[..., None, :]
        if call.is_causal:
            rows.append((q[..., t, None, :] @ S)[..., 0, :])
    return torch.stack(rows, -2) if call.is_causal else q @ S, (S,)


@attention_function(keeps="sums")
def selective_scan(
    call: Call,
    *,
    dt: Float[Tensor, "*batch M V"] | None = None,
    A: Float[Tensor, "*batch V K"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`selective_scan_reference` in chunks of at most `chunk` tokens, whose states are found by doubling: those after
    1, 2, 4, ... tokens of the chunk. All factors are decays between two tokens, so none exceeds 1 and nothing is
    divided. Kept for the backward pass is one state per chunk; the states within it are found again.
    """
    checks.untraced("selective_scan")
    q, k, v, log_decay, S = _operands(call, dt, A)
    checks.positive_int("chunk", chunk)
    rows = []
    for start in range(0, k.shape[-2], chunk):
        stop = min(start + chunk, k.shape[-2])
        parts = k[..., start:stop, :], v[..., start:stop, :], log_decay(start, stop), S
        queries = q[..., start:stop, :] if call.is_causal else None
        if torch.is_grad_enabled():
            o, S = checkpoint(_scan, queries, *parts, use_reentrant=False, preserve_rng_state=False)
        else:
            o, S = _scan(queries, *parts)
        rows.append(o)
    return torch.cat(rows, -2) if call.is_causal else q @ S, (S,)


def _scan(
    q: Tensor | None, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor
) -> tuple[Float[Tensor, "*batch C V"] | None, Float[Tensor, "*batch K V"]]:
    """(what the queries read, the state after the last token) of one chunk, from the state before it."""
    C, decay = k.shape[-2], log_decay.exp()  # (..., C, K, V)
    states = k[..., :, None] * v[..., None, :]
    shift = 1
    while shift < C:  # after each round a token has summed up the 2 shift tokens up to itself
        states = states + decay * pad(states[..., :-shift, :, :], (0, 0, 0, 0, shift, 0))
        decay = decay * pad(decay[..., :-shift, :, :], (0, 0, 0, 0, shift, 0), value=1.0)
        shift *= 2
    states = states + decay * S[..., None, :, :]
    o = None if q is None else (q[..., None, :] @ states)[..., 0, :]
    return o, states[..., -1, :, :]


def _operands(call: Call, dt: Tensor | None, A: Tensor | None) -> tuple[Any, ...]:
    r"""q, k, the values times their steps, a function that gives $-\Delta\alpha$ (..., stop - start, K, V) of some
    tokens, and the state (..., K, V)."""
    q, k, v = call.q, call.k, call.v
    checks.gate("dt", dt, v.shape, "values")
    checks.gate("A", A, (*v.shape[:-2], v.shape[-1], k.shape[-1]), "heads")
    for name, value in (("dt", dt), ("A", A)):
        checks.within(name, "numbers", value, 0, torch.finfo(v.dtype).max)
    dt = torch.ones_like(v) if dt is None else dt
    if call.key_mask is not None:
        dt = dt.masked_fill(~call.key_mask[..., None], 0)
    alpha = v.new_zeros(()) if A is None else A.mT[..., None, :, :]  # (..., 1, K, V)
    S = call.carried("S", k.shape[-1], v.shape[-1])
    S = v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1]) if S is None else S

    def log_decay(start: int, stop: int) -> Tensor:
        return (-dt[..., start:stop, None, :] * alpha).expand(*k.shape[:-2], -1, k.shape[-1], -1)

    return q if call.scale is None else q * call.scale, k, v * dt, log_decay, S


class ChannelStep(Gate):
    r"""$\Delta = \mathrm{softplus}(x W_1^T W_2^T + b)$, a duration for each channel of a token's values, through a
    bottleneck of 16 numbers; softplus(b) starts log-uniform in [0.001, 0.1] (Gu & Dao 2023, section 3.6)."""

    rank: ClassVar[int | None] = 16
    per_channel = True
    trained = 1

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        steps = step_biases(self.num_heads * self.head_dim, generator, kind)
        self.bias = nn.Parameter(steps.view(self.num_heads, 1, -1))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N V"]:
        return softplus(self._vectors(x) + self.bias)


class ChannelRates(Gate):
    r"""$\alpha$ (V, K) of each head, the same for every token: it starts as 1, 2, ..., K (Gu & Dao 2023, section 3.6,
    S4D-Real)."""

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        width = self.head_dim
        start = torch.arange(1, width + 1, **kind).log()
        self.log_rate = nn.Parameter(start.expand(self.num_heads, width, -1).clone())

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H V K"]:
        return self.log_rate.exp().expand(len(x), -1, -1, -1)

    @classmethod
    def sizes(cls, d: Size, K: Size, H: Size) -> tuple[list[tuple[Size, Size]], Size]:
        return [], H * K * K


MECHANISM = Mechanism(
    name="selective-scan",
    family="recurrent",
    source="Gu & Dao 2023, arXiv:2312.00752",
    reference=selective_scan_reference,
    fast=selective_scan,
    positional=True,
    signed=True,
    has_weights=False,  # each channel of the values has its own
    gates={"dt": ChannelStep, "A": ChannelRates},
)
