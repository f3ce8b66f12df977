"""The KV shift: its formula by loops, and a sequence in two calls."""

import torch
from seeded import draw, generator
from torch.testing import assert_close

from ortho import MultiheadAttention
from ortho.attention import MECHANISMS
from paper.experiments.learning.shifted import ShiftedKeysValues

B, N, WIDTH, H = 2, 7, 12, 3


def layer(form="fast"):
    shift = ShiftedKeysValues(H, form=form, generator=generator(1), dtype=torch.float64)
    return MultiheadAttention(WIDTH, H, attention=shift, generator=generator(2), dtype=torch.float64)


def test_the_shift_as_the_formula_reads():
    """Head by head and token by token; and the weights of a head add up to 1 at first."""
    one, x = layer(), draw(B, N, WIDTH)
    shift = one.attention
    assert_close(shift.keys.sum(1), torch.ones(H, dtype=torch.float64))
    assert shift.keys.min() >= 0 and shift.keys[:, 0].unique().numel() == H
    with torch.no_grad():
        shift.values.normal_(generator=generator(5))
    q, k = one.projection(x)
    v = (x @ one.weight_v.mT).unflatten(-1, (H, -1)).transpose(1, 2)
    mixed = [torch.zeros_like(y) for y in (k, v)]
    for to, y, weights in zip(mixed, (k, v), (shift.keys, shift.values), strict=True):
        for h in range(H):
            for t in range(N):
                to[:, h, t] = weights[h, 0] * y[:, h, t] + (weights[h, 1] * y[:, h, t - 1] if t else 0)
    o = MECHANISMS["rotary"].reference(q, *mixed, is_causal=True)
    # Sums of a few products of size 1, in another order.
    assert_close(one(x, is_causal=True), o.transpose(1, 2).flatten(2) @ one.weight_o.mT, rtol=1e-12, atol=1e-12)


def test_a_sequence_in_two_calls_is_the_whole():
    x = draw(B, N, WIDTH)
    for form in ("reference", "fast"):
        one = layer(form)
        first, state = one(x[:, :4], is_causal=True, return_state=True)
        rest = one(x[:, 4:], is_causal=True, initial_state=state)
        assert_close(torch.cat([first, rest], 1), one(x, is_causal=True), rtol=1e-12, atol=1e-12)
