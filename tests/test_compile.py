"""`torch.compile` as a user writes it: at one length after the other, a training step included, the result is right."""

import pytest
import torch

from ortho import HybridAttention, LanguageModel, MultiheadAttention
from ortho.attention.delta_product import delta_product

pytestmark = [
    pytest.mark.unchecked,
    # Of what PyTorch does itself while it compiles.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
# Of each way to compute one: a kernel, a kernel of ours, parts of a pattern, parts that are chosen, several kinds.
MODELS = {
    "softmax": lambda: MultiheadAttention(8, 2),
    "window": lambda: MultiheadAttention(8, 2, attention="window"),
    "window, reference": lambda: MultiheadAttention(8, 2, attention="window", form="reference"),
    "top-k": lambda: MultiheadAttention(8, 2, attention="top-k"),
    "nsa": lambda: MultiheadAttention(8, 2, attention="nsa"),
    "hybrid": lambda: HybridAttention(8, 2, heads={"learned": 1, "window": 1}),
    "model": lambda: LanguageModel(11, 8, 2, 1, max_length=16, attention="window"),
}


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", MODELS)
def test_lengths_one_after_the_other(name):
    """Outputs and all gradients, with shapes that become dynamic: the same sums in another order, 1e-6 of their size
    with a factor of 100."""
    model = MODELS[name]()
    compiled = torch.compile(model, backend="aot_eager")
    for length in (5, 9, 13):
        g = torch.Generator().manual_seed(length)
        if name == "model":
            given, kwargs = torch.randint(0, 11, (1, length), generator=g), {}
        else:
            given, kwargs = torch.randn(1, length, 8, generator=g), {"is_causal": True}
        results = []
        for call in (model, compiled):
            y = call(given, **kwargs)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
        for plain, other in zip(*results, strict=True):
            torch.testing.assert_close(other, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused(power):
    """Also where the backward pass is a traced one that runs as it is, and the upstream gradient is a constant."""
    compiled = torch.compile(delta_product, backend="eager")
    q, k, v = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(3))
    torch.autograd.grad(compiled(q, k, v, is_causal=True).pow(power).sum(), (q, k, v))
    with pytest.raises(
        RuntimeError, match="^create_graph: expected False: the fast form cannot be differentiated twice"
    ):
        torch.autograd.grad(compiled(q, k, v, is_causal=True).pow(power).sum(), (q, k, v), create_graph=True)
