"""Gated linear attention and Kimi delta attention: loops of scalars, both forms and all gradients, states, masks."""

import math
from itertools import product

import pytest
import torch
from channel_memories import FUNCTIONS, NAMES, arguments
from extent import WHOLE
from memory_operands import FORMS, call, close, draw, with_gradients

from ortho.attention.recurrent.delta import delta_rule_reference
from ortho.attention.recurrent.gla import chunk_width
from ortho.cost.counting import Allocations


def by_loops(q, k, v, log_decay, beta=None, initial_state=None, *, is_causal, scale):
    """(o, S) for one sequence, a number at a time: the memory fades, errors are taken, values written, answers read."""
    (M, K), V = k.shape, v.shape[1]
    S = [[initial_state[i, j].item() for j in range(V)] for i in range(K)]
    rows, a = [], log_decay.exp().tolist()
    q, k, v = q.tolist(), k.tolist(), v.tolist()

    def length(x):
        return 1 if beta is None else math.sqrt(sum(y * y for y in x) + 1e-6)

    def read(x):
        return [scale / length(x) * sum(S[i][j] * x[i] for i in range(K)) for j in range(V)]

    for t in range(M):
        S = [[a[t][i] * S[i][j] for j in range(V)] for i in range(K)]
        key, new = [x / length(k[t]) for x in k[t]], v[t]
        if beta is not None:
            held = [sum(key[i] * S[i][j] for i in range(K)) for j in range(V)]
            new = [float(beta[t]) * (new[j] - held[j]) for j in range(V)]
        S = [[S[i][j] + key[i] * new[j] for j in range(V)] for i in range(K)]
        if is_causal:
            rows.append(read(q[t]))
    return [torch.tensor(x, dtype=torch.float64) for x in (rows if is_causal else [read(x) for x in q], S)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_formula(name, form, causal, scale):
    """The recurrences as published. Without a scale GLA divides by sqrt(K), which is 2 here, and KDA does not."""
    given = arguments(name, length=13 if causal else 4, keys=13)
    kwargs = {"chunk": 4} if form == "fast" else {}
    default = 0.5 if name == "gla" else 1
    expected = by_loops(**given, is_causal=causal, scale=default if scale is None else scale)
    close(call(FUNCTIONS[name][form], given, is_causal=causal, scale=scale, **kwargs), expected)


LENGTHS = [(1, 4), (2, 1), (5, 2), (7, 7), (12, 4), (13, 3), (33, 16), (63, 64), (65, 64), (5, 1000), (130, 50)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "chunk"), LENGTHS)
def test_fast_equals_reference(name, causal, length, chunk):
    """Memories and all gradients, for chunks of one token and more, whole or not; if not causal, of a few queries."""
    given = arguments(name, 2, 3, length=length if causal else 4, keys=length)
    expected = with_gradients(FUNCTIONS[name]["reference"], given, is_causal=causal)
    close(with_gradients(FUNCTIONS[name]["fast"], given, is_causal=causal, chunk=chunk), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_a_part(name, causal):
    """Whichever operands need a gradient: those are the same as where all do."""
    given = arguments(name, 2, length=11)
    everything = dict(
        zip(given, with_gradients(FUNCTIONS[name]["reference"], given, is_causal=causal)[2:], strict=True)
    )
    for part in [[x] for x in given] + [[x for x in given if x not in ("q", "k")]]:
        found = with_gradients(FUNCTIONS[name]["fast"], given, part, is_causal=causal, chunk=4)[2:]
        close(found, [everything[x] for x in given if x in part])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_finite_differences(name, form, causal):
    """Of all operands, within their ranges, once and twice."""
    given = arguments(name, length=4)
    given["log_decay"] = -draw(4, 4).square() / 2 - 0.1
    if name == "kda":
        given["beta"] = 0.2 + 0.8 * given["beta"]
    names, kwargs = list(given), {"chunk": 2} if form == "fast" else {}

    def function(*values):
        return call(FUNCTIONS[name][form], dict(zip(names, values, strict=True)), is_causal=causal, **kwargs)

    leaves = [x.requires_grad_() for x in given.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=not WHOLE)
    assert torch.autograd.gradgradcheck(function, leaves, atol=1e-4, fast_mode=not WHOLE)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_cut_equals_whole(first, second, name, causal):
    """At every cut, with whichever form before and behind it; and all gradients, through the state."""
    given = arguments(name, 2, length=9)

    def in_two(cut):
        def function(return_state, initial_state, **rest):
            state, outputs = initial_state, []
            for form, part in ((first, slice(cut)), (second, slice(cut, None))):
                some, chunk = {x: y[:, part] for x, y in rest.items()}, {"chunk": 2} if form == "fast" else {}
                function = FUNCTIONS[name][form]
                o, state = function(**some, is_causal=causal, initial_state=state, return_state=True, **chunk)
                outputs.append(o)
            return outputs[1], state

        return function

    for cut in range(1, 9):

        def whole(cut=cut, **kwargs):
            o, state = FUNCTIONS[name]["reference"](**kwargs, is_causal=causal)
            return o[:, cut:], state

        close(with_gradients(in_two(cut), given), with_gradients(whole, given))


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    given, state, rows = arguments(name, 2, length=9, state=False), None, []
    for t in range(9):
        token = {x: y[:, t : t + 1] for x, y in given.items()}
        row, state = FUNCTIONS[name]["fast"](**token, is_causal=True, initial_state=state, return_state=True)
        rows.append(row)
    close([torch.cat(rows, 1), *state], call(FUNCTIONS[name]["reference"], given, is_causal=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_the_future_leaves_the_prefix(name, form):
    """Bit for bit, at cuts inside and between chunks, whatever comes."""
    given = arguments(name, 2, length=150, state=False)
    other = arguments(name, 2, length=150, state=False, seed=1)
    before, _ = call(FUNCTIONS[name][form], given, is_causal=True)
    for cut, size in product((1, 31, 64, 65, 149), (0.0, 30.0)):
        mixed = {x: torch.cat([y[:, :cut], other[x][:, cut:]], 1) for x, y in given.items()}
        mixed["v"][:, cut:] *= size
        assert torch.equal(call(FUNCTIONS[name][form], mixed, is_causal=True)[0][:, :cut], before[:, :cut])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", ["right", "left", "scattered", "none", "all"])
def test_hidden_keys(name, form, kept):
    """As if cut out of the sequence, whatever they hold; a hidden token has no gradient but that of its query, and
    reads what there was before it."""
    given = arguments(name, 2, length=11, state=False)
    index = torch.arange(11)
    mask = {"right": index < 7, "left": index > 4, "scattered": index % 3 == 1, "none": index < 0, "all": index >= 0}
    mask, kwargs = mask[kept], {"chunk": 4} if form == "fast" else {}
    function = FUNCTIONS[name][form]
    wild = {x: y.clone() for x, y in given.items()}
    wild["k"][:, ~mask] *= 1e6
    wild["v"][:, ~mask] *= -1e6
    o, S, *gradients = with_gradients(function, wild, attn_mask=mask, is_causal=True, **kwargs)
    close(call(function, given, attn_mask=mask, is_causal=True, **kwargs), [o, S])
    expected, state = [torch.zeros(2, 0, 3, dtype=torch.float64)], torch.zeros(2, 4, 3, dtype=torch.float64)
    reference = FUNCTIONS[name]["reference"]
    for t in range(11):
        token = {x: y[:, t : t + 1] for x, y in given.items()}
        hidden = token | {"k": torch.zeros_like(token["k"]), "log_decay": torch.zeros_like(token["log_decay"])}
        row, (state,) = reference(**(token if mask[t] else hidden), initial_state=(state,), return_state=True)
        expected.append(row)
    close([o, S], [torch.cat(expected, 1), state])
    for x, gradient in zip(wild, gradients, strict=True):
        assert x == "q" or not gradient[:, ~mask].any()
    everywhere = call(function, wild, attn_mask=mask, is_causal=False, **kwargs)[1]
    close([everywhere], [S])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_special_cases(form, causal):
    """With one decay for all channels KDA is the gated delta rule, without decay the delta rule; GLA without decay is
    linear attention's sum of k v^T, and KDA without write strengths writes all of each value."""
    kwargs = {"is_causal": causal} | ({"chunk": 8} if form == "fast" else {})
    given = arguments("kda", 2, length=20)
    kda, gla = FUNCTIONS["kda"][form], FUNCTIONS["gla"][form]
    rate = -draw(2, 20).square() / 2
    close(
        call(kda, given | {"log_decay": rate[..., None].expand_as(given["k"])}, **kwargs),
        call(delta_rule_reference, given | {"log_decay": rate}, is_causal=causal),
    )
    del given["log_decay"]
    close(call(kda, given, **kwargs), call(delta_rule_reference, given, is_causal=causal))
    del given["beta"]
    close(call(kda, given, **kwargs), call(delta_rule_reference, given, is_causal=causal))
    q, k, v, S = (given[x] for x in ("q", "k", "v", "initial_state"))
    weights = q @ k.mT
    expected = (weights.tril() if causal else weights) @ v + q @ S
    close(call(gla, given, **kwargs), [expected / 2, S + k.mT @ v])


def test_chunk_width():
    """The largest power of two that is at most the chunk, and no larger than the sequence needs."""
    widths = {(1, 64): 1, (2, 64): 2, (3, 64): 4, (64, 64): 64, (65, 64): 64, (1000, 63): 32, (1000, 1): 1, (9, 4): 4}
    assert {sizes: chunk_width(*sizes) for sizes in widths} == widths


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_linear(name):
    """A step's peak, forward and backward, at twice the length, in whole chunks."""
    peaks = []
    for length in (512, 1024):
        leaves = {x: y.requires_grad_() for x, y in arguments(name, 2, length=length, state=False).items()}
        with Allocations() as memory:
            o = FUNCTIONS[name]["fast"](**leaves, is_causal=True)
            torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
        peaks.append(memory.peak)
    assert 1.9 * peaks[0] < peaks[1] < 2.1 * peaks[0]
