"""Memory is counted from the tensors that are made: each storage once, while it exists."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ortho import MECHANISMS
from ortho.cost.allocations import Allocations


def test_each_storage_counts_once_while_it_exists():
    given = torch.zeros(1000)
    with Allocations() as memory:
        view = given[:10].reshape(2, 5)  # of memory that was there before
        assert memory.live == 0
        one = given + 1  # 4000 bytes
        part = one[5:]
        del one
        assert memory.live == memory.peak == 4000  # held by its view
        part.add_(view.sum())
        assert memory.peak == 4004  # the sum
        assert memory.live == 4000
        two = torch.ones(500, dtype=torch.float64)
        del part, two
        assert memory.live == 0
    assert memory.peak == 8000
    assert memory.largest == 4000


def test_what_autograd_keeps_exists():
    x = torch.zeros(1000, requires_grad=True)
    with Allocations() as memory:
        y = x.exp().sin().sum()
        assert memory.live == 4004  # the exponential serves both gradients, the sine none
        (gradient,) = torch.autograd.grad(y, x)
        del y
        assert memory.live == gradient.nbytes


def _by_the_allocator(step):
    """(peak, largest) of all blocks that PyTorch's allocator hands out and takes back, by its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes)), max(changes)


@pytest.mark.parametrize("name", ["softmax", "linear", "favor", "aderf"])
def test_the_count_is_the_allocator_s(name):
    """Up to scalars; the reference of softmax, as its fused kernel takes blocks that no tensor has."""
    mechanism = MECHANISMS[name]
    attention = mechanism.reference if name == "softmax" else mechanism.fast
    g = torch.Generator().manual_seed(0)
    *operands, upstream = (torch.randn(1, 2, 200, 16, generator=g) for _ in range(4))
    operands = [x.requires_grad_() for x in operands]

    def step():
        o = attention(*operands, is_causal=mechanism.causal)
        torch.autograd.grad(o, operands, upstream)

    step()  # draws the default features
    with Allocations() as memory:
        step()
    assert memory.live == 0
    peak, largest = _by_the_allocator(step)
    assert memory.largest == largest > 0
    assert memory.peak == pytest.approx(peak, abs=64)
