"""Closed forms of the encoder-decoder and of attention to a context: products of matrices, and parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ortho import _checks
from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.softmax.softmax_attention import softmax_cost
from ortho.cost.closed_forms import Cost, block, check_sizes, layer, shared_heads
from ortho.cost.hybrid import hybrid, stopped_layer
from ortho.cost.positional import positional_heads
from ortho.cost.projections import projection_cost
from ortho.layers.hybrid import HybridAttention
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.layers.stop_gradient import StoppedAttention

__all__ = ["StepCost", "cross_layer", "encoder_decoder"]

COSTS: Mapping[Any, Callable[..., Cost]] = {
    MultiheadAttention: layer,
    StoppedAttention: stopped_layer,
    HybridAttention: hybrid,
    PositionalHeads: positional_heads,
}
_CROSS = {MultiheadAttention: "learned", StoppedAttention: "structured-stopped"}  # and the projection by default


@dataclass(frozen=True)
class StepCost:
    """FLOPs of matrix products in one training step, 2 a multiply-add, and numbers of parameters."""

    forward: Any
    backward: Any
    trained: Any
    frozen: Any

    @property
    def step(self) -> Any:
        """FLOPs forward and backward."""
        return self.forward + self.backward


@checked
def cross_layer(
    B: Size,
    N: Size,
    M: Size,
    d: Size,
    H: Size,
    *,
    head_dim: Size = None,
    num_kv_heads: Size = None,
    bias: bool = False,
    projection: str = "learned",
    attention: str = "softmax",
    form: str = "fast",
) -> StepCost:
    """`MultiheadAttention(d, H)` of x (B, N, d) to a context (B, M, d), which both need a gradient.

    `StoppedAttention` costs as much, whose exchanged pass is that of self-attention alone. Raises TypeError or
    ValueError as the layer does, and for an attention other than softmax.
    """
    _checks.one_of("attention", attention, ("softmax",))
    if head_dim is None:
        check_sizes(B=B, N=N, M=M, d=d, H=H)
        K = d // H if isinstance(d, int) else d / H
    else:
        check_sizes(B=B, N=N, M=M, d=d)
        check_sizes(H=H, head_dim=head_dim)
        K = head_dim
    G = shared_heads(H, num_kv_heads)
    # Queries are half of what as many heads of queries and of keys cost at N tokens, keys half of it at M.
    halves = [projection_cost(projection, B, n, d, h, K, h, bias=bias) for n, h in ((N, H), (M, G))]
    made = projection_cost(projection, B, N, d, H, K, G, bias=bias)
    core = softmax_cost(B, 1, H, K, K, form=form, qk_grad=made.gradient)  # of one pair a head
    products = 2 * B * d * K * (M * G + N * H)  # with W_V, and with W_O
    return StepCost(
        forward=products + sum(half.forward for half in halves) // 2 + N * M * core.forward,
        backward=2 * products + sum(half.backward for half in halves) // 2 + N * M * core.backward,
        trained=d * K * (H + G) + int(bias) * (d + K * G) + made.trained,
        frozen=made.frozen,
    )


@checked
def encoder_decoder(
    B: Size,
    M: Size,
    N: Size,
    d: Size,
    H: Size,
    L: Size,
    *,
    vocab_size: Size,
    max_length: Size | None,
    positions: str = "learned",
    shared_embeddings: bool = True,
    encoder: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
    cross: Mapping[str, Any] | None = None,
    d_ff: Size = None,
    bias: bool = False,
) -> StepCost:
    """`EncoderDecoder(vocab_size, d, H, L, max_length=max_length, ...)` on sources (B, M) and targets (B, N), with the
    model's own settings of its layers; the loss is not included.

    A mask of the source's tokens changes nothing: padding is computed. Raises TypeError or ValueError as the model
    does, and for a layer that has no closed form here.
    """
    check_sizes(L=L, vocab_size=vocab_size, max_length=1 if max_length is None else max_length)
    parts: dict[str, Any] = {"d_ff": d_ff, "bias": bias}
    read = block(B, M, d, **_settings("encoder", H, encoder), **parts)
    write = block(B, N, d, causal=True, **_settings("decoder", H, decoder), **parts)
    cross = {"num_heads": H, **(cross or {})}
    made = cross.pop("layer", MultiheadAttention)
    if made not in _CROSS:
        raise TypeError(f"cross: expected the layer {_names(_CROSS)}, got {_checks.describe(made)}")
    beside = cross_layer(B, N, M, d, cross.pop("num_heads"), **{"projection": _CROSS[made], "bias": bias, **cross})
    norms = 1 + int(bias)  # of d numbers each: a decoder's block has one more, and either stack one behind it
    places = 0 if max_length is None else 2 * max_length * d
    fixed = _checks.one_of("positions", positions, ("learned", "sinusoidal")) == "sinusoidal"
    logits = 2 * B * N * d * vocab_size
    layers = (read, write, beside)
    return StepCost(
        forward=L * sum(part.forward for part in layers) + logits,
        backward=L * sum(part.backward for part in layers) + 2 * logits,
        trained=L * sum(part.trained for part in layers)
        + (L + 2) * norms * d
        + (1 if shared_embeddings else 2) * vocab_size * d
        + (0 if fixed else places),
        frozen=L * sum(part.frozen for part in layers) + (places if fixed else 0),
    )


def _settings(name: str, H: Size, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """A layer's settings as `block` takes them: its closed form in place of its class."""
    found = {"num_heads": H, "layer": MultiheadAttention, **(settings or {})}
    if found["layer"] not in COSTS:
        raise TypeError(f"{name}: expected the layer {_names(COSTS)}, got {_checks.describe(found['layer'])}")
    return {"H": found.pop("num_heads"), **found, "layer": COSTS[found["layer"]]}


def _names(classes: Mapping[Any, Any]) -> str:
    return " or ".join(one.__name__ for one in classes)
