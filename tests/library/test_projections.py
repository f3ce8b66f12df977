"""Matrices from a seed, and one in place of two: their law, what is stored, how they load; heads of any width."""

import io
from functools import partial

import pytest
import torch
from refusals import refusals, refuses
from seeded import draw, generator

from ortho import LanguageModel, MultiheadAttention, to_standard
from ortho.projections import FrozenProjection, LearnedProjection, MergedProjection, SeededProjection
from ortho.projections.projection import head_sizes, kv_heads
from ortho.projections.seeded import _normals

SIGMAS = 4.42  # two-sided, an error rate of 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def seeded(seed, *, dtype=torch.float32, **kwargs):
    """An attention layer whose queries and keys are a seed."""
    projection = partial(SeededProjection, seed=seed)
    return MultiheadAttention(24, 4, projection=projection, generator=generator(1), dtype=dtype, **kwargs)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True), len(file.getvalue())


def test_the_numbers_are_the_generator_s():
    """The first normal numbers of two matrices of a seed, to the last digits of a logarithm and a cosine: another
    generator, or another use of it, would make all stored seeds void."""
    first = [[0.01873257618418203, -1.2398568519165563], [1.3658952840160141, -0.5321618831204031]]
    second = [[-0.46444506161655436, 0.23933322622937053], [-0.3268403479832897, 1.7398990338792653]]
    for key, expected in enumerate((first, second)):
        assert torch.allclose(_normals(3, key, (2, 2)), torch.tensor(expected, dtype=torch.float64), atol=1e-14)
    values = _normals(5, 0, (300, 300))  # a mean of 0 and mean powers of 1, 0 and 3, whose variances are 2, 15 and 96
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float(values.pow(power).mean()) - mean) < SIGMAS * (variance / values.numel()) ** 0.5


def test_a_seed_stands_for_two_matrices():
    """The same ones wherever it is said; another seed has others; where it is not said it is drawn."""
    one, again, other = (SeededProjection(24, 4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.weight_q, again.weight_q) and torch.equal(one.weight_k, again.weight_k)
    assert one.digest == again.digest != other.digest and len(one.digest) == 32
    matrices = [one.weight_q, one.weight_k, other.weight_q, other.weight_k]
    assert len({tuple(m.flatten().tolist()) for m in matrices}) == 4
    drawn = [SeededProjection(8, 2, generator=generator(seed)).seed for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.manual_seed(7)
    assert SeededProjection(8, 2).seed != SeededProjection(8, 2).seed
    assert f"seed={one.seed}" in repr(one)


@pytest.mark.parametrize(
    "sizes", [(24, 4), (24, 4, 6, 2), (24, 4, 3), (24, 5, 7), (1, 1), (97, 1)], ids=lambda sizes: str(sizes)
)
def test_orthonormal(sizes):
    """Rows, or the columns of a matrix that has fewer, to float32's rounding: of a product of two vectors of length 1
    no entry is off by more than the sum of its terms' rounding, 2^-24 each in relation, by Cauchy and Schwarz 2^-23."""
    names = ("d_model", "num_heads", "head_dim", "num_kv_heads")
    one = SeededProjection(**dict(zip(names, sizes, strict=False)), seed=5, dtype=torch.float64)
    for w in (one.weight_q, one.weight_k):
        assert w.shape[1] == sizes[0]
        products = w @ w.T if len(w) <= len(w.T) else w.T @ w
        assert (products - torch.eye(len(products))).abs().max() <= 2**-23


def moments(matrices):
    """Of entries of matrices (samples, d, d): means with their standard errors."""
    a, b, c = matrices[:, 0, 0], matrices[:, 1, 0], matrices[:, 1, 1]
    terms = torch.stack([a, a * c, a**2, a**4, a**2 * b**2, a**2 * c**2])
    return terms.mean(1), terms.std(1) / terms.shape[1] ** 0.5


def haar_moments(d):
    """E of a, a c, a^2, a^4, a^2 b^2 and a^2 c^2, with b in a's column and c in another row and column (Collins &
    Sniady 2006, *Integration with respect to the Haar measure*)."""
    four = d * (d + 2)
    return torch.tensor([0, 0, 1 / d, 3 / four, 1 / four, (d + 1) / (four * (d - 1))], dtype=torch.float64)


def test_the_law_of_haar():
    """Second and fourth moments of W_Q, of W_K, and of what scores are made of, W_Q^T W_K; and of the one matrix that
    is merged of two. Each of 24 comparisons is wrong with probability 1e-5."""
    d, samples = 4, 1500
    made = [SeededProjection(d, 2, seed=seed, dtype=torch.float64) for seed in range(samples)]
    g = generator(2)
    merged = [MergedProjection(d, generator=g, dtype=torch.float64) for _ in range(samples)]
    q, k = (torch.stack([getattr(one, name) for one in made]) for name in ("weight_q", "weight_k"))
    for matrices in (q, k, q.mT @ k, torch.stack([one.weight_q.T @ one.weight_k for one in merged])):
        found, error = moments(matrices)
        assert ((found - haar_moments(d)).abs() < SIGMAS * error).all()


@DTYPES
def test_a_state_dict_holds_forty_bytes(dtype):
    """And restores what the layer does, bit for bit, through a file that is read without running code."""
    one, other = seeded(3, dtype=dtype, num_kv_heads=2), seeded(4, dtype=dtype, num_kv_heads=2)
    state = one.state_dict()
    assert set(state) == {"weight_v", "weight_o", "projection._extra_state"}
    assert (state["projection._extra_state"].dtype, state["projection._extra_state"].shape) == (torch.uint8, (40,))
    x = draw(2, 7, 24, dtype=dtype)
    assert not torch.equal(other(x), one(x))
    loaded, _ = through_a_file(state)
    other.load_state_dict(loaded)
    assert torch.equal(other(x), one(x)) and other.projection.seed == 3
    assert torch.equal(other.state_dict()["projection._extra_state"], state["projection._extra_state"])


@DTYPES
def test_every_dtype_has_the_same_matrices(dtype):
    """Rounded from float32's; a layer that was rounded has its digits back in float32, and if it loads its seed."""
    one = seeded(3, dtype=dtype)
    exact = seeded(3).projection.weight_q
    assert torch.equal(one.projection.weight_q, exact.to(dtype))
    state, wide = one.state_dict(), one.float()
    assert torch.equal(wide.projection.weight_q, exact)
    other = seeded(4, dtype=dtype).float()
    other.load_state_dict(state)
    assert torch.equal(other.projection.weight_q, exact)


def extra(projection, at, value):
    """Its stored bytes, with another one."""
    state = projection.get_extra_state()
    state[at] = value
    return {"_extra_state": state}


BAD_STATES = {
    "digest": (lambda p: extra(p, 20, p.get_extra_state()[20] ^ 1), ValueError, "digest: expected .* of seed 3, got"),
    "seed": (lambda p: extra(p, 0, 4), ValueError, "digest: expected .* of the matrices of seed 4, got"),
    "no seed": (lambda p: extra(p, 7, 255), ValueError, r"seed: expected an integer from 0 to 2\^63 - 1, got"),
    "short": (
        lambda p: {"_extra_state": p.get_extra_state()[:39]},
        ValueError,
        "seed: .* 40 bytes, got a uint8 tensor",
    ),
    "dtype": (
        lambda p: {"_extra_state": p.get_extra_state().int()},
        ValueError,
        "seed: .* got a int32 tensor of shape",
    ),
    "number": (lambda p: {"_extra_state": 3}, ValueError, "seed: expected a seed and a digest in 40 bytes, got int 3"),
    "nothing": (lambda p: {}, RuntimeError, "Missing key"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_is_not_its_own_is_refused(case):
    """And nothing has changed then."""
    change, error, message = BAD_STATES[case]
    one = SeededProjection(24, 4, seed=3)
    q, k, digest = one.weight_q.clone(), one.weight_k.clone(), one.digest
    refuses(message, one.load_state_dict, change(one), error=error)
    assert torch.equal(one.weight_q, q) and torch.equal(one.weight_k, k)
    assert (one.seed, one.digest) == (3, digest)


def test_other_sizes_have_another_digest():
    """A seed of other heads is refused, as is one whose matrices this machine would make otherwise."""
    with pytest.raises(ValueError, match="digest: expected"):
        SeededProjection(24, 4, seed=3).load_state_dict(SeededProjection(24, 4, seed=3, num_kv_heads=2).state_dict())


@pytest.mark.parametrize("stop", [False, True])
def test_merged_is_a_layer_of_one_head(stop):
    """q k^T = x W^T x^T; converted it is a layer with W and the identity, and gradients are those of its matrices."""
    merged = partial(MergedProjection, stop_gradient=stop)
    one = MultiheadAttention(12, 1, projection=merged, generator=generator(1), dtype=torch.float64)
    assert {name for name, _ in one.named_parameters()} == {"weight_v", "weight_o"}
    assert "projection.weight_k" not in one.state_dict()
    x = draw(2, 7, 12).requires_grad_()
    q, k = one.projection(x)
    close((q @ k.mT)[:, 0], x @ one.projection.weight_q.T @ x.mT)
    y = one(x, is_causal=True)
    frozen = FrozenProjection(12, 1, stop_gradient=stop, dtype=torch.float64)
    frozen.weight_q, frozen.weight_k = one.projection.weight_q, one.projection.weight_k
    by_matrices = MultiheadAttention(12, 1, projection=frozen, dtype=torch.float64)
    by_matrices.weight_v, by_matrices.weight_o = one.weight_v, one.weight_o
    z = by_matrices(x, is_causal=True)
    close(y, z)
    leaves = [x, *one.parameters()]
    close(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, z)))
    standard = to_standard(one)
    close(standard(x, is_causal=True), y)
    assert {name for name, _ in standard.named_parameters()} >= {"projection.weight_q", "projection.weight_k"}
    context = draw(2, 5, 12, seed=1)
    close(standard(x, context), one(x, context))


@pytest.mark.parametrize("projection", [LearnedProjection, FrozenProjection, SeededProjection])
def test_one_module_for_all_blocks(projection):
    """It is one module, whose parameters are there once, and have the gradient of all blocks together."""
    shared = projection(24, 4, generator=generator(1), dtype=torch.float64)
    kwargs = {"max_length": 16, "dtype": torch.float64}
    model = LanguageModel(13, 24, 4, 3, projection=shared, generator=generator(2), **kwargs)
    apart = LanguageModel(13, 24, 4, 3, projection=projection, generator=generator(2), **kwargs)
    apart.load_state_dict(model.state_dict())  # each block's name is there, and stands for the same
    learned = projection is LearnedProjection
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in apart.parameters()) - count == (2 * 2 * 24**2 if learned else 0)
    tokens = torch.randint(13, (2, 9), generator=generator(3))
    close(model(tokens), apart(tokens))
    close(to_standard(model)(tokens), model(tokens))
    if learned:
        for each in (model, apart):
            each(tokens).square().sum().backward()
        for name in ("weight_q", "weight_k"):
            blocks = [getattr(block.attention.projection, name).grad for block in apart.blocks]
            torch.testing.assert_close(getattr(shared, name).grad, sum(blocks), atol=1e-9, rtol=1e-9)  # sums of 1e3
    other = LanguageModel(13, 24, 4, 3, projection=projection(24, 4, dtype=torch.float64), **kwargs)
    other.load_state_dict(through_a_file(model.state_dict())[0])
    assert torch.equal(other(tokens), model(tokens))


BAD = [
    (lambda: SeededProjection(24, 4, seed=-1), r"seed: expected an integer from 0 to 2\^63 - 1, got -1"),
    (lambda: SeededProjection(24, 4, seed=2**63), "seed: expected an integer from 0"),
    (lambda: SeededProjection(24, 4, bias=True), "bias: expected False of a projection that is a seed"),
    (lambda: MergedProjection(24, 4), "num_heads: expected 1, of which W_Q W_K"),
    (lambda: MultiheadAttention(24, 4, projection=LearnedProjection(24, 4, head_dim=5)), "projection: exp"),
    (
        lambda: MultiheadAttention(24, 4, projection=torch.nn.Identity),
        "projection: expected a name, a class",
        TypeError,
    ),
]


@refusals(BAD)
def test_errors(refused):
    refused()


def test_a_seed_is_loaded_by_assignment():
    """Into a module without numbers, in which nothing can be copied."""
    one = SeededProjection(24, 4, seed=3, dtype=torch.float64)
    other = SeededProjection(24, 4, seed=5, dtype=torch.float64, device="meta")
    other.load_state_dict(one.state_dict(), assign=True)
    assert torch.equal(one.weight_q, other.weight_q) and torch.equal(one.weight_k, other.weight_k)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: head_sizes(8, 0, 4), "num_heads"),
        (lambda: head_sizes(-8, 2, 4), "d_model"),
        (lambda: head_sizes(8, 2, 0), "head_dim"),
        (lambda: kv_heads(4, 0), "num_kv_heads"),
        (lambda: kv_heads(4, -2), "num_kv_heads"),
    ],
)
def test_sizes_below_one_are_refused(call, name):
    refuses(f"^{name}: expected an integer of at least 1", call)
