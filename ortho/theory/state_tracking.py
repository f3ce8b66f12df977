r"""What a delta rule's memory can keep track of: parity, and counting round a circle, need eigenvalues below 0.

Constructions in exact numbers, with unit keys. A first token writes the start; a symbol then turns the memory.

* Parity, one channel: $1 - \beta k^2 = -1$ for $\beta = 2$ turns the sign at each one; $\beta = 0$ leaves it at a zero.
* Counting modulo m, two channels: two reflections whose keys are an angle $\pi s / m$ apart turn the plane by
  $2 \pi s / m$. That takes two steps a token (DeltaProduct; Siems et al. 2025, arXiv:2502.10297): the eigenvalues of
  one step are real.

Without negative eigenvalues there is no parity (after Grazzi et al. 2024, arXiv:2411.12537, theorem 1). Let a token,
with key k, value v and strength $\beta$, be repeated from any memory. Along k the memory goes to v by the factor
$\lambda = 1 - \beta |k|^2$ a step, and elsewhere it stays. So the answer after t of them is
$o_t = o_\infty + \lambda^t (o_0 - o_\infty)$, with the answer $o_\infty$ of the memory that holds v at k (`repeat`).
For $0 \le \lambda \le 1$ each linear function of $o_t$ moves one way only: a threshold on it changes sides at most
once, and the parity of t changes at every step. Nor does another way to read help at a finite precision: $o_t$
converges, and is the same for all but finitely many t.
"""

from math import inf, log, pi
from typing import Any

import torch

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Float, Int, Tensor

__all__ = [
    "Operands",
    "counter_operands",
    "lasts",
    "most_right",
    "parity_operands",
    "read_counts",
    "repeat",
    "sign_changes",
]

Operands = dict[str, Any]  # tensors, by the names of the mechanisms' arguments


@checked
def parity_operands(bits: Int[Tensor, "*batch N"]) -> Operands:
    r"""q, k, v (..., N + 1, 1) and beta (..., N + 1) with which the delta rule answers $(-1)^{b_1 + \dots + b_t}$."""
    _checks.indices("bits", bits, 2)
    start = torch.zeros(*bits.shape[:-1], bits.shape[-1] + 1, dtype=torch.float64)
    start[..., 0] = 1
    ones = torch.ones_like(start)[..., None]
    return {"q": ones, "k": ones, "v": start[..., None], "beta": torch.cat([start[..., :1], 2.0 * bits], -1)}


@checked
def counter_operands(numbers: Int[Tensor, "*batch N"], m: int) -> Operands:
    r"""Operands of DeltaProduct, width 2, N + 1 tokens of two steps, that add up numbers modulo m.

    The memory is a rotation by $2 \pi s / m$ for the sum s, of which the answers are the first row (`read_counts`).
    """
    shape = (*numbers.shape[:-1], numbers.shape[-1] + 1)
    axes = torch.eye(2, dtype=torch.float64)
    first = axes[0].expand(*shape, 2)  # what all tokens have in common
    angle = torch.cat([torch.full_like(numbers[..., :1], m / 2.0, dtype=torch.float64), numbers], -1)
    angle = angle * (pi / _checks.positive_int("m", m))  # a quarter turn at the start: its keys are the axes
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


@checked
def read_counts(o: Float[Tensor, "*batch N 2"], m: int) -> Int[Tensor, "*batch N"]:
    """The sums modulo m that the answers of `counter_operands` stand for."""
    turns = torch.atan2(-o[..., 1], o[..., 0]) / (2 * pi)
    return (turns * _checks.positive_int("m", m)).round().long() % m


@checked
def repeat(
    q: Float[Tensor, "K"],
    k: Float[Tensor, "K"],
    v: Float[Tensor, "V"],
    beta: float,
    S: Float[Tensor, "K V"],
    steps: int,
) -> Float[Tensor, "T V"]:
    """The answers o_0 to o_steps to q while one token is repeated, by their closed form; S is the memory at first."""
    square = k @ k
    powers = (1 - beta * square) ** torch.arange(_checks.positive_int("steps", steps) + 1, dtype=k.dtype)
    held = q @ S
    settled = held + (q @ k) * (v - k @ S) / square
    return settled + powers[:, None] * (held - settled)


@checked
def sign_changes(x: Float[Tensor, "T ..."]) -> Int[Tensor, "..."]:
    """How often a sequence, along its first axis, goes from positive to negative or back; zeros count as negative."""
    return (x > 0).diff(dim=0).sum(0)


@checked
def most_right(count: int) -> int:
    """Of so many alternating labels, the most that a sequence which changes sides at most once can have right."""
    return min(count, _checks.positive_int("count", count) // 2 + 1)


@checked
def lasts(beta: float, margin: float) -> float:
    """The steps after which what unit keys of strength `beta` keep turning has fallen to the share `margin`."""
    if not 0 <= beta <= 2:
        raise ValueError(f"beta: expected a number in [0, 2], got {beta}")
    if not 0 < margin < 1:
        raise ValueError(f"margin: expected a number in (0, 1), got {margin}")
    kept = abs(1 - beta)
    return inf if kept == 1 else 0.0 if kept == 0 else log(margin) / log(kept)
