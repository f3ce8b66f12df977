"""Layers with heads of several kinds: each kind is what it is alone; induction heads, global tokens and the short
convolution before attention by their formulas."""

from functools import partial
from math import exp, sqrt

import pytest
import torch
from gradients import step, trained
from seeded import draw
from torch import nn

from ortho import ConvolvedAttention, HybridAttention, InductionHeads, LongformerAttention
from ortho.attention import MECHANISMS
from ortho.layers.hybrid import HEADS
from ortho.layers.induction import default_sharpness
from ortho.layers.short_convolution import short_convolution

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
B, N, WIDTH, H, K = 2, 9, 24, 4, 6
SPLIT = {"learned": 1, "positional": 2, "stopped": 1}


# The kinds that are not mechanisms alone, and mechanisms of all sorts of states and gates.
OF_ALL_SORTS = ["rotary", "window", "linear", "gated-delta", "gla", "selective-scan"]
KINDS = [kind for kind in HEADS if kind not in MECHANISMS] + OF_ALL_SORTS


def layer(heads=SPLIT, *, dtype=torch.float64, **kwargs):
    return HybridAttention(WIDTH, H, heads=heads, generator=torch.Generator().manual_seed(1), dtype=dtype, **kwargs)


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_of_one_kind_it_is_that_layer(kind, form):
    """With the same weights bit for bit, forward and backward; and it has drawn what that layer draws."""
    one = layer({kind: H}, form=form)
    kwargs = {"head_dim": K, "form": form, "dtype": torch.float64}
    alone = HEADS[kind](WIDTH, H, generator=torch.Generator().manual_seed(1), **kwargs)
    x = draw(2, 7, WIDTH)
    for causal in (False, True):
        assert all(map(torch.equal, step(one, x, is_causal=causal), step(alone, x, is_causal=causal)))
    alone.load_state_dict(layer({kind: H}).groups[0].state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_initial_variance(kind):
    """1/d for every weight, beside whatever others: of the entries of a uniform law the variance is estimated with a
    relative spread of sqrt(0.8 / n), 0.35 % for n = 64 * 1024; the bound is ten of them."""
    other = "linear" if kind == "learned" else "learned"
    heads = {other: 15, kind: 1}
    one = HybridAttention(1024, 16, heads=heads, generator=torch.Generator().manual_seed(0)).groups[1]
    weights = [one.weight_v, one.weight_o]
    if kind != "positional":
        weights += [one.projection.weight_q, one.projection.weight_k]
    for weight in weights:
        assert weight.numel() == 64 * 1024
        assert abs(weight.square().mean().item() * 1024 - 1) < 0.04


# ------------------------------------------------------------------------------------------------------ induction heads

# Sums of at most 1e2 rounded products of size 1 in float64, magnified by exponentials of scores up to 16.
near = partial(torch.testing.assert_close, atol=1e-11, rtol=1e-11)
DRAWS = ["haar", "gaussian"]


def heads(form="fast", *, dtype=torch.float64, width=WIDTH, count=H, seed=1, **kwargs):
    return InductionHeads(width, count, form=form, generator=torch.Generator().manual_seed(seed), dtype=dtype, **kwargs)


def matrices(projection):
    """R_j of each head, (n, H, K, d)."""
    return projection.weight.unflatten(1, (projection.num_heads, -1))


def by_formula(layer, x, causal):
    """Pair by pair, as the formula reads; a gradient reaches the values alone."""
    p = layer.projection
    unit = (x / x.square().mean(-1, keepdim=True).sqrt()).detach()
    R, c, n, K = matrices(p), p.sharpness, p.tokens, p.head_dim
    u = torch.zeros(B, H, N, K, dtype=x.dtype)
    for t in range(N):
        for j in range(min(n, t + 1)):
            u[:, :, t] += torch.einsum("hkd,bd->bhk", R[j], unit[:, t - j]) * sqrt(c / n)
    scores = torch.zeros(B, H, N, N, dtype=x.dtype)
    for t in range(N):
        for s in range(1, N):
            scores[:, :, t, s] = (u[:, :, t] * u[:, :, s - 1]).sum(-1) / sqrt(K)
    if causal:
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (0 if layer.sink is None else exp(layer.sink * c * sqrt(K))))
    v = (x @ layer.weight_v.mT).unflatten(-1, (H, -1)).transpose(1, 2)
    return (weights @ v).transpose(1, 2).flatten(2) @ layer.weight_o.mT


@FORMS
@pytest.mark.parametrize(
    "own", [{"tokens": n} for n in (1, 2, 3)] + [{"sink": 0.6}, {"key_dim": 11, "sink": 0.1}], ids=str
)
def test_as_the_formula_reads(own, form):
    """Outputs and all gradients, causal and not."""
    layer = heads(form, **own)
    for causal in (False, True):
        x, d_y = draw(B, N, WIDTH).requires_grad_(), draw(B, N, WIDTH, seed=9)
        leaves = [x, *trained(layer).values()]
        found, expected = layer(x, is_causal=causal), by_formula(layer, x, causal)
        near(found, expected)
        near(*(torch.autograd.grad(y, leaves, d_y) for y in (found, expected)))


def test_defaults():
    """c is the square root of K, 4 at most. Keys are as wide as values, but with a sink 64 if the layer is. Rows have
    unit length, and those of heads that fit into d are orthogonal altogether."""
    assert [default_sharpness(width) for width in (9, 16, 64)] == [3.0, 4.0, 4.0]
    together = heads().projection.weight[0]
    near(together @ together.mT, torch.eye(WIDTH, dtype=torch.float64))
    more = heads(head_dim=10).projection.weight[0].unflatten(0, (H, 10))  # 40 rows: two heads at a time
    near(more @ more.mT, torch.eye(10, dtype=torch.float64).expand(H, 10, 10))
    near(more[0] @ more[1].mT, torch.zeros(10, 10, dtype=torch.float64))
    wide = heads(head_dim=2 * WIDTH, count=1).projection.weight[0]
    near(wide.square().sum(), torch.tensor(2.0 * WIDTH, dtype=torch.float64))  # the variance 1 / d
    assert heads(sharpness=2).projection.sharpness == 2.0
    for d, own, wanted in ((256, {}, 8), (256, {"sink": 0.9}, 64), (32, {"sink": 0.9}, 32)):
        assert heads(width=d, count=1, head_dim=8, **own).key_dim == wanted


@FORMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_padding_on_the_left_is_as_good_as_absent(tokens, causal, form):
    """What follows a token that is not there has no predecessor, as the first of a sequence; whatever padding holds."""
    layer, x = heads(form, tokens=tokens), draw(B, N, WIDTH)
    x[:, :4] *= 30
    padded = (torch.arange(N) < 4).expand(B, -1)
    expected = layer(x[:, 4:], is_causal=causal)
    near(layer(x, key_padding_mask=padded, is_causal=causal)[:, 4:], expected)
    near(layer(x, attn_mask=~padded[:, None, None], is_causal=causal)[:, 4:], expected)


@FORMS
def test_padding_beside_a_mask_of_pairs(form):
    """Is no predecessor, whatever it holds: the same as padding in a causal call."""
    x, padding = draw(B, N, WIDTH), torch.zeros(B, N, dtype=torch.bool)
    padding[0, :2] = padding[1, 4] = True
    louder = torch.where(padding[..., None], 9.0, x)
    pairs = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    kinds = {"heads": {"selective-induction": 2, "learned": 2}, "form": form, "dtype": torch.float64}
    for layer in (
        heads(form, tokens=2),
        HybridAttention(WIDTH, H, **kinds),
        ConvolvedAttention(WIDTH, H, of=HybridAttention, **kinds),
    ):
        if isinstance(layer, ConvolvedAttention):
            torch.nn.init.normal_(layer.kernel, generator=torch.Generator().manual_seed(3))
        y = layer(x, key_padding_mask=padding, is_causal=True)
        near(layer(louder, key_padding_mask=padding, attn_mask=pairs)[~padding], y[~padding])


# ------------------------------------------------------------------------------- the short convolution before attention


def convolved(**kwargs):
    """A layer whose kernel are not 0."""
    one = ConvolvedAttention(WIDTH, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64, **kwargs)
    with torch.no_grad():
        one.kernel.normal_(generator=torch.Generator().manual_seed(2))
    return one


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_convolved_as_the_formula_reads(width):
    """Number by number, with a state and without, outputs and all gradients; of short sequences, too."""
    for length in (1, 3, N):
        for conv_state in (None, draw(B, width - 1, WIDTH, seed=3)):
            leaves = [draw(B, length, WIDTH).requires_grad_(), draw(width, WIDTH, seed=1).requires_grad_()]
            leaves += [] if conv_state is None or width == 1 else [conv_state.requires_grad_()]
            x, kernel = leaves[:2]
            line = torch.cat([torch.zeros(B, width - 1, WIDTH) if conv_state is None else conv_state, x], 1)
            rows = [x[:, t] + sum(kernel[i] * line[:, width - 1 + t - i] for i in range(width)) for t in range(length)]
            found, expected = short_convolution(x, kernel, conv_state), torch.stack(rows, 1)
            close(found, expected)
            d_y = draw(B, length, WIDTH, seed=9)
            close(*(torch.autograd.grad(y, leaves, d_y) for y in (found, expected)))


@FORMS
@pytest.mark.parametrize("causal", [False, True])
def test_padding(causal, form):
    """On either side it is as good as absent, whatever it holds, by a mask of keys in one of its shapes; in a gap it
    is as good as zeros. A mask of pairs leaves out no token."""
    one, x = convolved(form=form), draw(B, N, WIDTH)
    for there in (torch.arange(N) >= 4, torch.arange(N) < 6):
        padded = torch.where(there[:, None], x, 30 * x)
        expected = one(x[:, there], is_causal=causal)
        masks = [{"key_padding_mask": ~there.expand(B, N)}, {"attn_mask": there}, {"attn_mask": there[None]}]
        masks += [{"attn_mask": there[None, None]}, {"attn_mask": there.expand(B, H, 1, N)}]
        for mask in masks:
            close(one(padded, is_causal=causal, **mask)[:, there], expected)
    gap = torch.arange(N) != 4
    found = one(x, is_causal=causal, key_padding_mask=~gap.expand(B, N))
    close(found[:, gap], one(x * gap[:, None], is_causal=causal, key_padding_mask=~gap.expand(B, N))[:, gap])
    pairs = torch.ones(N, N, dtype=torch.bool).tril()
    close(one(x, attn_mask=pairs), one(x, is_causal=True))


# -------------------------------------------------------------------------- global tokens with projections of their own

REACH, TOKENS = 4, 5
# Sums of a few dozen products of numbers near 1, in another order: each is rounded to eps.
TOLERANCE = {"rtol": 0, "atol": 1e3 * torch.finfo(torch.float64).eps}


def make(form="fast", bias=True, different=True):
    """A layer; by default its global weights are no longer equal to the others, as they are at first."""
    generator = torch.Generator().manual_seed(0)
    kind = {"bias": bias, "form": form, "dtype": torch.float64, "generator": generator}
    layer = LongformerAttention(WIDTH, H, width=REACH, tokens=TOKENS, **kind)
    if different:
        for p in layer.parameters():
            nn.init.normal_(p, std=WIDTH**-0.5, generator=generator)
    return layer


def inputs(length, seed=1):
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_rows(layer, x, mask):
    """One query of one head at a time: the first tokens use global weights over all keys, others the other weights."""
    heads = torch.zeros(*x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        end = "_global" if i < TOKENS else ""
        made, weight, bias = (getattr(layer, f"{name}{end}") for name in ("projection", "weight_v", "bias_v"))
        keys = [j for j in range(x.shape[1]) if i < TOKENS or j < TOKENS or abs(i - j) < REACH]
        q = x[:, i] @ made.weight_q.T + made.bias_q
        k, v = x[:, keys] @ made.weight_k.T + made.bias_k, x[:, keys] @ weight.T + bias
        for h in range(H):
            own = slice(h * K, (h + 1) * K)
            scores = (k[..., own] @ q[:, own, None])[..., 0] / K**0.5
            weights = scores.masked_fill(~mask[:, i, keys], -torch.inf).softmax(-1)
            heads[:, i, own] = (weights[:, None] @ v[..., own])[:, 0]
    return heads @ layer.weight_o.T + layer.bias_o


@FORMS
@pytest.mark.parametrize("length", [3, TOKENS, TOKENS + 1, 23])
@pytest.mark.parametrize("masked", ["", "pairs", "keys"])
def test_definition_and_gradients(form, length, masked):
    layer, x = make(form), inputs(length).requires_grad_()
    mask, call = torch.ones(2, length, length, dtype=torch.bool), {}
    if masked == "pairs":
        mask = torch.rand(2, length, length, generator=torch.Generator().manual_seed(2)) < 0.7
        mask |= torch.eye(length, dtype=torch.bool)
        call = {"attn_mask": mask[:, None]}
    elif masked:
        call = {"key_padding_mask": torch.arange(length).expand(2, -1) >= length - 1}
        mask = mask & ~call["key_padding_mask"][:, None]
    operands = [x, *trained(layer).values()]
    found, wanted = layer(x, **call), by_rows(layer, x, mask)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    pairs = zip(
        *(torch.autograd.grad(y.square().sum(), operands, allow_unused=True) for y in (found, wanted)), strict=True
    )
    for got, expected in pairs:
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)  # gradients of squares of about a dozen


def test_global_weights_begin_equal_to_the_others():
    """But they are separate parameters: 7 d^2 in all."""
    state = make(bias=False, different=False).state_dict()
    assert all(torch.equal(weight, state[name.replace("_global", "")]) for name, weight in state.items())
    assert sum(weight.numel() for weight in state.values()) == 7 * WIDTH**2
