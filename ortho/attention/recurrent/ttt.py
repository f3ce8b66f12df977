r"""A memory that learns while it reads, by gradient descent on a loss of its predictions, in mini-batches of tokens.

The memory S (K, V) predicts the value of a key, $p = S^T k$, and each token moves it against the gradient $k \psi^T$
of a loss of that prediction (`ttt_losses`). The gradients of a mini-batch are all taken at the memory $S_0$ from
before it (Sun et al. 2024, arXiv:2407.04620, sections 2.1 and 2.4):

$$S_t = S_{t-1} - \eta_t k_t \psi_t^T, \qquad \psi_t = \psi(S_0^T k_t, v_t), \qquad o_t = S_t^T q_t .$$

So they do not depend on each other, and $o_t = S_0^T q_t - \sum_{i \le t} \eta_i (k_i^T q_t)\, \psi_i$ over the
mini-batch. Mini-batches are counted from the start of the sequence, and their size changes the result. With the squared
loss and mini-batches of one token this is the delta rule. Steps that are all taken from $S_0$ may overshoot together:
with the squared loss or Huber's a mini-batch moves two memories no further apart if its $\eta_i |k_i|^2$ sum to at
most 2; beyond that it can.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import hidden_keys, working
from ortho.attention.recurrent.memory import gate, unit
from ortho.attention.recurrent.ttt_cost import ttt_cost
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, HuberNorm, Squared, TokenLoss
from ortho.gates import WriteStrength

SQUARED = Squared()
BATCH = 16  # tokens in a mini-batch (Sun et al. 2024, section 2.4)


class StepSize(WriteStrength):
    r"""$\eta = \sigma(x W^T) / 16$: a mini-batch moves the memory by a mean of its gradients, and cannot overshoot."""

    maximum: ClassVar[float] = 1 / BATCH


class _Memory(NamedTuple):
    """The memory before a mini-batch, and its p tokens so far: full, it waits for the next token."""

    S: Float[Tensor, "*batch K V"]
    k: Float[Tensor, "*batch p K"]
    steps: Float[Tensor, "*batch p V"]  # eta psi
    v: Float[Tensor, "*batch p V"]
    hidden: Bool[Tensor, "*batch p"]

    @property
    def now(self) -> Float[Tensor, "*batch K V"]:
        """The memory after the last token."""
        return self.S - self.k.mT @ self.steps if self.k.shape[-2] else self.S


class _Operands(NamedTuple):
    q: Float[Tensor, "*batch N K"]
    k: Float[Tensor, "*batch M K"]
    v: Float[Tensor, "*batch M V"]
    eta: Float[Tensor, "*batch M 1"]
    hidden: Bool[Tensor, "*batch M"]
    memory: _Memory


@checked(shapes=False)
def ttt_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    batch: int = BATCH,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Token after token: predict with the memory from before the mini-batch, write, read.

    `eta` are the steps, 1 / batch by default: the mean of the mini-batch's gradients. Queries and keys are made vectors
    of length 1 unless `normalise` is False. `scale`, 1 by default, multiplies the outputs. A call that is not causal
    lets every query read the memory after the last key. A masked key keeps its place in its mini-batch, writes nothing,
    and is no candidate of the contrastive loss.

    The state is (S (..., K, V) from before the mini-batch, its keys so far (..., p, K), its steps so far eta psi
    (..., p, V)), in float32 at least, 1 <= p <= batch; of a loss that looks back at earlier values also these
    (..., p, V), and which of them are masked (..., p). The memory after the last token is S - keys^T steps.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together, an `attn_mask` that is
    not one row for all queries, and a `batch` below 1; on the CPU also for an `eta` outside [0, 2], and, where keys are
    not normalised, for a step that overshoots by more than it corrects, eta |k|^2 > 2 (of losses whose curvature does
    not depend on the values).
    """
    dtype = q.dtype
    with no_autocast(q):
        q, k, v, rates, hidden, memory = _operands(
            q, k, v, loss, eta, batch, normalise, is_causal, attn_mask, scale, initial_state
        )
        before, S, outputs = memory.S, memory.now, []
        keys, steps, values, absent = ([x] if x.numel() else [] for x in memory[1:])
        tokens = zip(*(x.split(1, -2) for x in (k, v, rates)), hidden.split(1, -1), strict=True)
        queries, begun = q.split(1, -2), memory.k.shape[-2]
        for t, (key, value, rate, mask) in enumerate(tokens):
            if (begun + t) % batch == 0:
                before, keys, steps, values, absent = S, [], [], [], []
            keys.append(key)
            values.append(value)
            absent.append(mask)
            seen = slice(0 if loss.looks_back else -1, None)
            psi = loss.gradient(key @ before, torch.cat(values[seen], -2), torch.cat(absent[seen], -1))
            steps.append(_steps(rate, psi))
            S = S - key.mT @ steps[-1]
            if is_causal:
                outputs.append(queries[t] @ S)
        o = (torch.cat(outputs, -2) if is_causal else q @ S).to(dtype)
    if not return_state:
        return o
    k, v, written = (torch.cat(x, -2) for x in (keys, values, steps))
    return o, _state(_Memory(before, k, written, v, torch.cat(absent, -1)), loss)


@checked(shapes=False)
def ttt_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    batch: int = BATCH,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`ttt_attention_reference` by products over whole mini-batches; arguments, state and errors are the same."""
    dtype = q.dtype
    with no_autocast(q):
        q, k, v, rates, hidden, memory = _operands(
            q, k, v, loss, eta, batch, normalise, is_causal, attn_mask, scale, initial_state
        )
        sizes, outputs = _sizes(memory.k.shape[-2], k.shape[-2], batch), []
        tokens = zip(*(x.split(sizes, -2) for x in (k, v, rates)), hidden.split(sizes, -1), strict=True)
        queries = q.split(sizes, -2) if is_causal else ()
        for i, (key, value, rate, mask) in enumerate(tokens):
            memory = _extended(memory, key, value, rate, mask, loss, batch)
            if is_causal:
                pairs = (queries[i] @ memory.k.mT).tril(memory.k.shape[-2] - sizes[i])
                outputs.append(queries[i] @ memory.S - pairs @ memory.steps)
        o = (torch.cat(outputs, -2) if is_causal else q @ memory.now).to(dtype)
    return (o, _state(memory, loss)) if return_state else o


def memory_now(state: State) -> Float[Tensor, "*batch K V"]:
    """The memory after the last token, from the state that a call has returned."""
    S, keys, steps = state[:3]
    return S - keys.mT @ steps


def _extended(
    memory: _Memory, k: Tensor, v: Tensor, rates: Tensor, hidden: Tensor, loss: TokenLoss, batch: int
) -> _Memory:
    """The memory with n more tokens in its mini-batch; if that is full, in the next one."""
    begun = memory.k.shape[-2] % batch > 0
    before = memory.S if begun else memory.now
    if begun and loss.looks_back:
        v, hidden = torch.cat([memory.v, v], -2), torch.cat([memory.hidden, hidden], -1)
    steps = _steps(rates, loss.gradient(k @ before, v, hidden))
    if begun:
        k, steps = torch.cat([memory.k, k], -2), torch.cat([memory.steps, steps], -2)
    return _Memory(before, k, steps, v, hidden)


def _steps(rates: Tensor, psi: Tensor) -> Tensor:
    """What is written. ValueError, on the CPU, unless it is finite: products with weights of 0 would make it NaN in the
    rows of earlier tokens."""
    steps, most = rates * psi, torch.finfo(psi.dtype).max
    _checks.within("v", "values whose steps are", steps, -most, most)
    return steps


def _sizes(begun: int, length: int, batch: int) -> list[int]:
    """How many tokens go into each mini-batch, the first of which has `begun` already."""
    first = min(length, batch - begun % batch)
    whole, rest = divmod(length - first, batch)
    return [first, *[batch] * whole, *([rest] if rest else [])]


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loss: TokenLoss,
    eta: Tensor | None,
    batch: int,
    normalise: bool,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> _Operands:
    """What the loops take: checked, in float32 at least, hidden keys with steps of size 0."""
    _checks.qkv(q, k, v, attn_mask, is_causal)
    _checks.scale_factor(scale)
    _checks.positive_int("batch", batch)
    if not isinstance(loss, TokenLoss):
        raise TypeError(f"loss: expected a TokenLoss, got {_checks.describe(loss)}")
    gate("eta", eta, k, k.shape[:-1])
    rates = k.new_full(k.shape[:-1], 1 / batch) if eta is None else eta
    _checks.within("eta", "steps", rates, 0.0, 2.0)
    hidden, dtype = hidden_keys(attn_mask, k, initial_state), q.dtype
    q, k, v = (working(x) for x in (q, k, v))
    rates = working(rates.to(k.dtype))
    if hidden is None:
        hidden = torch.zeros(k.shape[:-1], dtype=torch.bool, device=k.device)
    else:
        rates, v = rates.masked_fill(hidden, 0), v.masked_fill(hidden[..., None], 0)
    if normalise:
        q, k = unit(q, "q"), unit(k, "k")
    elif loss.curvature is not None:
        # Rounding, of the caller's keys and of this sum, may leave a unit key a little longer.
        most = 2 + 8 * max(torch.finfo(dtype).eps, torch.finfo(k.dtype).eps * k.shape[-1])
        overshoot = loss.curvature * rates.detach() * k.detach().square().sum(-1)
        _checks.within("k", "eta |k|^2", overshoot, 0.0, most)
    if scale is not None:
        q = q * scale
    return _Operands(q, k, v, rates[..., None], hidden, _memory(initial_state, k, v, hidden, loss, batch))


def _memory(state: State | None, k: Tensor, v: Tensor, hidden: Tensor, loss: TokenLoss, batch: int) -> _Memory:
    """The memory that a state holds; without one an empty memory."""
    lead, K, V = k.shape[:-2], k.shape[-1], v.shape[-1]
    if state is None:
        return _Memory(v.new_zeros(*lead, K, V), k[..., :0, :], v[..., :0, :], v[..., :0, :], hidden[..., :0])
    names = ("S", "keys", "steps", "values", "masked")[: 5 if loss.looks_back else 3]
    tensors = _checks.state(state, *names)
    p = tensors[1].shape[-2] if tensors[1].dim() > 1 else 0
    shapes = [(*lead, K, V), (*lead, p, K), (*lead, p, V), (*lead, p, V), (*lead, p)][: len(names)]
    dtypes = [v.dtype] * 4 + [torch.bool]
    fits = all(x.shape == shape and x.dtype == dtype for x, shape, dtype in zip(tensors, shapes, dtypes, strict=False))
    if not fits or not 1 <= p <= batch:
        dtype = str(v.dtype).removeprefix("torch.")
        expected = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
        raise ValueError(
            f"initial_state: expected {dtype} {expected} of 1 to {batch} tokens, got {_checks.describe(tensors)}"
        )
    S, keys, steps = tensors[:3]
    values, masked = tensors[3:] if loss.looks_back else (v[..., :0, :], hidden[..., :0])
    return _Memory(S, keys, steps, values, masked)


def _state(memory: _Memory, loss: TokenLoss) -> State:
    # Copies: the last tokens' keys and values are views, and would hold on to those of the whole sequence.
    return tuple(x.clone() for x in memory[: 5 if loss.looks_back else 3])


def _mechanism(name: str, loss: TokenLoss, source: str) -> Mechanism:
    return Mechanism(
        name=name,
        family="memory",
        source=source,
        reference=partial(ttt_attention_reference, loss=loss),
        fast=partial(ttt_attention, loss=loss),
        causal=True,
        exact=False,
        cost=partial(ttt_cost, loss=loss, batch=BATCH),
        positional=True,
        signed=True,
        gates={"eta": StepSize},
    )


MECHANISMS = (
    _mechanism("ttt", Squared(), "Sun et al. 2024, arXiv:2407.04620"),
    _mechanism("ttt-huber", Huber(), "Behrouz et al. 2025, arXiv:2504.13173"),
    _mechanism("ttt-huber-norm", HuberNorm(), "Behrouz et al. 2025, arXiv:2504.13173"),
    _mechanism("ttt-contrastive", Contrastive(), "van den Oord et al. 2018, arXiv:1807.03748"),
)
