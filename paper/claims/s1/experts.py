"""S1, section 4.1: mixtures of experts."""

from typing import Any

import sympy
import torch

from ortho.cost.big_o import N, d
from ortho.cost.counting import count_step
from ortho.cost.layers import mixture_of_experts
from ortho.layers.experts import MixtureOfExperts
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, holds
from paper.claims.s0.methods import EXACT
from paper.claims.verdicts import Finding

CHAPTER = "22-experts"

EXPERTS, PICKED, WIDTH, TOKENS = 8, 2, 12, 40
E, k = sympy.symbols("E k", positive=True)


@evidence("S1.4.1a", chapter=CHAPTER)
def orders() -> Finding:
    cost = mixture_of_experts(1, N, d, E, k, 4 * d)
    return all_of(
        {
            "time": growth("N*d^2/k + N*d*E", sympy.expand(cost.forward)),
            "space, parameters": growth("d^2*E", sympy.expand(cost.trained)),
        }
    ).noting("More active experts are more work, not less: $k$ multiplies")


def both(form: str) -> Any:
    """A layer, of which every form draws the same."""
    generator = torch.Generator().manual_seed(0)
    return MixtureOfExperts(WIDTH, EXPERTS, top_k=PICKED, form=form, generator=generator, dtype=torch.float64)


def tokens() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def away() -> float:
    """How far the layer is from all experts, weighed by gates of which all but k are 0, relatively."""
    fast, reference = (both(form)(tokens()).detach() for form in ("fast", "reference"))
    return float((fast - reference).norm() / reference.norm())


@evidence("S1.4.1b", chapter=CHAPTER)
def routing() -> Finding:
    found = both("fast").route(tokens())
    router = 2 * TOKENS * WIDTH * EXPERTS
    one = 4 * TOKENS * WIDTH * 4 * WIDTH  # an expert, all tokens
    flops = count_step(both("fast"), tokens().requires_grad_()).forward
    return all_of(
        {
            "experts a token": counted({"": PICKED}, {"": found.experts.shape[-1]}),
            "networks computed, in passes of all tokens": counted({"": PICKED}, {"": (flops - router) // one}),
            "combined": holds("the outputs are weighed by the gate", away(), EXACT, at=f"{EXPERTS} experts"),
        }
    ).noting("The gate's weights are those of the picked experts, divided by their sum")
