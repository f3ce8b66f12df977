r"""S4, on linear attention: what replaces the softmax, and the code that is printed for it."""

from math import inf
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.attention.linear.efficient import efficient_attention
from ortho.attention.linear.feature_maps import EluPlusOne, Exp, Relu
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.cost.big_o import N, d
from ortho.theory.associativity import flops
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding

CHAPTER = "07-linear-attention"


def operands(tokens: int = 32, width: int = 8) -> tuple[Tensor, ...]:
    """Normal q, k and v, each (1, N, K), float64."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, tokens, width, generator=g, dtype=torch.float64).unbind()


def negative_weights() -> int:
    """How many weights below 0 the non-negative activations give to all pairs of normal tokens."""
    q, k, _ = operands()
    return sum(int((kernel_weights(activation, q, k) < 0).sum()) for activation in (EluPlusOne(), Relu(), Exp()))


@evidence("S4.2a", chapter=CHAPTER)
def without_softmax() -> Finding:
    return all_of(
        {
            "with softmax": growth("N^2*d", sympy.expand(flops(N, d, N, d).left)),
            "without": growth("N*d^2", sympy.expand(MECHANISMS["linear"].cost(1, N, 1, d, d).forward)),
            "weights below 0 with elu + 1, ReLU and exp": counted({"": 0}, {"": negative_weights()}),
        }
    )


def as_printed(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor | None = None, *, axes: str = "b") -> Tensor:
    """The source's function: q, k, v (B, N, K), kv_mask (B, N).

    Its mask is made for (B, H, N, K), its products for (B, N, K). With `axes` "bh" the products fit the mask.
    """
    if kv_mask is not None:
        lowest = -torch.finfo(q.dtype).max
        k = k.masked_fill(kv_mask[:, None, :, None] == 0, lowest)
    kv = torch.einsum(f"{axes}nd,{axes}ne->{axes}de", k, v)
    q = torch.softmax(q, dim=-1)
    return torch.einsum(f"{axes}nd,{axes}de->{axes}ne", q, kv)


class Printed(NamedTuple):
    """What the printed code does: whether it runs with a mask; how far row sums are from 1, and how many weights are
    negative, without one; how far a mask is from leaving the keys out, as printed and with the missing softmax."""

    runs: bool
    sums_off: float
    negative: int
    masked: float
    with_softmax: float


def printed_code(hidden: int = 8) -> Printed:
    """The printed code on normal tokens, the last `hidden` of which are padding."""
    q, k, v = operands()
    tokens = k.shape[1]
    mask = (torch.arange(tokens) < tokens - hidden)[None]
    try:
        as_printed(q, k, v, mask)
        runs = True
    except RuntimeError:
        runs = False
    weights = as_printed(q, k, torch.eye(tokens, dtype=q.dtype)[None])
    q, k, v = (x[:, None] for x in (q, k, v))  # one head
    short_k, short_v = (x[..., :-hidden, :] for x in (k, v))
    return Printed(
        runs=runs,
        sums_off=float((weights.sum(-1) - 1).abs().max()),
        negative=int((weights < 0).sum()),
        masked=_difference(as_printed(q, k, v, mask, axes="bh"), as_printed(q, short_k, short_v, axes="bh")),
        with_softmax=_difference(
            efficient_attention(q, k, v, attn_mask=mask[:, None, None]), efficient_attention(q, short_k, short_v)
        ),
    )


def _difference(one: Any, other: Any) -> float:
    """Relative, and infinite if it is no number."""
    found = float((one - other).norm() / other.norm())
    return found if found < inf else inf


@evidence("S4.2b", chapter=CHAPTER)
def linear_attn() -> Finding:
    found = printed_code()
    return all_of(
        {
            "without a mask": counted({"weights below 0": 0}, {"weights below 0": found.negative}),
            "their row sums": holds("1, as with softmax", found.sums_off, EXACT),
            "with a mask": holds("a hidden key is as good as absent", found.masked, EXACT),
        }
    ).noting(
        f"As printed the call with a mask {'runs' if found.runs else 'fails'}: the mask has one axis more than the "
        "products; here they have it too. With softmax over positions for the keys, as Shen et al. (2021) have it, "
        "all three hold"
    )
