"""Heads that find what followed: the formula, what they retrieve and why, what is there, states, costs, errors."""

from functools import partial
from math import exp, sqrt

import pytest
import torch
from gradients import trained
from seeded import draw

from ortho import (
    ConvolvedAttention,
    HybridAttention,
    InductionHeads,
    freeze_qk,
    to_standard,
)
from ortho.layers.induction import default_sharpness
from ortho.projections import FrozenProjection

# Sums of at most 1e2 rounded products of size 1 in float64, magnified by exponentials of scores up to 16.
close = partial(torch.testing.assert_close, atol=1e-11, rtol=1e-11)
FORMS = pytest.mark.parametrize("form", ["reference", "fast"])
DRAWS = ["haar", "gaussian"]
B, N, WIDTH, H, K = 2, 9, 24, 4, 6


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
@pytest.mark.parametrize("draw_name", DRAWS)
@pytest.mark.parametrize(
    "own", [{"tokens": n} for n in (1, 2, 3)] + [{"sink": 0.6}, {"key_dim": 11, "sink": 0.1}], ids=str
)
def test_as_the_formula_reads(own, draw_name, form):
    """Outputs and all gradients, causal and not."""
    layer = heads(form, draw=draw_name, **own)
    for causal in (False, True):
        x, d_y = draw(B, N, WIDTH).requires_grad_(), draw(B, N, WIDTH, seed=9)
        leaves = [x, *trained(layer).values()]
        found, expected = layer(x, is_causal=causal), by_formula(layer, x, causal)
        close(found, expected)
        close(*(torch.autograd.grad(y, leaves, d_y) for y in (found, expected)))


def test_defaults():
    """c is the square root of K, 4 at most. Keys are as wide as values, but with a sink 64 if the layer is. Rows have
    unit length, and those of heads that fit into d are orthogonal altogether."""
    assert [default_sharpness(width) for width in (9, 16, 64)] == [3.0, 4.0, 4.0]
    together = heads().projection.weight[0]
    close(together @ together.mT, torch.eye(WIDTH, dtype=torch.float64))
    more = heads(head_dim=10).projection.weight[0].unflatten(0, (H, 10))  # 40 rows: two heads at a time
    close(more @ more.mT, torch.eye(10, dtype=torch.float64).expand(H, 10, 10))
    close(more[0] @ more[1].mT, torch.zeros(10, 10, dtype=torch.float64))
    wide = heads(head_dim=2 * WIDTH, count=1).projection.weight[0]
    close(wide.square().sum(), torch.tensor(2.0 * WIDTH, dtype=torch.float64))  # the variance 1 / d
    assert heads(sharpness=2).projection.sharpness == 2.0
    for d, own, wanted in ((256, {}, 8), (256, {"sink": 0.9}, 64), (32, {"sink": 0.9}, 32)):
        assert heads(width=d, count=1, head_dim=8, **own).key_dim == wanted


@FORMS
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_first_key_is_zero(tokens, form):
    """Its score is that of what does not match, in the mean: a first token attends to itself alone."""
    layer, x = heads(form, tokens=tokens), draw(B, N, WIDTH)
    q, k = layer.projection(x)
    assert torch.equal(k[:, :, 0], torch.zeros(B, H, K, dtype=torch.float64))
    assert torch.equal(k[:, :, 1:], q[:, :, :-1])
    close(layer(x, is_causal=True)[:, 0], x[:, 0] @ layer.weight_v.mT @ layer.weight_o.mT)


@FORMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_padding_on_the_left_is_as_good_as_absent(tokens, causal, form):
    """What follows a token that is not there has no predecessor, as the first of a sequence; whatever padding holds."""
    layer, x = heads(form, tokens=tokens), draw(B, N, WIDTH)
    x[:, :4] *= 30
    padded = (torch.arange(N) < 4).expand(B, -1)
    expected = layer(x[:, 4:], is_causal=causal)
    close(layer(x, key_padding_mask=padded, is_causal=causal)[:, 4:], expected)
    close(layer(x, attn_mask=~padded[:, None, None], is_causal=causal)[:, 4:], expected)


def test_adapters_leave_them():
    """They have no projection that could be trained, and so none to freeze; learned heads beside them have."""
    layer = HybridAttention(WIDTH, H, heads={"induction": 2, "learned": 2}, dtype=torch.float64)
    x = draw(B, N, WIDTH)
    frozen = freeze_qk(layer, draw=None)
    assert isinstance(frozen.groups[1].projection, FrozenProjection)
    close(to_standard(frozen)(x, is_causal=True), layer(x, is_causal=True))


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
        close(layer(louder, key_padding_mask=padding, attn_mask=pairs)[~padding], y[~padding])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own
def test_forward_derivatives():
    """Of the definition: those of the values alone, as backward."""
    layer, x, t = heads("reference", tokens=2, sink=0.6), draw(1, N, WIDTH), draw(1, N, WIDTH, seed=3)
    y, vjp = torch.func.vjp(lambda x: layer(x, is_causal=True), x)
    _, tangent = torch.func.jvp(lambda x: layer(x, is_causal=True), (x,), (t,))
    close((vjp(torch.ones_like(y))[0] * t).sum(), tangent.sum())


@FORMS
def test_masks_that_broadcast_beside_a_sink(form):
    """Over keys, or over all: the same as with all axes."""
    layer, x = heads(form, sink=0.6), draw(B, N, WIDTH)
    for shape in ((), (1,), (N, 1), (B, 1, 1, 1), (B, 1, N, 1)):
        mask = draw(*shape, seed=4) > -0.5
        close(layer(x, attn_mask=mask), layer(x, attn_mask=mask.expand(B, H, N, N)))


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own
def test_compiled_decoding():
    layer, x = heads(tokens=2, sink=0.6), draw(1, N, WIDTH)
    step, cache = torch.compile(layer, backend="eager"), layer.new_cache(N)
    read = [step(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(N)]
    close(torch.cat(read, 1), layer(x, is_causal=True))
