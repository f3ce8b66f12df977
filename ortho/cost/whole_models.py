"""Closed forms of whole encoders, and what a step of training holds in memory.

The loss is not included: counts and `saved_bytes` end at what `forward` returns. An encoder reads its input as a whole;
its costs of decoding are 0.
"""

from dataclasses import replace
from typing import Any

from ortho._checks import checked
from ortho._typing import Size
from ortho.cost.closed_forms import Cost, added, block, check_sizes, layer_norm, repeated

__all__ = ["step_memory", "text_encoder", "vision_transformer"]


@checked
def text_encoder(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    L: Size,
    *,
    vocab_size: Size,
    max_length: Size,
    num_segments: Size = 2,
    itemsize: int = 4,
    **kwargs: Any,
) -> Cost:
    """`TextEncoder(vocab_size, d, H, L, max_length=max_length)` on tokens (B, N); `kwargs` are `block`'s."""
    check_sizes(vocab_size=vocab_size, max_length=max_length, num_segments=num_segments)
    if isinstance(N, int) and isinstance(max_length, int) and max_length < N:
        raise ValueError(f"N: expected at most max_length = {max_length}, got {N}")
    norm = layer_norm(B, N, d, bias=True, itemsize=itemsize)
    embeddings = _part(
        itemsize,
        elementwise_forward=2 * B * N * d,  # tokens + segments + places
        elementwise_backward=3 * B * N * d,  # two scattered, one summed over the batch
        saved_bytes=2 * 8 * B * N,  # the indices
        trained=(vocab_size + num_segments + max_length) * d,
    )
    pooler = _read_out(B, N, d, d, itemsize)
    tanh = _part(itemsize, elementwise_forward=B * d, elementwise_backward=B * d, saved_bytes=itemsize * B * d)
    return added(embeddings, norm, _stack(L, B, N, d, H, itemsize=itemsize, **kwargs), pooler, tanh)


@checked
def vision_transformer(
    B: Size,
    d: Size,
    H: Size,
    L: Size,
    *,
    image_size: Size,
    patch_size: Size,
    num_classes: Size,
    channels: Size = 3,
    itemsize: int = 4,
    **kwargs: Any,
) -> Cost:
    """`VisionTransformer(image_size, patch_size, d, H, L, num_classes=num_classes)` on B images without gradients.

    `kwargs` are `block`'s.
    """
    check_sizes(image_size=image_size, patch_size=patch_size, num_classes=num_classes, channels=channels)
    if isinstance(image_size, int) and isinstance(patch_size, int) and image_size % patch_size:
        raise ValueError(f"patch_size: expected a divisor of image_size = {image_size}, got {patch_size}")
    numbers = channels * patch_size**2  # in a patch
    patches = image_size**2 // patch_size**2
    N = 1 + patches
    product = 2 * B * patches * numbers * d
    embeddings = _part(
        itemsize,
        forward=product,
        backward=product,  # the weight's gradient alone
        elementwise_forward=B * N * d,  # places
        elementwise_backward=2 * B * N * d,  # summed over the batch: places'; the class token's and the bias'
        saved_bytes=itemsize * B * patches * numbers,
        trained=(numbers + 1 + 1 + N) * d,  # map and bias, class token, places
    )
    norm = layer_norm(B, N, d, bias=True, itemsize=itemsize)
    head = _read_out(B, N, d, num_classes, itemsize)
    return added(embeddings, _stack(L, B, N, d, H, itemsize=itemsize, **kwargs), norm, head)


@checked
def step_memory(cost: Cost) -> dict[str, Any]:
    """Bytes that a step of training with AdamW holds, by part, if all numbers have the size of `cost`."""
    return {
        "trained weights": cost.itemsize * cost.trained,
        "frozen weights": cost.itemsize * cost.frozen,
        "gradients": cost.itemsize * cost.trained,
        "moments": cost.optimiser_bytes,
        "activations": cost.saved_bytes,
    }


def _stack(L: Size, *sizes: Size, **kwargs: Any) -> Cost:
    """L blocks with biases; where their norms stand makes no difference to what they cost."""
    check_sizes(L=L)
    return replace(repeated(L, block(*sizes, bias=True, **kwargs)), decode=0, state_bytes=0)


def _read_out(B: Size, N: Size, d: Size, outputs: Size, itemsize: int) -> Cost:
    """A linear map of the first of N tokens. It keeps all of them: autograd holds on to the memory that it looks at."""
    product = 2 * B * d * outputs
    return _part(
        itemsize,
        forward=product,
        backward=2 * product,
        elementwise_backward=B * outputs,  # the bias' sum
        saved_bytes=itemsize * B * N * d,
        trained=(d + 1) * outputs,
    )


def _part(itemsize: int, **figures: Any) -> Cost:
    """A cost of which some figures are not 0."""
    zeros = dict.fromkeys((name for name in Cost.__dataclass_fields__ if name != "itemsize"), 0)
    return Cost(**{**zeros, **figures}, itemsize=itemsize)
