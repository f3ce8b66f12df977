r"""What memories recall, what rounding changes in their states, and which states they can track.

*Recall.* What a memory answers after pairs of unit keys and values were written. A write fades the memory by `decay`,
$\alpha$, and enters its pair with the strength `beta`. The linear memory adds to what is there,
$S \leftarrow \alpha S + \beta k v^T$, and the delta rule erases first,
$S \leftarrow (I - \beta k k^T)\, \alpha S + \beta k v^T$.

*Narrow states.* How rounding changes a delta rule's memory over a long sequence, compared with float64. Each step
rounds the memory that it returns. A rounding adds a relative error u (`rounding_error`), and each step
multiplies the errors so far by $I - \beta k k^T$. For independent unit keys of uniform direction this keeps, on
average, the share $\rho = 1 - \beta (2 - \beta) / K$ of the mean square of the errors, and of the memory, to which a
write adds $\beta^2 |v|^2$ (`expected_error`). For $\beta$ between 0 and 2 errors die out as fast as memories do, and
stay about $u / \sqrt{1 - \rho}$ however long the sequence is. At $\beta = 2$ nothing dies out: the memory grows like
$\sqrt{t}$, and the relative error like $u \sqrt{t / 2}$.

*State tracking.* Counting modulo m, around a circle, with two channels: two reflections whose keys are an angle
$\pi s / m$ apart turn the plane by $2 \pi s / m$. That takes two steps a token (DeltaProduct; Siems et al. 2025,
arXiv:2502.10297), as the eigenvalues of one step are real. The construction is exact in real numbers and uses unit
keys. A first token writes the start; each symbol then turns the memory.
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
from ortho.theory.transitions import unit_keys

# --------------------------------------------------------------------------------------------------------------- recall

MEMORIES = ("linear", "delta")


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


# -------------------------------------------------------------------------------------------------------- narrow states


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


def recurrent(x: Operands, at: list[int], state: torch.dtype) -> Float[Tensor, "marks runs K V"]:
    """The memories after the step counts in `at`, step by step in float32, rounded after each step to `state`."""
    k = x.k[..., None].unbind(1)  # (runs, K, 1)
    written, v = (x.beta[..., None] * x.k)[..., None].unbind(1), x.v[:, :, None].unbind(1)
    S = x.v.new_zeros(*x.k.shape[::2], x.v.shape[-1])
    found = []
    for start, stop in pairwise([0, *at]):
        for t in range(start, stop):
            S = (S + written[t] * (v[t] - (k[t] * S).sum(-2, keepdim=True))).to(state).float()
        found.append(S)
    return torch.stack(found)


def exact(x: Operands, at: list[int]) -> Float[Tensor, "marks runs K V"]:
    """The memories after the step counts in `at`, in float64."""
    k, v, beta = (operand.double() for operand in x)
    S = v.new_zeros(*k.shape[::2], v.shape[-1])
    found = []
    for start, stop in pairwise([0, *at]):
        tokens = slice(start, stop)
        # not `delta_rule`: float32's unit keys are a little too long for its check
        _, S = in_chunks(k[:, -1:], k[:, tokens], v[:, tokens], beta[:, tokens], None, S, is_causal=False)
        found.append(S)
    return torch.stack(found)


def rounding_error(bits: int) -> float:
    """The error of rounding normal numbers to `bits` significant bits: root mean square of errors over that of numbers.

    The error of a number in [2^e, 2^(e+1)) is uniform within 2^(e - bits) on either side.
    """
    exponents = range(-20, 4)  # all but 1e-5 of the numbers, and all that count
    square = sum(4.0**e * 2 * (ndtr(2.0 ** (e + 1)) - ndtr(2.0**e)) for e in exponents)
    return (square / 3) ** 0.5 / 2**bits


def expected_error(strengths: tuple[float, float], K: int, steps: int, bits: int) -> float:
    """The relative error of a memory that is rounded after each of n steps, from roundings of the memory alone.

    It is the root of the ratio of mean squares, for independent unit keys of uniform direction and strengths uniform in
    [least, most]: $u^2 (1 / (1 - \\rho) - n \\rho^n / (1 - \\rho^n))$, or $u^2 (n + 1) / 2$ for $\\rho = 1$.
    """
    least, most = strengths
    mean, square = (least + most) / 2, (least**2 + least * most + most**2) / 3
    kept, n = 1 - (2 * mean - square) / K, steps
    carried = (n + 1) / 2 if kept == 1 else 1 / (1 - kept) - n * kept**n / (1 - kept**n)
    return rounding_error(bits) * carried**0.5


# ------------------------------------------------------------------------------------------------------- state tracking


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
