"""The delta rule: the papers' loops, both forms and all gradients across chunks and tiles, states, masks."""

from itertools import product

import pytest
import torch
from extent import WHOLE
from memory_operands import FORMS, FUNCTIONS, arguments, call, close, with_gradients

from ortho.attention import MECHANISMS, chunking
from ortho.attention.chunking import CHUNK, TILE
from ortho.attention.operands import unit
from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference


def by_loops(q, k, v, beta, log_decay=None, initial_state=None, *, is_causal):
    """(o, S) for one sequence, as Yang et al. write it: a memory (V, K), a product of matrices a token."""
    S, rows = initial_state.mT, []
    for t in range(len(k)):
        erase = torch.eye(k.shape[1], dtype=k.dtype) - beta[t] * torch.outer(k[t], k[t])
        fade = 1 if log_decay is None else torch.exp(log_decay[t])
        S = fade * S @ erase + beta[t] * torch.outer(v[t], k[t])
        if is_causal:
            rows.append(S @ q[t])
    return torch.stack(rows if is_causal else [S @ row for row in q]), S.mT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, -2.0])
def test_formula(form, gated, causal, scale):
    """DeltaNet's and Gated DeltaNet's recurrence and its gradients, with keys made short and as they are."""
    given = arguments(length=7, keys=7 if causal else 9, gated=gated)
    kwargs = {"is_causal": causal, "scale": scale} | ({"chunk": 3} if form == "fast" else {})

    def expected(length):
        def function(q, k, return_state, initial_state, **rest):
            q, k = (x / length(x) for x in (q, k))
            o, S = by_loops(q * (scale or 1), k, **rest, initial_state=initial_state[0], is_causal=causal)
            return o, (S,)

        return with_gradients(function, given)

    close(
        with_gradients(FUNCTIONS[form], given, **kwargs), expected(lambda x: (x.square().sum(-1, True) + 1e-6).sqrt())
    )
    given["k"] = given["k"] / given["k"].norm(dim=-1, keepdim=True) * torch.linspace(0, 1, len(given["k"]))[:, None]
    close(with_gradients(FUNCTIONS[form], given, **kwargs, normalise=False), expected(lambda x: 1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "chunk"),
    [(1, 4), (2, 1), (7, 7), (12, 4), (13, 2), (13, 7), (33, 16), (63, 64), (65, 64), (5, 1000), (130, CHUNK)],
)
def test_fast_equals_reference(gated, causal, length, chunk, monkeypatch):
    """Six sequences, all in one tile, several a tile, one, or a part of one; where not causal, of a few queries."""
    given = arguments(2, 3, length=length if causal else 4, keys=length, gated=gated)
    expected = with_gradients(delta_rule_reference, given, is_causal=causal)
    for tile in (TILE, 7, 5, 2):
        monkeypatch.setattr(chunking, "TILE", tile)
        close(with_gradients(delta_rule, given, is_causal=causal, chunk=chunk), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_a_part(gated, causal):
    """Whichever operands need a gradient: those are the same as where all do."""
    given = arguments(2, length=11, gated=gated)
    everything = dict(zip(given, with_gradients(delta_rule_reference, given, is_causal=causal)[2:], strict=True))
    parts = [[name] for name in given] + [[x for x in given if x not in part] for part in (["q", "k"], ["v"], ["beta"])]
    for part in parts:
        found = with_gradients(delta_rule, given, part, is_causal=causal, chunk=4)[2:]
        close(found, [everything[name] for name in part])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_finite_differences(form, gated, causal):
    """Of all operands, within [0, 2] and below 0; twice through the reference, the fast form refuses."""
    given = arguments(length=4, gated=gated)
    given["beta"] = 0.2 + 0.8 * given["beta"]
    if gated:
        given["log_decay"] = given["log_decay"] - 0.1
    names, kwargs = list(given), {"chunk": 3} if form == "fast" else {}
    leaves = [given[name].requires_grad_() for name in names]

    def function(*values):
        return call(FUNCTIONS[form], dict(zip(names, values, strict=True)), is_causal=causal, **kwargs)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=not WHOLE)
    if form == "reference":
        assert torch.autograd.gradgradcheck(function, leaves, atol=1e-4, fast_mode=not WHOLE)
        return
    for leaf in leaves[0 if causal else 1 :]:  # where not causal, a product of q and the memory is all that q meets
        with pytest.raises(RuntimeError, match=r"^create_graph: expected False: .* its reference form can"):
            torch.autograd.grad(function(*leaves)[0].square().sum(), leaf, create_graph=True)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_cut_equals_whole(first, second, gated, causal):
    """At every cut, with whichever form before and behind it; and all gradients, through the state."""
    given = arguments(2, length=9, gated=gated)

    def in_two(cut):
        def function(return_state, initial_state, **rest):
            state, outputs = initial_state, []
            for form, part in ((first, slice(cut)), (second, slice(cut, None))):
                some = {name: x[:, part] for name, x in rest.items()}
                chunk = {"chunk": 2} if form == "fast" else {}
                o, state = FUNCTIONS[form](**some, is_causal=causal, initial_state=state, return_state=True, **chunk)
                outputs.append(o)
            return outputs[1], state

        return function

    for cut in range(1, 9):

        def whole(cut=cut, **kwargs):
            o, state = delta_rule_reference(**kwargs, is_causal=causal)
            return o[:, cut:], state

        close(with_gradients(in_two(cut), given), with_gradients(whole, given))


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_token_by_token(name):
    given = arguments(2, length=9, gated=name == "gated-delta", state=False)
    state, rows = None, []
    for t in range(9):
        token = {name: x[:, t : t + 1] for name, x in given.items()}
        row, state = MECHANISMS[name].fast(**token, is_causal=True, initial_state=state, return_state=True)
        rows.append(row)
    o, S = call(MECHANISMS[name].reference, given, is_causal=True)
    close([torch.cat(rows, 1), *state], [o, S])


@pytest.mark.parametrize(("form", "tile"), [("reference", TILE), ("fast", TILE), ("fast", 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_future_leaves_the_prefix(form, tile, gated, monkeypatch):
    """Bit for bit, at cuts inside and between chunks, whatever comes."""
    monkeypatch.setattr(chunking, "TILE", tile)
    given = arguments(2, length=150, gated=gated, state=False)  # three chunks of 50
    other = arguments(2, length=150, gated=gated, state=False, seed=1)
    before, _ = call(FUNCTIONS[form], given, is_causal=True)
    for cut, size in product((1, 49, 50, 51, 149), (0.0, 30.0)):
        mixed = {name: torch.cat([x[:, :cut], other[name][:, cut:]], 1) for name, x in given.items()}
        mixed["v"][:, cut:] *= size
        assert torch.equal(call(FUNCTIONS[form], mixed, is_causal=True)[0][:, :cut], before[:, :cut])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kept", ["right", "left", "middle", "scattered", "none", "all"])
def test_hidden_keys(form, gated, kept):
    """As if cut out of the sequence: rows of other tokens, the memory, and all gradients; a hidden token has none, and
    reads what there was before it."""
    given = arguments(2, length=11, gated=gated, state=False)
    index = torch.arange(11)
    outside = (index < 4) | (index > 7)
    masks = {"right": index < 7, "left": index > 4, "middle": outside, "scattered": index % 3 == 1}
    mask = {**masks, "none": index < 0, "all": index >= 0}[kept]
    mask = torch.stack([mask, mask.roll(1)])
    kwargs = {"chunk": 4} if form == "fast" else {}

    def masked(**leaves):
        return FUNCTIONS[form](**leaves, attn_mask=mask[:, None], is_causal=True, **kwargs)

    found = with_gradients(masked, given)

    def cut_out(return_state, **leaves):
        """Token by token, past those that are hidden."""
        outputs, states = [], []
        for b in range(2):
            S = torch.zeros(4, 3, dtype=torch.float64)
            for t in range(11):
                if mask[b, t]:
                    token = {name: x[b, t : t + 1] for name, x in leaves.items()}
                    _, (S,) = delta_rule_reference(**token, initial_state=(S,), return_state=True)
                outputs.append(unit(leaves["q"][b, t : t + 1]) @ S)
            states.append(S)
        # Where all is hidden nothing else leads to the operands.
        nothing = 0 * sum(x.sum() for x in leaves.values())
        return torch.cat(outputs).view(2, 11, 3) + nothing, (torch.stack(states),)

    close(found, with_gradients(cut_out, given))
    empty = mask.cumsum(-1) == 0
    assert not found[0][empty].any()
    for gradient in found[3:]:  # all but that of q
        assert not gradient[~mask].any()
    # Whatever it holds, and wherever queries are read; keys of any length too.
    wild = {name: x.clone() for name, x in given.items()}
    wild["k"][~mask] *= 1e6
    wild["v"][~mask] *= -1e6
    close(call(masked, wild), found[:2])
    kwargs |= {"attn_mask": mask[:, None], "normalise": False}
    wild["k"] = torch.where(mask[..., None], unit(given["k"]), wild["k"])
    for causal in (False, True):
        wild["q"] = unit(given["q"])
        o, S = call(FUNCTIONS[form], wild, is_causal=causal, **kwargs)
        close([o, S], [found[0] if causal else wild["q"] @ S, found[1]])
