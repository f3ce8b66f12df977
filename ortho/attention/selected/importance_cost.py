"""Closed forms of `ortho.attention.selected.importance`."""

from ortho._checks import checked
from ortho.attention.mechanism import AttentionCost
from ortho.attention.selected.selection_cost import Flops, best_cost, chosen_cost, flops
from ortho.attention.sparse.tiling import TILE, Work

COUNT = 64


def importance_flops(N: int, K: int, V: int, *, count: int = COUNT, causal: bool = True) -> Flops:
    """What the fast form spends on choosing, in which there are no products, and on attending, a sequence."""
    return flops(0, _work(N, count, causal), K, V)


def _comparing(N: int, K: int, count: int, form: str, causal: bool) -> int:
    """Scalar operations of choosing: squared lengths, and the highest of them."""
    if not causal:
        compared = best_cost(N, count)
    elif form == "reference":
        compared = N * (N + best_cost(N, count))
    else:  # of a tile those kept before it and its own, which are blocked for the queries before them
        kept = min(count, N)
        compared = sum(kept + n + n * (kept + n + best_cost(kept + n, kept)) for n in _sizes(N))
    return 2 * N * K + compared


def _sizes(N: int) -> list[int]:
    """Of the tiles."""
    return [min(TILE, N - start) for start in range(0, N, TILE)]


def _work(N: int, count: int, causal: bool) -> list[Work]:
    kept, tile, T = min(count, N), min(TILE, N), len(_sizes(N))
    if not causal:
        return [Work(T, T, tile, kept)]
    before = [min(kept, tile * t) for t in range(T)]
    return _some(Work(T, T, tile, tile), Work(T - 1, sum(before), tile, 1))


def _some(*work: Work) -> list[Work]:
    return [each for each in work if each.blocks]


@checked
def importance_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    count: int = COUNT,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form, for a number of tokens."""
    kept, item = min(count, N), max(itemsize, 4)
    held = kept if form == "fast" else N
    return chosen_cost(
        B,
        N,
        H,
        K,
        V,
        choosing=0,
        comparing=_comparing(N, K, count, form, causal),
        last_choosing=0,
        work=_work(N, count, causal),
        last=_some(Work(1, 1, 1, 1), Work(1, min(count, N - 1), 1, 1)) if causal else [Work(1, 1, 1, kept)],
        form=form,
        qk_grad=qk_grad,
        itemsize=itemsize,
        state_bytes=held * (itemsize * (K + V) + item),
    )
