"""Which pairs are selected, compared with loops that follow the definitions and with closed forms; what leaks."""

import pytest
import torch
from dynamic_sparse_mechanisms import TOLERANCE, qkv
from seeded import draw

from ortho.attention.dynamic_sparse import selection
from ortho.attention.dynamic_sparse.importance import (
    importance_attention,
    importance_attention_reference,
    importance_mask,
    sampled_importance,
)
from ortho.attention.dynamic_sparse.routing import normalised, routing_attention, routing_mask
from ortho.attention.dynamic_sparse.selection import leaked_pairs, left_out
from ortho.attention.dynamic_sparse.top_k import top_k_attention, top_k_mask

N = 23
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
    assert rows(top_k_mask(q, k, num_keys=count, is_causal=causal)) == expected
    if count == 4:  # and something was decided by the position
        assert any(len({scores[i][j] for j in kept}) < len(kept) for i, kept in enumerate(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_importance_by_hand(causal, count):
    q, k, _ = qkv(length=N)
    k = k.round()
    norms = k.square().sum(-1).tolist()
    expected = [highest(norms, past(i, causal), count) for i in range(N)]
    assert rows(importance_mask(q, k, num_keys=count, is_causal=causal)) == expected


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


CAUSAL = {
    "top-k": lambda q, k: top_k_mask(q, k, num_keys=3, is_causal=True),
    "importance": lambda q, k: importance_mask(q, k, num_keys=3, is_causal=True),
    "routing": lambda q, k: routing_mask(q, k, centroids=CENTROIDS, width=2, is_causal=True),
}
LEAKING = {
    "routing, balanced": lambda q, k: routing_mask(q, k, centroids=CENTROIDS, width=4, balanced=True, is_causal=True),
}


@pytest.mark.parametrize("name", [*CAUSAL, *LEAKING])
def test_what_leaks(name):
    """No causal form leaks, at any cut; balanced clusters, as published, do."""
    q, k, _ = qkv(2, 3, length=N)
    leaks = [leaked_pairs((CAUSAL | LEAKING)[name], q, k, cut) for cut in range(1, N)]
    assert (sum(leaks) == 0) is (name in CAUSAL)


def test_balanced_clusters_leave_tokens_out():
    """All clusters hold equally many queries, so overlaps leave others out. Five clusters of 23 have room for all."""
    q, k, _ = qkv(length=N)
    left = [left_out(routing_mask(q, k, centroids=CENTROIDS, width=width)) for width in (1, 5, 15, N)]
    assert left == sorted(left, reverse=True) and left[0] >= N - 5 and left[1] > 0 and left[-1] == 0


def test_a_selection_in_tiles_of_queries(monkeypatch):
    """The output is the same, whatever number of scores is looked at together."""
    q, k, v = qkv(2, length=N)
    whole = top_k_attention(q, k, v, is_causal=True, num_keys=3)
    for scores in (1, 100, 300):
        monkeypatch.setattr(selection, "SCORES", scores)
        torch.testing.assert_close(top_k_attention(q, k, v, is_causal=True, num_keys=3), whole, **TOLERANCE)


def test_sampled_importance_follows_the_norms():
    """A key is drawn first in proportion to its length: binomial counts of 4000 draws, each within 4.42 standard
    errors (two-sided 1e-5)."""
    lengths, draws = torch.tensor([1.0, 2, 3, 4]), 4000
    k = (lengths[:, None] * torch.tensor([0.6, 0.8])).expand(draws, 4, 2)
    numbers = sampled_importance(k, generator=torch.Generator().manual_seed(3))
    share = torch.bincount(numbers.argmax(-1), minlength=4) / draws
    p = lengths / lengths.sum()
    assert ((share - p).abs() < 4.42 * (p * (1 - p) / draws).sqrt()).all()


def test_a_state_passes_no_gradient_to_the_importance():
    """It decides which keys are read: a state that reached it would keep the graph of all earlier tokens."""
    q, k, v = (x.requires_grad_() for x in qkv(2, length=N))
    importance = draw(2, N, seed=5).requires_grad_()
    for attend in (importance_attention, importance_attention_reference):
        _, state = attend(q, k, v, importance=importance, is_causal=True, return_state=True)
        assert [part.requires_grad for part in state] == [True, True, False]
