"""Bytes that autograd keeps, and scalar operations: formulas fitted to counts, and counts by hand."""

import pytest
import torch
from torch import nn

from ortho import MultiheadAttention, cost
from ortho.cost.big_o import H, N, d
from ortho.cost.configurations import CONFIGURATIONS
from ortho.cost.counting import optimiser_bytes
from paper.elementwise import elementwise, formulas
from paper.memory import fitted, formula, kept, layer_bytes, model_bytes, step_memory


def test_formulas_by_hand():
    """A layer keeps x, q, k, v, the merged heads, and a number a row or all weights; frozen ones keep as much."""
    for projection in ("learned", "frozen"):
        assert formula(projection=projection) == 4 * (5 * N * d + H * N)
        assert formula(projection=projection, form="reference") == 4 * (5 * N * d + H * N**2)
    assert kept(lambda _, width, *__: nn.Sequential(nn.Linear(width, width), nn.Tanh()), N * d) == 2 * N * d


def test_what_the_terms_cannot_give_is_refused():
    with pytest.raises(AssertionError, match="terms: expected all, got"):
        fitted(lambda n, width, heads, features: n * width + n, N * d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_hold_at_larger_sizes(dtype):
    x = torch.zeros(1, 200, 64, dtype=dtype, requires_grad=True)
    found = cost.of(MultiheadAttention(64, 4, projection="stopped", dtype=dtype), x).saved_bytes
    assert layer_bytes(200, 64, 4, projection="stopped", dtype=dtype) == found


def test_scalar_operations_by_hand():
    """Six a score forward: the scale and five of the softmax. Index arithmetic is free."""
    made = formulas(lambda _, width, heads, __: MultiheadAttention(width, heads, form="reference"), H * N**2, N * d)
    assert made == (6 * H * N**2, 5 * H * N**2 + 2 * N * d)
    places = torch.arange(6)
    forward, _ = elementwise(lambda x: x * 2 + x.sum() + x[places * 2 // 3 > 1].exp().sum(), torch.ones(6))
    assert dict(forward) == {"mul": 6, "add": 12, "sum": 6 + 3, "exp": 3}


def test_a_step_holds_what_is_there():
    """Of a whole model: parts as declared, activations as kept by a model that runs."""
    at, dtype = CONFIGURATIONS["BERT-base"], torch.float32
    model = nn.Sequential(MultiheadAttention(64, 4, projection="frozen"))
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5, 64)).sum().backward()
    optimiser.step()
    held = step_memory(cost.layer(1, 5, 64, 4, projection="frozen"), 7)
    assert held["moments"] == optimiser_bytes(optimiser) and held["activations"] == 7
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.requires_grad)
    assert held["gradients"] == gradients == held["frozen weights"]
    per_block = layer_bytes(at.N, at.d, at.H, scope="block", bias=True, dtype=dtype)
    assert 0 < model_bytes("BERT-base", 1) - at.L * per_block < per_block  # besides the blocks little is kept
