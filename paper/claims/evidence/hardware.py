"""S1, sections 2.1, 3.1, 3.2 and 4.1: tiles, decoding with a cache, recomputation, and mixtures of experts."""

from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
import torch

from ortho.attention.cache import new_cache
from ortho.attention.softmax.flash import ROWS, flash_attention
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost import block, layer, of
from ortho.cost.attention import decoded
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import Allocations
from ortho.cost.models import mixture_of_experts, recomputed
from ortho.layers.feed_forward import MixtureOfExperts
from paper import experiments
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds, mended, region, untestable
from paper.claims.shared.common import EXACT, IN_N, normal, relative_error, seeded
from paper.claims.verdicts import Finding
from paper.experiments.speed import attention_analysis as attention_rows
from paper.experiments.speed.analysis import Row
from paper.memory import formula, layer_bytes

FLASH, SERVING, RECOMPUTATION, MIXTURES = "19-flash-attention", "20-serving", "21-recomputation", "22-experts"

# -------------------------------------------------------- attention by tiles that never stores its scores (section 2.1)

TOKENS, WIDTH = 1000, 8  # no multiple of a tile
FASTER, LESS, NEAR = (3, 5), 70, 10  # times, per cent, and how far from "about" a figure may be
MARKED = 0.8  # the largest ratio of constants that is "markedly smaller"
CAUSAL = (16384, 768, 12)  # tokens, width and heads of the causal layer whose FLOPs are compared
FORMS = {"reference": softmax_attention_reference, "tiles": flash_attention}


def away(*, is_causal: bool) -> float:
    """The largest relative error of the tiled form, of its output and gradients."""
    results: dict[str, Any] = {}
    for name, form in FORMS.items():
        q, k, v, upstream = normal(4, TOKENS, WIDTH)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o: Any = form(*leaves, is_causal=is_causal)
        results[name] = o.detach(), *torch.autograd.grad(o, leaves, upstream)
    return max(map(relative_error, results["tiles"], results["reference"]))


@cache
def largest(form: str) -> int:
    """Numbers of the largest tensor that a form of softmax attention makes, forward and backward, in float32."""
    return largest_tensor(FORMS[form])


def largest_tensor(attend: Callable[..., Any]) -> int:
    """The same for any attention."""
    q, k, v = torch.zeros(3, 1, TOKENS, WIDTH).unbind()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with Allocations() as memory:
        o: Any = attend(*leaves)
        torch.autograd.grad(o.sum(), leaves)
    return memory.largest // 4


@evidence("S1.2.1a", chapter=FLASH)
def exact_by_tiles() -> Finding:
    worst = max(away(is_causal=is_causal) for is_causal in (False, True))
    parts = {
        "computed tile by tile": holds(
            "outputs and gradients are those of the definition", worst, EXACT, at=f"$N = {TOKENS:,}$"
        ),
        f"numbers of the largest tensor, of $N^2 = {TOKENS**2:,}$": region(
            (0, TOKENS**2 / 2), {"tiles": largest("tiles")}
        ),
    }
    return all_of(parts).noting(
        f"Tiles of {ROWS} queries. The definition's largest tensor has {largest('reference'):,}"
    )


@evidence("S1.2.1b", chapter=FLASH)
def orders() -> Finding:
    fused, materialised = (layer(1, N, d, H, form=form) for form in ("fast", "reference"))
    backward = sympy.expand(fused.backward - materialised.backward)
    step = sympy.limit(fused.step / materialised.step, N, sympy.oo)
    shares = {"FLOPs, forward": 1.0 * (fused.forward == materialised.forward), "FLOPs of a step": float(step)}
    tiles, square = (layer(1, *CAUSAL, form=form, causal=True).step for form in ("fast", "reference"))
    shares[f"FLOPs of a causal step, $N = {CAUSAL[0]:,}$, $d = {CAUSAL[1]}$"] = round(tiles / square, 3)
    times = sorted((round(1 / row["ratio_alike"][1], 2), _named(row)) for row in rows())
    shares |= {f"seconds at {setting}": time for time, setting in times[:1] + times[-1:]}
    parts = {
        "time": growth("N^2*d + N*d^2", sympy.expand(fused.forward)),
        "space": growth("N*d", formula() / 4),
        "its constant, of the materialised form's": region((0, MARKED), shares),
    }
    return all_of(parts).noting(
        f"Markedly smaller is read as at most {MARKED}. Backward ${sympy.latex(backward)}$ FLOPs come on top, for "
        "scores that are computed again"
    )


def rows() -> list[Row]:
    """What the records say of the materialised form, one row a device, direction and length."""
    found = attention_rows.beside_alike(experiments.load("flash-speed"), "exact")
    return [row for row in found if row["arm"].startswith("materialised")]


@evidence("S1.2.1c", chapter=FLASH)
def faster_and_leaner() -> Finding:
    """Times are judged only if a GPU is among the devices: the algorithm was made for GPUs."""
    found, both = rows(), {"the materialised and the fused form": None}
    if not found:
        return untestable(f"3 to 5 times faster, {LESS} % less memory", both, lack="no record times")
    times = {_named(row): round(row["ratio_alike"][1], 2) for row in found}
    saved = {_named(row): round(100 - 100 / row["bytes_ratio"], 1) for row in found if row["bytes_ratio"]}
    parts = {
        "time": untestable("3 to 5 times faster", both, lack="no record of a GPU times")
        if all(experiments.on_cpu(row["device"]) for row in found)
        else region(FASTER, times),
        "less memory, %": region((LESS - NEAR, LESS + NEAR), saved),
    }
    return all_of(parts).noting(
        f"On all devices the materialised form takes {min(times.values())} to {max(times.values())} times as long"
    )


def _named(row: Row) -> str:
    way = "causal" if "causal" in row["arm"] else "both ways"
    return f"$N = {row['N']:,}$, {way}, {row['dtype']} on {row['device']}"


# ------------------------------------------ what a generated token costs, and whether it is the right one (section 3.1)

DECODED = 60


@evidence("S1.3.1a", chapter=SERVING)
def step() -> Finding:
    cached = layer(1, N, d, H, causal=True)
    attention = decoded("softmax", 1, N, H, d / H, d / H).forward
    rest = sympy.expand(cached.decode - attention)
    crossing = sympy.solve(attention - rest, N)[0]
    parts = {
        "a token with a cache": growth("N*d", sympy.expand(cached.decode), settings=IN_N),
        "without": growth("N^2*d", sympy.expand(cached.forward), settings=IN_N),
        "cache": growth("N*d", cached.state_bytes),
    }
    return all_of(parts).noting(
        f"The projections, ${sympy.latex(rest)}$, are the larger part of a token with a cache up to "
        f"$N = {sympy.latex(crossing)}$; attention alone takes ${sympy.latex(attention)}$"
    )


@cache
def decoded_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence's outputs: from the whole pass, from a cache read token by token, and as printed, from only the keys
    before each token, without a scale.

    Each is (DECODED - 1, WIDTH): the first token has none before it.
    """
    q, k, v = normal(3, DECODED, WIDTH)
    whole = softmax_attention_reference(q, k, v, is_causal=True)
    reader = new_cache("softmax", DECODED)
    steps = [reader.attend(q[t : t + 1], k[t : t + 1], v[t : t + 1]) for t in range(DECODED)]
    before = [softmax_attention_reference(q[t : t + 1], k[:t], v[:t], scale=1.0) for t in range(1, DECODED)]
    assert isinstance(whole, torch.Tensor)
    return whole[1:], torch.cat(steps)[1:], torch.cat(before)


@evidence("S1.3.1b", chapter=SERVING)
def last_row() -> Finding:
    whole, steps, before = decoded_rows()
    apart, printed = (relative_error(found, whole) for found in (steps, before))
    return mended(
        "the cached step is the last row of the whole pass",
        printed,
        {"with the token's own key and value, and $1/\\sqrt d$": apart},
        EXACT,
        at=f"all lengths to $N = {DECODED}$",
    )


# -------------------------------------------- activations that are computed again, in GPT-2 small's sizes (section 3.2)

GPT2 = {"B": 1, "N": 1024, "d": 768, "H": 12, "L": 12}
COMPUTE, MEMORY = (20, 30), (50, 70)  # per cent, as claimed
WAYS = {"each block": 12, "segments of 2 blocks": 6, "of 3": 4, "of 4": 3, "of 6": 2, "all in one": 1}


def more(segments: int, form: str = "fast") -> float:
    """The FLOPs that recomputation adds, in per cent of a step without it."""
    ours, whole = (recomputed(**GPT2, segments=n, form=form).step for n in (segments, 0))
    return 100 * (ours - whole) / whole


def peak(segments: int, form: str = "fast") -> int:
    """Bytes of activations at the peak, when one segment's have been computed again: the inputs of the other segments,
    and what the blocks of the longest keep. With 0 segments all blocks keep theirs."""
    N_, d_, L = GPT2["N"], GPT2["d"], GPT2["L"]
    one, own = layer_bytes(N_, d_, GPT2["H"], scope="block", form=form), 4 * N_ * d_
    return (segments - 1) * own + -(-L // segments) * one if segments else L * one


def less(segments: int, form: str = "fast") -> int:
    """Per cent of the activations at the peak that recomputation saves."""
    return round(100 - 100 * peak(segments, form) / peak(0, form))


@evidence("S1.3.2a", chapter=RECOMPUTATION)
def compute_and_memory() -> Finding:
    parts = {
        "compute, %": region(COMPUTE, {way: round(more(segments)) for way, segments in WAYS.items()}),
        "less memory for activations, %": region(MEMORY, {way: less(segments) for way, segments in WAYS.items()}),
    }
    fused, materialised = (
        [way for way, n in WAYS.items() if _within(round(more(n, form)), COMPUTE) and _within(less(n, form), MEMORY)]
        for form in ("fast", "reference")
    )
    exact = {way: more(WAYS[way]) for way in fused}
    meeting = ", ".join(f"segments {way} ({again:.3f} % more compute)" for way, again in exact.items()) or "none"
    one = block(*(GPT2[size] for size in ("B", "N", "d", "H")))
    return all_of(parts).noting(
        f"GPT-2 small, {GPT2['N']:,} tokens, fused attention, to whole per cents as the source has them. Both ranges "
        f"are met by {meeting}; with materialised scores by {', '.join(materialised) or 'none'}. All of the "
        f"forward pass again would be {100 * one.forward / one.step:.1f} % more; the last product of a segment is not "
        "needed again"
    )


def _within(value: float, ends: tuple[int, int]) -> bool:
    return ends[0] <= value <= ends[1]


# ------------------------------------------------------------------------------------ mixtures of experts (section 4.1)

EXPERTS, PICKED, EXPERT_WIDTH, ROUTED = 8, 2, 12, 40
E, k = sympy.symbols("E k", positive=True)


@evidence("S1.4.1a", chapter=MIXTURES)
def expert_orders() -> Finding:
    cost = mixture_of_experts(1, N, d, E, k, 4 * d)
    parts = {
        "time": growth("N*d^2/k + N*d*E", sympy.expand(cost.forward)),
        "space, parameters": growth("d^2*E", sympy.expand(cost.trained)),
    }
    return all_of(parts).noting("More active experts are more work, not less: $k$ multiplies")


@evidence("S1.4.1c", chapter=MIXTURES)
def less_work() -> Finding:
    """The work per token of some experts' networks, against that of one network with as many weights."""
    dense = mixture_of_experts(1, N, d, 1, 1, 4 * d * EXPERTS)
    picked = {n: mixture_of_experts(1, N, d, EXPERTS, n, 4 * d) for n in (1, PICKED, EXPERTS // 2)}
    at = {N: 1, d: 768}
    shares = {f"$k = {n}$": float(100 * cost.forward.subs(at) / dense.forward.subs(at)) for n, cost in picked.items()}
    weights = {n: float(100 * cost.trained.subs(at) / dense.trained.subs(at)) for n, cost in picked.items()}
    return region((0, 99), {label: round(share, 1) for label, share in shares.items()}, unit=" %").noting(
        f"Capacity is read as the number of weights, {min(weights.values()):.1f} % of the one network's. "
        f"{EXPERTS} experts, $d = {at[d]}$"
    )


@evidence("S1.4.1b", chapter=MIXTURES)
def routing() -> Finding:
    fast, every = (  # of the same draws; the second weighs all experts by gates, all but k of them 0
        MixtureOfExperts(EXPERT_WIDTH, EXPERTS, top_k=PICKED, form=form, generator=seeded(), dtype=torch.float64)
        for form in ("fast", "reference")
    )
    tokens = normal(1, ROUTED, EXPERT_WIDTH, seed=1)
    found = fast.route(tokens)
    router = 2 * ROUTED * EXPERT_WIDTH * EXPERTS
    one = 4 * ROUTED * EXPERT_WIDTH * 4 * EXPERT_WIDTH  # an expert, all tokens
    flops = of(fast, tokens.requires_grad_()).forward
    parts = {
        "experts a token": counted({"": PICKED}, {"": found.experts.shape[-1]}),
        "networks computed, in passes of all tokens": counted({"": PICKED}, {"": (flops - router) // one}),
        "combined": holds(
            "the outputs are weighed by the gate",
            relative_error(fast(tokens).detach(), every(tokens).detach()),
            EXACT,
            at=f"{EXPERTS} experts",
        ),
    }
    return all_of(parts).noting("The gate's weights are those of the picked experts, divided by their sum")
