"""Closed forms of `ortho.attention.selected.lsh`."""

from ortho._checks import checked
from ortho.attention.mechanism import AttentionCost
from ortho.attention.selected.groups import group_work
from ortho.attention.selected.selection_cost import Flops, chosen_cost, flops

ROUNDS, BUCKETS, WIDTH = 2, 32, 32


def lsh_flops(
    N: int,
    K: int,
    V: int,
    *,
    rounds: int = ROUNDS,
    buckets: int = BUCKETS,
    width: int = WIDTH,
    causal: bool = True,
) -> Flops:
    """What the fast form spends on choosing and on attending, a sequence: products with each row of a pair of opposite
    ones, of queries and keys; and chunks that are full in the worst case."""
    return flops(2 * N * K * buckets * rounds, group_work(N, N, rounds=rounds, count=buckets, width=width), K, V)


@checked
def lsh_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    rounds: int = ROUNDS,
    buckets: int = BUCKETS,
    width: int = WIDTH,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call without `shared_qk`, in either form, for a number of tokens.

    A causal call computes what any other does, and blocks what is behind a query.
    """
    work, last = (group_work(n, N, rounds=rounds, count=buckets, width=width) for n in (N, 1))
    return chosen_cost(
        B,
        N,
        H,
        K,
        V,
        choosing=lsh_flops(N, K, V, rounds=rounds, buckets=buckets, width=width).choosing,
        comparing=3 * N * buckets * rounds,  # signs; the highest, of queries and of keys
        last_choosing=2 * K * buckets * rounds,
        work=work,
        last=last,
        form=form,
        qk_grad=qk_grad,
        itemsize=itemsize,
        extra_bytes=8 * N * rounds,
    )
