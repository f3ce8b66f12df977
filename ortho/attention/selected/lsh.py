r"""Attention within hash buckets: tokens whose random projections peak at the same index see each other (Reformer:
Kitaev, Kaiser & Levskaya 2020, arXiv:2001.04451, section 2).

$h(x) = \mathrm{argmax}\,[xR;\, -xR]$ with R (K, buckets/2) drawn once: vectors at a small angle are likely to have the
same h. Several rounds, each with its own R, find more of them. A pair that is found more than once counts once, which
is equivalent to the paper's correction by the number of rounds (its appendix A).

In the paper, tokens are sorted by bucket, the whole order is cut into chunks, and a token sees those of its bucket in
its own and the previous chunk. The cuts depend on the sizes of other buckets, and so on the future
(`sorted_chunks_mask` shows it). Here each bucket is cut separately, which leaks nothing: see
`ortho.attention.selected.groups`.

Also in the paper, keys are the queries divided by their lengths, and a token attends to itself only if it finds nothing
else. For that, pass q as k, with `shared_qk`.
"""

import torch

from ortho import _checks
from ortho._checks import checked, no_autocast, upcast
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.mechanism import Mechanism
from ortho.attention.scores import unit
from ortho.attention.selected.call import Call, mask_form, selecting_form
from ortho.attention.selected.groups import chunk_round, group_mask, group_tilings, group_work
from ortho.attention.selected.selection import Selecting, attend_joined, attend_to_mask, drawn_once, selection_cost

ROUNDS, BUCKETS, WIDTH = 2, 32, 32
SEED = 2001_04451  # of the default projections, the same in every call; a number that nobody seeds data with


@checked
def hashed(
    x: Float[Tensor, "*batch N K"], projections: Float[Tensor, "rounds K half"]
) -> Int[Tensor, "*batch rounds N"]:
    """The bucket of each row in each round, from 0 to 2 half - 1."""
    with torch.no_grad(), no_autocast(x):
        x = upcast(x)
        turned = x[..., None, :, :] @ projections.to(x)
        return torch.cat([turned, -turned], -1).argmax(-1)


@mask_form()
def lsh_mask(
    call: Call,
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
) -> Bool[Tensor, "G N M"]:
    """The pairs that are kept. In a causal call the last query is at the last key's position."""
    R = _projections(projections, call)
    return _selected(call, hashed(call.q, R), hashed(call.k, R), width, shared_qk)


@selecting_form("buckets")
def lsh_attention_reference(
    call: Call,
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
) -> tuple[Float[Tensor, "G N V"], State]:
    """Softmax attention under `lsh_mask`.

    `projections` are by default 2 rounds of 32 buckets, the same in every call; a group is cut into chunks of `width`
    keys. A query whose bucket has no key gets zeros; with `shared_qk` a token finds at least itself, and there must be
    as many queries as keys. The state is (keys, values, buckets of the keys).

    Raises ValueError for a mask that is not the same for all queries.
    """
    R, buckets = _buckets(call, projections, shared_qk)
    kept = _selected(call, hashed(call.q, R), buckets, width, shared_qk)
    return attend_to_mask(_divided(call) if shared_qk else call, kept), (buckets,)


@selecting_form("buckets")
def lsh_attention(
    call: Call,
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
) -> tuple[Float[Tensor, "G N V"], State]:
    """`lsh_attention_reference` in time and memory linear in N, in float32 at least; not differentiable twice."""
    R, buckets = _buckets(call, projections, shared_qk)
    labels = zip(hashed(call.q, R).unbind(1), buckets.unbind(1), strict=True)
    rounds = [chunk_round(*pair, call, 2 * R.shape[-1], min(width, call.k.shape[1])) for pair in labels]
    tilings = group_tilings(rounds, call, skip_self=shared_qk)
    return attend_joined(_divided(call) if shared_qk else call, tilings), (buckets,)


def _selected(
    call: Call, of_queries: Int[Tensor, "G rounds N"], of_keys: Int[Tensor, "G rounds M"], width: int, shared_qk: bool
) -> Bool[Tensor, "G N M"]:
    """The pairs that any round finds."""
    labels = zip(of_queries.unbind(1), of_keys.unbind(1), strict=True)
    found = torch.stack([group_mask(*pair, call, width) for pair in labels]).any(0)
    if not shared_qk:
        return found
    found = _unless_alone(found, call.first)
    return found if call.visible is None else found & call.visible[:, None]


def _unless_alone(found: Bool[Tensor, "*batch N M"], first: int) -> Bool[Tensor, "*batch N M"]:
    """`found` without each token's pair with itself, except for tokens that find no other."""
    N, M = found.shape[-2:]
    itself = torch.arange(M, device=found.device) == torch.arange(first, first + N, device=found.device)[:, None]
    found = found & ~itself
    return found | (itself & ~found.any(-1, keepdim=True))


def _divided(call: Call) -> Call:
    """The call with keys of length 1."""
    return call._replace(k=unit(call.k, "k"))


def _buckets(
    call: Call, projections: Tensor | None, shared_qk: bool
) -> tuple[Float[Tensor, "rounds K half"], Int[Tensor, "G rounds M"]]:
    """R, and the buckets of all keys."""
    if shared_qk and call.q.shape[1] != call.new:
        queries, keys = (tuple(call.lead(x).shape) for x in (call.q, call.new_k))
        raise ValueError(f"k: expected q itself with shared_qk, of shape {queries}, got {keys}")
    R = _projections(projections, call)
    return R, call.continued("buckets", hashed(call.new_k, R))


def _projections(projections: Tensor | None, call: Call) -> Float[Tensor, "rounds K half"]:
    """The projections, checked; the default ones for None."""
    if projections is None:
        return drawn_once("lsh", draw_projections, SEED, call.q)
    K = call.q.shape[-1]
    if projections.dim() != 3 or projections.shape[1] != K or 0 in projections.shape:
        raise ValueError(f"projections: expected shape (rounds, {K}, half), got {tuple(projections.shape)}")
    _checks.finite("projections", projections)
    return projections.detach().to(call.q)


@checked
def draw_projections(
    K: int, *, rounds: int = ROUNDS, buckets: int = BUCKETS, generator: torch.Generator | None = None
) -> Float[Tensor, "rounds K half"]:
    """R of each round, standard normal; ValueError for an odd number of buckets."""
    if buckets % 2:
        raise ValueError(f"buckets: expected an even number, one for each row and its opposite, got {buckets}")
    return torch.randn((rounds, K, buckets // 2), generator=generator, dtype=torch.float64)


@checked
def sorted_chunks_mask(
    buckets: Int[Tensor, "*batch rounds N"], *, width: int = WIDTH, is_causal: bool = False
) -> Bool[Tensor, "*batch N N"]:
    """The pairs of tokens with these buckets that are kept in the paper: the whole order, by bucket and position, is
    cut into chunks of `width`. Which pairs of past tokens are kept depends on the future."""
    N = buckets.shape[-1]
    number = torch.arange(N, device=buckets.device)
    order = (buckets * N + number).argsort(-1)
    of_places = (number // width).expand_as(order)
    chunk = torch.empty_like(order).scatter_(-1, order, of_places)
    gap = chunk[..., :, None] - chunk[..., None, :]
    found = (buckets[..., :, None] == buckets[..., None, :]) & (gap >= 0) & (gap <= 1)
    if is_causal:
        found &= number <= number[:, None]
    return _unless_alone(found.any(-3), 0)


@selection_cost
def lsh_cost(
    N: int,
    K: int,
    *,
    rounds: int = ROUNDS,
    buckets: int = BUCKETS,
    width: int = WIDTH,
    form: str = "fast",
    causal: bool = False,
) -> Selecting:
    """Closed form of one self-attention call without `shared_qk`, in either form; N must be a number, not a symbol.

    Choosing multiplies queries and keys with one of each two opposite rows. A causal call computes the same as any
    other, chunks that are full in the worst case, and blocks the keys after a query.
    """
    work, last = (group_work(n, N, rounds=rounds, count=buckets, width=width) for n in (N, 1))
    return Selecting(
        choosing=2 * N * K * buckets * rounds,
        last_choosing=2 * K * buckets * rounds,
        work=work,
        last_work=last,
        keys=N,
        integers=N * rounds,
    )


MECHANISM = Mechanism(
    name="lsh",
    family="selected",
    source="Kitaev et al. 2020, arXiv:2001.04451",
    reference=lsh_attention_reference,
    fast=lsh_attention,
    positional=True,
    cost=lsh_cost,
)
