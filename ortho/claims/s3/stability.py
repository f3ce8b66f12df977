"""S3, section 3, improvement 4: whether products of $I - k k^T$ are unstable, and what orthogonalising them changes."""

from functools import cache
from math import inf, log10

import torch

from ortho.claims.ledger import evidence
from ortho.claims.rules import all_of, holds, region
from ortho.claims.verdicts import Finding
from ortho.theory import state_precision
from ortho.theory.stability import product, recall_errors, reflection_drift, unit_keys

CHAPTER = "12-chunked-form"

WIDTH, STEPS = 16, 400
LENGTHS = (1.0, 1.4, 1.5, 2.0)  # of keys
ROUNDED = (64, 8192)  # steps, after which errors of a bfloat16 memory are compared
STRENGTHS = {"$\\beta = 1$": (1.0, 1.0), "$\\beta$ in (0, 2)": (0.0, 2.0), "$\\beta = 2$": (2.0, 2.0)}
BITS = state_precision.STATES[torch.bfloat16]
# 256 numbers a memory, whose errors are not independent: measured ones lie within a third of what is derived.
FACTOR = 2.0
REFLECTIONS, EVERY = 4096, 64


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def left(length: float) -> float:
    """The spectral norm of 400 transitions I - k k^T with keys of that length and uniform direction."""
    P = product(length * unit_keys(STEPS, WIDTH, generator=generator()), 1.0)
    return float(f"{torch.linalg.matrix_norm(P, 2):.1e}")


def growing(strengths: tuple[float, float]) -> float:
    """How many times larger the relative error of a rounded memory becomes, as derived."""
    few, many = (state_precision.expected_error(strengths, WIDTH, steps, BITS) for steps in ROUNDED)
    return round(many / few, 1)


@cache
def unlike_derived() -> float:
    """The largest factor between measured errors of a bfloat16 memory, a step at a time, and the derived ones."""
    at, strengths = list(ROUNDED), tuple(STRENGTHS.values())
    x = state_precision.operands(at[-1], WIDTH, strengths, generator=generator())
    exact = state_precision.chunked(x, at, torch.float64)
    (found,) = state_precision.relative_errors(state_precision.recurrent(x, at, (torch.bfloat16,)), exact)
    derived = torch.tensor([[state_precision.expected_error(s, WIDTH, n, BITS) for s in strengths] for n in at])
    return float((found / derived).log().abs().max().exp())


@cache
def nearer() -> dict[str, int]:
    """By how many powers of ten 4,096 reflections in float32 are nearer to what they should be, orthogonalised."""
    plain, mended = (
        reflection_drift(REFLECTIONS, WIDTH, orthogonalise_every=every, generator=generator())
        for every in (None, EVERY)
    )
    return {
        "distance from orthogonal": round(log10(plain.from_orthogonal / mended.from_orthogonal)),
        "distance from the right product": round(log10(plain.from_exact / mended.from_exact)),
    }


@evidence("S3.3f", chapter=CHAPTER)
def unstable() -> Finding:
    lost = round(100 * recall_errors(WIDTH, generator=generator())[1])
    return all_of(
        {
            f"norm after {STEPS} steps of $I - k k^\\top$ grows": region(
                (1, inf), {f"$\\lvert k \\rvert = {length:g}$": left(length) for length in LENGTHS}
            ),
            f"rounding errors grow, from {ROUNDED[0]} to {ROUNDED[1]:,} steps with unit keys, by a factor": region(
                (2, inf), {name: growing(strengths) for name, strengths in STRENGTHS.items()}
            ),
            "measured, in bfloat16": holds("within a factor of the derived errors", unlike_derived(), FACTOR),
            f"orthogonalised every {EVERY} steps, {REFLECTIONS:,} reflections are better by a power of ten of": region(
                (1, inf), nearer()
            ),
        }
    ).noting(
        f"With $\\beta \\lvert k \\rvert^2 \\le 2$ no product grows, from whatever memory it starts. Orthogonalising "
        f"the memory itself changes its answers by {lost} %"
    )
