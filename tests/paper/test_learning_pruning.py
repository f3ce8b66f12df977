"""How many heads can be removed: which, in which order, and what is read from the records."""

import pytest
import torch

from ortho import EncoderDecoder
from paper.experiments.learning import pruning

IMPORTANCE = {0: [0.3, -0.1, 0.2], 1: [0.0, 0.1, 0.4]}


def record(least, most=(1.0, 0.2)):
    curves = {"least": least, "most": most}
    tests = {
        pruning.arm(first, count): {"faultless_fraction": [share], "loss_nats": [1 - share]}
        for first, shares in curves.items()
        for count, share in enumerate(shares)
    }
    return {"device": "cpu-x", "repetitions": tests, "provenance": {"device_name": "X"}}


def test_one_head_stays_in_each_layer_the_one_that_would_go_last():
    assert pruning.order(IMPORTANCE, "least") == [(0, 1), (1, 0), (1, 1), (0, 2)]
    assert pruning.order(IMPORTANCE, "most") == [(1, 2), (0, 0), (0, 2), (1, 1)]


def test_only_the_encoder_is_pruned_and_the_model_is_left_as_it_was():
    """A pruned layer gives the sum over its other heads; the loss rises by what the head's absence costs."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"max_length": 8, "positions": "sinusoidal", "dtype": torch.float64, "generator": generator}
    model = EncoderDecoder(11, 12, 3, 2, **sizes).eval()
    tokens = torch.randint(11, (2, 8), generator=generator)
    whole = model(tokens, tokens)
    smaller = pruning.pruned(model, [(0, 1), (1, 0), (0, 2)])
    x = torch.randn(2, 8, 12, dtype=torch.float64, generator=generator)
    for block, other, heads in zip(model.encoder, smaller.encoder, ([0], [1, 2]), strict=True):
        layer = block.attention
        q, k = layer.projection(x)
        v = (x @ layer.weight_v.T).unflatten(-1, (3, 4)).transpose(1, 2)
        of = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        wanted = sum(of[:, head] @ layer.weight_o[:, 4 * head : 4 * head + 4].T for head in heads)
        # Some hundred sums, each rounded to eps, in a different order.
        torch.testing.assert_close(other.attention(x), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(tokens, tokens), whole)
    assert not torch.equal(smaller(tokens, tokens), whole)

    def loss(one):
        return one(tokens, tokens).square().sum().item()

    rises = pruning.head_importance(model, loss)
    assert {index: len(each) for index, each in rises.items()} == {0: 3, 1: 3}
    assert rises[1][2] == loss(pruning.pruned(model, [(1, 2)])) - loss(model) != 0


@pytest.mark.parametrize(
    ("shares", "heads"),
    [((0.9, 0.9, 0.895, 0.5, 0.9), 2), ((0.9, 0.8), 0), ((0.5, 0.5, 0.6), 2)],
)
def test_heads_that_go_before_a_point_is_lost(shares, heads):
    assert pruning.removable(record(shares)) == heads


def test_curves_of_runs_side_by_side():
    records = [record((1.0, 0.5)), record((0.8, 0.7))]
    assert pruning.together(records, "least") == [(1.0, 0.8), (0.5, 0.7)]
    assert pruning.curve(records[0], "least") == [0.0, 0.5]
    table = pruning.table(records)
    assert "1 removed, least needed first" in table and "0.600 [0.500, 0.700]" in table
    assert "1.000 faultless; 0 heads go for a point, least needed first" in pruning.line(records[0])
