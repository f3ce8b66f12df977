"""Which pairs are selected, compared with loops that follow the definitions and with closed forms; what leaks."""

import pytest
import torch
from seeded import draw
from selected_mechanisms import TOLERANCE, qkv

from ortho.attention.selected import call
from ortho.attention.selected.importance import (
    importance_attention,
    importance_attention_reference,
    importance_mask,
    sampled_importance,
)
from ortho.attention.selected.lsh import draw_projections, hashed, lsh_attention, lsh_mask, sorted_chunks_mask
from ortho.attention.selected.moba import moba_attention, moba_mask, moba_pairs
from ortho.attention.selected.nsa import Sizes, nsa_masks
from ortho.attention.selected.routing import normalised, routing_attention, routing_mask
from ortho.attention.selected.selection import best, leaked_pairs, left_out, positions_of
from ortho.attention.selected.top_k import top_k_attention, top_k_mask

N = 23
SIZES = Sizes(length=4, stride=2, block=4, count=4, window=3)
PROJECTIONS = draw(3, 4, 2, seed=7)
CENTROIDS = draw(5, 4, seed=8)


def latest(group_of_query, groups, i, width, causal):
    """The keys of its group that a query reads, found by counting them off in chunks."""
    members = [j for j in range(len(groups)) if groups[j] == group_of_query]
    up_to = [j for j in members if j <= i]
    own = max(len(up_to) - 1, 0) // width
    found = members[max(0, own - 1) * width : (own + 1) * width]
    return {j for j in found if j <= i or not causal}


def highest(numbers, keys, count):
    return set(sorted(keys, key=lambda j: (-numbers[j], j))[:count])


def rows(mask):
    """The keys of each query of one sequence."""
    return [{j for j, kept in enumerate(row) if kept} for row in mask.tolist()]


def past(i, causal):
    return range(i + 1) if causal else range(N)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 4, N, 100])
def test_top_k_by_hand(causal, count):
    q, k, _ = qkv(length=N)
    k = k.round()  # many equal scores
    q = q.round()
    scores = (q @ k.T).tolist()
    expected = [highest(scores[i], past(i, causal), count) for i in range(N)]
    assert rows(top_k_mask(q, k, count=count, is_causal=causal)) == expected
    if count == 4:  # and something was decided by the position
        assert any(len({scores[i][j] for j in kept}) < len(kept) for i, kept in enumerate(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_importance_by_hand(causal, count):
    q, k, _ = qkv(length=N)
    k = k.round()
    norms = k.square().sum(-1).tolist()
    expected = [highest(norms, past(i, causal), count) for i in range(N)]
    assert rows(importance_mask(q, k, count=count, is_causal=causal)) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 64])
def test_hashing_by_hand(causal, width):
    q, k, _ = qkv(length=N)
    of_queries, of_keys = ([(x @ torch.cat([R, -R], 1)).argmax(1).tolist() for R in PROJECTIONS] for x in (q, k))
    expected = [
        set.union(*(latest(of_queries[r][i], of_keys[r], i, width, causal) for r in range(3))) for i in range(N)
    ]
    assert rows(lsh_mask(q, k, projections=PROJECTIONS, width=width, is_causal=causal)) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_sees_itself_only_if_alone(causal):
    q = qkv(length=N)[0]
    of = [(q @ torch.cat([R, -R], 1)).argmax(1).tolist() for R in PROJECTIONS]
    expected = [set.union(*(latest(of[r][i], of[r], i, 2, causal) for r in range(3))) - {i} or {i} for i in range(N)]
    found = lsh_mask(q, q, projections=PROJECTIONS, width=2, shared_qk=True, is_causal=causal)
    assert rows(found) == expected
    assert not causal or {0} in expected


@pytest.mark.parametrize("causal", [False, True])
def test_nearest_clusters_by_hand(causal):
    q, k, _ = qkv(length=N)
    of_queries, of_keys = ((normalised(x) @ CENTROIDS.T).argmax(1).tolist() for x in (q, k))
    expected = [latest(of_queries[i], of_keys, i, 3, causal) for i in range(N)]
    assert rows(routing_mask(q, k, centroids=CENTROIDS, width=3, balanced=False, is_causal=causal)) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_balanced_clusters_by_hand(causal):
    """The output is the mean over the clusters in which a query sees a key."""
    q, k, v = qkv(length=N)
    taken = [[highest(row, range(N), 3) for row in (CENTROIDS @ normalised(x).T).tolist()] for x in (q, k)]
    mask = routing_mask(q, k, centroids=CENTROIDS, width=3, balanced=True, is_causal=causal)
    o = routing_attention(q, k, v, centroids=CENTROIDS, width=3, balanced=True, is_causal=causal)
    for i, found in enumerate(rows(mask)):
        clusters = [
            sorted(j for j in keys if j <= i or not causal)
            for queries, keys in zip(*taken, strict=True)
            if i in queries
        ]
        assert found == {j for keys in clusters for j in keys}
        parts = [((q[i] @ k[keys].T) / 2).softmax(-1) @ v[keys] for keys in clusters if keys]
        expected = torch.stack(parts).mean(0) if parts else torch.zeros(5, dtype=v.dtype)
        torch.testing.assert_close(o[i], expected, **TOLERANCE)


@pytest.mark.parametrize(("block", "count"), [(4, 3), (1, 2), (5, 1), (7, 2), (64, 3), (3, 100)])
def test_moba_by_hand(block, count):
    q, k, _ = qkv(length=N)
    expected = []
    for i in range(N):
        own = i // block
        scores = [float(q[i] @ k[b * block : (b + 1) * block].mean(0)) for b in range(own)]
        blocks = highest(scores, range(own), count - 1) | {own}
        expected.append({j for j in range(i + 1) if j // block in blocks})
    mask = moba_mask(q, k, block=block, count=count)
    assert rows(mask) == expected
    assert int(mask.sum()) == moba_pairs(N, block=block, count=count)


def test_nsa_by_hand():
    q, k, _ = qkv(length=N)
    masks = nsa_masks(q, k, sizes=SIZES)
    ends = range(SIZES.length - 1, N, SIZES.stride)  # of compressed tokens
    means = torch.stack([k[end - SIZES.length + 1 : end + 1].mean(0) for end in ends])
    for i, (few, read, near) in enumerate(zip(*map(rows, masks), strict=True)):
        assert few == {c for c, end in enumerate(ends) if end <= i}
        assert near == set(range(max(0, i - SIZES.window + 1), i + 1))
        own = i // SIZES.block
        weight = [0.0] * own
        seen = sorted(few)
        for c, p in zip(seen, (q[i] @ means[seen].T / 2).softmax(-1).tolist() if seen else [], strict=True):
            for stride in range(SIZES.length // SIZES.stride):
                b = (c + stride) * SIZES.stride // SIZES.block
                if b < own:
                    weight[b] += p
        for b in {0, own - 1} & set(range(own)):
            weight[b] = torch.inf
        blocks = highest(weight, range(own), SIZES.count - 1) | {own}
        assert read == {j for j in range(i + 1) if j // SIZES.block in blocks}
        assert len(few) + len(read) + len(near) == SIZES.kept(i + 1)


def test_nsa_reads_the_block_before_where_nothing_is_compressed():
    """If blocks without a weight counted, the first ones would be taken."""
    q, k, _ = qkv(length=N)
    masks = nsa_masks(q, k, sizes=Sizes(length=2 * N, stride=2, block=4, count=3, window=3))
    assert masks.compressed.shape == (N, 0)
    assert rows(masks.selected) == [{j for j in range(i + 1) if j // 4 in {0, i // 4 - 1, i // 4}} for i in range(N)]


def test_published_counts():
    """NSA reads 2047, 2559 and 5631 keys of 8192, 16384 and 65536 (2502.11089, table 4); MoBA with blocks of 512, 3 of
    them, keeps 0.289 of the causal pairs of 8192 tokens."""
    assert [Sizes().keys(t) for t in (8192, 16384, 65536)] == [2047, 2559, 5631]
    assert [Sizes().kept(t) for t in (8192, 16384, 65536)] == [2047, 2559, 5631]  # of whole blocks
    assert round(moba_pairs(8192, block=512, count=3) / (8192 * 8193 // 2), 3) == 0.289


CAUSAL = {
    "top-k": lambda q, k: top_k_mask(q, k, count=3, is_causal=True),
    "importance": lambda q, k: importance_mask(q, k, count=3, is_causal=True),
    "lsh": lambda q, k: lsh_mask(q, k, projections=PROJECTIONS, width=2, is_causal=True),
    "lsh, shared": lambda q, k: lsh_mask(q, q, projections=PROJECTIONS, width=2, shared_qk=True, is_causal=True),
    "routing": lambda q, k: routing_mask(q, k, centroids=CENTROIDS, width=2, is_causal=True),
    "moba": lambda q, k: moba_mask(q, k, block=4, count=3),
    "nsa": lambda q, k: nsa_masks(q, k, sizes=SIZES).selected,
}
LEAKING = {
    "lsh, sorted": lambda q, k: sorted_chunks_mask(hashed(q, PROJECTIONS), width=2, is_causal=True),
    "routing, balanced": lambda q, k: routing_mask(q, k, centroids=CENTROIDS, width=4, balanced=True, is_causal=True),
}


@pytest.mark.parametrize("name", [*CAUSAL, *LEAKING])
def test_what_leaks(name):
    """No causal form leaks, at any cut; both published ways of sorting do."""
    q, k, _ = qkv(2, 3, length=N)
    leaks = [leaked_pairs((CAUSAL | LEAKING)[name], q, k, cut) for cut in range(1, N)]
    assert (sum(leaks) == 0) is (name in CAUSAL)


def test_balanced_clusters_leave_tokens_out():
    """All clusters hold equally many queries, so overlaps leave others out. Five clusters of 23 have room for all."""
    q, k, _ = qkv(length=N)
    left = [left_out(routing_mask(q, k, centroids=CENTROIDS, width=width)) for width in (1, 5, 15, N)]
    assert left == sorted(left, reverse=True) and left[0] >= N - 5 and left[1] > 0 and left[-1] == 0
    assert left_out(lsh_mask(q, q, projections=PROJECTIONS, shared_qk=True, is_causal=True)) == 0


def test_best_prefers_the_first_of_equals():
    scores = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [-torch.inf, -torch.inf, 3, -torch.inf, 1]])
    assert positions_of(best(scores, 2), 2).tolist() == [[1, 2], [0, 1], [2, 4]]
    assert positions_of(best(scores, 3), 3).tolist() == [[1, 2, 4], [0, 1, 2], [2, 4, -1]]
    assert positions_of(best(scores, 9), 9).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 4, -1, -1, -1]]
    with_infinity = torch.tensor([[torch.inf, 1, torch.inf, 5]])
    assert positions_of(best(with_infinity, 3), 3).tolist() == [[0, 2, 3]]


@pytest.mark.parametrize("form", [top_k_attention, moba_attention])
def test_a_selection_in_tiles_of_queries(form, monkeypatch):
    """The output is the same, whatever number of scores is looked at together."""
    q, k, v = qkv(2, length=N)
    size = {"count": 3} if form is top_k_attention else {"count": 3, "block": 4}
    whole = form(q, k, v, is_causal=True, **size)
    for scores in (1, 100, 300):
        monkeypatch.setattr(call, "SCORES", scores)
        torch.testing.assert_close(form(q, k, v, is_causal=True, **size), whole, **TOLERANCE)


def test_hashes():
    """A multiple of a vector has the same hash, its opposite the opposite row's, near vectors mostly the same."""
    R = draw_projections(16, rounds=4, buckets=8, generator=torch.Generator().manual_seed(0))
    x = draw(500, 16)
    assert torch.equal(hashed(x, R), hashed(3 * x, R))
    assert torch.equal((hashed(x, R) + 4) % 8, hashed(-x, R))
    moved = [x + far * draw(500, 16, seed=1) for far in (0.1, 1, 9)]
    shares = [float((hashed(x, R) == hashed(y, R)).double().mean()) for y in moved]
    assert shares[0] > shares[1] > shares[2] > 1 / 8  # 2000 draws: standard error .011; they are .9, .5 and .16


def test_sampled_importance_follows_the_norms():
    """A key is drawn first in proportion to its length: binomial counts of 4000 draws, each within 4.42 standard
    errors (two-sided 1e-5)."""
    lengths, draws = torch.tensor([1.0, 2, 3, 4]), 4000
    k = (lengths[:, None] * torch.tensor([0.6, 0.8])).expand(draws, 4, 2)
    numbers = sampled_importance(k, generator=torch.Generator().manual_seed(3))
    share = torch.bincount(numbers.argmax(-1), minlength=4) / draws
    p = lengths / lengths.sum()
    assert ((share - p).abs() < 4.42 * (p * (1 - p) / draws).sqrt()).all()


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_several_rounds_count_once(causal):
    """The same projection three times is the same as once."""
    q, k, v = qkv(2, length=N)
    once = lsh_attention(q, k, v, projections=PROJECTIONS[:1], width=3, is_causal=causal)
    thrice = lsh_attention(q, k, v, projections=PROJECTIONS[:1].expand(3, -1, -1), width=3, is_causal=causal)
    torch.testing.assert_close(thrice, once, **TOLERANCE)


def test_a_state_passes_no_gradient_to_the_importance():
    """It decides which keys are read: a state that reached it would keep the graph of all earlier tokens."""
    q, k, v = (x.requires_grad_() for x in qkv(2, length=N))
    importance = draw(2, N, seed=5).requires_grad_()
    for attend in (importance_attention, importance_attention_reference):
        _, state = attend(q, k, v, importance=importance, is_causal=True, return_state=True)
        assert [part.requires_grad for part in state] == [True, True, False]
