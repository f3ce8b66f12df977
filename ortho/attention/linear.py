r"""Linear attention: kernel $\phi(q)^T \phi(k)$ with $\phi(x) = \mathrm{elu}(x) + 1$ (Katharopoulos et al. 2020)."""

from dataclasses import replace
from math import inf, sqrt

from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.factored import (
    CHUNK,
    FeatureMap,
    Features,
    feature_attention,
    feature_attention_reference,
)
from ortho.attention.factored_cost import feature_cost
from ortho.attention.mechanism import AttentionCost, Mechanism


def root_scale(scale: float) -> float:
    """The factor of q and of k that multiplies their products by `scale`; ValueError for a negative one."""
    if not 0 <= scale < inf:
        raise ValueError(f"scale: expected a finite number of at least 0, got {scale}")
    return sqrt(scale)


def elu_plus_one(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """elu(x) + 1: x + 1 for positive x, exp(x) for others, with the digits that subtracting and adding 1 would cost."""
    low = x.clamp(max=0)
    return low.exp() + (x - low)


def _elu_features(scale: float | None) -> FeatureMap:
    if scale is None:
        return lambda q, k: Features(elu_plus_one(q), elu_plus_one(k))
    root = root_scale(scale)
    return lambda q, k: Features(elu_plus_one(q * root), elu_plus_one(k * root))


def linear_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""Attention with the weights $\phi(q_i)^T \phi(k_j)$, $\phi(x) = \mathrm{elu}(x) + 1$, divided by their row sums.

    Arguments and errors as in `softmax_attention_reference`, but for `scale`: q and k are multiplied by its square root
    before the map, and by default, as published, not at all. On the CPU, features so small or large that
    a row's weights leave the range of the dtype raise ValueError.
    """
    return feature_attention_reference(
        _elu_features(scale),
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        initial_state=initial_state,
        return_state=return_state,
    )


def linear_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    chunk: int = CHUNK,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`linear_attention_reference` in time and memory linear in N; a causal call goes in chunks of at most `chunk`.

    The state is (S (..., K, V), z (..., K)). Errors also as in `feature_attention`: a mask can only hide keys.
    """
    return feature_attention(
        _elu_features(scale),
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        initial_state=initial_state,
        return_state=return_state,
        chunk=chunk,
    )


def linear_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form; what comes after the features is `feature_cost`."""
    rest, rows = feature_cost(B, N, H, K, V, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, chunk=chunk)
    mapped = 2 * rows * K  # numbers in q and k
    return replace(
        rest,
        elementwise_forward=rest.elementwise_forward + 4 * mapped,  # minimum, exp, difference, sum
        elementwise_backward=rest.elementwise_backward + (6 * mapped if qk_grad else 0),
        saved_bytes=rest.saved_bytes + (2 * max(itemsize, 4) * mapped if qk_grad else 0),  # q and k, and their exp
        state_bytes=rest.state_bytes if form == "fast" else itemsize * B * H * N * (K + V),
    )


MECHANISM = Mechanism(
    name="linear",
    family="kernel",
    source="Katharopoulos et al. 2020, arXiv:2006.16236",
    reference=linear_attention_reference,
    fast=linear_attention,
    causal=True,
    exact=False,
    cost=linear_cost,
)
