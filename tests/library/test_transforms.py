"""torch.func and forward derivatives: a definition serves them; a fast form serves them or says that it cannot."""

import pytest
import torch
from compiled_models import CASES, causal
from extent import WHOLE as EVERY
from torch.autograd import forward_ad

from ortho import MECHANISMS, LanguageModel
from ortho.attention.linear.dense_features import DenseExponentialFeatures
from ortho.attention.linear.linear_attention import linear_attention_reference

CHOOSING = [name for name, m in MECHANISMS.items() if m.family == "dynamic_sparse" and name != "sparse-linear"]
WHOLE = [name for name in MECHANISMS if name not in CHOOSING]


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


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # about PyTorch's own code
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("name", WHOLE)
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


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # about PyTorch's own code
@pytest.mark.parametrize("attention", ["softmax", "linear", "window"])
def test_export(attention):
    """A program with the same results, for softmax at another length too; what depends on sizes is refused."""
    model = LanguageModel(11, 8, 2, 1, max_length=16, attention=attention)
    tokens = torch.arange(9)[None]
    if attention == "window":
        with pytest.raises(RuntimeError, match="^torch.export: expected a function that can be traced"):
            torch.export.export(model, (tokens,))
        return
    with torch.no_grad():  # products that are written in place have no derivative in a program
        same(torch.export.export(model, (tokens,)).module()(tokens), model(tokens))
    if attention == "softmax":
        lengths = {"dynamic_shapes": ({1: torch.export.Dim("n", min=2, max=16)},)}
        program = torch.export.export(model, (tokens,), **lengths).module()
        same(program(tokens[:, :5]), model(tokens[:, :5]))


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


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [x for x in CASES if "reference" not in x] if EVERY else LAYERS)
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
