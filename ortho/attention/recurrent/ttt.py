r"""A state that learns while it reads, by gradient descent on a loss of its predictions, in mini-batches of tokens.

The state S (K, V) predicts the value of a key, $p = S^T k$, and each token moves it against the gradient $k \psi^T$
of a loss of that prediction (`ttt_losses`). The gradients of a mini-batch are all taken at the state $S_0$
before it (Sun et al. 2024, arXiv:2407.04620, sections 2.1 and 2.4):

$$S_t = S_{t-1} - \eta_t k_t \psi_t^T, \qquad \psi_t = \psi(S_0^T k_t, v_t), \qquad o_t = S_t^T q_t .$$

So they do not depend on each other, and $o_t = S_0^T q_t - \sum_{i \le t} \eta_i (k_i^T q_t)\, \psi_i$ over the
mini-batch. Mini-batches are counted from the start of the sequence, and their size changes the result. With the squared
loss and mini-batches of one token this is the delta rule. Steps that are all taken from $S_0$ may overshoot together.
With the squared loss or Huber's, a mini-batch cannot move two states further apart if its $\eta_i |k_i|^2$ sum to at
most 2; beyond that it can.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import torch

from ortho import checks
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.call import Call, attention_function
from ortho.attention.mechanism import Mechanism
from ortho.attention.recurrent.state import check_growth
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared, TokenLoss
from ortho.attention.scores import unit
from ortho.gates import WriteStrength

SQUARED = Squared()
MINI_BATCH = 16  # tokens in a mini-batch (Sun et al. 2024, section 2.4)


class _State(NamedTuple):
    """S before a mini-batch, and the p tokens in it so far; a full one is folded into S when the next token comes."""

    S: Float[Tensor, "*batch K V"]
    k: Float[Tensor, "*batch p K"]
    steps: Float[Tensor, "*batch p V"]  # eta psi
    v: Float[Tensor, "*batch p V"]
    hidden: Bool[Tensor, "*batch p"]

    @property
    def now(self) -> Float[Tensor, "*batch K V"]:
        """S after the last token."""
        return self.S - self.k.mT @ self.steps if self.k.shape[-2] else self.S

    def parts(self, loss: TokenLoss) -> State:
        """The state as a call returns it."""
        # Copies: the last tokens' keys and values are views, which would keep the whole sequence's in memory.
        return tuple(x.clone() for x in self[: 5 if loss.looks_back else 3])


@attention_function(keeps="sums")
def ttt_attention_reference(
    call: Call,
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    mini_batch_size: int = MINI_BATCH,
    qk_l2norm: bool = True,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """Token by token: predict with the state before the mini-batch, write, read.

    `eta` are the step sizes, by default 1 / mini_batch_size, which takes the mean of the mini-batch's gradients.
    Queries and keys are scaled to length 1 unless `qk_l2norm` is False. `scale`, 1 by default, multiplies the outputs.
    In a call that is not causal every query reads the state after the last key. A masked key keeps its place in its
    mini-batch, but writes nothing and is not a candidate of the contrastive loss.

    The state is (S (..., K, V) before the mini-batch, its keys so far (..., p, K), its steps so far eta psi
    (..., p, V)), in float32 at least, 1 <= p <= mini_batch_size; with a loss that looks back at earlier values also
    these (..., p, V), and which of them are masked (..., p). S after the last token is S - keys^T steps.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together, and for an `attn_mask`
    that is not one row for all queries; on the CPU also for an `eta` outside [0, 2], and, where keys are not
    normalised, for a step that overshoots by more than it corrects, eta |k|^2 > 2 (for losses whose curvature does not
    depend on the values).
    """
    q, k, v, rates, hidden, state = _operands(call, loss, eta, mini_batch_size, qk_l2norm)
    before, S, outputs = state.S, state.now, []
    keys, steps, values, masks = ([x] if x.numel() else [] for x in state[1:])
    tokens = zip(*(x.split(1, -2) for x in (k, v, rates)), hidden.split(1, -1), strict=True)
    queries, begun = q.split(1, -2), state.k.shape[-2]
    for t, (key, value, rate, mask) in enumerate(tokens):
        if (begun + t) % mini_batch_size == 0:
            before, keys, steps, values, masks = S, [], [], [], []
        keys.append(key)
        values.append(value)
        masks.append(mask)
        seen = slice(0 if loss.looks_back else -1, None)
        psi = loss.gradient(key @ before, torch.cat(values[seen], -2), torch.cat(masks[seen], -1))
        steps.append(rate * psi)
        S = S - key.mT @ steps[-1]
        if call.is_causal:
            outputs.append(queries[t] @ S)
    k, written, v = (torch.cat(x, -2) for x in (keys, steps, values))
    o = torch.cat(outputs, -2) if call.is_causal else q @ S
    return o, _State(before, k, written, v, torch.cat(masks, -1)).parts(loss)


@attention_function(keeps="sums")
def ttt_attention(
    call: Call,
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    mini_batch_size: int = MINI_BATCH,
    qk_l2norm: bool = True,
) -> tuple[Float[Tensor, "*batch N V"], State]:
    """`ttt_attention_reference` by products over whole mini-batches; arguments, state and errors are the same."""
    q, k, v, rates, hidden, state = _operands(call, loss, eta, mini_batch_size, qk_l2norm)
    sizes, outputs = _sizes(state.k.shape[-2], k.shape[-2], mini_batch_size), []
    tokens = zip(*(x.split(sizes, -2) for x in (k, v, rates)), hidden.split(sizes, -1), strict=True)
    queries = q.split(sizes, -2) if call.is_causal else ()
    for i, (key, value, rate, mask) in enumerate(tokens):
        begun = state.k.shape[-2] % mini_batch_size > 0
        before = state.S if begun else state.now
        if begun and loss.looks_back:
            value, mask = torch.cat([state.v, value], -2), torch.cat([state.hidden, mask], -1)
        steps = rate * loss.gradient(key @ before, value, mask)
        if begun:
            key, steps = torch.cat([state.k, key], -2), torch.cat([state.steps, steps], -2)
        state = _State(before, key, steps, value, mask)
        if call.is_causal:
            pairs = (queries[i] @ state.k.mT).tril(state.k.shape[-2] - sizes[i])
            outputs.append(queries[i] @ state.S - pairs @ state.steps)
    o = torch.cat(outputs, -2) if call.is_causal else q @ state.now
    return o, state.parts(loss) if call.return_state else ()


def state_now(state: State) -> Float[Tensor, "*batch K V"]:
    """S after the last token, from the state that a call has returned."""
    S, keys, steps = state[:3]
    return S - keys.mT @ steps


def _sizes(begun: int, length: int, mini_batch_size: int) -> list[int]:
    """The number of tokens that go into each mini-batch; the first one has `begun` tokens already."""
    checks.untraced("ttt_attention")
    first = min(length, mini_batch_size - begun % mini_batch_size)
    whole, rest = divmod(length - first, mini_batch_size)
    return [first, *[mini_batch_size] * whole, *([rest] if rest else [])]


def _operands(
    call: Call, loss: TokenLoss, eta: Tensor | None, mini_batch_size: int, qk_l2norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, _State]:
    """(q, k, v, steps (..., M, 1), which keys are hidden (..., M), the state) as the loops take them; the steps of
    hidden keys are 0."""
    q, k, v, key_mask = call.q, call.k, call.v, call.key_mask
    checks.positive_int("mini_batch_size", mini_batch_size)
    checks.gate("eta", eta, k.shape[:-1])
    checks.within("eta", "steps", eta, 0, 2)
    rates = k.new_full(k.shape[:-1], 1 / mini_batch_size) if eta is None else eta
    hidden = torch.zeros(k.shape[:-1], dtype=torch.bool, device=k.device) if key_mask is None else ~key_mask
    if not qk_l2norm and loss.curvature is not None:
        check_growth("eta", loss.curvature * rates, k, hidden)
    if key_mask is not None:
        rates, v = rates.masked_fill(hidden, 0), v.masked_fill(hidden[..., None], 0)
    if qk_l2norm:
        q, k = unit(q), unit(k)
    if call.scale is not None:
        q = q * call.scale
    return q, k, v, rates[..., None], hidden, _first(call.state, k, v, hidden, loss, mini_batch_size)


def _first(given: State, k: Tensor, v: Tensor, hidden: Tensor, loss: TokenLoss, mini_batch_size: int) -> _State:
    """The state that a call starts from; an empty one without an `initial_state`."""
    lead, K, V = k.shape[:-2], k.shape[-1], v.shape[-1]
    empty = _State(v.new_zeros(*lead, K, V), k[..., :0, :], v[..., :0, :], v[..., :0, :], hidden[..., :0])
    if not given:
        return empty
    names = ("S", "keys", "steps", "values", "masked")[: 5 if loss.looks_back else 3]
    parts = checks.state(given, *names)
    p = parts[1].shape[-2] if parts[1].dim() > 1 else 0
    checks.expect(1 <= p <= mini_batch_size, "initial_state", f"keys of 1 to {mini_batch_size} tokens", p)
    shapes = ((*lead, K, V), (*lead, p, K), (*lead, p, V), (*lead, p, V), (*lead, p))
    for name, part, shape, like in zip(names, parts, shapes, empty, strict=False):
        checks.carried(name, part, shape, like)
    return _State(*parts, *empty[len(parts) :])


class StepSize(WriteStrength):
    r"""$\eta = \sigma(x W^T) / 16$: a mini-batch moves the state by a mean of its gradients, and cannot overshoot."""

    maximum: ClassVar[float] = 1 / MINI_BATCH


def _mechanism(name: str, loss: TokenLoss, source: str) -> Mechanism:
    return Mechanism(
        name=name,
        family="recurrent",
        source=source,
        reference=partial(ttt_attention_reference, loss=loss),
        fast=partial(ttt_attention, loss=loss),
        positional=True,
        signed=True,
        gates={"eta": StepSize},
        has_weights=isinstance(loss, Squared),  # other losses look at the values
    )


MECHANISMS = (
    _mechanism("ttt", Squared(), "Sun et al. 2024, arXiv:2407.04620"),
    _mechanism("ttt-huber", Huber(), "Behrouz et al. 2025, arXiv:2504.13173"),
    _mechanism("ttt-contrastive", Contrastive(), "van den Oord et al. 2018, arXiv:1807.03748"),
)
