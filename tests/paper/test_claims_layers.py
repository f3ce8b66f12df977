"""Evidence on layers, projections, memory and printed tables: its figures against others found independently."""

import pytest
import torch

from ortho import MultiheadAttention
from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.feature_map import EluPlusOne
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.cost import layer, of
from ortho.cost.big_o import H, N, d
from ortho.layers.synthesizer import SynthesizerAttention
from paper.claims.shared import lookup, methods
from paper.claims.shared.frozen_layer import PRODUCTS, backward_products
from paper.claims.shared.printed_models import (
    whole_limit,
)

# ---------------- The products found on autograd's graph are those that the closed forms declare and the counter counts


@pytest.mark.parametrize("projection", ["learned", "frozen", "stopped"])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_products_add_up(projection, form, input_grad):
    found = backward_products(projection, form=form, input_grad=input_grad)
    total = sum(PRODUCTS[name][1] for name, state in found.items() if state != "absent")
    declared = layer(1, N, d, H, projection=projection, form=form, input_grad=input_grad)
    assert total.expand() == declared.backward.expand()
    x = torch.zeros(1, 5, 8, requires_grad=input_grad)
    counts = of(MultiheadAttention(8, 2, projection=projection, form=form), x)
    assert counts.backward == total.subs({N: 5, d: 8})
    discarded = {name for name, state in found.items() if state == "discarded"}
    idle = form == "fast" and (projection == "stopped" or (projection == "frozen" and not input_grad))
    assert discarded == ({"dP", "dQ", "dK"} if idle else set())


# -------------------------------- The rules found behind S0's printed tables, and the limits that they are held against


def test_limits_of_whole_models_by_hand():
    """Each model's products, with pairs of tokens as either form counts them; the form that allows more is the
    bound."""
    N, d = 512, 768
    pooler = 3 * 2 * d * d
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + pooler
    assert whole_limit("BERT-base") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))
    N, d = 1024, 1024
    read_out, pairs = 3 * 2 * N * d * 50257, 14 * d * N * (N + 1) / 2  # fused: forward 4, backward 10, by pairs
    step = 24 * (72 * N * d**2 + pairs) + read_out
    assert whole_limit("GPT-2 medium") == pytest.approx(100 * (step / (step - 24 * 4 * N * d**2) - 1))
    N, d = 197, 768
    ends = 2 * 2 * 196 * d * d + 3 * 2 * 1000 * d  # patches (of the gradients only the weights'), and the head
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + ends
    assert whole_limit("ViT") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))


# ------ Section 3's rows are those of running layers; the lookup's bounds are met, and passed by nothing that was tried


def test_the_task_in_words():
    """A token's key is found among the axes, and its target is the value beside the next key."""
    embedding = lookup.apart(entries=5)
    x, target = lookup.sequences(embedding, 7)
    assert torch.allclose(x.square().mean(-1), torch.ones(7, 5).double())  # mean square one
    keys = x[..., :5].argmax(-1)
    values = x @ torch.linalg.pinv(embedding.values)
    for item in range(7):
        assert sorted(keys[item].tolist()) == list(range(5))
        for i, key in enumerate(keys[item].tolist()):
            wanted = keys[item].tolist().index((key + 1) % 5)
            assert torch.allclose(values[item, wanted], target[item, i])
    assert not torch.equal(x, lookup.sequences(embedding, 7, seed=2).x)


def test_least_error_is_a_minimum():
    """No random attempt has a smaller error, and the layer that solves the task has next to no error."""
    data = lookup.sequences(lookup.apart(6), 40)
    frozen = lookup.attention_layer("frozen")
    least = lookup.least_error(frozen, data)
    with torch.no_grad():
        for _ in range(20):
            frozen.weight_v.normal_(std=0.1)
            assert lookup.error(frozen(data.x), data.target) > least
    assert lookup.least_error(lookup.standard_solution(lookup.apart(6)), data) <= lookup.SOLVED


@pytest.mark.bad_input
def test_fixed_weights_reach_their_bound():
    """The error of a Synthesizer with equal weights on all other tokens is the bound, up to the sample's spread."""
    embedding = lookup.apart()
    data = lookup.sequences(embedding, 400)
    module = SynthesizerAttention(lookup.D_MODEL, lookup.HEADS, lookup.ENTRIES, dtype=torch.float64)
    with torch.no_grad():
        module.sources[0].matrix.copy_(-1e3 * torch.eye(lookup.ENTRIES).expand(lookup.HEADS, -1, -1))
        lookup.pass_values(module, embedding)
        found = lookup.error(module(data.x), data.target)
    # 51,200 outputs; the error of one has a standard deviation below 1
    assert abs(found - lookup.fixed_weights_error(lookup.ENTRIES)) < 4 / 51_200**0.5


@pytest.mark.parametrize("name", ["linear", "favor"])
def test_rank_bound(name):
    """In random attempts the weights of few features stay as far from a permutation as their rank requires."""
    generator = torch.Generator().manual_seed(3)
    eye = torch.eye(12, dtype=torch.float64)
    width = 3
    rows = torch.randn(width, width, generator=generator).double()
    feature_map = EluPlusOne() if name == "linear" else PositiveFeatures(rows)
    for size in (0.5, 2.0, 6.0):
        q, k = size * torch.randn(2, 12, width, generator=generator, dtype=torch.float64)
        weights = linear_attention_reference(q, k, eye, feature_map=feature_map)
        assert (weights - eye.roll(1, 1)).square().sum() / 12 >= lookup.low_rank_error(12, width)
    assert lookup.low_rank_error(12, width) == pytest.approx(1 - width / 12)
    assert lookup.low_rank_error(12, 12) == 0


def test_heads_of_linear_attention_solve_the_lookup_together():
    """They fail without the head that subtracts the means; if all features are in use, none is left for that head."""
    embedding = lookup.apart()
    data = lookup.sequences(embedding)
    layer = lookup.linear_solution(embedding)
    assert lookup.error(layer(data.x), data.target) <= lookup.SOLVED
    K, last = lookup.D_MODEL // lookup.HEADS, 3  # 16 keys in three heads, 7 at most in each
    with torch.no_grad():
        layer.weight_o[:, K * last : K * (last + 1)] = 0
    assert lookup.error(layer(data.x), data.target) > 0.1
    with pytest.raises(ValueError, match="at most 49 keys, got 50"):
        lookup.linear_solution(lookup.apart(50))


def test_codes_are_apart():
    products = lookup.codes(7, 4) @ lookup.codes(7, 4).T
    assert torch.equal(products.diag(), torch.ones(7).double())
    assert products.fill_diagonal_(0).max() <= 0
    with pytest.raises(ValueError, match="entries: expected at most 2 width = 8, got 9"):
        lookup.codes(9, 4)


def test_misplaced_weight():
    exact = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert methods.misplaced(exact, exact) == 0
    assert methods.misplaced(exact.flip(1), exact) == 50  # all of the first row, none of the second
