"""PyTorch's kernels for softmax attention by name: a call runs the named kernel or raises an error.

`scaled_dot_product_attention` chooses among them by device, dtype and shape, and does not report its choice.
"""

import warnings
from math import sqrt

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ortho import checks
from ortho._typing import Bool, Float, Tensor
from ortho.attention.call import blocked_pairs
from ortho.attention.scores import flat_mask
from ortho.attention.softmax.softmax_attention import positive_scale

BACKENDS = {
    "math": SDPBackend.MATH,  # the definition, materialised
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,  # from xFormers
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def backend_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    backend: str,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*batch N V"]:
    """`softmax_attention_reference` by one of `BACKENDS`, which decides what a row with nothing to attend to gives.

    Raises ValueError for other names, and RuntimeError, with PyTorch's reasons, for a call that the kernel does not
    serve on this device.
    """
    kernel = BACKENDS[checks.one_of("backend", backend, BACKENDS)]
    checks.operands(q, k, v, is_causal=is_causal, attn_mask=attn_mask)
    flat_q, flat_k, flat_v = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    in_kernel = is_causal and attn_mask is None
    blocked = None if in_kernel else blocked_pairs(q.shape[-2], k.shape[-2], is_causal, attn_mask, q.device)
    mask = None
    if blocked is not None:
        mask = flat_mask(~blocked, q.shape[:-2]).expand(flat_q.shape[1], q.shape[-2], k.shape[-2])[None]
    flat_q, scale = positive_scale(flat_q, 1 / sqrt(q.shape[-1]) if scale is None else scale)
    with sdpa_kernel(kernel), warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            o = scaled_dot_product_attention(flat_q, flat_k, flat_v, attn_mask=mask, is_causal=in_kernel, scale=scale)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            said = " ".join(str(reason.message).split(" (Triggered")[0] for reason in reasons) or str(error)
            wanted = f"expected one that serves {q.dtype} on {q.device.type} in these shapes, got {backend!r}"
            raise RuntimeError(f"backend: {wanted}: {said:.300}") from error
    return o.reshape(*q.shape[:-1], v.shape[-1])


def serves(backend: str, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, masked: bool = False) -> bool:
    """Whether a backend can run such a call forward, found out by making it."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device) if masked else None
    try:
        backend_attention(q, k, v, backend=backend, is_causal=is_causal, attn_mask=mask)
    except RuntimeError:
        return False
    return True
