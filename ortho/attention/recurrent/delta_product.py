r"""DeltaProduct: several steps of the delta rule per token (Siems et al. 2025, arXiv:2502.10297, equation 5).

With $n_h$ keys $k_{t,j}$, values $v_{t,j}$ and write strengths $\beta_{t,j}$ per token,

$$S_{t,j} = (I - \beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + \beta_{t,j} k_{t,j} v_{t,j}^T, \qquad S_{t,0} = S_{t-1,n_h},
\qquad o_t = S_{t,n_h}^T q_t .$$

This is the delta rule on a sequence $n_h$ times as long, read after every $n_h$-th key. A token multiplies the state
by a product of $n_h$ transitions. With $\beta$ up to 2, this can be any orthogonal matrix made of $n_h$ reflections.
"""

from functools import partial
from typing import Any, ClassVar

import torch

from ortho import _checks
from ortho._checks import attention_form, gate
from ortho._cost import Cost, product
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.chunking import CHUNK, chunks, cut, default_chunk, equal_chunks
from ortho.attention.mechanism import CostedCall, Mechanism, closed_form
from ortho.attention.recurrent.delta import Write, write_cost
from ortho.attention.recurrent.recurrence import check_writes, memory_cost, prepared, read_at_end_cost, recurrence
from ortho.gates import Gate


def by_step(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    more_keys: Tensor | None,
    more_values: Tensor | None,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(keys, values, strengths, mask of keys) with one row per step."""
    steps = 1
    if more_keys is not None and more_values is not None:
        steps += more_keys.shape[-2]
        k, v = (
            torch.cat([first[..., None, :], later.to(first.dtype)], -2).flatten(-3, -2)
            for first, later in ((k, more_keys), (v, more_values))
        )
    beta = beta if beta is None else beta.flatten(-2)
    return k, v, beta, attn_mask if attn_mask is None else attn_mask.repeat_interleave(steps, -1)


def check_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    beta: Tensor | None = None,
    more_keys: Tensor | None = None,
    more_values: Tensor | None = None,
    normalise: bool = True,
    **_: Any,
) -> None:
    """Refuse operands that differ in their number of steps per token, and what `check_writes` refuses."""
    if (more_keys is None) != (more_values is None):
        given, missing = ("more_values", "more_keys") if more_keys is None else ("more_keys", "more_values")
        raise ValueError(f"{missing}: expected beside {given}, got None")
    steps = 1
    if more_keys is not None and more_values is not None:
        steps += _later("more_keys", more_keys, k)
        if _later("more_values", more_values, v) != steps - 1:
            raise ValueError(
                f"more_values: expected {steps - 1} a token like more_keys, got shape {tuple(more_values.shape)}"
            )
    gate("beta", beta, k, (*k.shape[:-1], steps))
    k, v, beta, attn_mask = by_step(k, v, beta, more_keys, more_values, attn_mask)
    check_writes(q, k, v, attn_mask=attn_mask, beta=beta, normalise=normalise)


def _later(name: str, value: Tensor, first: Tensor) -> int:
    """The number of operands per token after the first one; TypeError or ValueError unless they are like the first."""
    _checks.float_tensor(name, value)
    more = value.shape[-2] if value.dim() > 1 else 0
    if not more:
        raise ValueError(f"{name}: expected shape (..., M, more, width), more >= 1, got {tuple(value.shape)}")
    gate(name, value, first, (*first.shape[:-1], more, first.shape[-1]))
    _checks.finite(name, value)
    return more


@attention_form(fixed_state=True, check=check_steps)
def delta_product_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M steps"] | None = None,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""DeltaProduct by its recurrence, step by step.

    A token's first step is (k, v). `more_keys` and `more_values`, given together, are the later ones; without them this
    is the delta rule. `beta`, in [0, 2], has one number per step, and is 1 by default. All else is as in
    `delta_rule_reference`: keys are divided by their lengths unless `normalise` is False, and the state is
    (S (..., K, V),) in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range and, without `normalise`, for keys with $\beta |k|^2 > 2$.
    """
    keys, values, beta, attn_mask = by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = prepared(q, keys, values, beta, None, attn_mask, scale, initial_state, normalise=normalise)
    o, S = recurrence(*x, is_causal=is_causal, steps=steps)
    return o, (S,)


@attention_form(fixed_state=True, check=check_steps)
def delta_product(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: Float[Tensor, "*batch M steps"] | None = None,
    more_keys: Float[Tensor, "*batch M more K"] | None = None,
    more_values: Float[Tensor, "*batch M more V"] | None = None,
    normalise: bool = True,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`delta_product_reference` by matrix products over chunks of whole tokens, at most `chunk` steps or one token.

    Writing is as in the delta rule, on the longer sequence; reading is done once per token. This form cannot be
    differentiated twice; the reference can.
    """
    keys, values, beta, attn_mask = by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = prepared(q, keys, values, beta, None, attn_mask, scale, initial_state, normalise=normalise)
    o, S = _in_chunks(*x, steps=steps, is_causal=is_causal, chunk=chunk or default_chunk(k))
    return o, (S,)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    _: Tensor | None,
    S: Tensor,
    *,
    steps: int,
    is_causal: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(o, the state after the last step)."""
    width = chunks(k.shape[-2] // steps, max(1, chunk // steps))[0]  # of a chunk, in tokens
    beta = torch.ones_like(k[..., 0]) if beta is None else beta
    k, v, strengths = (cut(x, width * steps) for x in (k, v, beta[..., None]))  # (G, n, C, ·)
    written, before, after = Write.apply(k, v, strengths, S.reshape(-1, *S.shape[-2:]), None)
    after = after.view(S.shape)
    return (read_steps(q, k, written, before, width) if is_causal else q @ after), after


def read_steps(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "G n C K"],
    written: Float[Tensor, "G n C V"],
    before: Float[Tensor, "G n K V"],
    width: int,
) -> Float[Tensor, "*batch N V"]:
    """What queries read from the state before their chunk (`width` tokens), and from its steps up to their token."""
    *lead, N, _ = q.shape
    steps = k.shape[-2] // width
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(steps, 1)
    q = cut(q, width)
    weights = (q @ k.mT).masked_fill(future, 0)  # (G, n, tokens, steps) of a chunk
    o = q @ before + weights @ written
    return o.reshape(*lead, q.shape[1] * width, -1)[..., :N, :]


class _Steps(Gate):
    """A number, or a vector of width d/H, for each of a token's `steps`; a subclass sets another number of steps."""

    steps: ClassVar[int] = 2

    def _by_step(self, x: Float[Tensor, "B N d"], steps: int) -> Float[Tensor, "B H N steps width"]:
        return self._product(x).unflatten(-1, (self.num_heads, steps, -1)).transpose(1, 2)


class StepStrengths(_Steps):
    r"""$\beta = 2 \sigma(x W^T)$ in (0, 2), one for each of a token's steps: x (B, N, d) -> (B, H, N, steps)."""

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return cls.steps * H

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N steps"]:
        # Copied first, so that autograd keeps a single copy, with the layout in which it is read.
        return self._by_step(x, self.steps)[..., 0].contiguous().sigmoid() * 2


class LaterOperands(_Steps):
    """The keys, or the values, of a token's steps after the first: x (B, N, d) -> (B, H, N, steps - 1, d/H)."""

    @classmethod
    def rows(cls, d: Size, H: Size) -> Size:
        return (cls.steps - 1) * d

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more K"]:
        return self._by_step(x, self.steps - 1)


@closed_form
def delta_product_cost(call: CostedCall, *, steps: Size = 2, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `beta`, and with keys and values for `steps` steps per token.

    Those of the later steps come from gates and need a gradient, whether or not the projected queries and keys do
    (`call.qk_grad`). With symbols, N is a multiple of the tokens in a chunk, and no width is 1.
    """
    return memory_cost(call, partial(_chunks_cost, steps=steps, chunk=chunk), steps=steps, k_grad=1)


def _chunks_cost(call: CostedCall, *, steps: Size, chunk: int) -> Cost:
    width, number = equal_chunks(call.N, max(1, chunk // steps))  # in tokens
    write = write_cost(call, width * steps, number)
    return write + (read_steps_cost(call, steps, width, number) if call.causal else read_at_end_cost(call))


def read_steps_cost(call: CostedCall, steps: Size, width: Size, number: Size) -> Cost:
    """The cost of `read_steps` in `number` chunks of `width` tokens."""
    (G, _, K, V), reach = call.sizes, call.reach
    tokens = G * number * width  # with the padding at the end
    seen = tokens * steps * width  # pairs of a token and a key
    return product(seen * K, 1 + reach) + product(seen * V) + product(tokens * K * V, 1 + reach)


MECHANISM = Mechanism(
    name="delta-product",
    family="recurrent",
    source="Siems et al. 2025, arXiv:2502.10297",
    reference=delta_product_reference,
    fast=delta_product,
    cost=delta_product_cost,
    positional=True,
    signed=True,
    gives_weights=False,  # it has further values of its own
    gates={"beta": StepStrengths, "more_keys": LaterOperands, "more_values": LaterOperands},
)
