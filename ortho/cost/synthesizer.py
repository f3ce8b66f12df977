"""Closed form of the Synthesizer layer."""

from collections.abc import Sequence

from ortho._checks import checked, one_of
from ortho._cost import Cost, head_width
from ortho._typing import Size
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD
from ortho.layers.synthesizer import SOURCES, Call, SourceCost
from ortho.layers.synthesizer.layer import by_position


@checked
def synthesizer(
    B: Size,
    N: Size,
    d: Size,
    H: Size,
    *,
    source: str | Sequence[str] = "random",
    max_length: Size = None,
    rank: Size = 8,
    k1: Size = None,
    head_dim: Size = None,
    causal: bool = False,
    input_grad: bool = True,
    itemsize: int = 4,
) -> Cost:
    """`SynthesizerAttention(d, H, max_length, source=source)` on x (B, N, d); `max_length` is N by default.

    `rank` is that of "factored-random". `k1` is "factored-dense"'s, by default as there; a `max_length` that is a
    symbol needs one. Weights that do not depend on x are the same for the whole batch: their softmax is taken, and
    kept, once. With `head_dim` heads are of that width, and weights by position alone.
    """
    names = [source] if isinstance(source, str) else source
    if not names:
        raise ValueError("source: expected at least one, got none")
    L = N if max_length is None else max_length
    width = H * head_width(d, H, head_dim)  # of all heads together
    if isinstance(N, int) and isinstance(L, int) and N > L:
        raise ValueError(f"N: expected at most max_length = {L}, got {N}")
    call = Call(B, N, d, H, L, rank, k1, int(len(names) > 1), input_grad, itemsize)
    sources = [SOURCES[one_of("source", name, SOURCES)] for name in names]
    if head_dim is not None:
        by_position(sources)
    parts = [source.cost(call) for source in sources]
    parts.append(_mixing(call, [part.items for part in parts]))
    trained = sum(part.trained for part in parts)
    product, values, weights = 2 * B * N * d * width, 2 * B * N * N * width, parts[-1].items * H * N * N
    return Cost(
        forward=2 * product + values + sum(part.forward for part in parts),
        backward=(3 + input_grad) * product + (1 + (trained != 0)) * values + sum(part.backward for part in parts),
        elementwise_forward=weights * (SOFTMAX_FORWARD + causal) + sum(part.elementwise_forward for part in parts),
        elementwise_backward=(weights * (SOFTMAX_BACKWARD + causal) if trained else 0)
        + sum(part.elementwise_backward for part in parts),
        # x, the merged heads, the weights; for the gradient of the logits v, and the blocked entries, a byte each
        saved_bytes=itemsize * (B * N * (d + width) + weights)
        + (itemsize * B * N * width + (N * N if causal else 0) if trained else 0)
        + sum(part.saved_bytes for part in parts),
        decode=4 * B * d * width + 2 * B * N * width + sum(part.decode for part in parts),
        state_bytes=itemsize * B * N * width + sum(part.state_bytes for part in parts),
        trained=2 * d * width + trained,
        frozen=sum(part.frozen for part in parts),
        itemsize=itemsize,
    )


def _mixing(call: Call, items: Sequence[Size]) -> SourceCost:
    """Of the sum of logits of (B or 1, H, N, N) and of the shares; `items` of the result is its length."""
    entries, shares = call.H * call.N**2, len(items) if call.shared else 0
    total, forward, backward = items[0], 0, 0
    for one in items[1:]:
        both = total if one == 1 else one
        forward += both * entries
        backward += both * entries * ((total != both) + (one != both))  # summed over the batch for who has no batch
        total = both
    return SourceCost(
        items=total,
        elementwise_forward=forward + SOFTMAX_FORWARD * shares,
        elementwise_backward=backward + SOFTMAX_BACKWARD * shares,
        saved_bytes=call.itemsize * shares,
        trained=shares,
    )
