r"""S3, section 3: the delta rule as printed, improvement 4, a form in chunks of matrix products, and its stability.

The source's S is (V, K), the transpose of the package's; the source names neither a write strength nor the keys'
length.
"""

from collections.abc import Callable, Iterable
from functools import cache
from math import inf, log, log10, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortho.attention.recurrence import token_by_token
from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from ortho.theory.transitions import product, recall_errors, reflection_drift, unit_keys
from paper import experiments
from paper.claims.figures import listing, show
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, improves, region
from paper.claims.shared.common import EXACT_STEPS, normal, relative_error, saves, seeded, without_records
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows
from paper.experiments.speed.analysis import Row
from paper.theory import delta_memory

FORMULA, CHUNKS = "11-delta-rule", "12-chunked-form"

LENGTH, WIDTH = 100, 8
CUTS = (1, 7, 16, 100)  # chunks; most do not divide the length
ARMS = ("delta causal", "gated-delta causal")
HARDWARE = (256, 64)  # tokens and width at which operations are counted
PRODUCTS = ("mm", "bmm", "mv", "addmm", "baddbmm")  # of matrices, and of matrices and vectors, as PyTorch runs them
TILE = 16  # a product in half precision with no side below it can fill the tiles of `mma.sync`, 16 x 8 x 16

# -------------------------------------------------------------------------------------------------- the rule as printed


def operands(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Normal queries and values, and keys of uniform direction with squared lengths up to 2, (length, WIDTH)."""
    g = seeded()
    q, k, v = torch.randn(3, length, WIDTH, generator=g, dtype=torch.float64)
    squares = 2 * torch.rand(length, 1, generator=g, dtype=torch.float64)
    return q, k / k.norm(dim=-1, keepdim=True) * squares.sqrt(), v


def as_printed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""$S_t = S_{t-1} + (v_t - S_{t-1} k_t) k_t^T$, $o_t = S_t q_t$, from an empty memory."""
    S, rows = v.new_zeros(v.shape[-1], k.shape[-1]), []
    for query, key, value in zip(q, k, v, strict=True):
        S = S + torch.outer(value - S @ key, key)
        rows.append(S @ query)
    return torch.stack(rows)


def left_after(square: float, writes: int) -> float:
    """The share of the error left after writing one pair, with this |k|^2, `writes` times to a random memory."""
    g = seeded(2)
    S = torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, WIDTH, generator=g, dtype=torch.float64)
    k = k * (square**0.5 / k.norm())
    before = (S @ k - v).norm()
    for _ in range(writes):
        S = S + torch.outer(v - S @ k, k)
    return float((S @ k - v).norm() / before)


@evidence("S3.3a", chapter=FORMULA)
def formula() -> Finding:
    squares = (1.0, 2.0, 2.5)
    left = ", ".join(f"{left_after(square, 20):.0f} for $|k|^2 = {square:g}$" for square in squares)
    q, k, v = operands()
    defined = delta_rule_reference(q, k, v, qk_l2norm=False, is_causal=True)
    S = normal(WIDTH, WIDTH, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad((S @ k[0] - v[0]).square().sum() / 2, S)
    unlike_descent = relative_error(-gradient, torch.outer(v[0] - S.detach() @ k[0], k[0]))
    parts = {
        "recurrence": holds(
            "the package's, with $\\beta = 1$ and keys as they are",
            relative_error(defined, as_printed(q, k, v)),
            EXACT_STEPS,
        ),
        "least mean squares": holds(
            "each step is one of gradient descent on $\\frac12 |S k - v|^2$, of rate 1", unlike_descent, EXACT_STEPS
        ),
    }
    return all_of(parts).noting(
        "The printed form has neither a write strength nor keys of a given length, and needs one of them: of the error "
        f"at a key that is written 20 times there is left, as a multiple of it, {left}"
    )


def stored(pairs: int) -> float:
    """The relative error of the answers of a delta rule that has written this many pairs with orthonormal keys."""
    keys, values = torch.linalg.qr(normal(WIDTH, WIDTH)).Q[:pairs], normal(pairs, WIDTH, seed=1)
    _, (S,) = delta_rule_reference(keys, keys, values, is_causal=True, qk_l2norm=False, return_state=True)
    return relative_error(keys @ S, values)


def least_missed(pairs: int) -> float:
    """The least that any memory of this width misses of this many random pairs, in per cent of the values."""
    keys, values = normal(pairs, WIDTH), normal(pairs, WIDTH, seed=1)
    return 100 * relative_error(keys @ torch.linalg.lstsq(keys, values).solution, values)


@evidence("S3.3i", chapter=FORMULA)
def capacity() -> Finding:
    more = {f"{pairs} pairs": least_missed(pairs) for pairs in (WIDTH + 1, 2 * WIDTH, 8 * WIDTH)}
    parts = {
        "up to $d$ pairs": holds("answered without error, keys orthonormal", stored(WIDTH), EXACT_STEPS),
        "a limit": improves("missed by any memory, of the values", more, unit=" %"),
    }
    return all_of(parts).noting(f"$d = {WIDTH}$, random pairs: a matrix has $d^2$ numbers, and $n$ values $n d$")


# --------------------------------------------------------------------------------------------------- the form in chunks


def unlike_recurrence() -> float:
    """The largest relative difference between the chunked form and the recurrence, with write strengths and decays."""
    worst = 0.0
    for length in (63, LENGTH):
        q, k, v = operands(length)
        g = seeded(3)
        beta, decay = (torch.rand(length, generator=g, dtype=torch.float64) for _ in range(2))
        gates: dict[str, Any] = {"is_causal": True, "beta": 2 * beta, "log_decay": decay.log()}
        exact = delta_rule_reference(q, k, v, **gates)
        for chunk in CUTS:
            worst = max(worst, relative_error(delta_rule(q, k, v, chunk=chunk, **gates), exact))
    return worst


class _Operations(TorchDispatchMode):
    """Counts all operations, those that are not PyTorch's own, the FLOPs of products, and the FLOPs of products with no
    side below `TILE`."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.foreign = self.flops = self.tiled = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.all += 1
        self.foreign += func.namespace != "aten"
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            first, second = args[-2:]
            *batch, rows, inner = first.shape
            columns = second.shape[-1] if second.dim() > 1 else 1
            flops = 2 * prod(batch) * rows * inner * columns
            self.flops += flops
            self.tiled += flops * (min(rows, inner, columns) >= TILE)
        return func(*args, **(kwargs or {}))


def step(attend: Callable[..., Any], qkv: Iterable[Tensor], **options: Any) -> _Operations:
    """The operations of a forward and a backward pass of a form."""
    leaves = [x.requires_grad_() for x in qkv]
    with _Operations() as seen:
        attend(*leaves, is_causal=True, **options).sum().backward()
    assert seen.all > seen.foreign
    return seen


def foreign_operations() -> int:
    """Operations of a step in chunks that are not among PyTorch's own."""
    return step(delta_rule, operands(), chunk=16).foreign


def longest() -> dict[str, dict[str, Row]]:
    """By device and arm, what was measured beside softmax attention at the greatest length."""
    found: dict[str, dict[str, Row]] = {}
    for device, curves in attention_rows.curves(experiments.load("memory-speed"), "delta").items():
        rows = {arm: max(curves[arm], key=lambda row: int(row["N"])) for arm in ARMS if arm in curves}
        if rows:
            found[device] = rows
    return found


def by_the_clock() -> dict[str, float]:
    """The time over that of fused softmax attention, also causal, at the greatest length of each device."""
    return {
        f"{arm.split()[0]}, $N = {row['N']:,}$ on {device}": round(row["ratio_alike"][1], 2)
        for device, rows in longest().items()
        for arm, row in rows.items()
    }


@evidence("S3.3e", chapter=CHUNKS)
def matrix_form() -> Finding:
    tokens, width = HARDWARE
    chunks, steps = (step(form, torch.zeros(3, tokens, width).unbind()) for form in (delta_rule, delta_rule_reference))
    tiled, one_by_one = (100 * one.tiled / max(one.flops, 1) for one in (chunks, steps))
    parts = {
        "form in chunks": holds(
            "what the recurrence gives, with write strengths and decays",
            unlike_recurrence(),
            EXACT_STEPS,
            at=f"chunks of {', '.join(map(str, CUTS))}",
        ),
        f"of its products' FLOPs, in products of matrices with no side below {TILE}": region(
            (50, 100), {f"$N = {tokens}$, $K = V = {width}$": round(tiled, 1)}, unit=" %"
        ),
        "operations one after the other": saves("fewer than of the recurrence", {"": (chunks.all, steps.all)}),
        "operations beyond PyTorch's own": counted({"": 0}, {"": foreign_operations()}),
    }
    clock = by_the_clock()
    told = f". Time over that of fused softmax attention: {listing({label: show(x) for label, x in clock.items()})}"
    return all_of(parts).noting(f"Of the recurrence's products {one_by_one:.0f} % are such{told if clock else ''}")


def without_kernels() -> Finding:
    """Whether a form without kernels of its own is slower on a GPU than fused softmax attention."""
    statement = "without kernels of its own the form is slower than fused softmax attention"
    on_gpus = {label: ratio for label, ratio in by_the_clock().items() if " on cpu-" not in label}
    if not on_gpus:
        return without_records(statement, "the form in chunks, which has no such kernel, on a GPU")
    return region((1, inf), on_gpus)


@evidence("S3.3k", chapter=CHUNKS)
def kernels() -> Finding:
    q, k, v = operands()
    # One chunk, by a triangular system for all of its errors at once.
    errors = torch.linalg.solve_triangular(torch.eye(LENGTH) + (k @ k.T).tril(-1), v, upper=False)
    apart = relative_error((q @ k.T).tril() @ errors, as_printed(q, k, v))
    parts = {
        "in parallel, by a linear system": holds("what the recurrence gives", apart, EXACT_STEPS),
        "without kernels of its own": without_kernels(),
    }
    clock = {label: show(ratio) for label, ratio in by_the_clock().items()}
    told = f"; time over that of fused softmax attention, {listing(clock)}" if clock else ""
    return all_of(parts).noting(
        f"The form in chunks runs {foreign_operations()} operations that are not PyTorch's own{told}"
    )


# ------------------------------------------------------------ whether products of transitions are unstable (chapter 12)

MEMORY, STEPS = 16, 400
LENGTHS = (1.0, 1.4, 1.5, 2.0)  # of keys
ROUNDED = (64, 8192)  # steps, after which errors of a bfloat16 memory are compared
STRENGTHS = {"$\\beta = 1$": (1.0, 1.0), "$\\beta$ in (0, 2)": (0.0, 2.0), "$\\beta = 2$": (2.0, 2.0)}
BITS = delta_memory.STATES[torch.bfloat16]
# Undamped errors add up like the square root of the steps; damped ones settle, at a factor of 1. A factor counts as
# growth if it is nearer to the first on a logarithmic scale.
GROWS = round((ROUNDED[1] / ROUNDED[0]) ** 0.25, 1)
# The errors of a memory's 256 numbers are not independent: measured errors lie within a third of the derived ones.
FACTOR = 2.0
TOO_LONG = 1.5  # a length of keys for which memories grow
REFLECTIONS, EVERY = 4096, 64


def left(length: float) -> float:
    """The spectral norm of 400 transitions I - k k^T with keys of that length and uniform direction."""
    P = product(length * unit_keys(STEPS, MEMORY, generator=seeded()), 1.0)
    return float(f"{torch.linalg.matrix_norm(P, 2):.1e}")


def growing(strengths: tuple[float, float]) -> float:
    """The factor by which the relative error of a rounded memory grows, as derived.

    Measured factors differ from one processor to another; `unlike_derived` checks the measured errors against derived
    ones.
    """
    few, many = (delta_memory.expected_error(strengths, MEMORY, steps, BITS) for steps in ROUNDED)
    return round(many / few, 1)


@cache
def unlike_derived() -> float:
    """The largest absolute logarithm of a bfloat16 memory's measured errors over derived ones; 0 if they agree."""
    at, strengths = list(ROUNDED), tuple(STRENGTHS.values())
    x = delta_memory.operands(at[-1], MEMORY, strengths, generator=seeded())
    exact = delta_memory.chunked(x, at, torch.float64)
    (found,) = delta_memory.relative_errors(delta_memory.recurrent(x, at, (torch.bfloat16,)), exact)
    derived = torch.tensor([[delta_memory.expected_error(s, MEMORY, n, BITS) for s in strengths] for n in at])
    return float((found / derived).log().abs().max())


@cache
def nearer() -> dict[str, int]:
    """By how many powers of ten orthogonalising brings 4,096 reflections in float32 nearer to what they should be."""
    which = f"{REFLECTIONS:,} reflections, orthogonalised every {EVERY}"
    plain, mended = (
        reflection_drift(REFLECTIONS, MEMORY, orthogonalise_every=every, generator=seeded()) for every in (None, EVERY)
    )
    return {
        f"{which}, from an orthogonal matrix": round(log10(plain.from_orthogonal / mended.from_orthogonal)),
        f"{which}, from the right product": round(log10(plain.from_exact / mended.from_exact)),
    }


@cache
def grown(start: str) -> tuple[float, float]:
    """The norm of a memory after 400 writes at keys that are too long, and its rounding error in float32 (Frobenius).

    `start` names the memory before: 'zero', 'identity' or 'normal' (independent normal numbers).
    """
    made = seeded()
    k = (TOO_LONG * unit_keys(STEPS, MEMORY, generator=made)).float()
    v, normal = (torch.randn(n, MEMORY, generator=made) for n in (STEPS, MEMORY))
    S = {"zero": torch.zeros_like(normal), "identity": torch.eye(MEMORY), "normal": normal}[start]

    def after(dtype: torch.dtype) -> torch.Tensor:
        x, values = k.to(dtype), v.to(dtype)
        # not `delta_rule_reference`, which refuses such keys
        return token_by_token(x, x, values, None, None, S.to(dtype), is_causal=False)[1].double()

    exact = after(torch.float64)
    return float(exact.norm()), float((after(torch.float32) - exact).norm())


def smaller() -> dict[str, int]:
    """By how many powers of ten such a memory, and its rounding error, are smaller than if it starts at 0."""
    return {
        f"{what} of a memory with $\\lvert k \\rvert = {TOO_LONG:g}$ from {name}, not 0": round(log10(zero / other))
        for start, name in (("identity", "the identity"), ("normal", "normal numbers"))
        for what, zero, other in zip(("norm", "rounding error"), grown("zero"), grown(start), strict=True)
    }


@evidence("S3.3f", chapter=CHUNKS)
def unstable() -> Finding:
    lost = round(100 * recall_errors(MEMORY, generator=seeded())[1])
    parts = {
        f"norm after {STEPS} steps of $I - k k^\\top$ grows": region(
            (1, inf), {f"$\\lvert k \\rvert = {length:g}$": left(length) for length in LENGTHS}
        ),
        f"rounding errors grow, from {ROUNDED[0]} to {ROUNDED[1]:,} steps, by a derived factor (unit keys)": region(
            (GROWS, inf), {name: growing(strengths) for name, strengths in STRENGTHS.items()}
        ),
        "measured, in bfloat16": holds(
            f"the errors are the derived ones, as logarithms to $\\ln {FACTOR:g}$", unlike_derived(), log(FACTOR)
        ),
        # "Re-orthogonalisation or initialisation": one part, of which either may hold.
        "better by a power of ten": region((1, inf), nearer() | smaller()),
    }
    return all_of(parts).noting(
        f"With $\\beta \\lvert k \\rvert^2 \\le 2$ no product grows. Two memories with the same keys differ by "
        f"the product times what they differed at the start, which does not change the product. Orthogonalising "
        f"the memory itself changes its answers by {lost} %"
    )
