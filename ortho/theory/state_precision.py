r"""What rounding makes of a delta rule's memory over a long sequence: narrow states against float64.

Each step, or each chunk, rounds the memory that it leaves behind. A rounding adds a relative error u
(`rounding_error`), and each step multiplies the errors there are by $I - \beta k k^T$. For independent unit keys of
uniform direction that leaves, on average, $\rho = 1 - \beta (2 - \beta) / K$ of a mean square, of the errors as of the
memory, to which a write adds $\beta^2 |v|^2$ (`expected_error`). For $\beta$ between 0 and 2 errors die out as fast as
memories do, and stay about $u / \sqrt{1 - \rho}$ however long the sequence is. At $\beta = 2$ nothing dies out: the
memory grows like $\sqrt{t}$, and the relative error like $u \sqrt{t / 2}$.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from scipy.special import ndtr

from ortho import _checks
from ortho._checks import checked, unchecked_values
from ortho._typing import Float, Tensor
from ortho.attention.recurrent.delta import delta_rule
from ortho.theory.stability import unit_keys

__all__ = [
    "CHUNK",
    "STATES",
    "Operands",
    "chunked",
    "expected_error",
    "marks",
    "operands",
    "recurrent",
    "relative_errors",
    "rounding_error",
]

# What the memory is rounded to, and the significant bits of that. The arithmetic is float32's.
STATES = {torch.float32: 24, torch.bfloat16: 8}
CHUNK = 64


class Operands(NamedTuple):
    """Keys, values and write strengths of some runs, in float32: all states are made of the same numbers."""

    k: Float[Tensor, "runs N K"]
    v: Float[Tensor, "runs N K"]
    beta: Float[Tensor, "runs N"]


@checked
def operands(
    steps: int, K: int, strengths: tuple[tuple[float, float], ...], *, generator: torch.Generator | None = None
) -> Operands:
    """Unit keys of uniform direction, normal values as wide, strengths uniform in [least, most]: a run a pair."""
    if not strengths:
        raise ValueError("strengths: expected one pair at least, got none")
    least, most = torch.tensor(strengths).mT[..., None]  # (runs, 1)
    runs, N = len(strengths), _checks.positive_int("steps", steps)
    share = torch.rand(runs, N, generator=generator)
    k = unit_keys(runs, N, K, generator=generator).float()
    return Operands(k, torch.randn(runs, N, K, generator=generator), least + (most - least) * share)


@checked
def marks(steps: int, count: int = 13, *, chunk: int = CHUNK) -> list[int]:
    """About so many multiples of `chunk` up to `steps`, evenly spread on a logarithmic axis: where errors are taken."""
    last = _checks.positive_int("steps", steps) // chunk
    return sorted({round(last ** (i / (count - 1))) * chunk for i in range(count)})


def recurrent(x: Operands, at: list[int], states: tuple[torch.dtype, ...]) -> Float[Tensor, "states marks runs K V"]:
    """The memories after so many steps, one step after the other in float32, rounded after each to every state."""
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
    """The memories after so many steps by the chunked delta rule, rounded after each chunk to `state`; what is computed
    for float64 is computed in float64, all else in float32."""
    wide = torch.float64 if state == torch.float64 else torch.float32
    k, v, beta = (operand.to(wide) for operand in x)
    S = v.new_zeros(*k.shape[::2], v.shape[-1])
    found = []
    with torch.no_grad(), unchecked_values():  # float32's unit keys are a little too long for float64's check
        for start, stop in pairwise([0, *at]):
            cuts = [start, stop] if state == wide else range(start, stop + 1, CHUNK)
            for first, last in pairwise(cuts):
                tokens = slice(first, last)
                _, (S,) = delta_rule(
                    k[:, -1:],
                    k[:, tokens],
                    v[:, tokens],
                    beta=beta[:, tokens],
                    normalise=False,
                    initial_state=(S,),
                    return_state=True,
                )
                S = S.to(state).to(wide)
            found.append(S)
    return torch.stack(found)


@checked
def rounding_error(bits: int) -> float:
    """What rounding to so many significant bits changes in normal numbers: root mean squares of errors over numbers.

    The error of a number in [2^e, 2^(e+1)) is uniform within 2^(e - bits) on either side.
    """
    exponents = range(-20, 4)  # all but 1e-5 of the numbers, and all that count
    square = sum(4.0**e * 2 * (ndtr(2.0 ** (e + 1)) - ndtr(2.0**e)) for e in exponents)
    return (square / 3) ** 0.5 / 2 ** _checks.positive_int("bits", bits)


@checked
def expected_error(strengths: tuple[float, float], K: int, steps: int, bits: int, *, every: int = 1) -> float:
    """The relative error of a memory that is rounded after `every` so many steps, from roundings of the memory alone.

    Root of the ratio of mean squares, for independent unit keys of uniform direction and strengths uniform in [least,
    most]: with $r = \\rho^{every}$ and n roundings, $u^2 (1 / (1 - r) - n r^n / (1 - r^n))$, or $u^2 (n + 1) / 2$
    for r = 1.
    """
    least, most = strengths
    mean, square = (least + most) / 2, (least**2 + least * most + most**2) / 3
    kept = 1 - (2 * mean - square) / _checks.positive_int("K", K)
    n, r = _checks.positive_int("steps", steps) // every, kept**every
    carried = (n + 1) / 2 if r == 1 else 1 / (1 - r) - n * r**n / (1 - r**n)
    return rounding_error(bits) * carried**0.5


@checked
def relative_errors(found: Float[Tensor, "*any K V"], exact: Float[Tensor, "*#any K V"]) -> Float[Tensor, "*any"]:
    """Frobenius norms of the differences over those of the exact memories."""
    return (found.double() - exact).flatten(-2).norm(dim=-1) / exact.flatten(-2).norm(dim=-1)
