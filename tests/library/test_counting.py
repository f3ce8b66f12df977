"""Counts from running code: operations, bytes kept and allocated; memory traffic, compared with explicit loops."""

import itertools

import pytest
import torch
from ortho.attention.indexing import indexing
from refusals import refusals
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ortho import MECHANISMS, MultiheadAttention
from ortho.cost import attention as costs
from ortho.cost.attention import Traffic, columns_first, materialised, rows_first
from ortho.cost.counting import Allocations, OperationCounter, count_step, saved_bytes


def test_pytorch_counter_agrees_on_products():
    """Both counters see the same products in the materialised form; only ours sees the fused CPU kernel."""
    x = torch.zeros(2, 7, 12, requires_grad=True)
    for form, seen in (("reference", True), ("fast", False)):
        layer = MultiheadAttention(12, 3, form=form)
        ours = count_step(layer, x)
        with FlopCounterMode(display=False) as theirs:
            layer(x).sum().backward()
        assert (theirs.get_total_flops() == ours.forward + ours.backward) is seen


def test_saved_bytes_counts_a_storage_once():
    x = torch.zeros(4, 6, requires_grad=True)
    w = torch.zeros(6, 6, requires_grad=True)
    with saved_bytes(exclude=[w]) as total:
        y = x @ w + x[:2].repeat(2, 1) @ w  # x is kept twice, as itself and as a copy of half of it
        assert y.shape == (4, 6)
    assert total() == 2 * x.numel() * 4


ELEMENTWISE = {
    **dict.fromkeys(("add", "sub", "mul", "div"), (torch.full((3, 4), 2.0),)),
    **dict.fromkeys(("neg", "exp", "relu", "sqrt"), ()),
    "clamp": (0.0,),
    "pow": (2,),
    "masked_fill": (torch.ones(4, dtype=torch.bool), 0.0),
    "addcmul": (torch.ones(3, 1), torch.ones(4)),
    "cumsum": (0,),
}


def counted(call):
    with OperationCounter() as counter:
        call()
    return dict(counter.flops), dict(counter.elementwise)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_in_place_counts_as_what_it_computes(name):
    """Under the same name: one operation for each number, wherever the result is written."""
    arguments = ELEMENTWISE[name]
    expected = {}, {name: 12}
    assert counted(lambda: getattr(torch.ones(3, 4), name)(*arguments)) == expected
    assert counted(lambda: getattr(torch.ones(3, 4), f"{name}_")(*arguments)) == expected


def test_products_in_place():
    a, b, out = torch.ones(2, 3, 4), torch.ones(2, 4, 5), torch.ones(2, 3, 5)
    assert counted(lambda: torch.bmm(a, b, out=out)) == counted(lambda: a @ b) == ({"bmm": 240}, {})
    assert counted(lambda: out.baddbmm_(a, b)) == counted(lambda: out.baddbmm(a, b)) == ({"baddbmm": 240}, {})
    assert (
        counted(lambda: out[0].addmm_(a[0], b[0])) == counted(lambda: out[0].addmm(a[0], b[0])) == ({"addmm": 120}, {})
    )
    assert counted(lambda: torch.mm(a[0], b[0], out=out[0])) == ({"mm": 120}, {})


def test_what_only_writes_is_free():
    x, other = torch.ones(3, 4), torch.zeros(3, 4)
    for call in (lambda: x.copy_(other), lambda: x.fill_(2.0), x.zero_, x.tril_, x.triu_):
        assert counted(call) == ({}, {})


def test_what_has_no_rule_is_an_error():
    """Also in place; a name is never taken for a similar one."""
    with pytest.raises(RuntimeError, match="no rule for aten.sort"), OperationCounter():
        torch.zeros(3).sort()
    with pytest.raises(RuntimeError, match="no rule for aten.scatter"), OperationCounter():
        torch.ones(3).scatter_(0, torch.tensor([1]), torch.ones(1))


def test_what_is_added_at_some_places_counts():
    x, places, numbers = torch.ones(3, 4), torch.tensor([1, 1]), torch.ones(2, 4)
    assert counted(lambda: x.index_add(0, places, numbers)) == ({}, {"index_add": 8})
    assert counted(lambda: x.scatter_add(0, places[:, None].expand(2, 4), numbers)) == ({}, {"scatter_add": 8})
    assert counted(lambda: x.scatter_add_(0, places[:, None].expand(2, 4), numbers)) == ({}, {"scatter_add": 8})


def test_eigenvalues():
    """A constant times n^3 for each matrix of a batch, whatever its entries (Golub & Van Loan 2013)."""
    for lead, n in (((), 4), ((2, 3), 5)):
        flops, elementwise = counted(lambda: torch.linalg.eigh(torch.eye(n).expand(*lead, n, n)))  # noqa: B023
        assert list(flops.values()) == [9 * n**3 * (6 if lead else 1)] and not elementwise


# ------------------------------------------------------------------------------------------------------------ allocated


def test_each_storage_counts_once_while_it_exists():
    given = torch.zeros(1000)
    with Allocations() as memory:
        view = given[:10].reshape(2, 5)  # a view of memory that existed before
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
        assert memory.live == 4004  # the exponential is needed for both gradients, the sine for none
        (gradient,) = torch.autograd.grad(y, x)
        del y
        assert memory.live == gradient.nbytes


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


# -------------------------------------------------------------------------------------------------------------- traffic


class Memory:
    """A fast memory of M numbers that counts what it loads and stores, and refuses what it cannot hold."""

    def __init__(self, M):
        self.M, self.held, self.reads, self.writes = M, {}, 0, 0

    def load(self, name, numbers):
        self.keep(name, numbers)
        self.reads += numbers

    def keep(self, name, numbers):
        self.held[name] = numbers
        assert sum(self.held.values()) <= self.M, self.held

    def store(self, numbers):
        self.writes += numbers


def blocks(N, size):
    return [min(size, N - start) for start in range(0, N, size)]


def by_columns(N, d, M):
    """Four blocks of M / 4d rows of d numbers fill the memory. Algorithm 1 also holds the scores of a tile and two
    numbers a row; these are left out here, as its authors leave them out."""
    memory, tile = Memory(M), costs.columns_first_tile(d, M)
    memory.store(N * (d + 2))  # outputs 0, maxima -inf, sums 0
    for columns in blocks(N, tile.columns):
        memory.load("K", columns * d), memory.load("V", columns * d)
        for rows in blocks(N, tile.rows):
            memory.load("Q", rows * d), memory.load("O", rows * d)
            memory.reads += 2 * rows
            memory.store(rows * (d + 2))
    return Traffic(memory.reads, memory.writes)


def by_rows(N, d, M):
    memory, tile = Memory(M), costs.rows_first_tile(d, M)
    for rows in blocks(N, tile.rows):
        memory.load("Q", rows * d), memory.keep("O", rows * d)
        memory.keep("maxima and sums", 2 * rows), memory.keep("scores", rows)
        for columns in blocks(N, tile.columns):
            memory.load("K", columns * d), memory.load("V", columns * d)
        memory.store(rows * (d + 1))
    return Traffic(memory.reads, memory.writes)


@pytest.mark.parametrize(("N", "d", "M"), [(1, 1, 7), (10, 2, 11), (100, 4, 64), (130, 8, 300), (64, 16, 2000)])
def test_closed_forms(N, d, M):
    assert rows_first(N, d, M) == by_rows(N, d, M)
    if 4 * d <= M:
        assert columns_first(N, d, M) == by_columns(N, d, M)


def test_three_passes():
    """Two matrices of N^2 numbers are each written once and read once; queries, keys, values and outputs move once."""
    assert materialised(7, 3).total == 4 * 7 * 7 + 4 * 7 * 3


@pytest.mark.parametrize(("traffic", "constant"), [(columns_first, 12), (rows_first, 4)])
def test_leading_orders(traffic, constant):
    """A constant times N^2 d^2 / M. Left out are two numbers a row beside d (.006 of it) and 2 d beside M (.0005)."""
    N, d, M = 2**22, 256, 2**20
    assert traffic(N, d, M).total == pytest.approx(constant * N * N * d * d / M, rel=0.01)


def test_a_memory_for_all():
    """If M is of the order of N d or more, everything is read once."""
    N, d = 128, 8
    assert rows_first(N, d, 3 * N * d) == Traffic(3 * N * d, N * (d + 1))


@refusals(
    [
        (lambda: columns_first(4, 8, 31), "M: expected room for four rows of 8 numbers, got 31"),
        (lambda: rows_first(4, 8, 34), "M: expected room for a query and a key of 8 numbers, at least 35, got 34"),
    ],
)
def test_memories_that_are_too_small(refused):
    refused()


def test_index_arithmetic_is_free_where_it_is_declared():
    """Index arithmetic is free for positions and masks, whatever the operator. Within the block, what reads or writes a
    number still counts; after the block all counts again, however it ends."""
    i, kept, x = torch.arange(6), torch.arange(6) > 2, torch.ones(6)
    for call in (lambda: i * 2 + 1, lambda: i > 3, lambda: kept & (i < 5), lambda: ~kept):
        assert counted(call)[1]
        assert counted(indexing()(call)) == ({}, {})
    assert counted(indexing()(lambda: i.sort().values.bincount())) == ({}, {})  # has no rule elsewhere
    for name, call in (("mul", lambda: x * i), ("gt", lambda: x > 0), ("masked_fill", lambda: x.masked_fill(kept, 0))):
        assert counted(call) == counted(indexing()(call)) == ({}, {name: 6})
    with pytest.raises(RuntimeError, match="no rule for aten.sort"), OperationCounter(), indexing():
        x.sort()
    assert counted(lambda: i + 1) == ({}, {"add": 6})


def test_looking_up_moves_numbers():
    x, rows = torch.ones(5, 3), torch.tensor([1, 3])
    for call in (
        lambda: x.index_select(0, rows),
        lambda: x.index_copy(0, rows, torch.ones(2, 3)),
        lambda: x.gather(0, rows[:, None]),
    ):
        assert counted(call) == ({}, {})
    assert counted(lambda: x.index_add_(0, rows, torch.ones(2, 3))) == ({}, {"index_add": 6})


def test_products_with_a_factor():
    """A product's count includes what it is added to, and a sign is free; a factor costs one operation an entry."""
    out, a, b = torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    for alpha, elementwise in ((1, {}), (-1, {}), (0.5, {"baddbmm": 30})):
        assert counted(lambda: torch.baddbmm(out, a, b, alpha=alpha)) == ({"baddbmm": 240}, elementwise)  # noqa: B023
    assert counted(lambda: torch.addmm(out[0], a[0], b[0], alpha=3)) == ({"addmm": 120}, {"addmm": 15})
