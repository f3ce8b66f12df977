"""FlexAttention with a pattern's blocks, compared with the pattern's definition; and what it refuses."""

import shutil
from itertools import product

import pytest
import torch
from drawn_tilings import Parity
from extent import some
from refusals import refuses
from seeded import draw
from torch.nn.attention.flex_attention import flex_attention

from ortho.attention import MECHANISMS
from ortho.attention.sparse import flex
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.flex import flex_pattern_attention
from ortho.attention.sparse.pattern import Pattern, pattern_attention_reference
from ortho.attention.sparse.window import Window

PATTERNS = {
    "one key": Window(1),
    "window": Window(70),
    "all": Window(10**6),
    "some rows empty": Parity(),
    "blocks": BlockSparse(30, ((1, 3), (), (0,), (3, 2), (6, 4), (1,), (5, 6))),
}
REGISTERED = {m.name: m.fast.keywords["pattern"] for m in MECHANISMS.values() if m.family == "sparse"}
pytestmark = pytest.mark.unchecked  # FlexAttention looks into the functions that it is given
# Warnings of PyTorch's own code while it compiles.
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def qkv(*lead, length, keys=None, dtype=torch.float64, K=16, V=16):
    keys = length if keys is None else keys
    return [draw(*lead, *s, seed=n).to(dtype) for n, s in enumerate(((length, K), (keys, K), (keys, V)))]


# Each pair is traced anew, which takes seconds; every sixth of the 25 pairs has each pattern and each call once.
CALLS = [
    (False, None, ((2, 3), (200, 200))),
    (True, 0.3, ((), (129, 129))),
    (False, -0.3, ((2, 1, 2), (30, 200))),
    (False, None, ((3,), (150, 20))),
    (True, None, ((1,), (1, 1))),
]


@pytest.mark.parametrize(("pattern", "call"), some(product(PATTERNS, CALLS), 6))
def test_its_own_definition_equals_ours(pattern, call):
    """Sums of at most 200 float64 products of size 10; causal and not, with any leading axes, at any lengths."""
    causal, scale, (lead, lengths) = call
    operands = qkv(*lead, length=lengths[0], keys=lengths[1], K=5, V=4)
    settings = {"pattern": PATTERNS[pattern], "is_causal": causal, "scale": scale}
    o = flex_pattern_attention(*operands, compiled=False, **settings)
    torch.testing.assert_close(o, pattern_attention_reference(*operands, **settings), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pattern", REGISTERED.values(), ids=REGISTERED)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_registered_patterns(pattern, causal):
    """FlexAttention's mask is the pattern's, pair by pair, and its blocks are those with a kept pair."""
    assert isinstance(pattern, Pattern)
    n = 500
    pairs = flex._block_mask(pattern, causal, n, n, torch.device("cpu"))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    kept = pattern.mask(n, is_causal=causal)
    assert torch.equal(pairs.mask_mod(torch.tensor(0), torch.tensor(0), i, j), kept)
    there = [[bool(block.any()) for block in rows.split(128, 1)] for rows in kept.split(128)]
    assert pairs.to_dense()[0, 0].bool().tolist() == there


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_kept_can_be_trained_with(mode):
    """Whatever mode the first call is made in."""
    flex._block_mask.cache_clear()
    with mode():
        pairs = flex._block_mask(Window(11), True, 200, 200, torch.device("cpu"))
    kept = [x for x in pairs.as_tuple() if isinstance(x, torch.Tensor)]
    assert kept and not any(x.is_inference() or x.requires_grad for x in kept)


@compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("pattern", "dtype", "bound"),
    some([(BigBird(30), torch.float32, 2e-5), (Window(70), torch.bfloat16, 0.1), (Parity(), torch.float32, 2e-5)], 3),
)
def test_compiles_to_the_same(pattern, dtype, bound):
    """In float32 a score of about 10 is rounded by 1e-6; in bfloat16 weights, values and outputs by 2^-9."""
    operands = qkv(2, 3, length=200, dtype=dtype)
    call = {"pattern": pattern, "is_causal": True}
    o = flex_pattern_attention(*operands, **call)
    exact = pattern_attention_reference(*(x.double() for x in operands), **call)
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), exact, atol=bound, rtol=0)


@compiles
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_gradients_on_a_gpu(pattern):
    """Outputs and gradients are up to 10, from products of numbers that are rounded by 2^-11 (TF32) at most."""
    operands = [x.float().cuda().requires_grad_() for x in qkv(2, 3, length=200)]
    results = []
    for function in (flex_pattern_attention, pattern_attention_reference):
        o = function(*operands, pattern=pattern, is_causal=True)
        results.append([o, *torch.autograd.grad(o, operands, draw(*o.shape, seed=9).float().cuda())])
    torch.testing.assert_close(*results, atol=2e-2, rtol=0)


@compiles
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (NotImplementedError("no\n kernel"), (RuntimeError, "compiled: .*, got NotImplementedError: no kernel")),
        (torch.OutOfMemoryError("no memory"), (torch.OutOfMemoryError, "^no memory")),
    ],
)
def test_what_cannot_be_compiled_is_an_error(monkeypatch, raised, expected):
    """A call that fails is not served by another form; too little memory is an error of its own."""

    def fails(*args, **kwargs):
        raise raised

    monkeypatch.setattr(flex, "_kernel", lambda: fails)
    with pytest.raises(expected[0], match=expected[1]):
        flex_pattern_attention(*qkv(length=20, dtype=torch.float32), pattern=Window(3))


@compiles
def test_too_many_kernels_are_an_error(monkeypatch):
    """PyTorch would run further ones one operator at a time. Here they are only traced, which counts them."""
    torch.compiler.reset()
    monkeypatch.setattr(flex, "KERNELS", 1)
    traced = torch.compile(flex_attention, backend="eager", **flex.WHOLE)
    monkeypatch.setattr(flex, "_kernel", lambda: traced)
    operands = qkv(1, length=20, dtype=torch.float32)
    flex_pattern_attention(*operands, pattern=Window(3))
    with pytest.raises(RuntimeError, match="compiled: .* got FailOnRecompileLimitHit"):
        flex_pattern_attention(*operands, pattern=Window(4))
    torch.compiler.reset()


@pytest.mark.bad_input
@pytest.mark.parametrize("compiled", [False, True])
def test_errors(compiled):
    q, k, v = qkv(2, length=6, dtype=torch.float32)
    call = {"pattern": Window(3), "compiled": compiled}
    for name, value in (
        ("attn_mask", torch.ones(6, dtype=torch.bool)),
        ("initial_state", (k, v)),
        ("return_state", True),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected none, which FlexAttention has no place for, got "):
            flex_pattern_attention(q, k, v, **{name: value}, **call)
    refuses("k: expected width 16 like q", flex_pattern_attention, q, k[..., :3], v, **call)
    for name, leaf in (("q", q), ("k", k), ("v", v)):
        leaf.requires_grad_()
        refuses(f"{name}: expected no need of a gradient", flex_pattern_attention, q, k, v, **call)
        leaf.requires_grad_(False)
    with pytest.raises(TypeError, match="q: expected one of torch.float32, .*, for compiled FlexAttention"):
        flex_pattern_attention(*(x.double() for x in (q, k, v)), pattern=Window(3))
