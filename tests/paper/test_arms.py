"""Arms of the learning experiments: each runs, is causal, trains what it says, and costs what is counted."""

import copy
import json
import pickle
from itertools import product

import pytest
import torch
from extent import some
from gradients import trained
from torch.nn.functional import cross_entropy

from ortho import MultiheadAttention, cost
from ortho.attention.sparse.window import Window
from ortho.layers.hybrid import HybridAttention
from paper.experiments.learning.arms import (
    BESIDE,
    EMBEDDED,
    FROZEN,
    MOST_LEARNED,
    OTHERS,
    Arm,
    arms,
    baseline,
    matched_steps,
    matched_width,
    mixed,
    training_flop,
)
from paper.experiments.learning.heads import StoppedRotaryAttention
from paper.experiments.learning.kinds import kinds

VOCABULARY, D, H, N, B = 11, 16, 4, 16, 2
ARMS = arms(H, N)
every_arm = pytest.mark.parametrize("name", ARMS)


def tokens(batch=B, length=N, seed=0):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def built(arm, d=D, layers=1, seed=1, **kwargs):
    return arm.build(VOCABULARY, d, layers, generator=torch.Generator().manual_seed(seed), **kwargs)


def trained_parameters(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def groups(model):
    """The attention layers of the first block, one for each group of heads."""
    attention = model.blocks[0].attention
    return list(attention.groups) if isinstance(attention, HybridAttention) else [attention]


def step(model, batch):
    """Take a step of AdamW on the next token; return the gradients."""
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    loss = cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    assert loss.isfinite()
    optimiser.step()
    return {name: p.grad for name, p in trained(model).items()}


def test_the_arms():
    """Each arm that is asked for is there once; if several groups name one, it is the same arm."""
    count = len(mixed(H, N))
    assert count == len(BESIDE) * (MOST_LEARNED + 1) + 2  # one or two learned heads alone can fill d, three cannot
    assert [len(mixed(heads, N)) for heads in (1, 2, 8)] == [len(BESIDE), 2 * len(BESIDE) + 1, count]
    again = {"frozen", "stopped", "linear", "window"}  # kinds beside no learned head
    assert len(ARMS) == 4 + len(EMBEDDED) + len(FROZEN) + count + len(OTHERS) - len(again)
    assert {"3 learned + 1 positional", "2 learned, wider", *again} <= set(ARMS)
    assert {kind for arm in ARMS.values() for kind, _ in arm.heads} == set(kinds(N))
    for name, arm in ARMS.items():
        assert arm.name == name and arm.num_heads == (int(name[0]) if "wider" in name else H)
        assert pickle.loads(pickle.dumps(arm)) == arm


def test_descriptions():
    """Flat JSON that tells arms apart."""
    described = [arm.describe() for arm in ARMS.values()]
    assert json.loads(json.dumps(described)) == described
    assert all(isinstance(value, str | int | float) for one in described for value in one.values())
    assert len({json.dumps({**one, "arm": ""}) for one in described}) == len(described)
    assert ARMS["1 learned + 3 window"].describe() == {
        "arm": "1 learned + 3 window", "N": N, "H": H, "heads": "1 learned + 3 window", "embeddings": "none",
        "window": 4,
    }  # fmt: skip
    assert ARMS["embeddings"].describe()["embeddings"] == "learned"
    assert ARMS["sinusoids"].describe()["embeddings"] == "sinusoidal"
    assert ARMS["frozen low-rank"].describe()["rank"] == 2
    assert ARMS["stopped 1/4 x"].describe()["factor"] == 0.25
    assert arms(4, 128)["window"].describe()["window"] == 16


@every_arm
def test_a_step(name):
    """What is trained has a gradient and moves, the rest stays; the same seed makes the same model. Positions are
    embedded only if an arm says so."""
    model = built(ARMS[name])
    before = copy.deepcopy(model.state_dict())
    for key, value in built(ARMS[name]).state_dict().items():
        assert torch.equal(value, before[key])
    gradients = step(model, tokens())
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) is (key not in gradients), key
    assert ("embed_positions" in gradients) is ("embeddings" in name)
    assert (model.embed_positions is None) is not ("embeddings" in name or name == "sinusoids")


@every_arm
def test_causal(name):
    """Later tokens do not change a prefix, up to the rounding of sums of 1e2 terms of size 1 to 10 in float64."""
    model, past = built(ARMS[name], dtype=torch.float64), tokens()
    other = past.clone()
    other[:, 9:] = (other[:, 9:] + 1) % VOCABULARY
    y, z = model(past), model(other)
    torch.testing.assert_close(y[:, :9], z[:, :9], atol=1e-12, rtol=1e-12)
    assert not torch.allclose(y[:, 9:], z[:, 9:])


@every_arm
def test_what_is_trained(name):
    """The query and key matrices of a kind are trained, or frozen, or do not exist."""
    arm = ARMS[name]
    without = ("positional", "identity", "static random", "random Synthesizer", "dense Synthesizer")
    made = groups(built(arm))
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


@pytest.mark.parametrize("kind", kinds(N))
def test_kinds(kind):
    """Each kind has the attention that it names, and its frozen matrices are drawn as it says."""
    module = kinds(N)[kind].make(D, H, generator=torch.Generator().manual_seed(1))
    if kind in ("positional", "identity"):
        names = [pattern.name for pattern in module.patterns]
        assert names == (["current"] * H if kind == "identity" else ["previous", "previous", "recent", "left"])
        return
    if not isinstance(module, MultiheadAttention):
        sources = {"static random": "fixed-random", "random Synthesizer": "random", "dense Synthesizer": "dense"}
        assert [source.name for source in module.sources] == [sources[kind]]
        return
    last = kind.split()[-1]
    exchanged = kind.startswith("stopped") and last != "temperature"  # a temperature needs the gradient of scores
    assert isinstance(module, StoppedRotaryAttention) is exchanged
    if last == "window":
        assert module.attention.pattern == Window(4)
    elif last == "FAVOR+":
        assert (module.attention.map, module.attention.draw) == ("positive", "orthogonal")
    else:
        assert module.attention == (last if last in ("softmax", "alibi", "linear", "delta") else "rotary")
    products = [w @ w.T for w in (module.projection.weight_q, module.projection.weight_k)]
    # 16 rows of 16 numbers, in float32. The squared lengths of a Gaussian matrix's rows vary by a third.
    orthogonal = kind.startswith(("frozen", "stopped", "tied")) and last not in ("Gaussian", "low-rank", "x")
    assert all(torch.allclose(p, torch.eye(D), atol=1e-5) for p in products) is orthogonal
    factors = {"4 x": 4.0, "1/4 x": 0.25}
    size = next((factor for name, factor in factors.items() if kind.endswith(f" {name}")), 1.0)
    for weights in products:
        # A sum of d^2 = 256 squares of mean 1/d has a relative standard error of at most sqrt(2 / 256). The tolerance
        # is 4.42 standard errors, which is a two-sided error rate of 1e-5.
        assert abs(weights.trace() / (D * size**2) - 1) < 0.4


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
    assert counts.trained == trained_parameters(built(arm, d, layers, d_ff=d_ff))


def test_flops_by_hand():
    """2 FLOPs a multiply-add, three times over for forward and both gradients; for a score the kernel computes 2
    products forward and 5 backward. A frozen layer computes no gradient of its matrices; a tied one has one product
    fewer, forward and backward."""
    sizes = (3, N, D, 2)
    learned, frozen, tied = (
        training_flop(ARMS[name], *sizes, vocab_size=VOCABULARY) for name in ("learned", "frozen", "tied")
    )
    of_a_layer = 6 * N * (4 + 8) * D**2 + 14 * D * N * (N + 1) // 2
    assert learned == 3 * (2 * of_a_layer + 6 * N * D * VOCABULARY)
    assert learned - frozen == frozen - tied == 2 * 3 * 4 * N * D**2


@pytest.mark.parametrize(("name", "layers"), some(product(ARMS, [1, 2]), 5))
def test_matched_width(name, layers):
    """The arm has as many trained parameters as the baseline, up to half of those of one hidden unit."""
    d = 32
    found = matched_width(ARMS[name], ARMS["learned"], d, layers)
    ours, theirs = (
        trained_parameters(built(arm, d, layers, d_ff=d_ff))
        for arm, d_ff in ((ARMS[name], found), (ARMS["learned"], None))
    )
    assert abs(ours - theirs) <= d * layers
    assert matched_width(ARMS[name], ARMS[name], d, layers, d_ff=7) == 7


@pytest.mark.bad_input
def test_errors():
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"H: expected an integer of at least 1, got {bad}"):
            arms(bad, N)
        with pytest.raises(ValueError, match=f"N: expected an integer of at least 1, got {bad}"):
            arms(H, bad)
    with pytest.raises(ValueError, match="num_heads: expected a divisor of d_model = 18, got 4"):
        built(ARMS["learned"], 18)
    with pytest.raises(ValueError, match="N: expected at most max_length = 16, got 17"):
        training_flop(ARMS["static random"], 1, 17, D, 1, vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="steps: expected an integer of at least 1, got 0"):
        matched_steps(ARMS["frozen"], ARMS["learned"], 0, 1, N, D, 1, vocab_size=VOCABULARY)
    heavy = Arm("random Synthesizer", 512, (("random Synthesizer", H),))
    with pytest.raises(ValueError, match="arm: expected fewer parameters than 'learned' has, .* has 1048064 more"):
        matched_width(heavy, baseline(H, 512), D, 1)
