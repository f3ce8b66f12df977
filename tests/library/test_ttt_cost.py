"""What test-time training costs: declared = counted, exactly, for values of another width and any mini-batches too."""

from dataclasses import fields
from itertools import product

import pytest
import sympy
import torch
from extent import some

from ortho.attention.recurrent.ttt import ttt_attention, ttt_attention_reference, ttt_cost
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, HuberNorm, Squared
from ortho.cost.counting import OperationCounter, count_forward, saved_bytes

LOSSES = [Squared(), Huber(), HuberNorm(), Contrastive()]
FORMS = {"reference": ttt_attention_reference, "fast": ttt_attention}

# (B, H, N, K, V, batch): single tokens, less than a mini-batch, whole ones, a rest, widths of 1.
SIZES = [(1, 1, 1, 1, 1, 4), (2, 3, 1, 3, 2, 4), (2, 1, 3, 4, 2, 4), (1, 2, 4, 3, 5, 4), (2, 2, 5, 3, 2, 4)]
SIZES += [(1, 2, 8, 3, 1, 4), (2, 2, 11, 1, 3, 4), (1, 2, 33, 4, 4, 16), (1, 1, 6, 2, 3, 1)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("causal", "qk_grad"), list(product([False, True], [True, False])))
def test_cost(loss, form, causal, qk_grad):
    function = FORMS[form]
    for (B, H, N, width, values, batch), dtype in product(SIZES, some((torch.float32, torch.float64), 2)):
        q, k = (torch.zeros(B, H, N, width, dtype=dtype, requires_grad=qk_grad) for _ in "qk")
        v, eta = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((B, H, N, values), (B, H, N)))
        with OperationCounter() as ahead, saved_bytes() as kept:
            o = function(q, k, v, loss=loss, eta=eta, batch=batch, is_causal=causal)
        with OperationCounter() as back:
            torch.autograd.grad(o, [q, k, v, eta] if qk_grad else [v, eta], torch.ones_like(o))
        c = ttt_cost(
            B,
            N,
            H,
            width,
            values,
            loss=loss,
            batch=batch,
            form=form,
            causal=causal,
            qk_grad=qk_grad,
            itemsize=q.element_size(),
        )
        assert (ahead.flops.total(), back.flops.total()) == (c.forward, c.backward)
        assert (ahead.elementwise.total(), back.elementwise.total()) == (c.elementwise_forward, c.elementwise_backward)
        assert kept() == c.saved_bytes


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_decoding(loss, form):
    """Products and state at every place in a mini-batch, and where it begins anew."""
    function, width, values, state = FORMS[form], 5, 4, None
    for N in range(1, 11):
        q, k, v = (torch.zeros(2, 3, 1, size) for size in (width, width, values))
        kwargs = {"loss": loss, "batch": 4, "eta": torch.zeros(2, 3, 1), "is_causal": True, "initial_state": state}
        flops, _ = count_forward(function, q, k, v, **kwargs)
        _, state = function(q, k, v, return_state=True, **kwargs)
        c = ttt_cost(2, N, 3, width, values, loss=loss, batch=4, form=form, causal=True)
        assert (flops, sum(x.numel() * x.element_size() for x in state)) == (c.decode, c.state_bytes)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("form", "causal"), list(product(FORMS, [False, True])))
def test_formulas(loss, form, causal):
    """With whole mini-batches put in for N, the closed form in symbols is the one in numbers."""
    B, N, H, K, V = sympy.symbols("B N H K V", positive=True, integer=True)
    kwargs = {"loss": loss, "batch": 4, "form": form, "causal": causal}
    formula, numbers = ttt_cost(B, N, H, K, V, **kwargs), ttt_cost(2, 12, 3, 5, 7, **kwargs)
    for field in fields(numbers):
        shown = sympy.sympify(getattr(formula, field.name))
        assert shown.subs({B: 2, N: 12, H: 3, K: 5, V: 7}) == getattr(numbers, field.name), field.name
