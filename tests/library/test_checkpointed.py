"""Recomputation: the same numbers, less memory kept, one more forward pass."""

import pytest
import torch
from gradients import trained
from refusals import refuses
from torch import nn

from ortho import LanguageModel, MultiheadAttention, TransformerBlock, cost
from ortho.cost.counting import Allocations
from ortho.cost.models import recomputed
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention

D, H, N = 12, 2, 10


def blocks(count, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return [TransformerBlock(D, H, generator=generator, dtype=torch.float64, **kwargs) for _ in range(count)]


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_in_a_model():
    """Logits are those of the model without it, also with caches."""
    model = LanguageModel(11, D, H, 4, max_length=None, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.randint(11, (2, N), generator=torch.Generator().manual_seed(1))
    whole = model(tokens)
    model.blocks = nn.ModuleList([Checkpointed(model.blocks)])
    assert torch.equal(model(tokens), whole)
    caches = model.new_caches(N)
    parts = [model(part, caches=caches) for part in (tokens[:, :6], tokens[:, 6:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)


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


def test_the_peak():
    """Counted over all live tensors, forward and backward: at the peak one segment's blocks and the other segments'
    inputs are kept, besides the gradients and temporaries of one block, which are there in any case."""
    size, peaks, declared = (1, 64, D), {}, {}
    one = cost.of(blocks(1)[0], draw(*size).requires_grad_()).saved_bytes
    for segments in (0, 1, 3, 9):
        rows, x = blocks(9), draw(*size).requires_grad_()
        run = Checkpointed(rows, segments) if segments else nn.Sequential(*rows)
        with Allocations() as memory:
            torch.autograd.grad(run(x).sum(), [x, *trained(run).values()])
        kept = (segments - 1) * 8 * 64 * D + 9 // segments * one if segments else 9 * one
        peaks[segments], declared[segments] = memory.peak, kept
    for segments in (1, 3, 9):
        saved = declared[0] - declared[segments]
        assert abs(peaks[0] - peaks[segments] - saved) <= one
    assert declared[1] == declared[0]  # one segment for all: nothing is gained
    assert peaks[9] < peaks[3] < peaks[1]  # a block keeps more than nine times its input


def test_more_segments_than_blocks():
    refuses("segments: expected at most the 2 blocks, got 3", recomputed, 1, 4, 4, 1, 2, 3)


def test_a_recomputed_model_decodes():
    """With a cache for each block, as the model without recomputation."""
    model = LanguageModel(9, 8, 2, 3, max_length=12, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3]])
    expected = model.generate(tokens, 5, temperature=0)
    model.blocks = nn.ModuleList([Checkpointed(model.blocks, segments=2)])
    assert torch.equal(model.generate(tokens, 5, temperature=0), expected)


def test_one_cache_for_several_blocks_is_refused():
    two = Checkpointed(blocks(2))
    call = {"is_causal": True, "cache": two.blocks[0].attention.new_cache(N)}
    refuses(r"^cache: expected None, as each block needs its own", two, draw(1, N, D), **call)
