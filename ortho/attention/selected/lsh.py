r"""Attention within hash buckets: tokens whose random projections peak at the same place see each other (Reformer:
Kitaev, Kaiser & Levskaya 2020, arXiv:2001.04451, section 2).

$h(x) = \mathrm{argmax}\,[xR;\, -xR]$ with R (K, buckets/2) drawn once: vectors at a small angle are likely to have the
same h. Several rounds, each with an R of its own, find more of them; a pair that is found more than once counts once,
which is what the paper's correction by the number of rounds (its appendix A) comes to.

As published, tokens are sorted by bucket, the whole order is cut into chunks, and a token sees those of its bucket in
its own and the previous chunk. Where the cuts fall depends on the sizes of other buckets, and so on the future
(`sorted_chunks_mask` shows it). Here each bucket is cut by itself, which leaks nothing: see
`ortho.attention.selected.groups`.

As published, too, queries are keys: keys are the queries divided by their lengths, and a token attends to itself only
if it finds nothing else. For that, hand q in as k, with `shared_qk`.
"""

import torch

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.indexing import indexing
from ortho.attention.mechanism import Mechanism
from ortho.attention.operands import carried, with_past, working
from ortho.attention.recurrent.memory import unit
from ortho.attention.selected.groups import chunk_round, group_mask, group_parts
from ortho.attention.selected.lsh_cost import BUCKETS, ROUNDS, WIDTH, lsh_cost
from ortho.attention.selected.selection import Call, attend_joined, attend_reference, begin, choice_call, drawn_once
from ortho.attention.transforms import uncompiled

# Of the default projections, the same in every call; a number that nobody seeds data with.
SEED = 2001_04451


@checked
def draw_projections(
    K: int, *, rounds: int = ROUNDS, buckets: int = BUCKETS, generator: torch.Generator | None = None
) -> Float[Tensor, "rounds K half"]:
    """R of each round, standard normal, for an even number of buckets; ValueError for an odd one."""
    if _checks.positive_int("buckets", buckets) % 2:
        raise ValueError(f"buckets: expected an even number, one for each row and its opposite, got {buckets}")
    shape = (_checks.positive_int("rounds", rounds), _checks.positive_int("K", K), buckets // 2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@checked
def hashed(
    x: Float[Tensor, "*batch N K"], projections: Float[Tensor, "rounds K half"]
) -> Int[Tensor, "*batch rounds N"]:
    """The bucket of each row in each round, below 2 half."""
    with torch.no_grad(), no_autocast(x):
        x = working(x)
        turned = x[..., None, :, :] @ projections.to(x)
        return torch.cat([turned, -turned], -1).argmax(-1)


@checked(shapes=False)
@indexing()
def lsh_mask(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
) -> Bool[Tensor, "*batch N M"]:
    """The pairs that are kept. The last query of a causal call stands at the last key."""
    with_past(q, k, k, False, attn_mask, None)
    R = _projections(projections, q)
    call = choice_call(q, k, is_causal=is_causal, attn_mask=attn_mask, scale=None)
    return _mask(call, _flat(hashed(q, R)), _flat(hashed(k, R)), width, shared_qk).reshape(*q.shape[:-1], -1)


@checked
def sorted_chunks_mask(
    buckets: Int[Tensor, "*batch rounds N"], *, width: int = WIDTH, is_causal: bool = False
) -> Bool[Tensor, "*batch N N"]:
    """The pairs that are kept as published, of tokens with these buckets: the whole order, by bucket and position, is
    cut into chunks of `width`. Which pairs of the past these are depends on the future."""
    N = buckets.shape[-1]
    number = torch.arange(N, device=buckets.device)
    order = (buckets * N + number).argsort(-1)
    of_places = (number // _checks.positive_int("width", width)).expand_as(order)
    chunk = torch.empty_like(order).scatter_(-1, order, of_places)
    gap = chunk[..., :, None] - chunk[..., None, :]
    found = (buckets[..., :, None] == buckets[..., None, :]) & (gap >= 0) & (gap <= 1)
    if is_causal:
        found &= number <= number[:, None]
    return _unless_alone(found.any(-3), 0)


@checked(shapes=False)
@uncompiled
@indexing()
def lsh_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`softmax_attention_reference` under `lsh_mask`.

    `projections` are by default 2 rounds of 32 buckets, the same in every call; a group is cut into chunks of `width`
    keys. A query whose bucket has no key gets zeros; with `shared_qk` a token finds at least itself, and there must be
    as many queries as keys. The state is (keys, values, buckets of the keys).

    Raises ValueError for a mask that is not the same for all queries.
    """
    keys, values, buckets, R, call = _begin(q, k, v, projections, shared_qk, is_causal, attn_mask, scale, initial_state)
    chosen = _mask(call, _flat(hashed(q, R)), _flat(buckets), width, shared_qk)
    o = attend_reference(q, _scaled(keys, shared_qk), values, call, chosen)
    return (o, (keys, values, buckets)) if return_state else o


@checked(shapes=False)
@uncompiled
@indexing()
def lsh_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    projections: Float[Tensor, "rounds K half"] | None = None,
    width: int = WIDTH,
    shared_qk: bool = False,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`lsh_attention_reference` in time and memory linear in N, in float32 at least; not differentiable twice."""
    keys, values, buckets, R, call = _begin(q, k, v, projections, shared_qk, is_causal, attn_mask, scale, initial_state)
    width = min(_checks.positive_int("width", width), keys.shape[-2])
    rounds = [
        chunk_round(*labels, call, 2 * R.shape[-1], width)
        for labels in zip(_flat(hashed(q, R)), _flat(buckets), strict=True)
    ]
    parts = group_parts(rounds, call, skip_self=shared_qk)
    o = attend_joined(q, _scaled(keys, shared_qk), values, call.scale, parts)
    return (o, (keys, values, buckets)) if return_state else o


def _begin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projections: Tensor | None,
    shared_qk: bool,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    initial_state: State | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Call]:
    """(keys, values, their buckets, R, call)."""
    state = None if initial_state is None else _checks.state(initial_state, "keys", "values", "buckets")
    keys, values, call = begin(q, k, v, is_causal, attn_mask, scale, None if state is None else state[:2])
    if shared_qk and q.shape != k.shape:
        raise ValueError(f"k: expected q itself with shared_qk, of shape {tuple(q.shape)}, got {tuple(k.shape)}")
    R = _projections(projections, q)
    buckets = hashed(k, R)
    if state is not None:
        past = state[0].shape[-2]
        buckets = torch.cat([carried("buckets", state[2], (*buckets.shape[:-1], past), buckets.dtype), buckets], -1)
    return keys, values, buckets, R, call


def _projections(projections: Tensor | None, q: Tensor) -> Float[Tensor, "rounds K half"]:
    """Checked, or the default ones."""
    if projections is None:
        return drawn_once("lsh", lambda K: draw_projections(K, generator=torch.Generator().manual_seed(SEED)), q)
    _checks.float_tensor("projections", projections)
    if projections.dim() != 3 or projections.shape[1] != q.shape[-1] or 0 in projections.shape:
        wanted = f"(rounds, {q.shape[-1]}, half)"
        raise ValueError(f"projections: expected shape {wanted}, got {tuple(projections.shape)}")
    _checks.finite("projections", projections)
    return projections.detach().to(q.device, torch.promote_types(q.dtype, torch.float32))


def _scaled(keys: Tensor, shared_qk: bool) -> Tensor:
    """The keys that scores are computed with."""
    return unit(working(keys), "k").to(keys.dtype) if shared_qk else keys


def _flat(labels: Int[Tensor, "*batch rounds N"]) -> Int[Tensor, "rounds G N"]:
    return labels.reshape(-1, *labels.shape[-2:]).transpose(0, 1)


def _mask(
    call: Call, of_queries: Int[Tensor, "rounds G N"], of_keys: Int[Tensor, "rounds G M"], width: int, shared_qk: bool
) -> Bool[Tensor, "G N M"]:
    _checks.positive_int("width", width)
    found = torch.stack([group_mask(*pair, call, width) for pair in zip(of_queries, of_keys, strict=True)]).any(0)
    if not shared_qk:
        return found
    found = _unless_alone(found, call.first)
    return found if call.visible is None else found & call.visible[:, None]


def _unless_alone(found: Bool[Tensor, "*batch N M"], first: int) -> Bool[Tensor, "*batch N M"]:
    """Without each token's pair with itself, but for tokens that find no other."""
    N, M = found.shape[-2:]
    itself = torch.arange(M, device=found.device) == torch.arange(first, first + N, device=found.device)[:, None]
    found = found & ~itself
    return found | (itself & ~found.any(-1, keepdim=True))


MECHANISM = Mechanism(
    name="lsh",
    family="dynamic",
    source="Kitaev et al. 2020, arXiv:2001.04451",
    reference=lsh_attention_reference,
    fast=lsh_attention,
    causal=True,
    exact=False,
    positional=True,
    cost=lsh_cost,
)
