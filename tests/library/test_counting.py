"""Counts from running code: operations, bytes kept and allocated."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ortho import MECHANISMS, MultiheadAttention, cost
from ortho.cost.counting import Allocations, Counts, flops_of, saved_bytes


def test_any_module():
    """PyTorch's own attention, which returns two results; a function; a module that trains nothing; one that is not a
    part of this package, by hand."""
    x = torch.zeros(2, 7, 12, requires_grad=True)
    theirs = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    declared = cost.layer(2, 7, 12, 3, form="reference")
    found = cost.of(theirs, x, x, x)
    assert (found.forward, found.trained) == (declared.forward, declared.trained)
    assert found.step == found.forward + found.backward == declared.step
    ours = cost.of(MultiheadAttention(12, 3, projection="frozen"), x)
    assert (ours.trained, ours.frozen) == (2 * 144, 2 * 144)
    network = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Tanh())
    assert cost.of(network, x) == Counts(2 * 14 * 60, 4 * 14 * 60, 65, 0, 4 * 14 * (12 + 5), {})
    assert cost.of(network.requires_grad_(False), x.detach()) == Counts(2 * 14 * 60, 0, 0, 65, 0, {})
    assert cost.of(torch.matmul, x, torch.zeros(12, 4)).backward == 2 * 14 * 12 * 4


def test_saved_bytes_counts_a_storage_once():
    x = torch.zeros(4, 6, requires_grad=True)
    w = torch.zeros(6, 6, requires_grad=True)
    with saved_bytes(exclude=[w]) as total:
        y = x @ w + x[:2].repeat(2, 1) @ w  # x is kept twice, as itself and as a copy of half of it
        assert y.shape == (4, 6)
    assert total() == 2 * x.numel() * 4


def test_products_in_place_and_with_vectors():
    a, b, out = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    for call in (lambda: torch.bmm(a, b, out=out), lambda: out.baddbmm_(a, b), lambda: out.baddbmm(a, b)):
        assert flops_of(call) == 240
    assert flops_of(lambda: out[0].addmm_(a[0], b[0])) == flops_of(lambda: torch.mm(a[0], b[0], out=out[0])) == 120
    assert flops_of(lambda: a[0] @ b[0, :, 0]) == 24 and flops_of(lambda: a[0, 0] @ b[0, :, 0]) == 8


def test_systems_and_eigenvalues():
    """A substitution goes over half of the matrix; eigenvalues take a constant times n^3 for each matrix of a batch,
    whatever its entries (Golub & Van Loan 2013)."""
    assert flops_of(lambda: torch.linalg.solve_triangular(torch.eye(4), torch.ones(4, 3), upper=False)) == 4 * 4 * 3
    for lead, n in (((), 4), ((2, 3), 5)):
        assert flops_of(torch.linalg.eigh, torch.eye(n).expand(*lead, n, n)) == 9 * n**3 * (6 if lead else 1)


def _by_the_allocator(step):
    """(peak, largest) of all blocks that PyTorch's allocator gives out and takes back, from PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes)), max(changes)


@pytest.mark.parametrize("name", ["softmax", "linear", "favor", "aderf"])
def test_the_count_is_the_allocator_s(name):
    """Equal up to scalars; softmax in its reference form, as its fused kernel takes blocks that no tensor has."""
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
