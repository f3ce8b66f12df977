r"""State-space duality, the core of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a state-space model, one rate per head.

The state fades by $\dot S = -\alpha S$ for the time $\Delta_t$ that a token chooses, and takes up
$\Delta_t k_t v_t^T$:

$$S_t = e^{-\Delta_t \alpha} S_{t-1} + \Delta_t k_t v_t^T, \qquad o_t = S_t^T q_t ,$$

with C, B, x in the paper for q, k, v. The same outputs are $(L \circ Q K^T)\, \mathrm{diag}(\Delta)\, V$ with $L_{ij} =
a_{j+1} \cdots a_i$ for $j \le i$, the products of the decays (section 5). The fast form uses this within chunks, and
the recurrence from chunk to chunk (section 6).

The skip $D v_t$, the short convolution and the output gate are left to the layer around it.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, softplus

from ortho import _checks
from ortho._checks import attention_form, gate
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, cut, default_chunk, equal_chunks
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.recurrent.recurrence import memory_cost, prepared, read_at_end_cost, recurrence
from ortho.gates import Gate, rate_logarithms, step_biases


def _check(
    _q: Tensor, k: Tensor, v: Tensor, *, step: Tensor | None = None, rate: Tensor | None = None, **_: Any
) -> None:
    """Refuse steps and rates that do not fit the keys, or are below 0, and steps that take the values out of range."""
    most = torch.finfo(torch.promote_types(k.dtype, torch.float32)).max
    for name, value, what in (("step", step, "steps"), ("rate", rate, "rates")):
        gate(name, value, k, k.shape[:-1])
        if value is not None:
            _checks.within(name, what, value, 0, most)
    if step is not None and _checks.reads_values(v):
        # An infinite product would make earlier rows NaN, although its weight there is 0.
        _checks.within("v", "values times their steps", v.detach().double() * step.detach()[..., None], -most, most)


@attention_form(fixed_state=True, check=_check)
def state_space_duality_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    step: Float[Tensor, "*batch M"] | None = None,
    rate: Float[Tensor, "*batch M"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""State-space duality by its recurrence, token by token.

    `step`, $\Delta_t \ge 0$, is 1 by default; `rate`, $\alpha \ge 0$, is 0 by default, so that nothing fades. Queries
    and keys are not normalised; `scale`, if given, multiplies the queries. In a call that is not causal every query
    reads the state after the last key. A masked key leaves the state unchanged; the mask must be the same for all
    queries, and cannot be combined with an `initial_state`. The state is (S (..., K, V),); it and all computation are
    in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    steps or rates below 0 or not finite, and for values whose products with their steps leave the dtype's range.
    """
    x = prepared(q, k, v, step, _log_decay(step, rate), attn_mask, scale, initial_state, normalise=False, erase=False)
    o, S = recurrence(*x, is_causal=is_causal, erase=False)
    return o, (S,)


@attention_form(fixed_state=True, check=_check)
def state_space_duality(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    step: Float[Tensor, "*batch M"] | None = None,
    rate: Float[Tensor, "*batch M"] | None = None,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`state_space_duality_reference` by matrix products over chunks of at most `chunk` tokens; linear in N.

    Chunks have 64 tokens by default; on a GPU they are longer where there would be more than 128 of them. Kept for the
    backward pass are one state per chunk and, per token, some vectors of widths K, V and `chunk`.
    """
    q, k, v, step, log_decay, S = prepared(
        q, k, v, step, _log_decay(step, rate), attn_mask, scale, initial_state, normalise=False, erase=False
    )
    written = v if step is None else v * step[..., None]
    o, S = _in_chunks(q, k, written, log_decay, S, is_causal=is_causal, chunk=chunk or default_chunk(k))
    return o, (S,)


def _log_decay(step: Tensor | None, rate: Tensor | None) -> Tensor | None:
    r"""$-\Delta_t \alpha$, (..., M), or None where nothing fades."""
    if rate is None:
        return None
    return -rate if step is None else -(rate * step)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor, *, is_causal: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """(o, the state after the last key); v is already multiplied by the steps."""
    *lead, N, _ = k.shape
    width, behind = chunks(N, chunk)
    log_decay = torch.zeros_like(k[..., 0]) if log_decay is None else log_decay
    k, v, log_decay = (cut(x, width) for x in (k, v, log_decay[..., None]))  # (G, n, C, ·)
    from_start = log_decay.cumsum(-2).exp()
    to_end = pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
    added = ((k * to_end).mT @ v).unbind(1)  # (G, K, V) each
    if is_causal:
        q = cut(q, width)
        readers = (q * from_start).unbind(1)
    state, read = S.reshape(-1, *S.shape[-2:]), []
    for i, fade in enumerate(from_start[..., -1:, :].unbind(1)):
        if is_causal:
            read.append(readers[i] @ state)
        state = fade * state + added[i]
    S = state.view(S.shape)
    if not is_causal:
        return q @ S, S
    # Sums of only the terms between two tokens: after a very strong decay, differences of sums from the start would
    # lose all digits of the later terms. `tril` removes pairs with the future whatever they hold, also infinity.
    between = log_decay.expand(*log_decay.shape[:-1], width).tril(-1).cumsum(-2).exp()
    weights = ((q @ k.mT) * between).tril()
    o = torch.stack(read, 1) + weights @ v
    return o.reshape(*lead, N + behind, -1)[..., :N, :], S


class Step(Gate):
    r"""$\Delta = \mathrm{softplus}(x W^T + b)$, the duration of a token; softplus(b) starts log-uniform in [0.001, 0.1]
    (Dao & Gu 2024, arXiv:2405.21060)."""

    trained = 1

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(step_biases(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        return softplus(self._numbers(x) + self.bias[:, None])


class Rate(Gate):
    r"""$\alpha = e^A$, how fast a head's state fades, the same for every token: it starts uniform in [1, 16] (Dao & Gu
    2024, arXiv:2405.21060)."""

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        self.log_rate = nn.Parameter(rate_logarithms(self.num_heads, generator, kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N"]:
        self._check(x)
        return self.log_rate.exp()[:, None].expand(len(x), -1, x.shape[1])

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> Cost:
        """The closed form; x is not used."""
        return Cost(trained=H)


@closed_form
def ssd_cost(call: CostedCall, *, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `step` and `rate` given, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `chunk` and larger, and no width is 1.
    """
    return memory_cost(call, partial(_chunks_cost, chunk=chunk), erase=0)


def _chunks_cost(call: CostedCall, *, chunk: int) -> Cost:
    """The cost in n chunks of C tokens."""
    G, N, K, V = call.sizes
    C, n = equal_chunks(N, chunk)
    rows = G * n * C
    if not call.causal:
        return product(rows * K * V) + read_at_end_cost(call)
    written = product(rows * K * V, 2 * int(n != 1))  # a lone chunk's state is not read
    read = product(rows * C * K, 2 * call.reach) + product(rows * C * V) + product(rows * K * V, 0)
    return written + read + Cost(backward=2 * G * C * K * V * (2 * n - 1))


MECHANISM = Mechanism(
    name="ssd",
    family="recurrent",
    source="Dao & Gu 2024, arXiv:2405.21060",
    reference=state_space_duality_reference,
    fast=state_space_duality,
    cost=ssd_cost,
    positional=True,
    signed=True,
    gates={"step": Step, "rate": Rate},
)
