"""Several keys a token: DeltaProduct's steps of the delta rule, low-rank sums; their gates, costs, and errors.

`test_properties.py` and `test_cost.py` test it, with two steps, for everything that holds for every mechanism.
"""

from functools import partial

import pytest
import torch
from counted import assert_declared
from refusals import refuses

from ortho import MECHANISMS, MultiheadAttention, cost
from ortho.attention.recurrent.delta import delta_rule_reference
from ortho.attention.recurrent.delta_product import LaterOperands, StepStrengths, delta_product, delta_product_reference
from ortho.attention.recurrent.low_rank import low_rank, low_rank_reference

# As in tests/library/test_properties.py: two float64 computations of the same sums.
close = partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
FORMS = pytest.mark.parametrize("attend", [delta_product_reference, delta_product, partial(delta_product, chunk=7)])
B, H, N, K, V = 2, 3, 37, 6, 5


class ThreeStrengths(StepStrengths):
    steps = 3


class TwoLater(LaterOperands):
    steps = 3


THREE = {"beta": ThreeStrengths, "more_keys": TwoLater, "more_values": TwoLater}


def operands(steps, *, length=N, seed=0, requires_grad=False):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(B, H, length, *shape, generator=g, dtype=torch.float64)

    given = {"q": normal(K), "k": normal(K), "v": normal(V), "beta": 2 * normal(steps).sigmoid()}
    if steps > 1:
        given |= {"more_keys": normal(steps - 1, K), "more_values": normal(steps - 1, V)}
    return {name: x.requires_grad_(requires_grad) for name, x in given.items()}


def spread(x):
    """The same operands for the delta rule: one row for each step, with each token's query at all of its steps."""
    steps = x["beta"].shape[-1]
    long = {"q": x["q"].repeat_interleave(steps, -2), "beta": x["beta"].flatten(-2)}
    for first, later in (("k", "more_keys"), ("v", "more_values")):
        parts = [x[first][..., None, :], *([x[later]] if steps > 1 else [])]
        long[first] = torch.cat(parts, -2).flatten(-3, -2)
    return long


@FORMS
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_delta_rule_on_a_longer_sequence(attend, steps, causal):
    """Outputs, read after each token's last step, and all gradients; from an empty memory and from a full one."""
    x = operands(steps, requires_grad=True)
    S = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for state in (None, (S,)):
        rest = {"is_causal": causal, "initial_state": state, "return_state": True, "scale": 0.7}
        o, (after,) = attend(**x, **rest)
        expected, (expected_after,) = delta_rule_reference(**spread(x), **rest)
        close(o, expected[..., steps - 1 :: steps, :])
        close(after, expected_after)
        pairs = ((o, after), (expected[..., steps - 1 :: steps, :], expected_after))
        totals = (out.sin().sum() + last.cos().sum() for out, last in pairs)
        close(*(torch.autograd.grad(y, list(x.values())) for y in totals))


@FORMS
def test_without_gates_it_is_the_delta_rule(attend):
    x = operands(1)
    q, k, v = x["q"], x["k"], x["v"]
    close(attend(q, k, v, is_causal=True), delta_rule_reference(q, k, v, is_causal=True))
    all_ones = torch.ones(B, H, N, 1, dtype=torch.float64)
    close(attend(q, k, v, beta=all_ones, is_causal=True), attend(q, k, v, is_causal=True))


@pytest.mark.parametrize("attend", [low_rank_reference, low_rank, partial(low_rank, chunk=7)])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_low_rank_sums(attend, steps, causal):
    """Each token adds U V^T of its own keys and values to S; with all gradients, and with masked tokens."""
    x = operands(steps, requires_grad=True)
    del x["beta"]
    start = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    U, W = (x[first][..., None, :] for first in "kv")
    if steps > 1:
        U, W = torch.cat([U, x["more_keys"]], -2), torch.cat([W, x["more_values"]], -2)
    for kept in (None, torch.arange(N) % 4 != 1):
        held = torch.ones(N) if kept is None else kept
        S = (start[:, :, None] if kept is None else 0) + (held[:, None, None] * (U.mT @ W)).cumsum(
            -3
        )  # (B, H, N, K, V)
        expected = (0.7 * x["q"][..., None, :] @ (S if causal else S[..., -1:, :, :]))[..., 0, :]
        state = {"initial_state": (start,)} if kept is None else {"attn_mask": kept}
        o, (after,) = attend(**x, **state, is_causal=causal, scale=0.7, return_state=True)
        close(after, S[..., -1, :, :])
        close(o, expected)
        found, wanted = (torch.autograd.grad(y.sin().sum(), list(x.values()), retain_graph=True) for y in (o, expected))
        close(found, wanted)


@pytest.mark.parametrize("name", ["delta-product", "low-rank"])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("causal", [True, False])
def test_three_steps_cost_what_is_declared(name, form, causal):
    for size in [(1, 5, 8, 2), (1, 1, 4, 4), (2, 33, 64, 4)]:
        b, n, d, h = size
        x = torch.zeros(b, n, d, requires_grad=True)
        gates = {gate: make for gate, make in THREE.items() if gate in MECHANISMS[name].gates}
        layer = MultiheadAttention(d, h, attention=name, form=form, gates=gates)
        declared = cost.layer(*size, attention=name, form=form, causal=causal, gates=gates, steps=3)
        assert_declared(declared, layer, x, is_causal=causal)


def test_gates():
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    later, strengths = (gate(12, 3, dtype=torch.float64) for gate in (TwoLater, ThreeStrengths))
    more = later(x)
    assert more.shape == (2, 3, 4, 2, 4)
    made = (x @ later.weight.T).view(2, 4, 3, 2, 4)  # B, N, H, more, K
    close(more, made.transpose(1, 2))
    beta = strengths(x)
    assert beta.shape == (2, 3, 4, 3)
    close(beta, 2 * (x @ strengths.weight.T).view(2, 4, 3, 3).transpose(1, 2).sigmoid())


@pytest.mark.parametrize("attend", [delta_product_reference, delta_product, low_rank_reference, low_rank])
@pytest.mark.bad_input
def test_errors(attend):
    x = operands(3)
    beta = x.pop("beta")

    def raised(error, message, **changes):
        refuses(message, attend, is_causal=True, error=error, **x | changes)

    raised(ValueError, "more_values: expected beside more_keys, got None", more_values=None)
    raised(ValueError, "more_keys: expected beside more_values, got None", more_keys=None)
    wide = r"more_keys: expected shape \(2, 3, 37, 2, 6\) like the keys, got \(2, 3, 37, 2, 5\)"
    raised(ValueError, wide, more_keys=x["more_values"])
    raised(ValueError, r"more_keys: expected shape \(..., M, more, width\)", more_keys=x["more_keys"][..., :0, :])
    raised(ValueError, "more_values: expected 2 a token like more_keys", more_values=x["more_values"][..., :1, :])
    if "low_rank" in attend.__name__:
        return
    x["beta"] = beta
    raised(ValueError, r"beta: expected shape \(2, 3, 37, 3\) like the keys, got \(2, 3, 37\)", beta=x["beta"][..., 0])
    raised(ValueError, "beta: expected write strengths within 0 and 2", beta=2 * x["beta"])
    raised(ValueError, r"k: expected beta \|k\|\^2 within 0 and 2", qk_l2norm=False)
    raised(TypeError, "more_keys: expected a floating-point tensor", more_keys=[1.0])
    raised(ValueError, "more_keys: expected finite numbers", more_keys=x["more_keys"] * torch.nan)
    raised(ValueError, "initial_state: expected S", initial_state=(torch.zeros(2, 3, 6, 6).double(),))
    pairs = torch.ones(N, N, dtype=torch.bool)  # the error names the sizes that were given
    raised(ValueError, r"of shape \(..., 1, 37\), got \(37, 37\)$", attn_mask=pairs)
    refuses("chunk: expected an integer of at least 1, got 0", delta_product, chunk=0, **x)
