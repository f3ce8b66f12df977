"""The products found on autograd's graph are those that the closed forms declare and the counter counts."""

import pytest
import torch

from ortho import MultiheadAttention
from ortho.cost import layer
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import count_step
from paper.claims.evidence.frozen_layer import PRODUCTS, backward_products, r, saved_share, speed_up


@pytest.mark.parametrize("projection", ["learned", "frozen", "stopped"])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_products_add_up(projection, form, input_grad):
    found = backward_products(projection, form=form, input_grad=input_grad)
    total = sum(PRODUCTS[name][1] for name, state in found.items() if state != "absent")
    declared = layer(1, N, d, H, projection=projection, form=form, input_grad=input_grad)
    assert total.expand() == declared.backward.expand()
    x = torch.zeros(1, 5, 8, requires_grad=input_grad)
    counts = count_step(MultiheadAttention(8, 2, projection=projection, form=form), x)
    assert counts.backward == total.subs({N: 5, d: 8})
    discarded = {name for name, state in found.items() if state == "discarded"}
    idle = form == "fast" and (projection == "stopped" or (projection == "frozen" and not input_grad))
    assert discarded == ({"dP", "dQ", "dK"} if idle else set())


def test_shares_by_hand():
    """Section 2's bounds at N = d, by hand: steps of 36, 32 and 22 units of N d^2, or 38, 34 and 30 with the kernel."""
    assert [speed_up(p).subs(r, 1) * s for p, s in (("frozen", 32), ("stopped", 22))] == [36, 36]
    assert [speed_up(p, form="fast").subs(r, 1) * s for p, s in (("frozen", 34), ("stopped", 30))] == [38, 38]
    assert [saved_share(p).subs(r, 1) * 24 for p in ("frozen", "stopped")] == [4, 14]
