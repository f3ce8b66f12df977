"""Costs of mechanisms that choose their pairs: declared = counted, exactly, at sizes that leave pairs out; and what of
them choosing takes."""

from functools import partial
from itertools import product

import pytest
import torch
from extent import some
from selected_mechanisms import ALL, ENTRIES, FORMS, centroids, projections, qkv, ways

from ortho.attention.selected.lsh import lsh_mask
from ortho.attention.selected.moba import moba_mask
from ortho.attention.selected.nsa import nsa_masks
from ortho.attention.selected.routing import routing_mask
from ortho.attention.selected.top_k import top_k_mask
from ortho.cost.attention import CHOOSING, choosing
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

COUNTED = ["forward", "backward", "elementwise_forward", "elementwise_backward"]
NAMES = [name for name in ALL if name != "lsh, shared"]  # whose closed form is that of queries beside keys
GATES = {"gates": (3,), "log_far": ()}  # numbers a token


def operands(name, B, N, H, K, V, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, N, width, generator=g).to(dtype) for width in (K, K, V))
    gates = {gate: torch.rand(B, H, N, *GATES[gate], generator=g).to(dtype) for gate in ALL[name].gates}
    return (q, k, v), gates


@pytest.fixture(autouse=True, scope="module")
def drawn():
    """What is drawn once is not part of a call."""
    for width in (1, 2, 3, 4):
        projections(width), centroids(width)
    for name in ("lsh", "routing"):
        for width, dtype in product((1, 2, 3, 4), (torch.float32, torch.float64)):
            ALL[name].fast(*torch.ones(3, 1, 1, 1, width, dtype=dtype))


# Every fifth of the product has all dtypes, forms and mechanisms, each with a gradient of q and k and without.
VARIANTS = product(NAMES, FORMS, [False, True], [torch.bfloat16, torch.float32, torch.float64])


@pytest.mark.parametrize(("name", "form", "qk_grad", "dtype"), some(VARIANTS, 5))
def test_declared_equals_counted(name, form, qk_grad, dtype):
    """In several tiles, whole and not, and of one token; with values of another width, and of width 1."""
    m = ALL[name]
    sizes = [(1, 12, 2, 3, 3), (2, 130, 1, 2, 5), (1, 192, 1, 1, 1), (3, 1, 2, 4, 2), (1, 65, 3, 2, 3), (1, 7, 1, 3, 1)]
    for number, (size, causal) in enumerate(product(sizes, ways(m))):
        (q, k, v), gates = operands(name, *size, dtype=dtype, seed=number)
        wanted = [x.requires_grad_() for x in ([q, k, v] if qk_grad else [v]) + list(gates.values())]
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = m.form(form)(q, k, v, **gates, is_causal=causal)
        with OperationCounter() as back:
            torch.autograd.grad(o, wanted, torch.ones_like(o))
        counted = [getattr(c, kind).total() for kind in ("flops", "elementwise") for c in (ahead, back)]
        declared = m.cost(*size, form=form, causal=causal, qk_grad=qk_grad, itemsize=q.element_size())
        where = (size, causal)
        assert dict(zip(COUNTED, counted, strict=True)) == {c: getattr(declared, c) for c in COUNTED}, where
        if dtype != torch.bfloat16:
            assert kept() == declared.saved_bytes + declared.output_bytes, where
        assert all(type(part) is int for part in vars(declared).values())


@pytest.mark.parametrize("name", [name for name in NAMES if ALL[name].causal])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode(name, form, dtype):
    """One token more, behind a state: its FLOPs, and the bytes of the state with it."""
    m, (B, H, K, V) = ALL[name], (2, 3, 4, 2)
    for N in (1, 2, 7, 64, 65, 200):
        x, gates = operands(name, B, N, H, K, V, dtype)
        state = None
        if N > 1:
            before = [part[:, :, :-1] for part in x]
            some = {gate: value[:, :, :-1] for gate, value in gates.items()}
            _, state = m.form(form)(*before, **some, is_causal=True, return_state=True)
        last = [part[:, :, -1:] for part in x]
        call = {gate: value[:, :, -1:] for gate, value in gates.items()} | {"is_causal": True, "initial_state": state}
        declared = m.cost(B, N, H, K, V, form=form, causal=True, itemsize=x[0].element_size())
        assert count_forward(m.form(form), *last, **call)[0] == declared.decode, N
        _, state = m.form(form)(*last, **call, return_state=True)
        assert sum(part.nbytes for part in state) == declared.state_bytes, N


MASKS = {
    "top-k": partial(top_k_mask, is_causal=True),
    "lsh": partial(lsh_mask, is_causal=True),
    "routing": partial(routing_mask, is_causal=True),
    "moba": moba_mask,
    "nsa": nsa_masks,
}


@pytest.mark.parametrize("name", CHOOSING)
def test_choosing_and_attending(name):
    """Together they are the cost's products; choosing alone is what the mask takes to be made, as counted."""
    m = next(m for m in ENTRIES if m.name == name)
    for length, causal in ((1, True), (50, True), (300, True), *([(300, False)] if m.bidirectional else [])):
        spent = choosing(name, length, 6, 5, causal=causal)
        assert sum(spent) == m.cost(1, length, 1, 6, 5, causal=causal).forward
        assert spent.share == spent.choosing / sum(spent)
        if name in MASKS and causal:
            q, k, _ = (x[None, None].float() for x in qkv(length=length, width=6))
            MASKS[name](q, k)  # draws what it draws once
            assert count_forward(MASKS[name], q, k)[0] == spent.choosing


def test_shares_by_hand():
    """Of 4096 tokens with K = V = 64: all scores beside 64 keys' scores and values; nothing; 64 products beside 320."""
    assert choosing("top-k", 4096, 64, 64).share == 4096 / (4096 + 2 * 64)
    assert choosing("importance", 4096, 64, 64).choosing == 0
    assert choosing("routing", 4096, 64, 64, causal=False) == (4 * 4096 * 64 * 16, 4 * 16 * 64 * 64 * 64)
    assert choosing("moba", 4096, 64, 64, count=1).choosing == 0
