"""S1, section 2.1: attention by tiles that never stores its scores, and what that saves."""

from functools import cache
from typing import Any

import sympy
import torch

from ortho.attention.softmax.flash import ROWS, flash_attention
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost import layer
from ortho.cost.allocations import Allocations
from ortho.cost.big_o import H, N, d
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, growth, holds, region, untestable
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows

CHAPTER = "19-flash-attention"

TOKENS, WIDTH = 1000, 8  # no multiple of a tile
FASTER, LESS, NEAR = (3, 5), 70, 10  # times, per cent, and how far from "about" a figure may be
FORMS = {"reference": softmax_attention_reference, "tiles": flash_attention}


def away(*, is_causal: bool) -> float:
    """How far the form in tiles is from the definition, relatively: output and gradients."""
    results: dict[str, Any] = {}
    for name, form in FORMS.items():
        generator = torch.Generator().manual_seed(0)
        q, k, v, upstream = torch.randn(4, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o: Any = form(*leaves, is_causal=is_causal)
        results[name] = o.detach(), *torch.autograd.grad(o, leaves, upstream)
    pairs = zip(results["tiles"], results["reference"], strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@cache
def largest(form: str) -> int:
    """Numbers of the largest tensor that is made, forward and backward, in float32."""
    q, k, v = torch.zeros(3, 1, TOKENS, WIDTH).unbind()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with Allocations() as memory:
        o: Any = FORMS[form](*leaves)
        torch.autograd.grad(o.sum(), leaves)
    return memory.largest // 4


@evidence("S1.2.1a", chapter=CHAPTER)
def exact_by_tiles() -> Finding:
    worst = max(away(is_causal=is_causal) for is_causal in (False, True))
    return all_of(
        {
            "exact": holds("outputs and gradients are those of the definition", worst, EXACT, at=f"$N = {TOKENS:,}$"),
            f"numbers of the largest tensor, of $N^2 = {TOKENS**2:,}$": region(
                (0, TOKENS**2 / 2), {"tiles": largest("tiles")}
            ),
        }
    ).noting(f"Tiles of {ROWS} queries. The definition's largest tensor has {largest('reference'):,}")


@evidence("S1.2.1b", chapter=CHAPTER)
def orders() -> Finding:
    fused, materialised = (layer(1, N, d, H, form=form) for form in ("fast", "reference"))
    saved = sympy.expand(fused.saved_bytes / fused.itemsize)
    backward = sympy.expand(fused.backward - materialised.backward)
    return all_of(
        {
            "time": growth("N^2*d + N*d^2", sympy.expand(fused.forward)),
            "space": growth("N*d", saved),
        }
    ).noting(
        f"Forward the FLOPs are those of the materialised form, backward ${sympy.latex(backward)}$ more, "
        "for scores that are computed again"
    )


def rows() -> list[attention_rows.Row]:
    """What the records say of the materialised form, one row a device, direction and length."""
    found = attention_rows.beside_alike(experiments.load("flash-speed"), "exact")
    return [row for row in found if row["arm"].startswith("materialised")]


@evidence("S1.2.1c", chapter=CHAPTER)
def faster_and_leaner() -> Finding:
    """Times are judged where a GPU is among the devices, for which the algorithm was made."""
    found, both = rows(), {"the materialised and the fused form": None}
    if not found:
        return untestable(f"3 to 5 times faster, {LESS} % less memory", both, lack="no record times")
    times = {_named(row): round(row["ratio_alike"][1], 2) for row in found}
    saved = {_named(row): round(100 - 100 / row["bytes_ratio"], 1) for row in found if row["bytes_ratio"]}
    return all_of(
        {
            "time": untestable("3 to 5 times faster", both, lack="no record of a GPU times")
            if all(row["device"].startswith("cpu") for row in found)
            else region(FASTER, times),
            "less memory, %": region((LESS - NEAR, LESS + NEAR), saved),
        }
    ).noting(f"On all devices the materialised form takes {min(times.values())} to {max(times.values())} times as long")


def _named(row: attention_rows.Row) -> str:
    way = "causal" if "causal" in row["arm"] else "both ways"
    return f"$N = {row['N']:,}$, {way}, {row['dtype']} on {row['device']}"
