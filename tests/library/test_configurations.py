"""The published models: their parameters, what a training step costs, and the memory it holds, byte by byte."""

from dataclasses import replace

import pytest
import torch
from counted import assert_declared

from ortho import PROJECTIONS
from ortho.cost import layer
from ortho.cost.configurations import CONFIGURATIONS

TINY = {  # what differs from the published size
    "BERT-base": {"N": 7, "sizes": {"vocab_size": 11, "max_length": 7}},
    "GPT-2 medium": {"N": 7, "sizes": {"vocab_size": 11, "max_length": 7, "bias": True}},
    "ViT-Base": {"N": 10, "sizes": {"image_size": 6, "patch_size": 2, "num_classes": 5, "channels": 3}},
}


def tiny(name):
    return replace(CONFIGURATIONS[name], d=12, H=2, L=2, **TINY[name])


def test_published_parameters():
    """Those of the papers' released models: with the pooler, with the tied read-out once, with 1000 classes."""
    published = {"BERT-base": 109_482_240, "GPT-2 medium": 354_823_168, "ViT-Base": 86_567_656}
    assert {name: at.parameters for name, at in CONFIGURATIONS.items()} == published
    for at in CONFIGURATIONS.values():
        for projection in PROJECTIONS:
            built, declared = at.build(projection=projection, device="meta"), at.cost(1, projection=projection)
            stored = [*built.parameters(), *built.buffers()]
            trained, frozen = (sum(t.numel() for t in stored if t.requires_grad is needs) for needs in (True, False))
            assert (trained, frozen) == (declared.trained, declared.frozen)
            if not projection.startswith("structured"):  # their signs stand for matrices
                assert trained + frozen == at.parameters
                assert frozen == (0 if projection == "learned" else 2 * at.L * at.d * (at.d + 1))


def test_widths_and_lengths_fit():
    for at in CONFIGURATIONS.values():
        assert at.d == 64 * at.H
        (given,) = at.inputs(3, device="meta")
        built = at.build(device="meta")
        assert len(built(given)) == 3
        assert len(built.embed_positions) == at.N  # each place of the published length is in use
        assert given.is_floating_point() or given.shape == (3, at.N)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_costs(name, projection, form):
    at = tiny(name)
    for B, dtype in ((1, torch.float32), (2, torch.float64)):
        given = at.inputs(B, dtype=dtype, generator=torch.Generator().manual_seed(0))
        declared = at.cost(B, projection=projection, form=form, itemsize=dtype.itemsize)
        assert_declared(declared, at.build(projection=projection, form=form, dtype=dtype), *given)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_parts_of_a_step(name, projection, form):
    """The parts equal the layer's closed form and sums by hand: look-ups have no products, patches no gradient."""
    at, B = CONFIGURATIONS[name], 3
    options = {"projection": projection, "form": form}
    parts = at.step_by_part(B, **options)
    assert sum(parts.values()) == at.cost(B, **options).step
    alone = layer(B, at.N, at.d, at.H, causal=name == "GPT-2 medium", bias=True, **options)
    assert parts["attention"] == at.L * alone.step
    assert parts["networks"] == at.L * 48 * B * at.N * at.d**2
    assert parts["embeddings"] == (2 * 2 * B * 196 * 768 * 768 if name == "ViT-Base" else 0)
    outputs = {"BERT-base": 768, "GPT-2 medium": 1024 * 50257, "ViT-Base": 1000}
    assert parts["read-out"] == 6 * B * at.d * outputs[name]
