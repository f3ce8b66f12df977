r"""The gradient of the values by one Triton kernel, for GPUs: $dv_j = \sum_i e^{s_{ij} - L_i}\, do_i$ as it reads.

A block of keys stays with its program while the queries pass by. The log-sum-exps are known, so there is no running
maximum and no sum of weights to correct by, as a forward kernel has them, and no channels for them.
"""

from math import log

import triton
import triton.language as tl

from ortho._typing import Float, Tensor

LOG2_E = tl.constexpr(1 / log(2))


def gradient_of_values(
    q: Float[Tensor, "B H N K"],
    k: Float[Tensor, "B H M K"],
    L: Float[Tensor, "B H N"],
    do: Float[Tensor, "B H N V"],
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "B H M V"]:
    """dv, laid out token by token, so that merging heads is free; M = N if causal. K and V are 16, 32, 64 or 128."""
    (B, H, N, K), M, V = q.shape, k.shape[2], do.shape[3]
    q, k, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, do))
    dv = do.new_empty(B, M, H, V).transpose(1, 2)
    keys, queries = 128 if max(K, V) <= 64 else 64, 64  # the fastest of eight choices on an H200
    _kernel[triton.cdiv(M, keys), B * H](
        *(q, k, L.contiguous(), do, dv),
        *(stride for x in (q, k, do, dv) for stride in x.stride()[:3]),
        *(H, N, M, scale / log(2)),
        causal=is_causal,
        whole=N % queries == 0,
        K=K,
        V=V,
        KEYS=keys,
        QUERIES=queries,
        num_warps=4,
        num_stages=3,
    )
    return dv


@triton.jit
def _kernel(
    q,
    k,
    L,
    do,
    dv,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    do_batch,
    do_head,
    do_token,
    dv_batch,
    dv_head,
    dv_token,
    H,
    N,
    M,
    scale,
    causal: tl.constexpr,
    whole: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """dv of KEYS keys of one head."""
    first, item = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64)
    batch, head = item // H, item % H
    j, c, e = first.to(tl.int64) + tl.arange(0, KEYS), tl.arange(0, K), tl.arange(0, V)
    keys = tl.load(k + batch * k_batch + head * k_head + j[:, None] * k_token + c, mask=j[:, None] < M, other=0.0)
    q += batch * q_batch + head * q_head + c[:, None]
    do += batch * do_batch + head * do_head + e
    L += item * N
    sums = tl.zeros([KEYS, V], tl.float32)
    start = 0
    if causal:  # first the queries among the block's own tokens, which do not see all of its keys
        start = first + KEYS
        for at in range(first, tl.minimum(start, N), QUERIES):
            sums = _added(sums, keys, j, q, L, do, at, N, q_token, do_token, scale, True, whole, QUERIES)
    for at in range(start, N, QUERIES):
        sums = _added(sums, keys, j, q, L, do, at, N, q_token, do_token, scale, False, whole, QUERIES)
    dv += batch * dv_batch + head * dv_head + j[:, None] * dv_token + e
    tl.store(dv, sums.to(dv.dtype.element_ty), mask=j[:, None] < M)


@triton.jit
def _added(
    sums,
    keys,
    j,
    q,
    L,
    do,
    at,
    N,
    q_token,
    do_token,
    scale,
    masked: tl.constexpr,
    whole: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The sums and what QUERIES queries from `at` on add to them. Past the end L is infinite and a weight 0."""
    i = tl.arange(0, QUERIES)
    q, L, do = q + tl.cast(at, tl.int64) * q_token, L + at, do + tl.cast(at, tl.int64) * do_token
    if whole:
        queries, L, do = tl.load(q + i * q_token), tl.load(L + i), tl.load(do + i[:, None] * do_token)
    else:
        queries = tl.load(q + i * q_token, mask=at + i < N, other=0.0)
        L = tl.load(L + i, mask=at + i < N, other=float("inf"))
        do = tl.load(do + i[:, None] * do_token, mask=at + i[:, None] < N, other=0.0)
    weights = tl.exp2(tl.dot(keys, queries) * scale - L * LOG2_E)
    if masked:
        weights = tl.where(at + i >= j[:, None], weights, 0.0)
    return tl.dot(weights.to(do.dtype), do, sums)
