"""`torch.compile` as a user calls it gives the right result at one length after the other, training step included;
torch.func, forward derivatives and traces: a definition serves them, a fast form serves them or says that it cannot.

Compiling takes seconds, most of them for symbolic sizes. By default one case of each kind of code is compiled with
symbolic sizes, and one of each further way to compute at a single length. With ORTHO_TESTS=all, as in the nightly run,
all are compiled with symbolic sizes.
"""

import copy
from shutil import which

import adapter_models
import pytest
import torch
from sample import WHOLE
from torch.autograd import forward_ad

from ortho import MECHANISMS, PROJECTIONS, HybridAttention, LanguageModel, MultiheadAttention, TransformerBlock
from ortho.adapters import freeze_qk
from ortho.attention import FORMS
from ortho.attention.linear.dense_features import DenseExponentialFeatures
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.attention.linear.random_feature_attention import RandomFeatureAttention
from ortho.attention.positional import patterns
from ortho.layers.checkpointed import Checkpointed, CheckpointedAttention
from ortho.layers.feed_forward import MixtureOfExperts
from ortho.layers.frozen_qk import FrozenQKAttention
from ortho.layers.hybrid import HEADS
from ortho.layers.positional import PositionalHeads
from ortho.layers.short_convolution import ConvolvedAttention
from ortho.layers.synthesizer import SOURCES, SynthesizerAttention
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.encoders import TextEncoder, VisionTransformer

pytestmark = [
    pytest.mark.unchecked,
    # Warnings about what PyTorch itself does while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

# Small float64 layers and models of every kind, with their inputs.
D, H, WORDS, LONGEST = 8, 2, 11, 16
KIND = {"dtype": torch.float64}
TEXT = {"max_length": LONGEST, **KIND}


def sequences(n, width=D):
    return torch.randn(1, n, width, generator=torch.Generator().manual_seed(n), **KIND)


def tokens(n):
    return torch.randint(0, WORDS, (1, n), generator=torch.Generator().manual_seed(n))


def bidirectional(n):
    return (sequences(n),), {}


def causal(n):
    return (sequences(n),), {"is_causal": True}


def padded(n):
    return (sequences(n),), {"key_padding_mask": torch.arange(n)[None] > n - 3}


def text(n):
    return (tokens(n),), {}


def padded_text(n):
    return (tokens(n),), {"key_padding_mask": torch.arange(n)[None] >= n - 2}


def pair(n):
    return (tokens(n), tokens(n - 2)), {"source_mask": torch.arange(n)[None] < n - 1}


def images(n):
    """A batch of n images: the number of tokens of an image model is fixed, so the size of the batch varies instead."""
    return (torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(n), **KIND),), {}


def layer(given=causal, heads=H, **kwargs):
    return lambda: MultiheadAttention(D, heads, **kwargs, **KIND), given


def model(given=text, **kwargs):
    return lambda: LanguageModel(WORDS, D, H, 1, **TEXT, **kwargs), given


def frozen(name):
    def given(n):
        x = sequences(n, adapter_models.D)
        return ((x, x.flip(1)) if "Decoder" in name else (x,)), {}

    return lambda: freeze_qk(adapter_models.build(name)), given


# Name -> (what makes it, its inputs at each length as (arguments, keywords)).
CASES = {
    f"{name}, {form}": layer(causal if m.causal else bidirectional, attention=name, form=form)
    for name, m in MECHANISMS.items()
    for form in FORMS
}
CASES |= {f"{name} projection": layer(projection=name) for name in PROJECTIONS}
CASES |= {
    "grouped": layer(num_kv_heads=1, bias=True),
    "padded": layer(padded, attention="linear"),
    "padded, tiled": layer(padded, attention="alibi"),
    "exchanged": (lambda: FrozenQKAttention(D, H, **KIND), causal),
    "positional": (lambda: PositionalHeads(D, H, **KIND), causal),
    "convolved": (lambda: ConvolvedAttention(D, H, **KIND), causal),
    "redrawn": layer(causal, attention=RandomFeatureAttention(D // H, 8, **KIND)),
    "positional, reference": (lambda: PositionalHeads(D, H, form="reference", **KIND), bidirectional),
}
CASES |= {
    f"{kind} heads": (
        lambda kind=kind: HybridAttention(D, H, heads=[(kind, 1), ("learned", 1)], **KIND),
        causal if kind not in MECHANISMS or MECHANISMS[kind].causal else bidirectional,
    )
    for kind in HEADS
}
CASES |= {
    f"synthesizer {source}": (lambda source=source: SynthesizerAttention(D, H, LONGEST, source=source, **KIND), causal)
    for source in (*SOURCES, tuple(SOURCES))
}
CASES |= {
    f"experts, {form}, room {room}": (
        lambda form=form, room=room: MixtureOfExperts(D, 3, form=form, capacity_factor=room, **KIND),
        bidirectional,
    )
    for form in FORMS
    for room in (None, 1.0)
}
CASES |= {
    f"recomputed {name}": layer(attention=CheckpointedAttention(name, "fast"))
    for name in ("softmax", "linear", "window")
}
CASES |= {
    f"recomputed blocks, {name}": (
        lambda name=name: Checkpointed([TransformerBlock(D, H, attention=name, **KIND) for _ in range(2)]),
        causal,
    )
    for name in ("softmax", "window")
}
CASES |= {
    "language model": model(),
    "language model, window": model(attention="window"),
    "language model, fox": model(attention="fox", positions="sinusoidal"),
    "language model, hybrid": model(layer=HybridAttention, heads={"selective-induction": 1, "positional": 1}),
    "text encoder": (lambda: TextEncoder(WORDS, D, H, 1, **TEXT), padded_text),
    "vision transformer": (lambda: VisionTransformer(4, 2, D, H, 1, num_classes=3, channels=1, **KIND), images),
    "encoder-decoder": (lambda: EncoderDecoder(WORDS, D, H, 1, **TEXT), pair),
    "encoder-decoder, linear": (lambda: EncoderDecoder(WORDS, D, H, 1, cross={"attention": "linear"}, **TEXT), pair),
}
FROZEN = ("torch", "torch, kdim, vdim", "nn.TransformerEncoder", "nn.TransformerDecoderLayer", "named")
CASES |= {f"frozen {name}": frozen(name) for name in FROZEN}

# A kernel of PyTorch's, our kernels in chunks, selected tilings; a layer of PyTorch's, heads of several kinds.
FEW = ["softmax, fast", "linear, fast", "top-k, fast", "frozen torch", "stopped heads"]
# Autograd in chunks, tilings of several kinds, tilings of a pattern.
AT_ONE_LENGTH = ["fox, fast", "language model, window"]
# Tiles, our kernels with feature maps and with gates, every kind of layer and of model. (Induction heads of one token
# have a projection of exactly one tensor.)
IN_ONE_GRAPH = [
    *("flash, fast", "favor, fast", "gated-delta, fast", "synthesizer dot-product"),
    *("frozen projection", "padded", "exchanged", "structured-stopped heads", "rotary heads", "linear heads"),
    *("induction heads", "selective-induction heads", "positional heads", "convolved"),
    *("language model, hybrid", "text encoder", "vision transformer"),
]
# Projections of one, two and four tensors; other backward passes of our own; a model.
SERVED = [
    *("induction heads", "stopped projection", "exchanged", "selective-induction heads", "linear, fast", "flash, fast"),
    *("convolved", "language model, hybrid"),
]
BY_DEFAULT = ["softmax, fast", "top-k, fast", "linear, fast", "fox, fast", "delta, fast", "language model, window"]


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(call, module, given, kwargs):
    """Outputs, and gradients of operands and parameters; the parameters are then changed by a step of SGD."""
    operands = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    module.zero_grad()
    y = call(*operands, **kwargs)
    y.square().sum().backward()
    found = {"y": y.detach()}
    for name, x in [*enumerate(operands), *module.named_parameters()]:
        if x.grad is not None:
            found[name] = x.grad.clone()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 1e-2).step()
    return found


def agree(name, compiler, lengths=(5, 9, 13)):
    """Compiled and plain steps agree; shapes become dynamic at the second length. The tolerance is for the same float64
    sums in another order: about 1e3 terms of 1e-16, times a thousand for exponentials of scores and for fits."""
    torch.manual_seed(0)
    make, given = CASES[name]
    plain = make()
    other = copy.deepcopy(plain)
    compiled = compiler(other)
    for length in lengths:
        operands, kwargs = given(length)
        expected, found = step(plain, plain, operands, kwargs), step(compiled, other, operands, kwargs)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", CASES if WHOLE else [*FEW, *AT_ONE_LENGTH])
def test_lengths_one_after_the_other(name):
    lengths = (5, 9, 13) if WHOLE or name in FEW else (5,)
    agree(name, lambda module: torch.compile(module, backend="aot_eager"), lengths)


@pytest.mark.parametrize("name", IN_ONE_GRAPH)
def test_without_a_graph_break(name):
    """Checks that read values are skipped while compiling."""
    agree(name, lambda module: torch.compile(module, backend="eager", fullgraph=True), lengths=(5,))


@pytest.mark.parametrize("name", CASES if WHOLE else SERVED)
def test_without_gradients(name):
    """Under `no_grad` and `inference_mode`, as a model is served."""
    make, given = CASES[name]
    torch.manual_seed(0)
    module, (operands, kwargs) = make(), given(5)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            compiled = torch.compile(module, backend="eager", fullgraph=name in SERVED)
            torch.testing.assert_close(
                compiled(*operands, **kwargs), module(*operands, **kwargs), atol=1e-10, rtol=1e-10
            )


@pytest.mark.parametrize("name", BY_DEFAULT if WHOLE else BY_DEFAULT[:1])
def test_by_default(name, tmp_path, monkeypatch):
    """The default backend generates code, for which it needs a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("torch.compile needs a compiler of C++, and there is none")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    agree(name, torch.compile, lengths=(5, 9, 13) if WHOLE else (5,))


def second(attend, causal, power):
    """The derivatives of the sum of squared first derivatives; or the message, if they are refused."""
    operands = [
        torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64, requires_grad=True)
        for i in range(3)
    ]
    options = {"allow_unused": True, "materialize_grads": True}
    try:
        o = attend(*operands, is_causal=causal).pow(power).sum()
        first = torch.autograd.grad(o, operands, create_graph=True, **options)
        return torch.autograd.grad(sum(x.square().sum() for x in first), operands, **options)
    except RuntimeError as error:
        return str(error)


# Two kernels that refuse them; autograd and tiles, which serve them. Power 1 makes the upstream gradient a constant.
TWICE = [("linear", 1), ("delta-product", 2), ("fox", 2), ("window", 1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"] if WHOLE else ["eager"])
@pytest.mark.parametrize(("name", "power"), [(name, n) for name in MECHANISMS for n in (1, 2)] if WHOLE else TWICE)
def test_second_derivatives(name, power, backend):
    """What is refused uncompiled is also refused compiled, even if the traced backward pass runs as it is and the
    upstream gradient is a constant. What is served uncompiled gives the same compiled, or is refused by PyTorch."""
    m = MECHANISMS[name]
    plain = second(m.fast, m.causal, power)
    found = second(torch.compile(m.fast, backend=backend), m.causal, power)
    if isinstance(plain, str):
        assert isinstance(found, str)
        if backend == "eager":
            assert plain in found
    elif isinstance(found, str):
        assert "does not currently support double backward" in found
    else:
        torch.testing.assert_close(found, plain, atol=1e-8, rtol=1e-8)


@pytest.mark.skipif(which("c++") is None, reason="needs a C++ compiler")
def test_cubes_of_positions():
    """Compiled, powers of positions are products in float64 as well. Of integers they would overflow: in int64 on a CPU
    beyond 77,000 tokens, in int32 on a GPU beyond 1,290, where weights of `left` and `end` came out wrong."""

    def sums():
        m = torch.arange(100_000)
        return patterns.cubes(m), patterns.sum_of_cubes(m)

    for found, wanted in zip(torch.compile(sums)(), sums(), strict=True):
        assert torch.equal(found, wanted)


# ----------------------------------------------------------------------------------- torch.func and forward derivatives

CHOOSING = [name for name, m in MECHANISMS.items() if m.family == "dynamic_sparse" and name != "sparse-linear"]
SMOOTH = [name for name in MECHANISMS if name not in CHOOSING]


def drawn(*lead):
    return [torch.randn(*lead, 5, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3)]


def call(name, form):
    m = MECHANISMS[name]
    return lambda q, k, v: m.form(form)(q, k, v, is_causal=m.causal)


def same(a, b):
    """Two float64 computations of the same; fits are singular up to 1e6."""
    torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def expected_of(function, plain, form):
    """Assert that the function's result is the plain one or, for a fast form, that PyTorch refuses it."""
    try:
        result = function()
    except RuntimeError:
        assert form == "fast"
        return
    same(result, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # about PyTorch's own code
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("name", SMOOTH)
def test_transforms(name, form):
    """The gradient, a map over a batch, and a forward derivative."""
    f, (q, k, v) = call(name, form), drawn(2)
    leaf = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(q, k, leaf).square().sum(), leaf)
    expected_of(lambda: torch.func.grad(lambda v: f(q, k, v).square().sum())(v), gradient, form)
    tangent = torch.ones_like(v)
    along = f(q, k, v + tangent) - f(q, k, v)  # linear in v, except for losses of the values
    if not name.startswith("ttt"):
        expected_of(lambda: torch.func.jvp(lambda v: f(q, k, v), (v,), (tangent,))[1], along, form)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(v, tangent)
            expected_of(lambda: forward_ad.unpack_dual(f(q, k, dual)).tangent, along, form)
    many = drawn(3, 2)
    each = torch.stack([f(*x) for x in zip(*many, strict=True)])
    expected_of(lambda: torch.func.vmap(f)(*many), each, form)


LAYERS = [
    *(f"{name}, fast" for name in MECHANISMS),
    *("exchanged", "induction heads", "positional heads", "convolved", "stopped projection", "structured projection"),
    *(
        "synthesizer dense",
        "experts, fast, room None",
        "experts, fast, room 1.0",
        "language model",
        "vision transformer",
    ),
]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [x for x in CASES if "reference" not in x] if WHOLE else LAYERS)
def test_trace(name):
    """`torch.jit.trace`, as in TensorBoard's `add_graph`: right at other lengths, too, or refused in one sentence."""
    make, given = CASES[name]
    torch.manual_seed(0)
    module = make()

    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, *operands):
            masks = {"is_causal": True} if given is causal else {}
            return self.inner(*operands, **masks)

    one, refused = Call(), ""
    try:
        traced = torch.jit.trace(one, given(9)[0], check_trace=False)
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert refused.startswith("torch.jit.trace: expected a function that can be traced, got ")
        return
    for length in (5, 13):
        operands, _ = given(length)
        same(traced(*operands), one(*operands))


@pytest.mark.parametrize("fit", ["gerf", "saderf", "aderf", "sderf"])
def test_fitted_parameters_are_constants_in_forward_mode_too(fit):
    # a fit that passed a derivative on would change the first four digits
    q, k, v, along = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with_map = DenseExponentialFeatures(fit)

    def attend(q):
        return linear_attention_reference(q, k, v, feature_map=with_map)

    forward = torch.func.jvp(attend, (q,), (along,))[1]
    backward = torch.einsum("abcd,cd->ab", torch.func.jacrev(attend)(q), along)
    assert torch.allclose(forward, backward, rtol=1e-10, atol=1e-12)
