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
from typing import Any, ClassVar, NamedTuple

import torch

from ortho import _checks
from ortho._checks import attention_form, check_growth, gate
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared, TokenLoss
from ortho.attention.scores import unit
from ortho.gates import WriteStrength

SQUARED = Squared()
BATCH = 16  # tokens in a mini-batch (Sun et al. 2024, section 2.4)


class StepSize(WriteStrength):
    r"""$\eta = \sigma(x W^T) / 16$: a mini-batch moves the state by a mean of its gradients, and cannot overshoot."""

    maximum: ClassVar[float] = 1 / BATCH


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


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    loss: TokenLoss = SQUARED,
    eta: Tensor | None = None,
    batch: int = BATCH,
    qk_l2norm: bool = True,
    **_: Any,
) -> None:
    """Refuse steps that do not fit the keys, are out of range, or overshoot."""
    gate("eta", eta, k, k.shape[:-1])
    if eta is not None:
        _checks.within("eta", "steps", eta, 0.0, 2.0)
    if not qk_l2norm and loss.curvature is not None:
        steps = 1 / batch if eta is None else eta
        check_growth("eta", loss.curvature * steps, k, attn_mask)


@attention_form(fixed_state=True, check=_check)
def ttt_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    batch: int = BATCH,
    qk_l2norm: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """Token by token: predict with the state before the mini-batch, write, read.

    `eta` are the step sizes, by default 1 / batch, which takes the mean of the mini-batch's gradients. Queries and keys
    are scaled to length 1 unless `qk_l2norm` is False. `scale`, 1 by default, multiplies the outputs. In a call that is
    not causal every query reads the state after the last key. A masked key keeps its place in its mini-batch, but
    writes nothing and is not a candidate of the contrastive loss.

    The state is (S (..., K, V) before the mini-batch, its keys so far (..., p, K), its steps so far eta psi
    (..., p, V)), in float32 at least, 1 <= p <= batch; with a loss that looks back at earlier values also these
    (..., p, V), and which of them are masked (..., p). S after the last token is S - keys^T steps.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together, an `attn_mask` that is
    not one row for all queries, and a `batch` below 1; on the CPU also for an `eta` outside [0, 2], and, where keys are
    not normalised, for a step that overshoots by more than it corrects, eta |k|^2 > 2 (for losses whose curvature does
    not depend on the values).
    """
    q, k, v, rates, hidden, state = _prepared(q, k, v, loss, eta, batch, qk_l2norm, attn_mask, scale, initial_state)
    before, S, outputs = state.S, state.now, []
    keys, steps, values, absent = ([x] if x.numel() else [] for x in state[1:])
    tokens = zip(*(x.split(1, -2) for x in (k, v, rates)), hidden.split(1, -1), strict=True)
    queries, begun = q.split(1, -2), state.k.shape[-2]
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
    o = torch.cat(outputs, -2) if is_causal else q @ S
    if not return_state:
        return o
    k, written, v = (torch.cat(x, -2) for x in (keys, steps, values))
    return o, _State(before, k, written, v, torch.cat(absent, -1)).parts(loss)


@attention_form(fixed_state=True, check=_check)
def ttt_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    loss: TokenLoss = SQUARED,
    eta: Float[Tensor, "*batch M"] | None = None,
    batch: int = BATCH,
    qk_l2norm: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`ttt_attention_reference` by products over whole mini-batches; arguments, state and errors are the same."""
    q, k, v, rates, hidden, state = _prepared(q, k, v, loss, eta, batch, qk_l2norm, attn_mask, scale, initial_state)
    sizes, outputs = _sizes(state.k.shape[-2], k.shape[-2], batch), []
    tokens = zip(*(x.split(sizes, -2) for x in (k, v, rates)), hidden.split(sizes, -1), strict=True)
    queries = q.split(sizes, -2) if is_causal else ()
    for i, (key, value, rate, mask) in enumerate(tokens):
        state = _extended(state, key, value, rate, mask, loss, batch)
        if is_causal:
            pairs = (queries[i] @ state.k.mT).tril(state.k.shape[-2] - sizes[i])
            outputs.append(queries[i] @ state.S - pairs @ state.steps)
    o = torch.cat(outputs, -2) if is_causal else q @ state.now
    return (o, state.parts(loss)) if return_state else o


def state_now(state: State) -> Float[Tensor, "*batch K V"]:
    """S after the last token, from the state that a call has returned."""
    S, keys, steps = state[:3]
    return S - keys.mT @ steps


def _extended(
    state: _State, k: Tensor, v: Tensor, rates: Tensor, hidden: Tensor, loss: TokenLoss, batch: int
) -> _State:
    """The state with n more tokens in its mini-batch, or in the next one if that is full."""
    begun = state.k.shape[-2] % batch > 0
    before = state.S if begun else state.now
    if begun and loss.looks_back:
        v, hidden = torch.cat([state.v, v], -2), torch.cat([state.hidden, hidden], -1)
    steps = _steps(rates, loss.gradient(k @ before, v, hidden))
    if begun:
        k, steps = torch.cat([state.k, k], -2), torch.cat([state.steps, steps], -2)
    return _State(before, k, steps, v, hidden)


def _steps(rates: Tensor, psi: Tensor) -> Tensor:
    """What is written. ValueError, on the CPU, if it is not finite: its products with weights of 0 would put NaN into
    the rows of earlier tokens."""
    steps, most = rates * psi, torch.finfo(psi.dtype).max
    _checks.within("v", "values whose steps are", steps, -most, most)
    return steps


def _sizes(begun: int, length: int, batch: int) -> list[int]:
    """The number of tokens that go into each mini-batch; the first one has `begun` tokens already."""
    first = min(length, batch - begun % batch)
    whole, rest = divmod(length - first, batch)
    return [first, *[batch] * whole, *([rest] if rest else [])]


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loss: TokenLoss,
    eta: Tensor | None,
    batch: int,
    qk_l2norm: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, _State]:
    """(q, k, v, steps (..., M, 1), which keys are hidden (..., M), the state) as the loops take them; the steps of
    hidden keys are 0."""
    rates = k.new_full(k.shape[:-1], 1 / batch) if eta is None else eta
    if attn_mask is None:
        hidden = torch.zeros(k.shape[:-1], dtype=torch.bool, device=k.device)
    else:
        hidden = ~attn_mask
        rates, v = rates.masked_fill(hidden, 0), v.masked_fill(hidden[..., None], 0)
    if qk_l2norm:
        q, k = unit(q, "q"), unit(k, "k")
    if scale is not None:
        q = q * scale
    return q, k, v, rates[..., None], hidden, _first(initial_state, k, v, hidden, loss, batch)


def _first(state: State | None, k: Tensor, v: Tensor, hidden: Tensor, loss: TokenLoss, batch: int) -> _State:
    """The state that an `initial_state` holds; an empty state without one."""
    lead, K, V = k.shape[:-2], k.shape[-1], v.shape[-1]
    if state is None:
        return _State(v.new_zeros(*lead, K, V), k[..., :0, :], v[..., :0, :], v[..., :0, :], hidden[..., :0])
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
    return _State(S, keys, steps, values, masked)


class _Sizes(NamedTuple):
    """N tokens in `parts` mini-batches: `whole` ones of `batch` tokens, and one of `rest` if that is not 0."""

    N: Size
    K: Size
    V: Size
    batch: int
    whole: Size
    rest: int

    @property
    def parts(self) -> Size:
        return self.whole + int(self.rest > 0)

    @property
    def last(self) -> int:
        """Tokens of the last mini-batch."""
        return self.rest or self.batch

    @property
    def later(self) -> Size:
        """Tokens after the first mini-batch."""
        return self.N - (self.batch if self.whole else self.rest)


@closed_form
def ttt_cost(call: CostedCall, *, loss: TokenLoss, batch: int) -> Cost:
    """Closed form of one self-attention call with `eta` given, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `batch` and larger.
    """
    (G, N, K, V), item, reach, fast = call.sizes, call.item, call.reach, call.form == "fast"
    back = int(loss.looks_back)
    whole, rest = divmod(N, batch) if isinstance(N, int) else (N / batch, 0)
    s = _Sizes(N, K, V, batch, whole, rest)
    core = (_by_mini_batches if fast else _by_tokens)(s, int(call.causal), reach)

    def seen(tokens: Size) -> Size:
        """Pairs of a prediction and a value that it sees: all in a mini-batch; token by token, those up to its own."""
        return tokens**2 if fast else tokens * (tokens + 1) // 2

    pairs = whole * seen(batch) + seen(rest)
    psi = loss.cost(pairs, V)
    # If k needs no gradient, predictions from the first S, which is empty, need none.
    unreached = (1 - reach) * loss.into_predictions(seen(N - s.later), V)
    other = Cost(
        backward=-unreached,
        decode=_decode(s, loss, fast),
        state_bytes=item * (K * V + s.last * (K + V)) + back * s.last * (item * V + 1),
    )
    return (core + psi + other) * G


def _decode(s: _Sizes, loss: TokenLoss, fast: bool) -> Size:
    """FLOPs of the last token, as a call of its own that starts from a state."""
    begun = s.last - 1 or (0 if s.N == 1 else s.batch)  # tokens of the state's mini-batch
    K, V = s.K, s.V
    predict = 2 * K * V + loss.cost(s.last, V).forward
    if fast:  # a full mini-batch is folded first
        return (2 * begun * K * V if s.last == 1 else 0) + predict + 2 * K * V + 2 * s.last * (K + V)
    return 2 * begun * K * V + predict + 4 * K * V


# Below: S has K V numbers, and a product with it 2 K V FLOPs. The first S is empty, and needs no gradient. A gradient's
# sum over a broadcast axis of length 1 is left out.


def _by_mini_batches(s: _Sizes, causal: int, reach: int) -> Cost:
    N, K, V = s.N, s.K, s.V
    state, pairs = K * V, s.whole * s.batch**2 + s.rest**2
    folded = N - s.last if causal else N
    core = Cost(
        forward=2 * state * (2 * N + folded),  # predict, read, fold
        # Into states through predictions and readings, into steps through folds; into k by all three, and into q.
        backward=2 * state * (s.later + (s.later if causal else N) + folded + reach * (2 * N + folded)),
    )
    if not causal:
        return core
    # What the mini-batch itself adds to what is read: pairs of its tokens, and their product with the steps.
    within = product(pairs * K, 2 * reach) + product(pairs * V, 1 + reach)
    return core + within


def _by_tokens(s: _Sizes, causal: int, reach: int) -> Cost:
    N, K, V = s.N, s.K, s.V
    state = K * V
    return Cost(
        forward=6 * N * state,  # predict, write, read
        backward=2 * state * (s.later + (2 + 3 * reach) * N),
    )


def _mechanism(name: str, loss: TokenLoss, source: str) -> Mechanism:
    return Mechanism(
        name=name,
        family="recurrent",
        source=source,
        reference=partial(ttt_attention_reference, loss=loss),
        fast=partial(ttt_attention, loss=loss),
        cost=partial(ttt_cost, loss=loss, batch=BATCH),
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
