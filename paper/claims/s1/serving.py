"""S1, section 3.1: what a token costs that is generated with a cache, and whether it is the right one."""

from functools import cache

import sympy
import torch

from ortho.attention import MECHANISMS
from ortho.attention.decoding import new_cache
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost import layer
from ortho.cost.big_o import N, d
from ortho.cost.decoding import decoded
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, growth, region
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding

CHAPTER = "20-serving"

TOKENS, WIDTH = 60, 8


@evidence("S1.3.1a", chapter=CHAPTER)
def step() -> Finding:
    with_cache = decoded("softmax", 1, N, 1, d, d)
    whole = MECHANISMS["softmax"].cost(1, N, 1, d, d, form="reference")
    of_layer = sympy.expand(layer(1, N, d, 1, causal=True).decode)
    rest = sympy.expand(of_layer - with_cache.forward)
    crossing = sympy.solve(with_cache.forward - rest, N)[0]
    return all_of(
        {
            "attention of a token, with a cache": growth("N*d", with_cache.forward),
            "without": growth("N^2*d", whole.forward),
            "cache": growth("N*d", with_cache.nbytes),
        }
    ).noting(
        f"A layer's step takes ${sympy.latex(of_layer)}$ FLOPs: its projections, ${sympy.latex(rest)}$, are the larger "
        f"part up to $N = {sympy.latex(crossing)}$"
    )


@cache
def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence's outputs: of the whole pass, of a cache read token by token, and of keys before each token alone.

    Each is (TOKENS - 1, WIDTH): the first token has none before it.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    whole = softmax_attention_reference(q, k, v, is_causal=True)
    reader = new_cache("softmax", TOKENS)
    steps = [reader.attend(q[t : t + 1], k[t : t + 1], v[t : t + 1]) for t in range(TOKENS)]
    before = [softmax_attention_reference(q[t : t + 1], k[:t], v[:t]) for t in range(1, TOKENS)]
    assert isinstance(whole, torch.Tensor)
    return whole[1:], torch.cat(steps)[1:], torch.cat(before)  # type: ignore[arg-type]


@evidence("S1.3.1b", chapter=CHAPTER)
def last_row() -> Finding:
    whole, steps, before = rows()
    apart, printed = (float((found - whole).norm() / whole.norm()) for found in (steps, before))
    readings = {"all keys, the token's own included": apart, "the keys before it alone, as printed": round(printed, 2)}
    return all_of({"difference from the whole pass": region((0, EXACT), readings)}).noting(
        f"Relative, over all lengths to $N = {TOKENS}$. The source prints $K_{{1:t-1}}$"
    )
