r"""S3, section 3: the delta rule as the source prints it, and improvement 4, a form in chunks of matrix products.

The source's S is (V, K), the transpose of the package's; it names neither a write strength nor a length of the keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortho.attention import MECHANISMS
from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, region, untestable
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows
from paper.experiments.speed.attention_analysis import Row

FORMULA, CHUNKS = "11-delta-rule", "12-chunked-form"

LENGTH, WIDTH = 100, 8
# Relative, in float64: a hundred steps that enlarge no error, with sums of eight terms each, round to about 1e-14.
EXACT = 1e-12
CUTS = (1, 7, 16, 100)  # chunks; most do not divide the length
ARMS = ("delta causal", "gated-delta causal")


def operands(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Normal queries and values, and keys of uniform direction with squared lengths up to 2, (length, WIDTH)."""
    g = torch.Generator().manual_seed(0)
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


def unlike_printed() -> float:
    """The relative difference of the package's definition and the printed formula."""
    q, k, v = operands()
    printed, ours = as_printed(q, k, v), delta_rule_reference(q, k, v, normalise=False, is_causal=True)
    assert isinstance(ours, Tensor)
    return float((ours - printed).norm() / printed.norm())


def unlike_descent() -> float:
    r"""The relative difference of a printed step and one against the gradient of $\frac12 |S k - v|^2$, of rate 1."""
    _, k, v = operands()
    S = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad((S @ k[0] - v[0]).square().sum() / 2, S)
    step = torch.outer(v[0] - S.detach() @ k[0], k[0])
    return float((step + gradient).norm() / step.norm())


def left_after(square: float, writes: int) -> float:
    """The share of the error that is left when one pair, with that |k|^2, is written so often to a random memory."""
    g = torch.Generator().manual_seed(2)
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
    return all_of(
        {
            "recurrence": holds("the package's, with $\\beta = 1$ and keys as they are", unlike_printed(), EXACT),
            "least mean squares": holds(
                "each step is one of gradient descent on $\\frac12 |S k - v|^2$, of rate 1", unlike_descent(), EXACT
            ),
        }
    ).noting(
        "The printed form has neither a write strength nor keys of a given length, and needs one of them: of the error "
        f"at a key that is written 20 times there is left, as a multiple of it, {left}"
    )


def unlike_recurrence() -> float:
    """The largest relative difference of the form in chunks and the recurrence, with write strengths and decays."""
    worst = 0.0
    for length in (63, LENGTH):
        q, k, v = operands(length)
        g = torch.Generator().manual_seed(3)
        beta, decay = (torch.rand(length, generator=g, dtype=torch.float64) for _ in range(2))
        gates: dict[str, Any] = {"beta": 2 * beta, "log_decay": decay.log()}
        exact = delta_rule_reference(q, k, v, is_causal=True, **gates)
        for chunk in CUTS:
            found = delta_rule(q, k, v, is_causal=True, chunk=chunk, **gates)
            assert isinstance(exact, Tensor)
            assert isinstance(found, Tensor)
            worst = max(worst, float((found - exact).norm() / exact.norm()))
    return worst


class _Namespaces(TorchDispatchMode):
    """Counts what is dispatched, by whose operation it is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found[func.namespace] = self.found.get(func.namespace, 0) + 1
        return func(*args, **(kwargs or {}))


def foreign_operations() -> int:
    """Operations of a forward and a backward pass in chunks that are not among PyTorch's own."""
    q, k, v = (x.requires_grad_() for x in operands())
    with _Namespaces() as seen:
        o = delta_rule(q, k, v, is_causal=True, chunk=16)
        assert isinstance(o, Tensor)
        o.sum().backward()
    assert seen.found["aten"] > 0
    return sum(seen.found.values()) - seen.found["aten"]


def product_share(N: int = 4096, K: int = 64) -> float:
    """How many of the operations of a training step are in products of matrices, in per cent."""
    cost = MECHANISMS["delta"].cost(1, N, 1, K, K, causal=True)
    products, others = cost.forward + cost.backward, cost.elementwise_forward + cost.elementwise_backward
    return float(100 * products / (products + others))


def longest() -> dict[str, dict[str, Row]]:
    """By device and arm, what was measured beside softmax attention at the greatest length."""
    found: dict[str, dict[str, Row]] = {}
    for device, curves in attention_rows.curves(experiments.load("memory-speed"), "delta").items():
        rows = {arm: max(curves[arm], key=lambda row: int(row["N"])) for arm in ARMS if arm in curves}
        if rows:
            found[device] = rows
    return found


def by_the_clock() -> Finding:
    """The time over that of fused softmax attention, causal as well, at the greatest length of each device."""
    measured = {
        f"{arm.split()[0]}, $N = {row['N']:,}$ on {device}": round(row["ratio_alike"][1], 2)
        for device, rows in longest().items()
        for arm, row in rows.items()
    }
    if not measured:
        lack = "the experiment 'memory-speed' has no records of"
        return untestable("faster than fused softmax attention", dict.fromkeys(ARMS), lack=lack)
    return region((0, 1), measured)


@evidence("S3.3e", chapter=CHUNKS)
def matrix_form() -> Finding:
    return all_of(
        {
            "form in chunks": holds(
                "what the recurrence gives, with write strengths and decays",
                unlike_recurrence(),
                EXACT,
                at=f"chunks of {', '.join(map(str, CUTS))}",
            ),
            "most operations in products of matrices": region(
                (50, 100), {"$N = 4,096$, $K = V = 64$": round(product_share(), 1)}, unit=" %"
            ),
            "operations beyond PyTorch's own": counted({"": 0}, {"": foreign_operations()}),
            "time over softmax attention's": by_the_clock(),
        }
    )
