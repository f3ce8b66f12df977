"""Closed forms of `ortho.attention.selected.routing`."""

from dataclasses import replace

from ortho._checks import checked
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, AttentionCost
from ortho.attention.selected.groups import group_work
from ortho.attention.selected.routing_centroids import CLUSTERS, WIDTH, is_balanced
from ortho.attention.selected.selection_cost import Flops, best_cost, chosen_cost, flops
from ortho.attention.sparse.tiled_attention import tiled_cost
from ortho.attention.sparse.tiling import Work


def routing_flops(
    N: int,
    K: int,
    V: int,
    *,
    clusters: int = CLUSTERS,
    width: int = WIDTH,
    balanced: bool | None = None,
    causal: bool = True,
) -> Flops:
    """What the fast form spends on choosing and on attending, a sequence: products of normalised queries and keys with
    each centroid; and clusters of `width`, or chunks that are full in the worst case."""
    if is_balanced(balanced, causal):
        width = min(width, N)
        work = [Work(clusters, clusters, width, width)]
    else:
        work = group_work(N, N, rounds=1, count=clusters, width=width)
    return flops(4 * N * K * clusters, work, K, V)


@checked
def routing_cost(
    B: int,
    N: int,
    H: int,
    K: int,
    V: int,
    *,
    clusters: int = CLUSTERS,
    width: int = WIDTH,
    balanced: bool | None = None,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form, for a number of tokens."""
    a_token = 2 * K * clusters
    normalised = 2 * N * (5 * K + 2)  # mean, difference, square, mean, product; a row's sum with a constant, and root
    if not is_balanced(balanced, causal):
        work, last = (group_work(n, N, rounds=1, count=clusters, width=width) for n in (N, 1))
        return chosen_cost(
            B,
            N,
            H,
            K,
            V,
            choosing=2 * N * a_token,
            comparing=normalised + 2 * N * clusters,  # the highest, of queries and of keys
            last_choosing=2 * a_token,
            work=work,
            last=last,
            form=form,
            qk_grad=qk_grad,
            itemsize=itemsize,
            extra_bytes=8 * N,
        )
    G, item = B * H, max(itemsize, 4)
    if form == "reference":
        cost = _materialised(G, N, K, V, clusters, qk_grad, item)
    else:
        cost = _copied(B, H, K, V, N, clusters, min(width, N), qk_grad, item)
    return replace(
        cost,
        forward=cost.forward + G * 2 * N * a_token,
        elementwise_forward=cost.elementwise_forward + G * (normalised + 2 * clusters * best_cost(N, width)),
        decode=cost.decode + G * (1 + N) * a_token,  # a query and all keys
        state_bytes=itemsize * G * N * (K + V),
    )


def _materialised(G: int, N: int, K: int, V: int, clusters: int, qk_grad: bool, item: int) -> AttentionCost:
    rows, pairs, reach = G * N, G * N * N, int(qk_grad)
    return AttentionCost(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (V + reach * (2 * K + V)),
        # scale; of each cluster block, softmax, block; their sum, and its share
        elementwise_forward=pairs * (1 + clusters * (2 + SOFTMAX_FORWARD) + clusters - 1 + 1),
        elementwise_backward=reach * pairs * (1 + clusters * (2 + SOFTMAX_BACKWARD) + clusters - 1 + 1),
        # the weights; those of each cluster, with a mask, a byte a pair; how many clusters a query is in
        saved_bytes=item * pairs + reach * (clusters * (item + 1) * pairs + item * rows * (2 * K + V) + 8 * rows),
        decode=2 * rows * (K + V),
        state_bytes=0,
    )


def _copied(B: int, H: int, K: int, V: int, N: int, clusters: int, w: int, qk_grad: bool, item: int) -> AttentionCost:
    """As attention of as many tokens as clusters hold, with the copies there and back."""
    G, reach = B * H, int(qk_grad)
    work, last = ([Work(clusters, clusters, n, w)] for n in (w, 1))
    cost = tiled_cost(B, clusters * w, H, K, V, work=work, last=last, qk_grad=qk_grad, itemsize=item)
    copies = G * clusters * w
    return replace(
        cost,
        # how many clusters a query is in, at least 1, a copy's share; outputs times their shares, added up
        elementwise_forward=cost.elementwise_forward + 2 * copies + G * N + 2 * copies * V,
        elementwise_backward=cost.elementwise_backward + copies * (2 * V + 2 * reach * K),
        # outputs before and after their shares, these, the numbers of the rows that were copied, of queries and of keys
        saved_bytes=cost.saved_bytes + cost.output_bytes + item * copies * (V + 1) + 16 * copies,
        output_bytes=0,
    )
