"""What cannot be frozen is said, and leaves the model as it was."""

import pytest
from adapted_models import D, H, NamedAttention, OfTorch, assert_same, described, encoder
from torch import nn

from ortho import MultiheadAttention
from ortho.adapters import freeze_qk, unfreeze_qk
from ortho.projections import LearnedProjection


class Subclass(nn.MultiheadAttention):
    pass


class QuantisedLinear(nn.Linear):
    pass


def with_child(name, layer):
    model = NamedAttention()
    setattr(model, name, layer)
    return model


def tied():
    model = nn.ModuleList([NamedAttention(), NamedAttention()])
    model[1].q_proj.weight = model[0].q_proj.weight
    return model


def sharing():
    model = nn.ModuleList([MultiheadAttention(D, H), MultiheadAttention(D, H)])
    model[1].projection = model[0].projection
    return model


ERRORS = {
    "nothing": (lambda: nn.Linear(3, 3), {}, ValueError, "got Linear with none"),
    "subclass": (
        lambda: nn.ModuleList([OfTorch(), Subclass(D, H)]),
        {},
        ValueError,
        "of 1 nn.MultiheadAttention itself, got .*Subclass",
    ),
    "quantised": (
        lambda: with_child("k_proj", QuantisedLinear(D, D)),
        {},
        ValueError,
        "k_proj .*got .*QuantisedLinear",
    ),
    "width": (
        lambda: with_child("k_proj", nn.Linear(D, 7)),
        {},
        ValueError,
        "fits 12 outputs of q_proj and 7 outputs of k_proj",
    ),
    "number": (lambda: with_child("num_heads", 6), {}, ValueError, "their number .* fits 12 outputs of q_proj"),
    "tied": (tied, {}, ValueError, "of its own in 0"),
    "shared": (sharing, {}, ValueError, "of its own in 0"),
    "layer": (encoder, {"layers": [1, 3]}, ValueError, "layers: expected a part of .0, 1, 2., got 3"),
    "head": (encoder, {"heads": [4]}, ValueError, "heads: expected a part of .0, 1, 2, 3., got 4"),
    "negative": (encoder, {"heads": [-1]}, ValueError, "heads: expected a part of"),
    "twice": (encoder, {"layers": [1, 1]}, ValueError, "layers: expected at least one index, and none twice"),
    "none": (encoder, {"heads": []}, ValueError, "heads: expected at least one index"),
    "late": (encoder, {"heads": {0: [1], 1: [9]}}, ValueError, "heads: expected a part of"),
    "layer of a mapping": (encoder, {"heads": {5: [1]}}, ValueError, "heads: expected a part of .0, 1, 2., got 5"),
    "both": (encoder, {"heads": {0: [1]}, "layers": [0]}, ValueError, "layers: expected None beside a mapping"),
    "draw": (encoder, {"draw": "uniform"}, ValueError, "draw: expected one of"),
    "zero": (
        lambda: OfTorch(add_zero_attn=True),
        {"stop_gradient": True},
        ValueError,
        "expected False with add_bias_kv",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_change_nothing(case):
    build, kwargs, error, match = ERRORS[case]
    model = build()
    before = described(model)
    with pytest.raises(error, match=match):
        freeze_qk(model, **kwargs)
    assert_same(described(model), before)


def test_parts_of_a_group_change_nothing():
    """Nor of the layers before it, whose heads have keys of their own."""
    model = nn.ModuleList([OfTorch(), NamedAttention()])
    before = described(model)
    with pytest.raises(
        ValueError, match="heads: expected all 2 heads that share a head of keys in 1, or none, got .0, 1, 2."
    ):
        freeze_qk(model, heads=[0, 1, 2])
    assert_same(described(model), before)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"model": "bert"}, "model: expected an nn.Module, got str"),
        ({"layers": 1}, "layers: expected indices, got int 1"),
        ({"layers": "0"}, "layers: expected indices, got str"),
        ({"heads": [1.0]}, "heads: expected integers, got float"),
        ({"heads": [True]}, "heads: expected integers, got bool"),
        ({"stop_gradient": 1}, "stop_gradient: expected True or False, got int 1"),
    ],
)
def test_wrong_types(kwargs, match):
    with pytest.raises(TypeError, match=match):
        freeze_qk(**{"model": encoder()} | kwargs)
    with pytest.raises(TypeError, match="model: expected an nn.Module"):
        unfreeze_qk(3)


def test_own_projections_are_refused():
    class Own(LearnedProjection):
        pass

    model = nn.ModuleList([MultiheadAttention(D, H), MultiheadAttention(D, H, projection=Own(D, H))])
    before = described(model)
    for convert in (freeze_qk, unfreeze_qk):
        with pytest.raises(TypeError, match="projection: expected one of this package, got Own"):
            convert(model)
        assert_same(described(model), before)
