"""Arms of the learning experiments: each runs, trains what it says, and costs what is counted."""

import copy

import pytest
import torch
from gradients import trained
from sample import some
from seeded import generator
from torch.nn.functional import cross_entropy

from ortho import cost
from ortho.layers.hybrid import HybridAttention
from paper.experiments.learning.arms import arms, training_flop

VOCABULARY, D, H, N, B = 11, 16, 4, 16, 2
ARMS = arms(H, N)
every_arm = pytest.mark.parametrize("name", ARMS)


def tokens(batch=B, length=N):
    return torch.randint(VOCABULARY, (batch, length), generator=generator())


def built(arm, d=D, layers=1, **kwargs):
    return arm.build(VOCABULARY, d, layers, generator=generator(1), **kwargs)


@every_arm
def test_a_step(name):
    """What is trained has a gradient and moves, the rest stays; the same seed makes the same model. Positions are
    embedded only if an arm says so."""
    model = built(ARMS[name])
    before = copy.deepcopy(model.state_dict())
    for key, value in built(ARMS[name]).state_dict().items():
        assert torch.equal(value, before[key])
    optimiser, batch = torch.optim.AdamW(model.parameters(), 1e-2), tokens()
    cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimiser.step()
    gradients = {name: p.grad for name, p in trained(model).items()}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) is (key not in gradients), key
    assert ("embed_positions" in gradients) is ("embeddings" in name)
    assert (model.embed_positions is None) is not ("embeddings" in name or name == "sinusoids")


@every_arm
def test_what_is_trained(name):
    """The query and key matrices of a kind are trained, or frozen, or do not exist."""
    arm = ARMS[name]
    without = ("positional", "identity", "static random", "random Synthesizer", "dense Synthesizer")
    attention = built(arm).blocks[0].attention
    made = list(attention.groups) if isinstance(attention, HybridAttention) else [attention]
    assert len(made) == len(arm.heads)
    for (kind, count), group in zip(arm.heads, made, strict=True):
        assert group.num_heads == count
        weights = [f"projection.weight_{one}" for one in "qk"]
        needs = trained(group)
        fixed = dict(group.named_parameters()).keys() - needs
        assert {"weight_v", "weight_o"} <= set(needs)
        if kind in without:
            assert not {*weights} & {*needs, *fixed}
            assert ("sources.0.matrix" in fixed) is (kind == "static random")
            assert ("sources.0.matrix" in needs) is (kind == "random Synthesizer")
            continue
        frozen = kind.startswith(("frozen", "stopped", "tied"))
        assert {*weights} <= set(fixed if frozen else needs)
        assert ("projection.log_scale" in needs) is kind.endswith("temperature")
        assert getattr(group.projection, "stop_gradient", False) is kind.startswith("stopped")


SIZES = [(1, 7, 24, 2, 100), (2, 16, 16, 1, 16)]  # B, N, d, L, d_ff


@every_arm
@pytest.mark.parametrize(("batch", "length", "d", "layers", "d_ff"), some(SIZES, 2))
def test_declared_flops_and_parameters_are_counted(name, batch, length, d, layers, d_ff):
    arm = ARMS[name]
    counts = cost.of(built(arm, d, layers, d_ff=d_ff), tokens(batch, length))
    flop = training_flop(arm, batch, length, d, layers, vocab_size=VOCABULARY, d_ff=d_ff)
    assert isinstance(flop, int) and flop == counts.forward + counts.backward
    places = arm.N if arm.embeddings == "learned" else None
    sizes = (batch, length, d, arm.num_heads, layers)
    whole = cost.model(*sizes, vocab_size=VOCABULARY, max_length=places, layer=arm.cost, d_ff=d_ff)
    assert (whole.forward, whole.trained) == (counts.forward, counts.trained)
    assert counts.trained == sum(p.numel() for p in trained(built(arm, d, layers, d_ff=d_ff)).values())
