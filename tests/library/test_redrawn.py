"""`RandomFeatureAttention`: rows in the state dict, drawn anew on request and never by themselves."""

import copy

import pytest
import torch

from ortho import MultiheadAttention, TransformerBlock
from ortho.attention.linear.favor import PositiveFeatures, orthogonal_features
from ortho.attention.linear.linear_attention import linear_attention, linear_attention_reference
from ortho.attention.linear.random_feature_attention import MAPS, RandomFeatureAttention


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def qkv(*lead, length=9, width=4):
    g = generator(7)
    return [torch.randn(*lead, length, width, generator=g, dtype=torch.float64) for _ in range(3)]


def attention(**options):
    return RandomFeatureAttention(4, 16, generator=generator(1), dtype=torch.float64, **options)


@pytest.mark.parametrize(("form", "function"), [("fast", linear_attention), ("reference", linear_attention_reference)])
def test_is_feature_attention_on_its_rows(form, function):
    rows = orthogonal_features(16, 4, generator=generator(1), dtype=torch.float64)
    q, k, v = qkv(2, 3)
    module = attention(form=form)
    assert torch.equal(module.features, rows)
    for causal in (False, True):
        expected = function(q, k, v, feature_map=PositiveFeatures(rows), is_causal=causal)
        assert torch.equal(module(q, k, v, is_causal=causal), expected)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("draw", ["orthogonal", "iid", "structured"])
def test_redraw(name, draw):
    """Other rows of the same law, reproducibly; the output follows, and nothing else changes it."""
    module, (q, k, v) = attention(map=name, draw=draw), qkv(2)
    before = module(q, k, v)
    assert torch.equal(module(q, k, v), before)
    module.redraw(generator(2))
    after = module(q, k, v)
    assert not torch.equal(after, before)
    assert module.features.shape == (16 // MAPS[name].of_a_row, 4)  # 16 features in all
    module.redraw(generator(1))
    torch.testing.assert_close(module(q, k, v), before, atol=1e-12, rtol=1e-12)


def test_state_dict():
    """The rows are saved, loaded, copied and cast with the module, and are not trained."""
    module, other = attention(), RandomFeatureAttention(4, 16, generator=generator(5), dtype=torch.float64)
    assert list(module.state_dict()) == ["features"]
    assert not list(module.parameters())
    other.load_state_dict(module.state_dict())
    operands = qkv(2)
    assert torch.equal(other(*operands), module(*operands))
    copied = copy.deepcopy(module)
    copied.redraw(generator(3))
    assert not torch.equal(copied.features, module.features)
    assert module.float().features.dtype == torch.float32


def test_in_a_layer():
    """In place of a name; saved with the layer, and one sequence in parts as the whole."""
    options = {"generator": generator(4), "dtype": torch.float64}
    layer = MultiheadAttention(12, 3, attention=attention(), **options)
    assert "attention.features" in layer.state_dict()
    x = torch.randn(2, 9, 12, generator=generator(6), dtype=torch.float64)
    whole = layer(x, is_causal=True)
    head, state = layer(x[:, :5], is_causal=True, return_state=True)
    parts = torch.cat([head, layer(x[:, 5:], is_causal=True, initial_state=state)], 1)
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    layer.attention.redraw(generator(8))
    assert not torch.equal(layer(x, is_causal=True), whole)
    block = TransformerBlock(12, 3, attention=attention(), **options)
    assert block(x, is_causal=True).shape == x.shape
    assert "RandomFeatureAttention(4, 16, map='positive', draw='orthogonal', form='fast')" in repr(layer)
    with pytest.raises(ValueError, match="attention: expected 'softmax', got RandomFeatureAttention"):
        layer.to_torch()


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="m: expected an integer of at least 1, got 0"):
        RandomFeatureAttention(4, 0)
    with pytest.raises(
        ValueError, match="m: expected an even number of features, two for each row of 'hyperbolic', got 5"
    ):
        RandomFeatureAttention(4, 5, map="hyperbolic")
    with pytest.raises(ValueError, match="d_head: expected an integer of at least 1, got 0"):
        RandomFeatureAttention(0)
    with pytest.raises(ValueError, match="map: expected one of 'positive', .* got 'cosine'"):
        RandomFeatureAttention(4, map="cosine")
    with pytest.raises(ValueError, match="draw: expected one of .* got 'qr'"):
        RandomFeatureAttention(4, draw="qr")
    with pytest.raises(ValueError, match="fit: expected one of .* got 'best'"):
        RandomFeatureAttention(4, map="dense", fit="best")
    layer = MultiheadAttention(12, 3, attention=RandomFeatureAttention(5))
    with pytest.raises(ValueError, match=r"features: expected shape \(m, 4\), as wide as q, got \(256, 5\)"):
        layer(torch.ones(1, 2, 12))
    with pytest.raises(ValueError, match="is_causal: expected a feature map that looks at one token at a time"):
        attention(map="dense")(*qkv(2), is_causal=True)
