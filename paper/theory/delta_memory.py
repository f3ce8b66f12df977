r"""What memories recall, what rounding changes in their states, and which states they can track.

*Recall.* What a memory answers after M pairs were written: exact expected errors of the linear memory and of the delta
rule. Keys are independent unit vectors of uniform direction in $R^K$; values are independent, with mean 0 and equal
mean squares. Errors are shares of this mean square: a memory that answers 0 has the error 1. The age a of a pair is the
number of pairs written after it. A write fades the memory by `decay`, $\alpha$, and enters its pair with the strength
`beta`. The linear memory adds to what is there, $S \leftarrow \alpha S + \beta k v^T$, and the delta rule erases first,
$S \leftarrow (I - \beta k k^T)\, \alpha S + \beta k v^T$.

The answer to the key $k_j$ is $\sum_i w_i v_i$, $w_i = \beta \alpha^{M-i} k_i^T x_i$, where $x_i$ is $k_j$ in the
linear memory, and by the delta rule $x_M = k_j$, $x_{i-1} = (I - \beta k_i k_i^T) x_i$. With
$E\, k k^T X k k^T = (2 X + \mathrm{tr}(X) I) / (K (K + 2))$ for symmetric X, all $E w_i^2$ are sums of powers.

*Narrow states.* How rounding changes a delta rule's memory over a long sequence, compared with float64. Each step, or
each chunk, rounds the memory that it returns. A rounding adds a relative error u (`rounding_error`), and each step
multiplies the errors so far by $I - \beta k k^T$. For independent unit keys of uniform direction this keeps, on
average, the share $\rho = 1 - \beta (2 - \beta) / K$ of the mean square of the errors, and of the memory, to which a
write adds $\beta^2 |v|^2$ (`expected_error`). For $\beta$ between 0 and 2 errors die out as fast as memories do, and
stay about $u / \sqrt{1 - \rho}$ however long the sequence is. At $\beta = 2$ nothing dies out: the memory grows like
$\sqrt{t}$, and the relative error like $u \sqrt{t / 2}$.

*State tracking.* Parity, and counting around a circle, need eigenvalues below 0. The constructions are exact in real
numbers and use unit keys. A first token writes the start; each symbol then turns the memory.

* Parity, one channel: $1 - \beta k^2 = -1$ for $\beta = 2$ flips the sign at each 1; $\beta = 0$ keeps it at each 0.
* Counting modulo m, two channels: two reflections whose keys are an angle $\pi s / m$ apart turn the plane by
  $2 \pi s / m$. That takes two steps a token (DeltaProduct; Siems et al. 2025, arXiv:2502.10297): the eigenvalues of
  one step are real.
"""

from itertools import pairwise
from math import pi
from typing import Any, NamedTuple

import torch
from scipy.special import ndtr

from ortho._typing import Float, Int, Tensor
from ortho.attention.chunked_recurrence import in_chunks
from ortho.attention.recurrence import token_by_token
from ortho.attention.recurrent.delta import delta_rule
from ortho.checks import expect, one_of
from ortho.theory.estimates import Estimate, estimate
from ortho.theory.transitions import unit_keys

# --------------------------------------------------------------------------------------------------------------- recall

MEMORIES = ("linear", "delta")
VALUES = 16  # numbers of a value in draws


class Answer(NamedTuple):
    """Expectations of an answer, as shares of the values' mean square."""

    own: float  # the product with the value that was written, E o^T v
    square: float  # E |o|^2

    @property
    def error(self) -> float:
        """E |o - v|^2."""
        return 1 - 2 * self.own + self.square


def expected_answer(memory: str, K: int, pairs: int, age: int, *, beta: float = 1.0, decay: float = 1.0) -> Answer:
    r"""The expected answer to the key of the pair of that `age`, 0 for the last one written, after M `pairs`.

    For beta = decay = 1 the error is $(M - 1) / K$ in the linear memory, and by the delta rule
    $2 (1 - \rho^a) - \rho^M (1 - (\sigma / \rho)^a)$ with $\rho = 1 - 1/K$ and $\sigma = 1 - 2 (K + 1) / (K (K + 2))$.
    """
    _gates(memory, beta, decay)
    expect(0 <= age < pairs, "age", f"0 to {pairs - 1} with {pairs} pairs", age)
    fresh = beta * decay**age
    if memory == "linear":
        others = _geometric(decay**2, pairs) - decay ** (2 * age)
        return Answer(fresh, fresh**2 + beta**2 / K * others)
    erased = beta * (2 - beta)
    kept = 1 - erased / K  # the share of the mean square of x that one write keeps
    along = 1 - 2 * beta / K + 2 * beta**2 / (K * (K + 2))  # the same along k_j, without what enters from elsewhere
    square = ((K - 1) * along**age + kept**age) / K  # E (k_j^T x_j)^2
    fading = decay**2 * kept
    later = _geometric(fading, age)
    earlier = decay ** (2 * age + 2) * (kept**age - erased * square) * _geometric(fading, pairs - 1 - age)
    return Answer(fresh * (1 - beta / K) ** age, fresh**2 * square + beta**2 / K * (later + earlier))


def answers(
    memory: str,
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    beta: float = 1.0,
    decay: float = 1.0,
) -> Float[Tensor, "*batch M V"]:
    """The answer to each key after all M pairs of unit keys and values were written in their order."""
    one_of("memory", memory, MEMORIES)
    strength = torch.full_like(k[..., 0], beta)
    log_decay = None if decay == 1 else torch.full_like(strength, decay).log()
    if memory == "delta":
        found: Any = delta_rule(k, k, v, beta=strength, log_decay=log_decay, qk_l2norm=False)
        return found
    empty = v.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    return token_by_token(k, k, v, strength, log_decay, empty, is_causal=False, erase=False)[0]


def sampled_errors(
    memory: str,
    K: int,
    pairs: int,
    *,
    draws: int,
    beta: float = 1.0,
    decay: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[Estimate]:
    """The errors for random keys and normal values, float64, by age; each is the mean of that many `draws`."""
    _gates(memory, beta, decay)
    k = unit_keys(draws, pairs, K, generator=generator)
    v = torch.randn(draws, pairs, VALUES, generator=generator, dtype=torch.float64)
    errors = (answers(memory, k, v, beta=beta, decay=decay) - v).square().mean(-1)  # (draws, M)
    return [estimate(column) for column in errors.flip(-1).mT]


def _geometric(ratio: float, terms: int) -> float:
    """The sum 1 + ratio + ratio^2 + ... of `terms` terms."""
    return terms if ratio == 1 else (1 - ratio**terms) / (1 - ratio)


def _gates(memory: str, beta: float, decay: float) -> None:
    """ValueError for an unknown memory, and for gates outside their range."""
    one_of("memory", memory, MEMORIES)
    for name, value, most in (("beta", beta, 2), ("decay", decay, 1)):
        expect(0 < value <= most, name, f"a number in (0, {most}]", value)


# -------------------------------------------------------------------------------------------------------- narrow states


# The dtypes that the memory is rounded to, and their significant bits. The arithmetic is float32's.
STATES = {torch.float32: 24, torch.bfloat16: 8}
CHUNK = 64


class Operands(NamedTuple):
    """Keys, values and write strengths of some runs, in float32: all states are computed from the same numbers."""

    k: Float[Tensor, "runs N K"]
    v: Float[Tensor, "runs N K"]
    beta: Float[Tensor, "runs N"]


def operands(
    steps: int, K: int, strengths: tuple[tuple[float, float], ...], *, generator: torch.Generator | None = None
) -> Operands:
    """Unit keys of uniform direction, normal values as wide as keys, strengths uniform in [least, most]: one run a
    pair."""
    expect(strengths, "strengths", "one pair at least", "none")
    least, most = torch.tensor(strengths).mT[..., None]  # (runs, 1)
    runs, N = len(strengths), steps
    share = torch.rand(runs, N, generator=generator)
    k = unit_keys(runs, N, K, generator=generator).float()
    return Operands(k, torch.randn(runs, N, K, generator=generator), least + (most - least) * share)


def recurrent(x: Operands, at: list[int], states: tuple[torch.dtype, ...]) -> Float[Tensor, "states marks runs K V"]:
    """The memories after the step counts in `at`, step by step in float32, rounded after each step to every state."""
    k = x.k[..., None].unbind(1)  # (runs, K, 1)
    written, v = (x.beta[..., None] * x.k)[..., None].unbind(1), x.v[:, :, None].unbind(1)
    S = x.v.new_zeros(len(states), *x.k.shape[::2], x.v.shape[-1])
    narrow = [(memory, state) for memory, state in zip(S, states, strict=True) if state != S.dtype]
    found = []
    for start, stop in pairwise([0, *at]):
        for t in range(start, stop):
            S.addcmul_(written[t], v[t] - (k[t] * S).sum(-2, keepdim=True))
            for memory, state in narrow:
                memory.copy_(memory.to(state))
        found.append(S.clone())
    return torch.stack(found, 1)


def chunked(x: Operands, at: list[int], state: torch.dtype) -> Float[Tensor, "marks runs K V"]:
    """The memories after the step counts in `at` by the chunked delta rule, rounded after each chunk to `state`;
    computed in float64 if `state` is float64, otherwise in float32."""
    wide = torch.float64 if state == torch.float64 else torch.float32
    k, v, beta = (operand.to(wide) for operand in x)
    S = v.new_zeros(*k.shape[::2], v.shape[-1])
    found = []
    with torch.no_grad():
        for start, stop in pairwise([0, *at]):
            cuts = [start, stop] if state == wide else range(start, stop + 1, CHUNK)
            for first, last in pairwise(cuts):
                tokens = slice(first, last)
                # not `delta_rule`: float32's unit keys are a little too long for its check
                _, S = in_chunks(k[:, -1:], k[:, tokens], v[:, tokens], beta[:, tokens], None, S, is_causal=False)
                S = S.to(state).to(wide)
            found.append(S)
    return torch.stack(found)


def rounding_error(bits: int) -> float:
    """The error of rounding normal numbers to `bits` significant bits: root mean square of errors over that of numbers.

    The error of a number in [2^e, 2^(e+1)) is uniform within 2^(e - bits) on either side.
    """
    exponents = range(-20, 4)  # all but 1e-5 of the numbers, and all that count
    square = sum(4.0**e * 2 * (ndtr(2.0 ** (e + 1)) - ndtr(2.0**e)) for e in exponents)
    return (square / 3) ** 0.5 / 2**bits


def expected_error(strengths: tuple[float, float], K: int, steps: int, bits: int, *, every: int = 1) -> float:
    """The relative error of a memory that is rounded once in `every` steps, from roundings of the memory alone.

    It is the root of the ratio of mean squares, for independent unit keys of uniform direction and strengths uniform in
    [least, most]: with $r = \\rho^{every}$ and n roundings, $u^2 (1 / (1 - r) - n r^n / (1 - r^n))$, or
    $u^2 (n + 1) / 2$ for r = 1.
    """
    least, most = strengths
    mean, square = (least + most) / 2, (least**2 + least * most + most**2) / 3
    kept = 1 - (2 * mean - square) / K
    n, r = steps // every, kept**every
    carried = (n + 1) / 2 if r == 1 else 1 / (1 - r) - n * r**n / (1 - r**n)
    return rounding_error(bits) * carried**0.5


def relative_errors(found: Float[Tensor, "*any K V"], exact: Float[Tensor, "*#any K V"]) -> Float[Tensor, "*any"]:
    """Frobenius norms of the differences over those of the exact memories."""
    return (found.double() - exact).flatten(-2).norm(dim=-1) / exact.flatten(-2).norm(dim=-1)


# ------------------------------------------------------------------------------------------------------- state tracking


def parity_operands(bits: Int[Tensor, "*batch N"]) -> dict[str, Any]:
    r"""q, k, v (..., N + 1, 1) and beta (..., N + 1) with which the delta rule answers $(-1)^{b_1 + \dots + b_t}$."""
    start = torch.zeros(*bits.shape[:-1], bits.shape[-1] + 1, dtype=torch.float64)
    start[..., 0] = 1
    ones = torch.ones_like(start)[..., None]
    return {"q": ones, "k": ones, "v": start[..., None], "beta": torch.cat([start[..., :1], 2.0 * bits], -1)}


def counter_operands(numbers: Int[Tensor, "*batch N"], m: int) -> dict[str, Any]:
    r"""Operands of DeltaProduct, width 2, N + 1 tokens of two steps, that add up numbers modulo m.

    The memory is a rotation by $2 \pi s / m$ for the sum s; the answers are its first row (`read_counts`).
    """
    shape = (*numbers.shape[:-1], numbers.shape[-1] + 1)
    axes = torch.eye(2, dtype=torch.float64)
    first = axes[0].expand(*shape, 2)  # what all tokens have in common
    angle = torch.cat([torch.full_like(numbers[..., :1], m / 2.0, dtype=torch.float64), numbers], -1)
    angle = angle * (pi / m)  # a quarter turn at the start: its keys are the axes
    start = torch.zeros(shape, dtype=torch.float64)
    start[..., 0] = 1
    return {
        "q": first,
        "k": first,
        "v": start[..., None] * axes[0],
        "beta": (2 - start)[..., None].expand(*shape, 2),
        "more_keys": torch.stack([angle.cos(), angle.sin()], -1)[..., None, :],
        "more_values": (start[..., None] * axes[1])[..., None, :],
    }


def read_counts(o: Float[Tensor, "*batch N 2"], m: int) -> Int[Tensor, "*batch N"]:
    """The sums modulo m that the answers of `counter_operands` stand for."""
    turns = torch.atan2(-o[..., 1], o[..., 0]) / (2 * pi)
    return (turns * m).round().long() % m
