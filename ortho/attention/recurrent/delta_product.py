r"""DeltaProduct: several steps of the delta rule a token (Siems et al. 2025, arXiv:2502.10297, equation 5).

With $n_h$ keys $k_{t,j}$, values $v_{t,j}$ and write strengths $\beta_{t,j}$ a token,

$$S_{t,j} = (I - \beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + \beta_{t,j} k_{t,j} v_{t,j}^T, \qquad S_{t,0} = S_{t-1,n_h},
\qquad o_t = S_{t,n_h}^T q_t .$$

That is the delta rule on a sequence $n_h$ times as long, read after every $n_h$-th key. A token multiplies the memory
by a product of $n_h$ transitions: for $\beta$ up to 2, by any orthogonal matrix that $n_h$ reflections make.
"""

from typing import Any, ClassVar

import torch
from torch.nn.functional import linear

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho._weights import new_weight
from ortho.attention.chunking import CHUNK, chunks, default_chunk, pad_tokens
from ortho.attention.mechanism import AttentionCost, Mechanism
from ortho.attention.operands import attention_form
from ortho.attention.recurrent import memory
from ortho.attention.recurrent.delta_cost import Part, division_cost, read_at_end_cost, write_cost
from ortho.attention.recurrent.delta_kernels import Write
from ortho.gates import Gate, GateCost


def _by_step(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    more_keys: Tensor | None,
    more_values: Tensor | None,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(keys, values, strengths, mask of keys) with a row a step."""
    steps = 1
    if more_keys is not None and more_values is not None:
        steps += more_keys.shape[-2]
        k, v = (
            torch.cat([first[..., None, :], later.to(first.dtype)], -2).flatten(-3, -2)
            for first, later in ((k, more_keys), (v, more_values))
        )
    beta = beta if beta is None else beta.flatten(-2)
    return k, v, beta, attn_mask if attn_mask is None else attn_mask.repeat_interleave(steps, -1)


def _check(
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
    """Refuse what has not the same number of steps for each token, and what `memory.check_writes` refuses."""
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
    memory.gate("beta", beta, k, (*k.shape[:-1], steps))
    k, v, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    memory.check_writes(q, k, v, attn_mask=attn_mask, beta=beta, normalise=normalise)


def _later(name: str, value: Tensor, first: Tensor) -> int:
    """How many operands a token has behind its first; TypeError or ValueError unless they are like that."""
    _checks.float_tensor(name, value)
    more = value.shape[-2] if value.dim() > 1 else 0
    if not more:
        raise ValueError(f"{name}: expected shape (..., M, more, width), more >= 1, got {tuple(value.shape)}")
    memory.gate(name, value, first, (*first.shape[:-1], more, first.shape[-1]))
    _checks.finite(name, value)
    return more


@attention_form(fixed_state=True, check=_check)
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
    r"""The recurrence, one step after the other.

    A token's steps are (k, v) and those of `more_keys` and `more_values`, which come together; without them it has one,
    and this is the delta rule. `beta` in [0, 2] has one number a step, and is 1 by default. All else is as in
    `delta_rule_reference`: keys are divided by their lengths unless `normalise` is False, and the state is
    (S (..., K, V),) in float32 at least.

    Raises TypeError or ValueError, naming the argument, for operands that do not fit together; on the CPU also for
    gates outside their range and, without `normalise`, for keys with $\beta |k|^2 > 2$.
    """
    keys, values, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = memory.prepared(
        q,
        keys,
        values,
        beta,
        None,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _by_token(*x, steps=steps) if is_causal else memory.recurrence(*x, is_causal=False)
    return o, (S,)


def _by_token(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, _: Tensor | None, S: Tensor, *, steps: int
) -> tuple[Tensor, Tensor]:
    """(o, the memory after the last step): each token writes its keys, and is answered."""
    tokens = [operand.unflatten(-2, (-1, steps)).unbind(-3) for operand in (k, v)]
    betas = (None,) * q.shape[-2] if beta is None else beta.unflatten(-1, (-1, steps)).unbind(-2)
    rows = []
    for query, keys, values, strengths in zip(q[..., None, :].unbind(-3), *tokens, betas, strict=True):
        o, S = memory.recurrence(query, keys, values, strengths, None, S, is_causal=False)
        rows.append(o)
    return torch.cat(rows, -2), S


@attention_form(fixed_state=True, check=_check)
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
    """`delta_product_reference` by matrix products over chunks of at most `chunk` steps, though of no part of a token.

    What is written is the delta rule's, on the longer sequence; queries are answered for each token alone. It cannot be
    differentiated twice; the reference can.
    """
    keys, values, beta, attn_mask = _by_step(k, v, beta, more_keys, more_values, attn_mask)
    steps = keys.shape[-2] // k.shape[-2]
    x = memory.prepared(
        q,
        keys,
        values,
        beta,
        None,
        normalise=normalise,
        attn_mask=attn_mask,
        scale=scale,
        initial_state=initial_state,
    )
    o, S = _in_chunks(*x, steps=steps, is_causal=is_causal, chunk=default_chunk(k) if chunk is None else chunk)
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
    """(o, the memory after the last step)."""
    *lead, tokens = k.shape[:-1]
    tokens //= steps
    width, behind = chunks(tokens, max(1, chunk // steps))  # of a chunk, in tokens
    beta = torch.ones_like(k[..., 0]) if beta is None else beta

    def cut(tensor: Tensor, rows: int = steps) -> Tensor:  # (..., rows a token, width) -> (G, n, C, width)
        n = (tokens + behind) // width
        return pad_tokens(tensor, rows * behind).reshape(-1, n, rows * width, tensor.shape[-1])

    shape, k = S.shape, cut(k)
    written, before, S = Write.apply(k, cut(v), cut(beta[..., None]), S.reshape(-1, *shape[-2:]), None)
    S = S.view(shape)
    if not is_causal:
        return q @ S, S
    q = cut(q, 1)
    future = torch.ones(width, width, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(steps, 1)
    weights = (q @ k.mT).masked_fill(future, 0)  # (G, n, tokens, steps) of a chunk
    o = q @ before + weights @ written
    return o.reshape(*lead, tokens + behind, -1)[..., :tokens, :], S


class _Steps(Gate):
    """One product x W^T, and what the subclass makes of it. For more steps: a subclass with another number."""

    steps: ClassVar[int] = 2
    given: ClassVar[int] = 0  # steps that have theirs from elsewhere
    wide: ClassVar[bool] = False  # whether a step and head has d/H numbers, not one
    operations: ClassVar[int] = 0  # scalar operations a number, forward as backward
    kept: ClassVar[int] = 0  # numbers that autograd keeps for each

    @classmethod
    def _rows(cls, d: Size, H: Size) -> Size:
        """The numbers made for a token."""
        return (cls.steps - cls.given) * (d if cls.wide else H)

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        rows = self._rows(self.d_model, self.num_heads)
        self.weight = new_weight(rows, self.d_model, generator=generator, **kind)

    def _numbers(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more width"]:
        made = linear(x, self.weight).unflatten(-1, (self.num_heads, self.steps - self.given, -1))
        return made.transpose(1, 2)

    @classmethod
    def cost(cls, B: Size, N: Size, d: Size, H: Size, *, input_grad: bool = True, itemsize: int = 4) -> GateCost:
        rows = cls._rows(d, H)
        product, numbers = 2 * B * N * d * rows, B * N * rows
        return GateCost(
            forward=product,
            backward=(1 + input_grad) * product,
            elementwise_forward=cls.operations * numbers,
            elementwise_backward=cls.operations * numbers + (B * N * d if input_grad else 0),
            saved_bytes=itemsize * cls.kept * numbers,
            decode=2 * B * d * rows,
            trained=d * rows,
        )


class StepStrengths(_Steps):
    r"""$\beta = 2 \sigma(x W^T)$ in (0, 2), one for each of a token's steps: x (B, N, d) -> (B, H, N, steps)."""

    operations = 2  # sigmoid, product
    kept = 1

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N steps"]:
        # Copied before anything is made of it, so that autograd keeps one copy, laid out as it is read.
        return self._numbers(x)[..., 0].contiguous().sigmoid() * 2


class LaterOperands(_Steps):
    """The keys, or the values, of a token's steps after the first: x (B, N, d) -> (B, H, N, steps - 1, d/H)."""

    given = 1
    wide = True

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N more K"]:
        return self._numbers(x)


@checked
def delta_product_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    steps: Size = 2,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with `beta`, and with the keys and values of so many `steps` a token.

    Those of the later steps come from gates and need a gradient, whether or not the projected queries and keys do
    (`qk_grad`). With symbols, N is a multiple of the tokens in a chunk, and no width is 1.
    """
    G, item = B * H, max(itemsize, 4)
    keys = G * N * steps
    width = max(1, chunk // steps)  # of a chunk, in tokens
    mask = 0
    if form == "reference":
        rest, decode = _recurrence_cost(G, N, K, V, steps, causal, qk_grad), 2 * G * K * V * (2 * steps + 1)
    else:
        width, behind = chunks(N, width) if isinstance(N, int) else (width, 0)
        number = (N + behind) // width if isinstance(N, int) else N / width
        rest = _chunks_cost(G, N, K, V, steps, width, number, causal, qk_grad)
        decode = _chunks_cost(G, 1, K, V, steps, 1, 1, True, qk_grad).forward
        mask = width**2 * steps if causal else 0  # the steps that a token does not see, a byte each
    total = rest + division_cost(keys + G * N, K, keys + (G * N if qk_grad else 0))
    return AttentionCost(
        forward=total.forward,
        backward=total.backward,
        elementwise_forward=total.elementwise_forward,
        elementwise_backward=total.elementwise_backward,
        saved_bytes=item * total.saved + mask,
        decode=decode,
        state_bytes=item * G * K * V,
    )


# Below: G = B H, the sequences; a flag counts as 0 or 1.


def _recurrence_cost(G: Size, N: Size, K: Size, V: Size, steps: Size, causal: bool, qk_grad: bool) -> Part:
    """A step a row, with a read after each token's last, or after the last of all for every query."""
    rows, reads, memory = G * N * steps, G * N, G * K * V
    return Part(
        forward=(4 * rows + 2 * reads) * K * V,  # what a key holds, what is written; what is read
        # No gradient reaches the first memory.
        backward=(8 * rows + (4 if qk_grad else 2) * reads) * K * V - 2 * memory,
        elementwise_forward=rows * (2 * V + K * V),  # error, strength, sum
        # Strengths' two products, signs of the errors, sums; keys are used twice, and so is each memory but the last,
        # three times where it is read
        elementwise_backward=rows * (3 * V + (V if V != 1 else 0) + K)
        + (N * steps - 1) * memory
        + ((N - 1) * memory if causal else 0),
        # Queries, keys, strengths, errors before and after them; every memory, the last for the queries' gradient alone
        saved=reads * K + rows * (K + 1 + 2 * V) + (N * steps + qk_grad) * memory,
    )


def _chunks_cost(
    G: Size, N: Size, K: Size, V: Size, steps: Size, width: Size, number: Size, causal: bool, qk_grad: bool
) -> Part:
    tokens = G * number * width  # with what is behind the end
    rows = tokens * steps
    seen = rows * width  # pairs of a token and a key
    write = write_cost(G, K, V, width * steps, number)
    if not causal:
        return write + read_at_end_cost(G, N, K, V, qk_grad)
    return write + Part(
        forward=2 * seen * (K + V) + 2 * tokens * K * V,
        backward=2 * seen * (K + 2 * V) + 2 * tokens * K * V + (2 * seen * K + 2 * tokens * K * V if qk_grad else 0),
        elementwise_forward=seen + tokens * V,
        # blocked; the sums of the gradients of keys and of queries
        elementwise_backward=seen + rows * K + (tokens * K if qk_grad else 0),
        saved=tokens * K + seen,
    )


MECHANISM = Mechanism(
    name="delta-product",
    family="memory",
    source="Siems et al. 2025, arXiv:2502.10297",
    reference=delta_product_reference,
    fast=delta_product,
    causal=True,
    exact=False,
    cost=delta_product_cost,
    positional=True,
    signed=True,
    gives_weights=False,  # it has further values of its own
    gates={"beta": StepStrengths, "more_keys": LaterOperands, "more_values": LaterOperands},
)
