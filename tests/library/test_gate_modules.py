"""Gates: their formulas, ranges, extremes and initial values; and how a layer makes and hands them on."""

import math

import pytest
import torch
from counted import assert_declared
from seeded import draw
from torch.nn.functional import logsigmoid, softplus

from ortho import MECHANISMS, PROJECTIONS, MultiheadAttention, cost, to_standard
from ortho.attention.position_bias.forgetting_transformer import ForgetGate
from ortho.attention.recurrent.channels import ChannelDecay
from ortho.attention.recurrent.delta import Decay
from ortho.attention.recurrent.ssd import Rate, StepSize
from ortho.gates import ReflectingWriteStrength, WriteStrength

GATES = [WriteStrength, ReflectingWriteStrength, Decay, ForgetGate, ChannelDecay, StepSize]
RANGES = {WriteStrength: (0, 1), ReflectingWriteStrength: (0, 2), StepSize: (0, torch.inf)}  # the others are at most 0


def make(kind, d=12, H=3, seed=0, dtype=torch.float64):
    return kind(d, H, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_formula(gate, x):
    """The gate's numbers (B, H, N), or (B, H, N, K), one head after the other."""
    if isinstance(gate, ChannelDecay):
        z = x @ gate.weight_down.mT @ gate.weight_up.mT
        heads = [z[..., 4 * j : 4 * j + 4] + gate.bias[j] for j in range(3)]
        return torch.stack([logsigmoid(z) / 16 for z in heads], 1)
    heads = [x @ gate.weight[j] for j in range(3)]
    if isinstance(gate, Decay):
        heads = [-gate.log_rate[j].exp() * (1 + (z + gate.bias[j]).exp()).log() for j, z in enumerate(heads)]
    elif isinstance(gate, StepSize):
        heads = [(1 + (z + gate.bias[j]).exp()).log() for j, z in enumerate(heads)]
    elif isinstance(gate, ForgetGate):
        heads = [logsigmoid(z + gate.bias[j]) for j, z in enumerate(heads)]
    else:
        heads = [gate.maximum / (1 + (-z).exp()) for z in heads]
    return torch.stack(heads, 1)


@pytest.mark.parametrize("kind", GATES)
def test_formula(kind):
    """Outputs, and the gradients of x and of every parameter, also of biases. Above 20, softplus leaves out e^-20, or
    2e-9; these numbers do not go there."""
    gate, x = make(kind), draw(2, 5, 12).requires_grad_()
    with torch.no_grad():
        for i, parameter in enumerate(gate.parameters()):
            parameter += draw(*parameter.shape, seed=i + 1) / 4
    wanted, upstream = [x, *gate.parameters()], draw(2, 3, 5, *([4] if kind is ChannelDecay else []), seed=9)
    results = [[y, *torch.autograd.grad(y, wanted, upstream)] for y in (gate(x), by_formula(gate, x))]
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_range_and_extremes(kind, dtype):
    """Within the range for tokens of any size, in each dtype, with finite gradients."""
    low, high = RANGES.get(kind, (-torch.inf, 0))
    for size in (0.0, 1.0, 1e3, 1e30):
        gate, x = make(kind, dtype=dtype), (size * draw(2, 50, 12)).to(dtype).requires_grad_()
        y = gate(x)
        assert y.shape == (2, 3, 50, 4)[: 4 if kind is ChannelDecay else 3] and y.dtype == dtype
        assert y.isfinite().all() and (low <= y).all() and (y <= high).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, *gate.parameters()]))
        if size == 1e3:  # both ends are met
            assert y.max() > (10 if high == torch.inf else high - 1e-2 * (high - low if high else 1))
            assert y.min() < (low + 1e-2 if high else -10)


def test_rates_are_the_same_for_every_token():
    """And their gradient is summed over all tokens."""
    gate = make(Rate)
    y = gate(draw(2, 5, 12))
    assert torch.equal(y, gate.log_rate.exp()[None, :, None].expand(2, 3, 5))
    upstream = draw(2, 3, 5, seed=1)
    (found,) = torch.autograd.grad(y, gate.log_rate, upstream)
    torch.testing.assert_close(found, upstream.sum((0, 2)) * gate.log_rate.exp())


def test_initial_values():
    """Decays' rates in [1, 16] and steps in [0.001, 0.1], uniform and log-uniform: their means over 20 000 heads are
    within 4.42 standard errors, which a right draw exceeds with probability 1e-5 each. Other biases are 0."""
    g = torch.Generator().manual_seed(3)
    decays, steps, rates = (
        [kind(40, 40, generator=g, dtype=torch.float64) for _ in range(500)] for kind in (Decay, StepSize, Rate)
    )
    drawn_rates = (torch.cat([gate.log_rate.exp() for gate in gates]) for gates in (decays, rates))
    drawn_steps = (torch.cat([softplus(gate.bias).log10() for gate in gates]) for gates in (decays, steps))
    for drawn, low, high in (*((x, 1, 16) for x in drawn_rates), *((x, -3, -1) for x in drawn_steps)):
        assert low - 1e-9 < drawn.min() and drawn.max() < high + 1e-9
        error = (high - low) / math.sqrt(12 * len(drawn))
        assert (drawn.mean() - (low + high) / 2).abs() < 4.42 * error
    for kind in (ForgetGate, ChannelDecay):
        assert not make(kind).bias.any()


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_replaced_gates_in_the_cost(form):
    """`test_cost.py` counts every mechanism with its own gates."""
    for attention, gates in (("kda", {"beta": ReflectingWriteStrength}), ("gated-delta", {"log_decay": ForgetGate})):
        kind, x = {"attention": attention, "gates": gates, "form": form}, torch.zeros(2, 7, 12, requires_grad=True)
        assert_declared(
            cost.layer(2, 7, 12, 3, causal=True, **kind), MultiheadAttention(12, 3, **kind), x, is_causal=True
        )


def layer(attention="kda", **kwargs):
    g = torch.Generator().manual_seed(0)
    return MultiheadAttention(12, 3, attention=attention, generator=g, dtype=torch.float64, **kwargs)


def by_hand(one, x, context, **kwargs):
    """The layer's output, with each gate made here and passed to the mechanism."""
    of_queries = MECHANISMS[one.attention].query_gates
    gates = {name: gate(x if name in of_queries else context) for name, gate in one.gates.items()}
    q, k = one.projection(x, context)
    v = (context @ one.weight_v.mT).unflatten(-1, (3, 4)).transpose(1, 2)
    o = MECHANISMS[one.attention].reference(q, k, v, **gates, **kwargs)
    return o.transpose(1, 2).flatten(2) @ one.weight_o.mT


@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("keys", [9, 5])
def test_gates_of_queries_are_made_of_their_tokens(form, keys):
    """The weight of far keys is made from the query alone, however many keys the context has."""
    one, x, context = layer("sparse-linear", form=form), draw(2, 5, 12), draw(2, keys, 12, seed=1)
    torch.testing.assert_close(one(x, context), by_hand(one, x, context), atol=1e-12, rtol=1e-12)
    other = draw(2, keys, 12, seed=2)
    assert torch.equal(
        one._operands(x, other)[3]["log_linear_weight"], one._operands(x, context)[3]["log_linear_weight"]
    )


@pytest.mark.parametrize("attention", ["favor++", "saderf", "aderf", "sderf", "routing"])
@pytest.mark.parametrize("form", ["reference", "fast"])
def test_attention_to_a_context_of_equal_length(attention, form):
    """The layer tells the function whether queries and keys are the same tokens; beside hidden keys this changes which
    tokens a fit and clusters take in."""
    one, x, context = layer(attention, form=form), draw(2, 5, 12), draw(2, 5, 12, seed=1)
    padding = torch.tensor([[False] * 5, [True, False, False, True, False]])
    q, k, v, _ = one._operands(x, context)
    given = {"attn_mask": ~padding[:, None, None]}
    for call, same in (((x, context), False), ((x,), True)):
        q, k, v, _ = one._operands(x, None if same else context)
        o = MECHANISMS[attention].form(form)(q, k, v, same_tokens=same, **given)
        expected = o.transpose(1, 2).flatten(2) @ one.weight_o.mT
        torch.testing.assert_close(one(*call, key_padding_mask=padding), expected, atol=1e-12, rtol=1e-12)
        other = MECHANISMS[attention].form(form)(q, k, v, same_tokens=not same, **given)
        assert not torch.allclose(o, other)
    with pytest.raises(ValueError, match="^same_tokens: expected False for 5 queries and 4 keys, got True"):
        MECHANISMS[attention].form(form)(q, k[..., :4, :], v[..., :4, :], same_tokens=True)


def test_other_gates_and_none():
    """A layer has the gates that it is given: made from the keys' tokens, trained under every projection, and kept by a
    conversion. A mechanism without gates has none. Gates are drawn last, so that they change no other weight's draw."""
    own, given = layer(), layer(gates={"beta": ReflectingWriteStrength})
    assert type(own.gates["beta"]) is WriteStrength and type(given.gates["beta"]) is ReflectingWriteStrength
    assert type(given.gates["log_decay"]) is ChannelDecay
    x, context = draw(2, 5, 12), draw(2, 7, 12, seed=1)
    assert not torch.equal(own(x), given(x))
    for projection in PROJECTIONS:
        one = layer("gated-delta", projection=projection, gates={"beta": ReflectingWriteStrength})
        trained = {n for n, _ in one.named_parameters() if n.startswith("gates.")}
        assert trained == {"gates.beta.weight"} | {f"gates.log_decay.{n}" for n in ("weight", "bias", "log_rate")}
        assert one.gates["beta"](context).max() > 1  # more than the mechanism's own strengths reach
        torch.testing.assert_close(one(x, context), by_hand(one, x, context), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(to_standard(one)(x, context), one(x, context), atol=1e-12, rtol=1e-12)
    plain = layer("softmax")
    assert not len(plain.gates)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, own.state_dict()[name])
