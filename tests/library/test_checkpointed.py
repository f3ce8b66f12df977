"""Recomputation: the same numbers, less memory kept, one more forward pass."""

import pytest
import torch
from gradients import trained
from seeded import draw
from torch import nn

from ortho import LanguageModel, MultiheadAttention, TransformerBlock, cost
from ortho.cost.models import recomputed
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention

D, H, N = 12, 2, 10


def blocks(count, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [TransformerBlock(D, H, generator=generator, dtype=torch.float64, **kwargs) for _ in range(count)]


@pytest.mark.parametrize(("count", "segments"), [(1, 1), (5, None), (5, 1), (5, 3), (5, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_numbers(count, segments, causal):
    """Bit for bit: the same operations run in the same order, the gradients' too."""
    rows, x = blocks(count), draw(2, N, D).requires_grad_()
    plain = nn.Sequential(*rows)
    y = x
    for block in rows:
        y = block(y, is_causal=causal)
    z = Checkpointed(rows, segments)(x, is_causal=causal)
    upstream = draw(2, N, D, seed=2)
    leaves = [x, *trained(plain).values()]
    assert torch.equal(y, z)
    for one, other in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(z, leaves, upstream), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_alone(causal):
    """The weights, N^2 numbers a head, are not kept; all else is."""
    x = draw(1, 40, D).requires_grad_()
    layers = []
    for attention in ("softmax", CheckpointedAttention()):
        options = {"form": "reference"} if attention == "softmax" else {}
        layers.append(
            MultiheadAttention(
                D, H, attention=attention, generator=torch.Generator().manual_seed(0), dtype=torch.float64, **options
            )
        )
    plain, recomputed = (cost.of(layer, x, is_causal=causal) for layer in layers)
    assert torch.equal(*(layer(x, is_causal=causal) for layer in layers))
    assert plain.saved_bytes - recomputed.saved_bytes == 8 * H * 40 * 40 + (40 * 40 if causal else 0)
    assert 0 < recomputed.backward - plain.backward <= 4 * 40 * 40 * D


@pytest.mark.parametrize(("count", "segments"), [(6, 1), (6, 2), (7, 3), (6, 6)])
def test_declared_is_counted(count, segments):
    x = draw(1, N, D).requires_grad_()
    counts = cost.of(Checkpointed(blocks(count), segments), x)
    declared = recomputed(1, N, D, H, count, segments, itemsize=8)
    assert (counts.forward, counts.backward) == (declared.forward, declared.backward)
    assert counts.saved_bytes == segments * 8 * N * D  # the segments' inputs


def test_a_recomputed_model_decodes():
    """With a cache for each block, as the model without recomputation."""
    model = LanguageModel(9, 8, 2, 3, max_length=12, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3]])
    expected = model.generate(tokens, 5, temperature=0)
    model.blocks = nn.ModuleList([Checkpointed(model.blocks, segments=2)])
    assert torch.equal(model.generate(tokens, 5, temperature=0), expected)
