"""S2, sections 4.2 and 4.3: the evidence on products and memory of frozen projections holds its figures to others."""

import copy
from types import SimpleNamespace

import pytest
import torch

from ortho import MultiheadAttention
from ortho.cost.counting import count_forward
from ortho.projections import FrozenProjection, MergedProjection, StructuredProjection
from paper.claims.evidence import cheaper_heads as s2


@pytest.mark.parametrize("d", [128, 512])
def test_shares_are_counted(d):
    """On running projections, of twice as many FLOPs as multiplications."""
    x = torch.randn(1, 1, d)
    dense = count_forward(FrozenProjection(d, 2, draw="gaussian"), x)[0]
    assert dense == 2 * 2 * d**2
    assert count_forward(StructuredProjection(d, d // 64, rounds=1), x)[0] / dense == pytest.approx(
        s2.structured(d) / 100
    )
    alone = count_forward(MergedProjection(d, draw="gaussian"), x)[0]
    assert 1 - alone / dense == s2.merged(1) / 100 == 0.5


@pytest.mark.parametrize("heads", [2, 4])
def test_several_merged_heads(heads):
    """A head's scores are those of x (W_Q W_K^T) and x, at as many FLOPs as one matrix a head has."""
    d = 16
    both = FrozenProjection(d, heads, dtype=torch.float64)
    w_q, w_k = (w.view(heads, d // heads, d) for w in (both.weight_q, both.weight_k))
    products = w_q.mT @ w_k  # (heads, d, d)
    x = torch.randn(1, 5, d, dtype=torch.float64)
    q, k = both(x)
    found = (x[:, None] @ products) @ x[:, None].mT
    torch.testing.assert_close(found, q @ k.mT, atol=1e-12, rtol=0)
    flops = count_forward(lambda x: x @ products, x.expand(heads, -1, -1))[0] / count_forward(both, x)[0]
    assert 1 - flops == pytest.approx(s2.merged(heads) / 100)


def test_what_is_called_fast():
    """No threshold that the comment allows would decide otherwise."""
    assert max(s2.structured(d) for d in s2.WIDTHS) < 15 < s2.FAST[1] < 49 < s2.general(s2.D) < 50
    assert all(s2.PRIME % n for n in range(2, s2.PRIME))
    assert s2.structured(s2.PRIME, None) > 100


def test_general_is_the_dimension_of_the_group():
    """The tangent space at the identity, the antisymmetric matrices, has d (d - 1) / 2 of d^2 dimensions."""
    d = 7
    entries = torch.eye(d * d, dtype=torch.float64).view(-1, d, d)
    rank = torch.linalg.matrix_rank((entries - entries.mT).flatten(1))
    assert s2.general(d) == pytest.approx(100 * int(rank) / d**2)


def test_cached_queries():
    assert s2.still_right(False) == 100
    assert s2.still_right(True) == 0


def test_sharing_and_copies_differ_where_they_must(monkeypatch):
    """Half as many layers hold as much; with a copy that is another matrix the model is another one."""
    assert s2.shared() == (2 * s2.NARROW**2, 0.0)
    monkeypatch.setattr(s2, "LAYERS", 2)
    assert s2.shared.__wrapped__() == (2 * s2.NARROW**2, 0.0)
    right = copy.deepcopy

    def other(x):
        made = right(x)
        if isinstance(made, FrozenProjection):
            made.weight_q.neg_()
        return made

    monkeypatch.setattr(s2, "copy", SimpleNamespace(deepcopy=other))
    assert s2.shared.__wrapped__()[1] > 0.01


def test_learned_projections_have_gradients():
    """The count of what frozen ones do not store is not zero for want of looking."""
    layer = MultiheadAttention(s2.NARROW, 2)
    layer(torch.randn(1, 3, s2.NARROW)).sum().backward()
    assert all(w.grad is not None for w in (layer.projection.weight_q, layer.projection.weight_k))
    assert s2.train_once("learned", s2.TRAINED).gradient_bytes == 2 * s2.train_once("frozen", s2.TRAINED).gradient_bytes
