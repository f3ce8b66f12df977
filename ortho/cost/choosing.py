"""How much of the work of a mechanism that chooses its pairs goes into choosing."""

from collections.abc import Callable
from typing import Any

from ortho import _checks
from ortho._checks import checked
from ortho.attention import MECHANISMS
from ortho.attention.selected.importance_cost import importance_flops
from ortho.attention.selected.lsh_cost import lsh_flops
from ortho.attention.selected.moba import moba_flops
from ortho.attention.selected.nsa_cost import nsa_flops
from ortho.attention.selected.routing_cost import routing_flops
from ortho.attention.selected.selection_cost import Flops
from ortho.attention.selected.top_k import top_k_flops

# Not of a sparse + linear hybrid, in which near keys are so by their positions.
CHOOSING: dict[str, Callable[..., Flops]] = {
    "top-k": top_k_flops,
    "importance": importance_flops,
    "lsh": lsh_flops,
    "routing": routing_flops,
    "moba": moba_flops,
    "nsa": nsa_flops,
}


@checked
def choosing(attention: str, N: int, K: int, V: int, *, causal: bool = True, **sizes: Any) -> Flops:
    """What the fast form spends on choosing pairs and on attending to them, for a sequence of N tokens, in FLOPs of
    matrix products; its `share` is that of choosing. `sizes` are those of the mechanism's closed form.

    Comparisons are not in it, which is all that "importance" chooses by. Raises ValueError for a mechanism that does
    not choose, and for a call that it does not serve.
    """
    for name, value in (("N", N), ("K", K), ("V", V)):
        _checks.positive_int(name, value)
    flops = CHOOSING[_checks.one_of("attention", attention, CHOOSING)]
    if not causal and not MECHANISMS[attention].bidirectional:
        raise ValueError(f"causal: expected True, since {attention!r} chooses from a query's past, got {causal}")
    return flops(N, K, V, causal=causal, **sizes)
