"""Mechanisms that select their pairs: errors name the argument, what came, and what was expected."""

import re
from functools import partial

import pytest
import torch
from selected_mechanisms import ENTRIES, FORMS, draw

from ortho.attention.selected.importance import MECHANISM as IMPORTANCE
from ortho.attention.selected.lsh import MECHANISM as LSH
from ortho.attention.selected.lsh import draw_projections, hashed, sorted_chunks_mask
from ortho.attention.selected.moba import MECHANISM as MOBA
from ortho.attention.selected.moba import moba_pairs
from ortho.attention.selected.nsa import MECHANISM as NSA
from ortho.attention.selected.nsa import Sizes
from ortho.attention.selected.routing import MECHANISM as ROUTING
from ortho.attention.selected.routing import draw_centroids, update_centroids
from ortho.attention.selected.sparse_linear import MECHANISM as SPARSE_LINEAR
from ortho.attention.selected.top_k import MECHANISM as TOP_K
from ortho.cost.attention import choosing

pytestmark = pytest.mark.bad_input

Q = draw(2, 9, 4)
BAD = [
    (TOP_K, {"count": 0}, ValueError, "count: expected an integer of at least 1, got 0"),
    (TOP_K, {"count": 2.0}, TypeError, "count: expected an integer of at least 1, got float 2.0"),
    (IMPORTANCE, {"count": 0}, ValueError, "count: expected an integer of at least 1, got 0"),
    (IMPORTANCE, {"importance": Q[..., :3, 0]}, ValueError, "importance: expected shape (2, 9) like the keys"),
    (IMPORTANCE, {"importance": Q[..., 0] / 0}, ValueError, "importance: expected finite numbers"),
    (IMPORTANCE, {"importance": [1]}, TypeError, "importance: expected a floating-point tensor"),
    (LSH, {"width": 0}, ValueError, "width: expected an integer of at least 1, got 0"),
    (LSH, {"projections": Q}, ValueError, "projections: expected shape (rounds, 4, half), got (2, 9, 4)"),
    (LSH, {"projections": 3}, TypeError, "projections: expected a floating-point tensor, got int 3"),
    (ROUTING, {"width": 0}, ValueError, "width: expected an integer of at least 1, got 0"),
    (ROUTING, {"width": 0, "balanced": True}, ValueError, "width: expected an integer of at least 1, got 0"),
    (ROUTING, {"balanced": 1}, TypeError, "balanced: expected True, False or None, got int 1"),
    (ROUTING, {"centroids": Q[0, :2, :3]}, ValueError, "centroids: expected shape (clusters, 4)"),
    (ROUTING, {"balanced": True, "return_state": True}, ValueError, "return_state: expected none with balanced"),
    (ROUTING, {"balanced": True, "initial_state": (Q, Q, Q)}, ValueError, "initial_state: expected none with balanced"),
    (MOBA, {"block": 0}, ValueError, "block: expected an integer of at least 1, got 0"),
    (MOBA, {"count": 0}, ValueError, "count: expected an integer of at least 1, got 0"),
    (MOBA, {"is_causal": False}, ValueError, "is_causal: expected True"),
    (NSA, {"is_causal": False}, ValueError, "is_causal: expected True"),
    (NSA, {"sizes": 64}, TypeError, "sizes: expected Sizes, got int 64"),
    (NSA, {"gates": Q[..., :2]}, ValueError, "gates: expected shape (2, 9, 3) like the keys, got (2, 9, 2)"),
    (SPARSE_LINEAR, {"window": 0}, ValueError, "window: expected an integer of at least 1, got 0"),
    (SPARSE_LINEAR, {"scale": -1.0}, ValueError, "scale: expected a finite number of at least 0, got -1.0"),
    (SPARSE_LINEAR, {"log_far": Q[..., :3, 0]}, ValueError, "log_far: expected shape (2, 9)"),
    (SPARSE_LINEAR, {"log_far": Q[..., 0] / 0}, ValueError, "log_far: expected finite numbers"),
    (SPARSE_LINEAR, {"feature_map": "relu"}, TypeError, "feature_map: expected a FeatureMap, got str 'relu'"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("m", "given", "error", "message"), BAD, ids=lambda x: getattr(x, "name", None))
def test_bad_sizes(m, given, error, message, form):
    with pytest.raises(error, match="^" + re.escape(message)):
        m.form(form)(Q, Q, Q, **{"is_causal": True, **given})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", ENTRIES, ids=lambda m: m.name)
def test_bad_calls(m, form):
    f = partial(m.form(form), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask: expected a mask of keys, of shape \(..., 1, 9\)"):
        f(Q, Q, Q, attn_mask=torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="scale: expected a finite number, got nan"):
        f(Q, Q, Q, scale=float("nan"))
    with pytest.raises(ValueError, match="k: expected finite numbers, got 72 NaN or infinite of 72"):
        f(Q, Q / 0, Q)
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys, got 9 and 5"):
        f(Q, Q[:, :5], Q[:, :5])
    with pytest.raises((TypeError, ValueError), match="^initial_state: expected"):
        f(Q, Q, Q, initial_state=(Q[..., :1], Q, Q, Q))


def test_bad_states():
    """A key more or less than there are buckets, clusters, numbers; a mask beside a state that leaves keys out."""
    for m in (LSH, ROUTING, IMPORTANCE):
        state = m.fast(Q, Q, Q, is_causal=True, return_state=True)[1]
        with pytest.raises(ValueError, match="^initial_state: expected (buckets|clusters|importance) "):
            m.fast(Q, Q, Q, is_causal=True, initial_state=(*state[:2], state[2][..., 1:]))
    for m in (IMPORTANCE, SPARSE_LINEAR):
        state = m.fast(Q, Q, Q, is_causal=True, return_state=True)[1]
        with pytest.raises(ValueError, match="^attn_mask: expected None beside a"):
            m.fast(Q, Q, Q, is_causal=True, initial_state=state, attn_mask=torch.ones(18, dtype=torch.bool))


def test_bad_draws_and_counts():
    with pytest.raises(ValueError, match="buckets: expected an even number, one for each row and its opposite, got 3"):
        draw_projections(4, buckets=3)
    with pytest.raises(ValueError, match="count: expected an integer of at least 1, got 0"):
        draw_centroids(4, count=0)
    with pytest.raises(ValueError, match="decay: expected a number from 0 to 1, got float 1.5"):
        update_centroids(draw_centroids(4), Q, Q, decay=1.5)
    with pytest.raises(ValueError, match="k: expected q itself with shared_qk"):
        LSH.fast(Q, Q[:, :5], Q[:, :5], shared_qk=True)
    with pytest.raises(ValueError, match="width: expected an integer of at least 1, got 0"):
        sorted_chunks_mask(hashed(Q, draw_projections(4)), width=0)
    with pytest.raises(ValueError, match="block: expected an integer of at least 1, got 0"):
        moba_pairs(10, block=0)
    with pytest.raises(ValueError, match="attention: expected one of 'top-k', .* got 'window'"):
        choosing("window", 10, 4, 4)
    with pytest.raises(ValueError, match="N: expected an integer of at least 1, got 0"):
        choosing("moba", 0, 4, 4)
    for name in ("moba", "nsa"):
        with pytest.raises(ValueError, match=f"causal: expected True, since '{name}' chooses .* past, got False"):
            choosing(name, 10, 4, 4, causal=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 33}, "length: expected a multiple of stride = 16, got 33"),
        ({"block": 8}, "block: expected a multiple of stride = 16, got 8"),
        ({"count": 2}, "count: expected at least 3, got 2"),
        ({"window": 0}, "window: expected an integer of at least 1, got 0"),
    ],
)
def test_bad_sizes_of_branches(given, message):
    with pytest.raises(ValueError, match=message):
        Sizes(**given)
