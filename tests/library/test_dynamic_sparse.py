"""Mechanisms that select their pairs: the selection compared with loops; all mechanisms' properties at sizes that leave
most pairs out; groups that stay empty; masks; states; errors. (Page dynamic-sparsity shows what leaks.)"""

import math
import re
from itertools import product

import pytest
import test_properties as general
import torch
from dynamic_sparse_mechanisms import ALL, ENTRIES, FORMS, SMALL, TOLERANCE, qkv
from piecewise import ways
from refusals import refuses
from seeded import draw

from ortho import MECHANISMS
from ortho.attention.dynamic_sparse import importance, selection
from ortho.attention.dynamic_sparse.importance import importance_attention, importance_attention_reference
from ortho.attention.dynamic_sparse.routing import (
    draw_centroids,
    nearest,
    normalised,
    routing_attention,
    routing_attention_reference,
    update_centroids,
)
from ortho.attention.dynamic_sparse.sparse_linear import sparse_linear_attention_reference
from ortho.attention.dynamic_sparse.top_k import top_k_attention, top_k_attention_reference
from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.feature_maps import CosFormer, Taylor
from ortho.attention.weights import weights_of

TOP_K, IMPORTANCE, ROUTING, SPARSE_LINEAR = ENTRIES


def read_pairs(definition):
    """The pairs that a definition reads, as a function of q, k and options."""
    return lambda q, k, **options: weights_of(definition, q, k, **options) > 0


top_k_mask, importance_mask = read_pairs(top_k_attention_reference), read_pairs(importance_attention_reference)
routing_mask = read_pairs(routing_attention_reference)

PASSED_ON = [general.test_symmetries, general.test_padding_equals_truncation, general.test_float32_is_near_float64]
PASSED_ON += [general.test_the_future_leaves_the_prefix, general.test_cut_equals_whole]
# Within the neighbourhood in which the same pairs are selected: the selection itself is not differentiated.
PASSED_ON += [general.test_gradients_by_finite_differences]


@pytest.fixture
def small(request, monkeypatch):
    monkeypatch.setitem(MECHANISMS, request.param, SMALL[request.param])
    monkeypatch.setattr(importance, "TILE", 8)  # several in a sequence
    return request.param


@pytest.mark.parametrize("small", SMALL, indirect=True)
def test_fast_equals_reference(small):
    general.test_fast_equals_reference(projection="learned", attention=small)


@pytest.mark.parametrize("small", SMALL, indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("test", PASSED_ON, ids=lambda test: test.__name__.removeprefix("test_"))
def test_properties(test, form, small):
    if SMALL[small].causal or test not in (general.test_the_future_leaves_the_prefix, general.test_cut_equals_whole):
        test(form=form, projection="learned", attention=small)


N = 23


def compare(m, leaves, **kwargs):
    """Assert that both forms have equal outputs and gradients; return the output."""
    results = []
    for form in FORMS:
        inputs = [x.clone().requires_grad_() for x in leaves]
        o = m.form(form)(*inputs, **kwargs)
        results.append([o, *torch.autograd.grad(o, inputs, draw(*o.shape, seed=9))])
    torch.testing.assert_close(*results, **TOLERANCE)
    return results[0][0].detach()


@pytest.mark.parametrize("b", [None, draw(N, seed=5)], ids=["default", "drawn"])
def test_the_weights_of_near_and_far(b):
    """By the definition, pair by pair: rows sum to 1."""
    q, k, _ = qkv(length=N)
    found = weights_of(sparse_linear_attention_reference, q, k, window=3, is_causal=True, log_linear_weight=b)
    features = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    for i in range(N):
        share = 1 / 4 if b is None else float(b[i].exp())
        near = [float((q[i] @ k[j] / 2).exp()) for j in range(i + 1)]
        far = [share * float(features[0][i] @ features[1][j]) for j in range(i + 1)]
        row = far[: max(0, i - 2)] + near[max(0, i - 2) :]
        torch.testing.assert_close(found[i, : i + 1], torch.tensor(row, dtype=q.dtype) / sum(row), **TOLERANCE)
    assert not found.triu(1).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 130])
def test_near_and_far_of_any_size(form, causal, length):
    """Scores a thousand below and above the far weights, and nothing far at all, in float32.

    Compared with logarithms in float64. A score of 1e3 is off by 1e-4 in float32, and so is a weight; the tolerance is
    ten times this."""
    ones = torch.ones(1, length, 4)
    noise = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(0)) / 10
    v = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(1))
    for size, window in product((1.0, 10.0, 30.0, 50.0), (1, 2, 256)):
        for q, k in ((size * ones + noise, noise - size * ones), (noise - size * ones, size * ones + noise)):
            o = SPARSE_LINEAR.form(form)(q, k, v, window=window, is_causal=causal)
            torch.testing.assert_close(o.double(), _by_logarithms(q, k, v, window, causal), atol=1e-3, rtol=1e-3)


def _by_logarithms(q, k, v, window, causal):
    q, k, v = (x.double() for x in (q, k, v))
    place = torch.arange(q.shape[-2])
    near = (place[:, None] - place).abs() < window
    of_q, of_k = (torch.where(x > 0, (x + 1).abs().log(), x) for x in (q, k))  # of elu + 1
    far = torch.logsumexp(of_q[..., :, None, :] + of_k[..., None, :, :], -1) - math.log(4)
    scores = torch.where(near, q @ k.mT / 2, far)
    return (scores.masked_fill(place > place[:, None], -torch.inf) if causal else scores).softmax(-1) @ v


# ------------------------------------------------------------------------------------------------------ empty groups


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_clusters_that_stay_empty(causal, balanced):
    """Centroids that are nearest to no token, as beside another of their direction, change no nearest cluster."""
    q, k, v = qkv(2, length=N)
    mu = torch.stack([torch.tensor([1.0, 1, -1, -1]), torch.tensor([-1.0, 1, 1, -1])]).double()
    sizes = {"width": 4, "balanced": balanced, "is_causal": causal}
    compare(ROUTING, (q, k, v), centroids=torch.cat([mu, mu, torch.zeros(3, 4).double()]), **sizes)  # twice the same
    # All tokens in one cluster of three.
    same = torch.stack([mu[0] * s for s in (1.0, 0.5, 0.25)])
    x, y = (mu[0] + draw(2, N, 4, seed=s) / 10 for s in (1, 2))
    assert (nearest(torch.cat([x, y], 1), same) == 0).all()
    o = compare(ROUTING, (x, y, v), centroids=same, **sizes)
    if not balanced:
        alone = ROUTING.reference(x, y, v, centroids=same[:1], **sizes)
        torch.testing.assert_close(o, alone, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_whose_group_has_no_key(causal):
    """Such queries get zeros, and other queries are not affected."""
    towards = torch.tensor([1.0, 1, -1, -1], dtype=torch.float64)
    q, away, v = draw(N, 4) / 10 + towards, draw(N, 4, seed=1) / 10 - towards, draw(N, 5, seed=2)
    k = torch.where(torch.arange(N)[:, None] % 2 == 0, -away, away)
    sizes = {"centroids": torch.stack([towards, -towards]), "balanced": False, "width": 4, "is_causal": causal}
    assert not compare(ROUTING, (q, away, v), **sizes).any()
    assert compare(ROUTING, (q, k, v), **sizes).any(-1).all()


# ------------------------------------------------------------------------------------------- lengths, masks, dtypes


@pytest.mark.parametrize("m", ENTRIES, ids=lambda m: m.name)
def test_long_sequences(m):
    """At the registered sizes, on a sequence longer than they reach."""
    for causal in ways(m):
        compare(m, qkv(2, length=700, width=8), is_causal=causal)


@pytest.mark.parametrize("name", [name for name, m in ALL.items() if m.bidirectional])
def test_other_numbers_of_keys(name):
    for length, keys in ((9, 70), (70, 9), (1, 30), (30, 1)):
        compare(ALL[name], qkv(2, length=length, keys=keys))


def test_scales():
    """With a negative scale the lowest products have the highest scores. With 0 all scores are equal: the first keys
    are taken."""
    m, (q, k, v) = ALL["top-k, 3"], qkv(2, length=N)
    o = compare(m, (q, k, v), scale=-0.7, is_causal=True)
    torch.testing.assert_close(o, m.reference(-q, k, v, scale=0.7, is_causal=True), **TOLERANCE)
    zeros = m.reference(torch.zeros_like(q), k, v, is_causal=True)
    for form in FORMS:
        torch.testing.assert_close(m.form(form)(q, k, v, scale=0.0, is_causal=True), zeros, **TOLERANCE)


def test_centroids_move():
    """Centroids move towards the mean of the nearest tokens; one without tokens stays; heads may have their own."""
    q, k, _ = qkv(2, 3, length=N)
    mu = draw_centroids(4, clusters=3, generator=torch.Generator().manual_seed(0))[
        [0, 1, 2, 0]
    ]  # the last takes nothing
    moved = update_centroids(mu, q, k, decay=0.75)
    x = torch.cat([q, k], -2).reshape(-1, 4)
    number = nearest(x, mu)
    for c in range(4):
        mine = normalised(x[number == c])
        expected = 0.75 * mu[c] + 0.25 * mine.mean(0) if len(mine) else mu[c]
        torch.testing.assert_close(moved[c], expected, **TOLERANCE)
    heads = update_centroids(mu.expand(3, 4, 4), q, k, decay=0.75)
    for h in range(3):
        torch.testing.assert_close(heads[h], update_centroids(mu, q[:, h], k[:, h], decay=0.75), **TOLERANCE)
    assert torch.equal(update_centroids(mu, q, k, decay=1.0), mu)
    assert not update_centroids(mu, q.requires_grad_(), k).requires_grad  # a running mean would keep every step's graph
    refuses("decay: expected a number from 0 to 1, got 1.5", update_centroids, mu, q, k, decay=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_keys_tie(dtype):
    """Among equal keys the first are taken, by one query as by many: a product rounds by its place and their number.

    A score may still round apart from its equals in one of 1e8 cases; here are 2e4.
    """
    q, k = draw(4, 40, 16, dtype=dtype), draw(4, 1, 16, seed=1, dtype=dtype).expand(4, 23, 16).contiguous()
    first = torch.arange(23) < 5
    assert (top_k_mask(q, k, num_keys=5) == first).all()
    for i in range(40):
        assert (top_k_mask(q[:, i : i + 1], k, num_keys=5) == first).all()


# ----------------------------------------------------------------------------------------------------------- errors

Q = draw(2, 9, 4)
BAD = [
    (TOP_K, {"num_keys": 2.0}, TypeError, "num_keys: expected an integer of at least 1, got float 2.0"),
    (IMPORTANCE, {"num_keys": 0}, ValueError, "num_keys: expected an integer of at least 1, got 0"),
    (IMPORTANCE, {"importance": Q[..., :3, 0]}, ValueError, "importance: expected shape (2, 9) like the keys"),
    (ROUTING, {"centroids": Q[0, :2, :3]}, ValueError, "centroids: expected shape (clusters, 4)"),
    (ROUTING, {"balanced": True, "return_state": True}, ValueError, "return_state: expected none with balanced"),
    (ROUTING, {"balanced": True, "initial_state": (Q, Q, Q)}, ValueError, "initial_state: expected none with balanced"),
    (SPARSE_LINEAR, {"scale": -1.0}, ValueError, "scale: expected a finite number of at least 0, got -1.0"),
    (SPARSE_LINEAR, {"feature_map": Taylor(1)}, ValueError, "feature_map: expected one of single tokens"),
    (SPARSE_LINEAR, {"feature_map": CosFormer(9)}, ValueError, "feature_map: expected one of single tokens"),
    (SPARSE_LINEAR, {"feature_map": PositiveFeatures(m=4)}, ValueError, "feature_map: expected one of single tokens"),
    (SPARSE_LINEAR, {"log_linear_weight": Q[..., :3, 0]}, ValueError, "log_linear_weight: expected shape (2, 9) like"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "given", "error", "message"), BAD, ids=lambda x: getattr(x, "name", None))
def test_bad_options(m, given, error, message, form):
    refuses("^" + re.escape(message), m.form(form), Q, Q, Q, error=error, **{"is_causal": True, **given})


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", ENTRIES, ids=lambda m: m.name)
def test_bad_calls(m, form):
    """Refused are a mask of pairs, one key more or less than there are clusters or numbers, and a mask beside a state
    that leaves keys out."""
    f = m.form(form)
    with pytest.raises(ValueError, match=r"attn_mask: expected a mask of keys, of shape \(..., 1, 9\)"):
        f(Q, Q, Q, is_causal=True, attn_mask=torch.ones(9, 9, dtype=torch.bool))
    call = {"is_causal": True, "initial_state": f(Q, Q, Q, is_causal=True, return_state=True)[1]}
    if m in (ROUTING, IMPORTANCE):
        *state, part = call["initial_state"]
        with pytest.raises(ValueError, match="^initial_state: expected (clusters|importance) "):
            f(Q, Q, Q, is_causal=True, initial_state=(*state, part[..., 1:]))
    if m is IMPORTANCE or (m is SPARSE_LINEAR and form == "fast"):
        refuses("^attn_mask: expected None beside a", f, Q, Q, Q, attn_mask=torch.ones(18, dtype=torch.bool), **call)


@pytest.mark.parametrize("form", FORMS)
def test_hidden_keys_stay_hidden_after_a_state(form):
    f, there = IMPORTANCE.form(form), torch.tensor([True] * 3 + [False] + [True] * 5)
    start, rest = Q[:, :5], Q[:, 5:]
    state = f(start, start, start, is_causal=True, attn_mask=there[None, :5], return_state=True)[1]
    later = f(rest, rest, rest, is_causal=True, initial_state=state)
    assert torch.allclose(later, f(Q, Q, Q, is_causal=True, attn_mask=there[None])[:, 5:], atol=1e-6)


# --------------------------------------------------------------------------------------------- which pairs are selected

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


def test_a_selection_in_tiles_of_queries(monkeypatch):
    """The output is the same, whatever number of scores is looked at together."""
    q, k, v = qkv(2, length=N)
    whole = top_k_attention(q, k, v, is_causal=True, num_keys=3)
    for scores in (1, 100, 300):
        monkeypatch.setattr(selection, "SCORES", scores)
        torch.testing.assert_close(top_k_attention(q, k, v, is_causal=True, num_keys=3), whole, **TOLERANCE)


def test_a_state_passes_no_gradient_to_the_importance():
    """It decides which keys are read: a state that reached it would keep the graph of all earlier tokens."""
    q, k, v = (x.requires_grad_() for x in qkv(2, length=N))
    importance = draw(2, N, seed=5).requires_grad_()
    for attend in (importance_attention, importance_attention_reference):
        _, state = attend(q, k, v, importance=importance, is_causal=True, return_state=True)
        assert [part.requires_grad for part in state] == [True, True, False]
