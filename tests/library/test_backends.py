"""PyTorch's kernels by name: those that serve a call give what the definition gives, the others say that they don't."""

import pytest
import torch

from ortho.attention.softmax.backends import BACKENDS, backend_attention, serves
from ortho.attention.softmax.softmax_attention import softmax_attention_reference

HERE = ["math", "flash"]  # on a CPU


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_exact(backend, lead, causal, masked):
    """Output and gradients; sums of 17 products of size 10, in another order."""
    leaves = [draw(*lead, 17, 8, seed=s).requires_grad_() for s in range(3)]
    mask = draw(*lead, 17, 17, seed=4) > 0 if masked else None
    if masked:
        mask[..., 0] = True  # a row with nothing to attend to is the kernel's own matter
    upstream = draw(*lead, 17, 8, seed=5)
    kwargs = {"is_causal": causal, "attn_mask": mask, "scale": 0.7}
    o = backend_attention(*leaves, backend=backend, **kwargs)
    want = softmax_attention_reference(*leaves, **kwargs)
    got, wanted = ((x, *torch.autograd.grad(x, leaves, upstream)) for x in (o, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_serves_on_a_cpu(backend):
    q = draw(2, 5, 8, dtype=torch.float32)
    assert serves(backend, q, q, q, is_causal=True, masked=True) == (backend in HERE)
    assert serves(backend, q, q, q[..., :4]) == (backend == "math")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_on_cuda(backend):
    """bfloat16, whose numbers have 8 bits: two roundings of weights and values of size 1."""
    q, k, v = (draw(2, 4, 64, 32, seed=s).to("cuda", torch.bfloat16) for s in range(3))
    if serves(backend, q, k, v, is_causal=True):
        o = backend_attention(q, k, v, backend=backend, is_causal=True)
        want = softmax_attention_reference(*(x.double() for x in (q, k, v)), is_causal=True)
        torch.testing.assert_close(o.double(), want, atol=2**-6, rtol=2**-6)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("backend", "width", "error", "message"),
    [
        ("fastest", 8, ValueError, "backend: expected one of 'math', 'flash', 'efficient', 'cudnn', got 'fastest'"),
        (
            "cudnn",
            8,
            RuntimeError,
            r"backend: expected one that serves torch.float64 on cpu in these shapes, got 'cudnn'",
        ),
        ("flash", 4, RuntimeError, r"got 'flash': .*same last dimension"),
    ],
)
def test_errors(backend, width, error, message):
    x = draw(2, 5, 8)
    with pytest.raises(error, match=message):
        backend_attention(x, x, x[..., :width], backend=backend)
