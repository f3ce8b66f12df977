"""Section 3's rows are those of running layers; the lookup's bounds are met, and passed by nothing that was tried."""

import pytest
import torch

from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.feature_maps import EluPlusOne
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.cost.counting import count_step
from ortho.layers.synthesizer import SynthesizerAttention
from paper.claims.evidence import lookup, methods
from paper.claims.evidence.methods import COSTS, build, evaluate


@pytest.mark.parametrize("name", COSTS)
def test_rows_are_counted(name):
    for length, d_model, heads in ((6, 4, 2), (9, 12, 3)):  # formulas are for several heads
        counts = count_step(build(name, length, d_model, heads), torch.zeros(1, length, d_model, requires_grad=True))
        for figure in ("forward", "backward", "elementwise_forward", "elementwise_backward", "saved_bytes", "trained"):
            assert getattr(counts, figure) == evaluate(getattr(COSTS[name], figure), length, d_model, heads), figure


def test_a_formula_that_is_no_count():
    with pytest.raises(ValueError, match=r"formula: expected an integer at .*, got 8/7 of"):
        evaluate(8 * COSTS["learned"].trained / 28, 1, 1, 1)


def test_the_task_in_words():
    """A token's key is found among the axes, and its target is the value which stands beside the next key."""
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
    """No random attempt is better; and the layer that solves the task has no error to speak of."""
    data = lookup.sequences(lookup.apart(6), 40)
    frozen = lookup.attention_layer("frozen")
    least = lookup.least_error(frozen, data)
    with torch.no_grad():
        for _ in range(20):
            frozen.weight_v.normal_(std=0.1)
            assert lookup.error(frozen(data.x), data.target) > least
    assert lookup.least_error(lookup.standard_solution(lookup.apart(6)), data) <= lookup.SOLVED


def test_training_does_not_get_below():
    """Gradient descent on W_V and W_O comes near the bound from above."""
    data = lookup.sequences(lookup.apart(4), 60)
    frozen = lookup.attention_layer("frozen")
    least = lookup.least_error(frozen, data)
    optimiser = torch.optim.Adam(frozen.parameters(), lr=0.01)
    for _ in range(150):
        loss = (frozen(data.x)[..., : lookup.VALUES] - data.target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    reached = lookup.error(frozen(data.x), data.target)
    assert least - 1e-9 < reached < least + 0.1


@pytest.mark.bad_input
def test_fixed_weights_reach_their_bound():
    """A Synthesizer with equal weights on all other tokens; its error is the bound up to the sample's spread."""
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
    """Against random attempts: the weights of few features stay as far from a permutation as their rank says."""
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
